// Every call of lapis.hpp: wrapper SOCKET MODEL.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <lapis.hpp>
#include <malloc.h>
#include <optional>
#include <thread>
#include <type_traits>

#define IS(condition)                                                            \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

template <typename F>
static lapis::Error thrown(F call) {
    try {
        call();
    } catch (const lapis::Error& error) {
        return error;
    }
    std::fprintf(stderr, "nothing was thrown\n");
    std::exit(1);
}

static_assert(!std::is_copy_constructible_v<lapis::Mapping> && std::is_nothrow_move_constructible_v<lapis::Mapping>);
static_assert(std::is_nothrow_move_assignable_v<lapis::Client> && std::is_nothrow_destructible_v<lapis::Client>);

static void memory(const lapis::Client& client) {
    lapis::Allocation memory = client.allocate(200000);
    IS(memory.size() == 200000 && memory.id() != 0);
    const bool cuda = client.info().device == LAPIS_DEVICE_CUDA;
    client.prefetch({memory.all()});
    client.cancel_prefetch({memory.all()});
    client.advise({memory.all()}, LAPIS_ADVICE_KEEP);
    lapis::Recording recording = client.record();
    {
        lapis::Mapping mapping = client.map({memory.range(0, 10), memory.range(100000, 20)}, LAPIS_WRITE);
        IS(mapping.size() == 2 && mapping.length(1) == 20 && mapping.stats().pages >= 1);
        mapping.copy_from_host(1, 2, "tiers", 5);
        if (cuda) {
            IS(mapping.device_ptr(1) != 0);
            IS(thrown([&] { (void)mapping.data(1); }).code() == LAPIS_ON_DEVICE);
        } else {
            IS(std::memcmp(mapping.data<char>(1) + 2, "tiers", 5) == 0);
            mapping.data_mut<char>(1)[2] = 'T';
        }
        IS(client.stats().mappings == 1);
        // Moving it leaves nothing behind, and what it is moved to ends.
        lapis::Mapping other = client.map(memory.range(0, 0), LAPIS_READ);
        other = std::move(mapping);
        IS(!mapping && other.size() == 2);
        IS(thrown([&] { mapping.unmap(); return mapping.size(); }).code() == LAPIS_BAD_HANDLE);
        IS(client.stats().mappings == 1);
    }
    IS(client.stats().mappings == 0);
    client.flush({memory.all()});
    lapis::Plan recorded = recording.plan();
    IS(!recording);
    recorded.end();
    lapis::Plan plan = client.plan({{{memory.get(), 0, 65536, LAPIS_READ}}, {{memory.get(), 65536, 65536, LAPIS_WRITE}}});
    lapis::Mapping mapping = client.map(memory.range(0, 5), LAPIS_READ);
    mapping.unmap_after(nullptr);
    IS(!mapping);
    lapis::Error error = thrown([&] { client.map(memory.range(1, 200000), LAPIS_READ); });
    IS(error.code() == LAPIS_OUT_OF_RANGE && error.limit() == 200000 && !error.is_retryable());
    IS(std::strstr(error.what(), "outside the allocation of 200000 bytes") != nullptr);
    memory.free();
    IS(thrown([&] { (void)memory.size(); }).code() == LAPIS_BAD_HANDLE);
}

static void model(const lapis::Client& client, const std::string& path) {
    lapis::Model model = client.open_model(path);
    lapis::Plan plan = model.plan();
    for (std::size_t i = 0; i < model.layers(); i++) {
        model.prefetch_layer(i);
        lapis::Mapping layer = model.map_layer(i);
        for (std::size_t range = 0; range < layer.size(); range++) {
            lapis_tensor tensor = model.tensor(layer.tensor(range));
            IS(layer.length(range) == tensor.bytes && model.find(tensor.name) == layer.tensor(range));
        }
        IS(model.layer(i).tensor_count == layer.size());
    }
    lapis::Mapping tensor = model.map_tensor(0);
    model.close();
    IS(tensor.length(0) > 0);
    lapis::Allocation file = client.open_path(path, 8, 100);
    IS(file.size() == 100);
}

static void leaks(const lapis::Client& client) {
    const bool cuda = client.info().device == LAPIS_DEVICE_CUDA;
    lapis::Allocation memory = client.allocate(65536);
    std::size_t before = 0;
    for (int i = -1000; i < (cuda ? 3000 : 100000); i++) {
        if (i == 0) before = mallinfo2().uordblks;
        lapis::Mapping mapping = client.map(memory.all(), i % 2 ? LAPIS_READ : LAPIS_WRITE);
        if (i % 3 == 0) mapping.unmap();
        if (i % 100 == 0) thrown([&] { (void)client.allocate(0); });
    }
    IS(client.stats().mappings == 0);
    IS(mallinfo2().uordblks < before + 16384);
}

int main(int argc, char** argv) {
    IS(argc == 3);
    {
        lapis::Client client{std::string(argv[1])};
        memory(client);
        model(client, argv[2]);
        leaks(client);
        // What is left of it ends on another thread, after the client.
        std::optional<lapis::Allocation> memory = client.allocate(10);
        std::optional<lapis::Mapping> mapping = client.map(memory->all(), LAPIS_WRITE);
        client.close();
        std::thread([&] { memory.reset(), mapping.reset(); }).join();
    }
    lapis_options options{};
    options.size = sizeof options;
    options.socket = argv[1];
    lapis_stats stats = lapis::Client(options).stats();
    IS(stats.sessions == 1 && stats.allocations == 0 && stats.mappings == 0);
    IS(thrown([] { lapis::Client("/nowhere/s"); }).code() == LAPIS_CONNECT);
    std::puts("all of it");
}
