// Lapis for C++17: what lapis.h has, with handles that close themselves and failures that are thrown.
//
// Every class owns one handle, can be moved and not copied, and is empty when moved from or closed; a call on an empty
// one throws Error with LAPIS_BAD_HANDLE. Destructors never throw. Threads, fork and signals: see lapis.h.
#ifndef LAPIS_HPP
#define LAPIS_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lapis.h"

namespace lapis {

using Wait = std::chrono::microseconds;

/// How long calls wait for room when they aren't told.
inline constexpr Wait wait_default{LAPIS_WAIT_DEFAULT};

/// Why a call failed. what() says what went wrong with what, and what to do.
class Error : public std::runtime_error {
public:
    explicit Error(const lapis_error& error) : std::runtime_error(error.message), error_(error) {
        error_.message = nullptr;
    }

    lapis_code code() const noexcept { return error_.code; }
    /// Whether the same call may succeed later.
    bool is_retryable() const noexcept { return error_.retryable; }
    std::uint64_t object() const noexcept { return error_.object; }
    std::uint64_t asked() const noexcept { return error_.asked; }
    std::uint64_t in_use() const noexcept { return error_.in_use; }
    std::uint64_t limit() const noexcept { return error_.limit; }

private:
    lapis_error error_;
};

/// Throws unless the call succeeded.
inline void check(lapis_code code) {
    if (code == LAPIS_OK) return;
    lapis_error error{};
    lapis_last_error(&error, sizeof error);
    throw Error(error);
}

/// The owner of a handle.
template <typename H, lapis_code (*Close)(H*)>
class Handle {
public:
    Handle() noexcept = default;
    explicit Handle(H* handle) noexcept : handle_(handle) {}
    Handle(Handle&& other) noexcept : handle_(other.release()) {}
    Handle& operator=(Handle&& other) noexcept {
        if (this != &other) {
            reset();
            handle_ = other.release();
        }
        return *this;
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    ~Handle() { reset(); }

    /// The handle, for the functions of lapis.h.
    H* get() const noexcept { return handle_; }
    /// Gives the handle away.
    H* release() noexcept { return std::exchange(handle_, nullptr); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    void reset() noexcept {
        if (handle_ != nullptr) Close(release());
    }

private:
    H* handle_ = nullptr;
};

/// A plan in force, until it is destroyed.
class Plan : public Handle<lapis_plan, lapis_plan_end> {
public:
    using Handle::Handle;
    void end() { check(lapis_plan_end(release())); }
};

/// What is mapped meanwhile becomes a plan.
class Recording : public Handle<lapis_recording, lapis_recording_drop> {
public:
    using Handle::Handle;
    Plan plan(bool cyclic = true) {
        lapis_plan* out = nullptr;
        const lapis_code code = lapis_recording_plan(get(), cyclic, &out);
        if (code != LAPIS_BUSY) release();
        check(code);
        return Plan(out);
    }
};

/// The right to touch ranges of bytes, until it is unmapped or destroyed.
class Mapping : public Handle<lapis_mapping, lapis_unmap> {
public:
    using Handle::Handle;

    std::size_t size() const {
        std::size_t out = 0;
        check(lapis_mapping_count(get(), &out));
        return out;
    }
    /// Which of its model's tensors a range is.
    std::size_t tensor(std::size_t range) const {
        std::size_t out = 0;
        check(lapis_mapping_tensor(get(), range, &out));
        return out;
    }
    std::size_t length(std::size_t range) const {
        const void* bytes = nullptr;
        std::uint64_t pointer = 0;
        std::size_t length = 0;
        lapis_code code = lapis_mapping_bytes(get(), range, &bytes, &length);
        if (code == LAPIS_ON_DEVICE) code = lapis_mapping_device_ptr(get(), range, &pointer, &length);
        check(code);
        return length;
    }
    template <typename T = std::byte>
    const T* data(std::size_t range = 0) const {
        const void* out = nullptr;
        check(lapis_mapping_bytes(get(), range, &out, nullptr));
        return static_cast<const T*>(out);
    }
    template <typename T = std::byte>
    T* data_mut(std::size_t range = 0) {
        void* out = nullptr;
        check(lapis_mapping_bytes_mut(get(), range, &out, nullptr));
        return static_cast<T*>(out);
    }
    /// A CUdeviceptr.
    std::uint64_t device_ptr(std::size_t range = 0) const {
        std::uint64_t out = 0;
        check(lapis_mapping_device_ptr(get(), range, &out, nullptr));
        return out;
    }
    void copy_to_host(std::size_t range, std::uint64_t offset, void* target, std::size_t length) const {
        check(lapis_mapping_copy_to_host(get(), range, offset, target, length));
    }
    void copy_from_host(std::size_t range, std::uint64_t offset, const void* source, std::size_t length) {
        check(lapis_mapping_copy_from_host(get(), range, offset, source, length));
    }
    lapis_map_stats stats() const {
        lapis_map_stats out{};
        check(lapis_mapping_stats(get(), &out, sizeof out));
        return out;
    }
    /// Ends it now and says if that failed. If another thread is in a call with it, it lives on, and so does this.
    void unmap() {
        end(lapis_unmap(get()));
    }
    /// Ends it once the GPU has done what a stream holds now.
    void unmap_after(void* stream) {
        end(lapis_unmap_after(get(), stream));
    }

private:
    void end(lapis_code code) {
        if (code != LAPIS_BUSY) release();
        check(code);
    }
};

/// Bytes with addresses of their own, wherever their pages are.
class Allocation : public Handle<lapis_allocation, lapis_allocation_free> {
public:
    using Handle::Handle;

    std::uint64_t size() const {
        std::uint64_t out = 0;
        check(lapis_allocation_size(get(), &out));
        return out;
    }
    std::uint64_t id() const {
        std::uint64_t out = 0;
        check(lapis_allocation_id(get(), &out));
        return out;
    }
    lapis_range range(std::uint64_t offset, std::uint64_t length) const { return {get(), offset, length}; }
    lapis_range all() const { return {get(), 0, size()}; }
    void free() { check(lapis_allocation_free(release())); }
};

/// A model file or several, opened.
class Model : public Handle<lapis_model, lapis_model_close> {
public:
    using Handle::Handle;

    std::size_t layers() const {
        std::size_t out = 0;
        check(lapis_model_layers(get(), &out));
        return out;
    }
    std::size_t tensors() const {
        std::size_t out = 0;
        check(lapis_model_tensors(get(), &out));
        return out;
    }
    lapis_layer layer(std::size_t index) const {
        lapis_layer out{};
        check(lapis_model_layer(get(), index, &out, sizeof out));
        return out;
    }
    lapis_tensor tensor(std::size_t index) const {
        lapis_tensor out{};
        check(lapis_model_tensor(get(), index, &out, sizeof out));
        return out;
    }
    std::size_t find(const std::string& name) const {
        std::size_t out = 0;
        check(lapis_model_find(get(), name.c_str(), &out));
        return out;
    }
    Mapping map_layer(std::size_t layer, Wait wait = wait_default) const {
        lapis_mapping* out = nullptr;
        check(lapis_model_map_layer(get(), layer, micros(wait), &out));
        return Mapping(out);
    }
    Mapping map_tensor(std::size_t tensor, std::uint64_t offset = 0, std::uint64_t length = UINT64_MAX,
                       Wait wait = wait_default) const {
        lapis_mapping* out = nullptr;
        check(lapis_model_map_tensor(get(), tensor, offset, length, micros(wait), &out));
        return Mapping(out);
    }
    void prefetch_layer(std::size_t layer) const { check(lapis_model_prefetch_layer(get(), layer)); }
    Plan plan(bool cyclic = true) const {
        lapis_plan* out = nullptr;
        check(lapis_model_plan(get(), cyclic, &out));
        return Plan(out);
    }
    void close() { check(lapis_model_close(release())); }

    static std::uint64_t micros(Wait wait) { return wait.count() < 0 ? 0 : static_cast<std::uint64_t>(wait.count()); }
};

/// A connection to lapisd.
class Client : public Handle<lapis_client, lapis_client_close> {
public:
    /// The daemon at $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
    Client() : Handle(connect(nullptr)) {}
    explicit Client(const std::string& socket) : Handle(connect(socket.c_str())) {}
    explicit Client(const lapis_options& options) : Handle(connect_with(options)) {}

    lapis_info info() const {
        lapis_info out{};
        check(lapis_client_info(get(), &out, sizeof out));
        return out;
    }
    lapis_stats stats() const {
        lapis_stats out{};
        check(lapis_client_stats(get(), &out, sizeof out));
        return out;
    }
    Allocation allocate(std::uint64_t size) const {
        lapis_allocation* out = nullptr;
        check(lapis_allocate(get(), size, &out));
        return Allocation(out);
    }
    Allocation open_file(int descriptor, std::uint64_t offset, std::uint64_t length) const {
        lapis_allocation* out = nullptr;
        check(lapis_open_file(get(), descriptor, offset, length, &out));
        return Allocation(out);
    }
    Allocation open_path(const std::string& path, std::uint64_t offset, std::uint64_t length) const {
        lapis_allocation* out = nullptr;
        check(lapis_open_path(get(), path.c_str(), offset, length, &out));
        return Allocation(out);
    }
    Model open_model(const std::string& path) const {
        lapis_model* out = nullptr;
        check(lapis_open_model(get(), path.c_str(), &out));
        return Model(out);
    }
    Mapping map(const std::vector<lapis_range>& ranges, lapis_access access, Wait wait = wait_default) const {
        lapis_mapping* out = nullptr;
        check(lapis_map(get(), ranges.data(), ranges.size(), access, Model::micros(wait), &out));
        return Mapping(out);
    }
    Mapping map(const lapis_range& range, lapis_access access, Wait wait = wait_default) const {
        lapis_mapping* out = nullptr;
        check(lapis_map(get(), &range, 1, access, Model::micros(wait), &out));
        return Mapping(out);
    }
    void prefetch(const std::vector<lapis_range>& ranges, std::uint8_t priority = 0, Wait within = Wait{0}) const {
        check(lapis_prefetch(get(), ranges.data(), ranges.size(), priority, Model::micros(within)));
    }
    void cancel_prefetch(const std::vector<lapis_range>& ranges) const {
        check(lapis_cancel_prefetch(get(), ranges.data(), ranges.size()));
    }
    void advise(const std::vector<lapis_range>& ranges, lapis_advice advice) const {
        check(lapis_advise(get(), ranges.data(), ranges.size(), advice));
    }
    void advise(const lapis_range& range, lapis_advice advice) const { check(lapis_advise(get(), &range, 1, advice)); }
    void flush(const std::vector<lapis_range>& ranges, Wait wait = wait_default) const {
        check(lapis_flush(get(), ranges.data(), ranges.size(), Model::micros(wait)));
    }
    Plan plan(const std::vector<std::vector<lapis_use>>& steps, bool cyclic = true) const {
        std::vector<lapis_step> all;
        all.reserve(steps.size());
        for (const auto& step : steps) all.push_back({step.data(), step.size()});
        lapis_plan* out = nullptr;
        check(lapis_plan_set(get(), all.data(), all.size(), cyclic, &out));
        return Plan(out);
    }
    Recording record() const {
        lapis_recording* out = nullptr;
        check(lapis_record(get(), &out));
        return Recording(out);
    }
    void close() { check(lapis_client_close(release())); }

private:
    static lapis_client* connect(const char* socket) {
        lapis_client* out = nullptr;
        check(lapis_connect(socket, &out));
        return out;
    }
    static lapis_client* connect_with(const lapis_options& options) {
        lapis_client* out = nullptr;
        check(lapis_connect_with(&options, &out));
        return out;
    }
};

}  // namespace lapis

#endif  // LAPIS_HPP
