#ifndef LAPIS_H
#define LAPIS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Lapis: more GPU memory than the card has. Interface version 0; docs/clients.md says how to use it.
 *
 * Every call that can fail returns a lapis_code: LAPIS_OK, which is 0, or why not. lapis_last_message() says of the
 * calling thread's last failure what went wrong and what to do, lapis_last_error() its numbers. A call that fails changes
 * nothing, and sets the handle that it would have returned to NULL.
 *
 * Handles (lapis_client, lapis_allocation, lapis_mapping, lapis_model, lapis_plan, lapis_recording) are names, not
 * addresses: nothing lies there, they are never used twice, and NULL, a handle that was closed, one of another kind and
 * any other number give LAPIS_BAD_HANDLE. Closing NULL is no error. Allocations, mappings, models and plans keep their
 * connection, and mappings their allocations: close them in any order.
 *
 * All calls may be made from several threads at once, with the same handles. After fork() the child's calls fail with
 * LAPIS_FORKED; it may connect anew. No call may be made in a signal handler. Pointers must point to as much readable
 * or writable memory as the call says, for as long as it lasts: that can't be checked.
 */


/**
 * A time to wait when there is no reason for another: 60 s, in microseconds.
 */
#define LAPIS_WAIT_DEFAULT 60000000

/**
 * Why a call failed. Below 64 the daemon or this library refused it: the request can't be granted as it is. From 64 to 127
 * something failed at the daemon. From 1000 on it failed in this process. Numbers are frozen; there will be more.
 */
typedef enum lapis_code {
  /**
   * It did not fail.
   */
  LAPIS_OK = 0,
  /**
   * The message breaks the protocol.
   */
  LAPIS_BAD_REQUEST = 1,
  /**
   * No such allocation.
   */
  LAPIS_UNKNOWN_ALLOCATION = 2,
  /**
   * No such mapping.
   */
  LAPIS_UNKNOWN_MAPPING = 3,
  /**
   * Bytes outside an allocation, a range, a tensor or a file; or no such range, layer or tensor.
   */
  LAPIS_OUT_OF_RANGE = 4,
  /**
   * Writing what can only be read.
   */
  LAPIS_READ_ONLY = 5,
  /**
   * More than can ever be mapped at once.
   */
  LAPIS_OVER_CAPACITY = 6,
  /**
   * The tiers can't hold another allocation of this size.
   */
  LAPIS_OUT_OF_MEMORY = 7,
  /**
   * The wait ended first.
   */
  LAPIS_TIMED_OUT = 8,
  /**
   * Client and daemon have no protocol version in common.
   */
  LAPIS_VERSION_UNSUPPORTED = 9,
  /**
   * This user may not do that.
   */
  LAPIS_NOT_PERMITTED = 10,
  /**
   * A count limit of the session or the daemon is met.
   */
  LAPIS_TOO_MANY = 11,
  /**
   * A mapping still holds pages of the allocation.
   */
  LAPIS_IN_USE = 12,
  /**
   * The descriptor isn't one of a readable regular file.
   */
  LAPIS_NOT_A_FILE = 13,
  /**
   * The daemon is stopping.
   */
  LAPIS_SHUTTING_DOWN = 14,
  /**
   * The daemon, the device or this library can't do this.
   */
  LAPIS_UNSUPPORTED = 15,
  /**
   * A quota is met.
   */
  LAPIS_OVER_QUOTA = 16,
  /**
   * The file isn't the one that was opened any more.
   */
  LAPIS_FILE_CHANGED = 64,
  /**
   * The file ended before the bytes asked for.
   */
  LAPIS_FILE_TRUNCATED = 65,
  /**
   * Reading or writing failed.
   */
  LAPIS_IO = 66,
  /**
   * Spilled bytes don't match their checksum.
   */
  LAPIS_DATA_LOST = 67,
  /**
   * The GPU failed, and the daemon restarts.
   */
  LAPIS_DEVICE_LOST = 68,
  /**
   * No daemon at the socket.
   */
  LAPIS_CONNECT = 1000,
  /**
   * Something else than lapisd is at the socket.
   */
  LAPIS_NOT_LAPIS = 1001,
  /**
   * The daemon broke the protocol; the connection is closed.
   */
  LAPIS_PROTOCOL = 1002,
  /**
   * The daemon is gone. Bytes that are mapped stay readable; connect anew for anything else.
   */
  LAPIS_DISCONNECTED = 1003,
  /**
   * The handle is of the process that this one was forked from.
   */
  LAPIS_FORKED = 1004,
  /**
   * A system call failed in this process.
   */
  LAPIS_SYSTEM = 1005,
  /**
   * A file can't be opened.
   */
  LAPIS_OPEN = 1006,
  /**
   * A model's files can't be used.
   */
  LAPIS_MODEL = 1007,
  /**
   * The GPU's memory can't be used by this process.
   */
  LAPIS_CUDA = 1008,
  /**
   * The bytes are in a GPU's memory, out of the CPU's reach.
   */
  LAPIS_ON_DEVICE = 1009,
  /**
   * A live mapping of this process has some of the bytes, and one of the two writes.
   */
  LAPIS_CONFLICT = 1010,
  /**
   * More in one request than the protocol can carry.
   */
  LAPIS_TOO_LARGE = 1011,
  /**
   * A handle of another connection.
   */
  LAPIS_FOREIGN = 1012,
  /**
   * No handle, or one that was closed, or one of another kind.
   */
  LAPIS_BAD_HANDLE = 1013,
  /**
   * Another thread is in a call with this handle.
   */
  LAPIS_BUSY = 1014,
  /**
   * A NULL where something must be, a text that isn't UTF-8, a number that means nothing.
   */
  LAPIS_BAD_ARGUMENT = 1015,
  /**
   * A fault of this library. Please report it.
   */
  LAPIS_BUG = 1016,
} lapis_code;

/**
 * What bytes are mapped for.
 */
typedef enum lapis_access {
  /**
   * To read them.
   */
  LAPIS_READ = 0,
  /**
   * To read and write them.
   */
  LAPIS_WRITE = 1,
  /**
   * To write all of them before any is read: they are not fetched.
   */
  LAPIS_OVERWRITE = 2,
} lapis_access;

/**
 * How bytes will be used.
 */
typedef enum lapis_advice {
  /**
   * Nothing is known.
   */
  LAPIS_ADVICE_NORMAL = 0,
  /**
   * In order.
   */
  LAPIS_ADVICE_SEQUENTIAL = 1,
  /**
   * In any order.
   */
  LAPIS_ADVICE_RANDOM = 2,
  /**
   * Often: to be kept in VRAM before others.
   */
  LAPIS_ADVICE_KEEP = 3,
  /**
   * Not soon.
   */
  LAPIS_ADVICE_DONT_NEED = 4,
} lapis_advice;

/**
 * What a daemon's VRAM is.
 */
typedef enum lapis_device {
  /**
   * Host memory: mapped bytes are for the CPU.
   */
  LAPIS_DEVICE_SIM = 0,
  /**
   * Memory of a CUDA device: mapped bytes are for the GPU.
   */
  LAPIS_DEVICE_CUDA = 1,
} lapis_device;

/**
 * Bytes with addresses of their own, wherever their pages are.
 */
typedef struct lapis_allocation lapis_allocation;

/**
 * A connection to lapisd.
 */
typedef struct lapis_client lapis_client;

/**
 * The right to touch some ranges of bytes, which are in VRAM meanwhile. Ranges are counted from 0, in the order in which
 * they were asked for.
 */
typedef struct lapis_mapping lapis_mapping;

/**
 * A model file or several, opened: safetensors or GGUF.
 */
typedef struct lapis_model lapis_model;

/**
 * A plan in force.
 */
typedef struct lapis_plan lapis_plan;

/**
 * What a client maps, being recorded.
 */
typedef struct lapis_recording lapis_recording;

/**
 * Bytes of an allocation.
 */
typedef struct lapis_range {
  /**
   * Which.
   */
  const struct lapis_allocation *allocation;
  /**
   * The first byte.
   */
  uint64_t offset;
  /**
   * How many.
   */
  uint64_t length;
} lapis_range;

/**
 * How to connect. Fill it with zeros, then set size to sizeof(lapis_options), and what is to be different.
 */
typedef struct lapis_options {
  /**
   * sizeof(lapis_options).
   */
  size_t size;
  /**
   * The daemon's socket. NULL: $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
   */
  const char *socket;
  /**
   * Name for the daemon's log. NULL: the program's.
   */
  const char *name;
  /**
   * The CUDA driver's library. NULL: $LAPIS_LIBCUDA, else the system's.
   */
  const char *libcuda;
  /**
   * How long to wait for the daemon's welcome. 0: 10 s.
   */
  uint64_t timeout_us;
  /**
   * Whether to leave the process's limit of open files as it is. Otherwise it is raised so that each VRAM frame can
   * have a descriptor.
   */
  bool leave_open_files;
} lapis_options;

/**
 * What the daemon said of itself.
 */
typedef struct lapis_info {
  /**
   * Bytes of a page: the unit in which bytes are in VRAM or not.
   */
  uint64_t page_size;
  /**
   * Number of this connection.
   */
  uint64_t session;
  /**
   * Frames of VRAM.
   */
  uint32_t vram_frames;
  /**
   * Most pages that can be mapped at once.
   */
  uint32_t mapped_pages_max;
  /**
   * What VRAM is: a lapis_device.
   */
  int32_t device;
  /**
   * Version of the protocol.
   */
  uint32_t protocol;
  /**
   * Whether the device shares the host's memory.
   */
  bool unified;
  /**
   * Which CUDA device, as cuDeviceGetUuid says.
   */
  uint8_t device_uuid[16];
} lapis_info;

/**
 * What is known of a failure. Numbers that mean nothing for it are 0.
 */
typedef struct lapis_error {
  /**
   * What the call returned.
   */
  enum lapis_code code;
  /**
   * Whether the same call may succeed later: after LAPIS_DISCONNECTED only on a new connection.
   */
  bool retryable;
  /**
   * What went wrong with what, and what to do; never NULL. It lasts until the next failure on this thread.
   */
  const char *message;
  /**
   * Which allocation, mapping or byte it is about.
   */
  uint64_t object;
  /**
   * How much was asked for.
   */
  uint64_t asked;
  /**
   * How much of it is in use.
   */
  uint64_t in_use;
  /**
   * How much there can be.
   */
  uint64_t limit;
} lapis_error;

/**
 * What a mapping cost.
 */
typedef struct lapis_map_stats {
  /**
   * Pages in all.
   */
  uint32_t pages;
  /**
   * Pages that were in VRAM when it was asked for.
   */
  uint32_t hits_vram;
  /**
   * Pages that came from RAM.
   */
  uint32_t hits_ram;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * How long the daemon took, in microseconds.
   */
  uint64_t waited_us;
} lapis_map_stats;

/**
 * Tensors that are used together. What it points to lasts as long as its model.
 */
typedef struct lapis_layer {
  /**
   * Such as "model.layers.3"; "embeddings" comes first, "head" last.
   */
  const char *name;
  /**
   * Its tensors, by their number in the model.
   */
  const size_t *tensors;
  /**
   * How many.
   */
  size_t tensor_count;
  /**
   * Bytes of all of them.
   */
  uint64_t bytes;
} lapis_layer;

/**
 * One tensor. What it points to lasts as long as its model.
 */
typedef struct lapis_tensor {
  /**
   * Its name, unique in the model.
   */
  const char *name;
  /**
   * Type of its elements, as the file's format spells it, such as "F32", "BF16" or "Q4_K".
   */
  const char *dtype;
  /**
   * Its dimensions, slowest first.
   */
  const uint64_t *shape;
  /**
   * How many.
   */
  size_t dimensions;
  /**
   * Bytes of all its elements.
   */
  uint64_t bytes;
  /**
   * Elements of a block, the least number of them that has whole bytes.
   */
  uint64_t block_elements;
  /**
   * Bytes of a block.
   */
  uint64_t block_bytes;
} lapis_tensor;

/**
 * Bytes of an allocation, with what they are mapped for.
 */
typedef struct lapis_use {
  /**
   * Which allocation.
   */
  const struct lapis_allocation *allocation;
  /**
   * The first byte.
   */
  uint64_t offset;
  /**
   * How many.
   */
  uint64_t length;
  /**
   * What for: a lapis_access.
   */
  int access;
} lapis_use;

/**
 * What is mapped together.
 */
typedef struct lapis_step {
  /**
   * Ranges.
   */
  const struct lapis_use *uses;
  /**
   * How many.
   */
  size_t count;
} lapis_step;

/**
 * One tier, in bytes.
 */
typedef struct lapis_tier {
  /**
   * Size.
   */
  uint64_t capacity;
  /**
   * Holding a page.
   */
  uint64_t used;
  /**
   * May not be moved now.
   */
  uint64_t pinned;
  /**
   * The longest run of free frames.
   */
  uint64_t free_run_longest;
  /**
   * Whether it doesn't take what it should: 0 or 1.
   */
  uint64_t degraded;
} lapis_tier;

/**
 * What was moved from one tier to another.
 */
typedef struct lapis_hop {
  /**
   * Pages.
   */
  uint64_t pages;
  /**
   * Bytes.
   */
  uint64_t bytes;
  /**
   * Failed transfers.
   */
  uint64_t errors;
} lapis_hop;

/**
 * Counters since the daemon started, or since this client connected.
 */
typedef struct lapis_counters {
  /**
   * Model files to RAM.
   */
  struct lapis_hop file_to_ram;
  /**
   * Spill to RAM.
   */
  struct lapis_hop spill_to_ram;
  /**
   * RAM to VRAM.
   */
  struct lapis_hop ram_to_vram;
  /**
   * VRAM to RAM.
   */
  struct lapis_hop vram_to_ram;
  /**
   * RAM to spill.
   */
  struct lapis_hop ram_to_spill;
  /**
   * Mapped pages that were in VRAM.
   */
  uint64_t hits_vram;
  /**
   * Mapped pages that were in RAM.
   */
  uint64_t hits_ram;
  /**
   * Mapped pages that came from a file or the spill.
   */
  uint64_t misses;
  /**
   * Mapped pages that had never been written.
   */
  uint64_t zero_fills;
  /**
   * Maps that were granted.
   */
  uint64_t maps;
  /**
   * Microseconds that they waited.
   */
  uint64_t stalled_us;
  /**
   * Prefetched pages that a map then used.
   */
  uint64_t prefetch_useful;
  /**
   * Prefetched pages that came too late.
   */
  uint64_t prefetch_late;
  /**
   * Prefetched pages that were evicted before any use.
   */
  uint64_t prefetch_wasted;
} lapis_counters;

/**
 * The daemon's counters.
 */
typedef struct lapis_stats {
  /**
   * VRAM.
   */
  struct lapis_tier vram;
  /**
   * RAM.
   */
  struct lapis_tier ram;
  /**
   * NVMe.
   */
  struct lapis_tier nvme;
  /**
   * Open connections of all clients.
   */
  uint32_t sessions;
  /**
   * Live allocations of all clients.
   */
  uint32_t allocations;
  /**
   * Live mappings of all clients.
   */
  uint32_t mappings;
  /**
   * Frames kept out of use because a client may still write them.
   */
  uint32_t quarantined_frames;
  /**
   * Of this client.
   */
  struct lapis_counters session;
  /**
   * Of all clients.
   */
  struct lapis_counters total;
} lapis_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Says that ranges will be mapped soon, in this order. Returns at once. Those of a higher priority are fetched first.
 * within_us: after how many microseconds it is too late to begin; 0: never.
 */
enum lapis_code lapis_prefetch(const struct lapis_client *client,
                               const struct lapis_range *ranges,
                               size_t count,
                               uint8_t priority,
                               uint64_t within_us);

/**
 * Takes prefetches of ranges back, as far as they have not begun.
 */
enum lapis_code lapis_cancel_prefetch(const struct lapis_client *client,
                                      const struct lapis_range *ranges,
                                      size_t count);

/**
 * Says how ranges will be used, which changes what is evicted first and nothing else. advice: a lapis_advice.
 */
enum lapis_code lapis_advise(const struct lapis_client *client,
                             const struct lapis_range *ranges,
                             size_t count,
                             int advice);

/**
 * Writes ranges of allocated memory down to the NVMe tier, and leaves them where they are as well. Waits up to wait_us
 * microseconds until all is written.
 */
enum lapis_code lapis_flush(const struct lapis_client *client,
                            const struct lapis_range *ranges,
                            size_t count,
                            uint64_t wait_us);

/**
 * Reserves size bytes, which start as zeros.
 */
enum lapis_code lapis_allocate(const struct lapis_client *client,
                               uint64_t size,
                               struct lapis_allocation **out);

/**
 * Makes length bytes of an open file, from offset on, an allocation that can be read. The daemon reads them through
 * this descriptor, which may be closed afterwards.
 */
enum lapis_code lapis_open_file(const struct lapis_client *client,
                                int32_t descriptor,
                                uint64_t offset,
                                uint64_t length,
                                struct lapis_allocation **out);

/**
 * Opens a file and makes length bytes of it, from offset on, an allocation that can be read.
 */
enum lapis_code lapis_open_path(const struct lapis_client *client,
                                const char *path,
                                uint64_t offset,
                                uint64_t length,
                                struct lapis_allocation **out);

/**
 * How many bytes were asked for.
 */
enum lapis_code lapis_allocation_size(const struct lapis_allocation *allocation, uint64_t *out);

/**
 * Its number, as lapisctl shows it.
 */
enum lapis_code lapis_allocation_id(const struct lapis_allocation *allocation, uint64_t *out);

/**
 * Gives the allocation up, once no mapping has any of it.
 */
enum lapis_code lapis_allocation_free(struct lapis_allocation *allocation);

/**
 * Connects to the daemon at a socket. NULL: $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
 */
enum lapis_code lapis_connect(const char *socket,
                              struct lapis_client **out);

/**
 * Connects with options.
 */
enum lapis_code lapis_connect_with(const struct lapis_options *options, struct lapis_client **out);

/**
 * What the daemon said of itself. size: sizeof(lapis_info).
 */
enum lapis_code lapis_client_info(const struct lapis_client *client, struct lapis_info *out, size_t size);

/**
 * Closes a connection: it ends with the last of its allocations, mappings, models and plans.
 */
enum lapis_code lapis_client_close(struct lapis_client *client);

/**
 * Version of this library, such as "0.1.0".
 */
const char *lapis_version(void);

/**
 * What went wrong in the last call that failed on this thread, and what to do; empty if none has. Calls that succeed
 * leave it. It lasts until the next failure on this thread.
 */
const char *lapis_last_message(void);

/**
 * The last failure of a call on this thread; with LAPIS_OK if none has failed. size: sizeof(lapis_error).
 */
enum lapis_code lapis_last_error(struct lapis_error *out, size_t size);

/**
 * Brings ranges of bytes to VRAM, all or none of them, and keeps them there until lapis_unmap. access: a lapis_access.
 * Waits up to wait_us microseconds for other mappings to make room; with 0 only as long as the transfers take.
 */
enum lapis_code lapis_map(const struct lapis_client *client,
                          const struct lapis_range *ranges,
                          size_t count,
                          int access,
                          uint64_t wait_us,
                          struct lapis_mapping **out);

/**
 * How many ranges it has.
 */
enum lapis_code lapis_mapping_count(const struct lapis_mapping *mapping, size_t *out);

/**
 * Which of its model's tensors a range is, for a mapping of a model.
 */
enum lapis_code lapis_mapping_tensor(const struct lapis_mapping *mapping, size_t range, size_t *out);

/**
 * The bytes of a range, to be read until lapis_unmap: afterwards reading them faults. LAPIS_ON_DEVICE on a CUDA device.
 * length may be NULL.
 */
enum lapis_code lapis_mapping_bytes(const struct lapis_mapping *mapping,
                                    size_t range,
                                    const void **out,
                                    size_t *length);

/**
 * The bytes of a range, to be read and written until lapis_unmap: afterwards touching them faults. LAPIS_READ_ONLY if
 * they were mapped for reading, LAPIS_ON_DEVICE on a CUDA device. length may be NULL.
 */
enum lapis_code lapis_mapping_bytes_mut(const struct lapis_mapping *mapping,
                                        size_t range,
                                        void **out,
                                        size_t *length);

/**
 * The device address of a range, a CUdeviceptr, for kernels until lapis_unmap. LAPIS_UNSUPPORTED where the device isn't
 * a CUDA device. length may be NULL.
 */
enum lapis_code lapis_mapping_device_ptr(const struct lapis_mapping *mapping,
                                         size_t range,
                                         uint64_t *out,
                                         size_t *length);

/**
 * Copies length bytes of a range, from its byte offset on, to target, on any device.
 */
enum lapis_code lapis_mapping_copy_to_host(const struct lapis_mapping *mapping,
                                           size_t range,
                                           uint64_t offset,
                                           void *target,
                                           size_t length);

/**
 * Copies length bytes at source over a range, from its byte offset on, on any device.
 */
enum lapis_code lapis_mapping_copy_from_host(const struct lapis_mapping *mapping,
                                             size_t range,
                                             uint64_t offset,
                                             const void *source,
                                             size_t length);

/**
 * What it cost. size: sizeof(lapis_map_stats).
 */
enum lapis_code lapis_mapping_stats(const struct lapis_mapping *mapping,
                                    struct lapis_map_stats *out,
                                    size_t size);

/**
 * Ends a mapping. On a CUDA device it waits first for all work of this process in the device's primary context. The
 * handle is closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_unmap(struct lapis_mapping *mapping);

/**
 * Ends a mapping once the GPU has done what stream holds now, and returns at once. stream: a live CUstream or
 * cudaStream_t of the device's primary context, or NULL for its default stream. Where the device isn't a CUDA device, it
 * ends at once. The handle is closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_unmap_after(struct lapis_mapping *mapping,
                                  void *stream);

/**
 * Opens a .safetensors file, a .safetensors.index.json with its shards, a .gguf file, or a directory that has one of these.
 */
enum lapis_code lapis_open_model(const struct lapis_client *client,
                                 const char *path,
                                 struct lapis_model **out);

/**
 * How many layers it has.
 */
enum lapis_code lapis_model_layers(const struct lapis_model *model, size_t *out);

/**
 * How many tensors it has.
 */
enum lapis_code lapis_model_tensors(const struct lapis_model *model, size_t *out);

/**
 * One of its layers, in the order of execution. size: sizeof(lapis_layer).
 */
enum lapis_code lapis_model_layer(const struct lapis_model *model,
                                  size_t layer,
                                  struct lapis_layer *out,
                                  size_t size);

/**
 * One of its tensors. size: sizeof(lapis_tensor).
 */
enum lapis_code lapis_model_tensor(const struct lapis_model *model,
                                   size_t tensor,
                                   struct lapis_tensor *out,
                                   size_t size);

/**
 * The number of the tensor with this name.
 */
enum lapis_code lapis_model_find(const struct lapis_model *model, const char *name, size_t *out);

/**
 * Brings all tensors of a layer to VRAM, one range each; lapis_mapping_tensor says which. Empty tensors have none.
 */
enum lapis_code lapis_model_map_layer(const struct lapis_model *model,
                                      size_t layer,
                                      uint64_t wait_us,
                                      struct lapis_mapping **out);

/**
 * Brings bytes of one tensor to VRAM: length of them from its byte offset on, or with UINT64_MAX all from there. So a
 * tensor larger than VRAM can be used piece by piece.
 */
enum lapis_code lapis_model_map_tensor(const struct lapis_model *model,
                                       size_t tensor,
                                       uint64_t offset,
                                       uint64_t length,
                                       uint64_t wait_us,
                                       struct lapis_mapping **out);

/**
 * Says that a layer will be mapped soon. Returns at once.
 */
enum lapis_code lapis_model_prefetch_layer(const struct lapis_model *model, size_t layer);

/**
 * Declares that the model's layers are going to be mapped in order: once, or if cyclic over and over.
 */
enum lapis_code lapis_model_plan(const struct lapis_model *model, bool cyclic, struct lapis_plan **out);

/**
 * Closes a model. Mappings of it stay.
 */
enum lapis_code lapis_model_close(struct lapis_model *model);

/**
 * Declares in which order ranges are going to be mapped: once, or if cyclic over and over. Returns at once; the first
 * steps are fetched from then on.
 */
enum lapis_code lapis_plan_set(const struct lapis_client *client,
                               const struct lapis_step *steps,
                               size_t count,
                               bool cyclic,
                               struct lapis_plan **out);

/**
 * Takes a plan back.
 */
enum lapis_code lapis_plan_end(struct lapis_plan *plan);

/**
 * Takes down what this client maps from now on, in order, on all threads.
 */
enum lapis_code lapis_record(const struct lapis_client *client, struct lapis_recording **out);

/**
 * Ends a recording, and declares that the same will be mapped again: once, or if cyclic over and over. The recording is
 * closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_recording_plan(struct lapis_recording *recording,
                                     bool cyclic,
                                     struct lapis_plan **out);

/**
 * Forgets a recording.
 */
enum lapis_code lapis_recording_drop(struct lapis_recording *recording);

/**
 * The daemon's counters, as of now. size: sizeof(lapis_stats).
 */
enum lapis_code lapis_client_stats(const struct lapis_client *client, struct lapis_stats *out, size_t size);

/**
 * What went wrong in the last call that failed on this thread, and what to do; empty if none has. Calls that succeed
 * leave it. It lasts until the next failure on this thread.
 */
const char *lapis_last_message(void);

/**
 * The last failure of a call on this thread; with LAPIS_OK if none has failed. size: sizeof(lapis_error).
 */
enum lapis_code lapis_last_error(struct lapis_error *out, size_t size);

/**
 * Connects to the daemon at a socket. NULL: $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
 */
enum lapis_code lapis_connect(const char *socket,
                              struct lapis_client **out);

/**
 * Connects with options.
 */
enum lapis_code lapis_connect_with(const struct lapis_options *options, struct lapis_client **out);

/**
 * What the daemon said of itself. size: sizeof(lapis_info).
 */
enum lapis_code lapis_client_info(const struct lapis_client *client, struct lapis_info *out, size_t size);

/**
 * Closes a connection: it ends with the last of its allocations, mappings, models and plans.
 */
enum lapis_code lapis_client_close(struct lapis_client *client);

/**
 * Version of this library, such as "0.1.0".
 */
const char *lapis_version(void);

/**
 * Reserves size bytes, which start as zeros.
 */
enum lapis_code lapis_allocate(const struct lapis_client *client,
                               uint64_t size,
                               struct lapis_allocation **out);

/**
 * Makes length bytes of an open file, from offset on, an allocation that can be read. The daemon reads them through
 * this descriptor, which may be closed afterwards.
 */
enum lapis_code lapis_open_file(const struct lapis_client *client,
                                int32_t descriptor,
                                uint64_t offset,
                                uint64_t length,
                                struct lapis_allocation **out);

/**
 * Opens a file and makes length bytes of it, from offset on, an allocation that can be read.
 */
enum lapis_code lapis_open_path(const struct lapis_client *client,
                                const char *path,
                                uint64_t offset,
                                uint64_t length,
                                struct lapis_allocation **out);

/**
 * How many bytes were asked for.
 */
enum lapis_code lapis_allocation_size(const struct lapis_allocation *allocation, uint64_t *out);

/**
 * Its number, as lapisctl shows it.
 */
enum lapis_code lapis_allocation_id(const struct lapis_allocation *allocation, uint64_t *out);

/**
 * Gives the allocation up, once no mapping has any of it.
 */
enum lapis_code lapis_allocation_free(struct lapis_allocation *allocation);

/**
 * Brings ranges of bytes to VRAM, all or none of them, and keeps them there until lapis_unmap. access: a lapis_access.
 * Waits up to wait_us microseconds for other mappings to make room; with 0 only as long as the transfers take.
 */
enum lapis_code lapis_map(const struct lapis_client *client,
                          const struct lapis_range *ranges,
                          size_t count,
                          int access,
                          uint64_t wait_us,
                          struct lapis_mapping **out);

/**
 * How many ranges it has.
 */
enum lapis_code lapis_mapping_count(const struct lapis_mapping *mapping, size_t *out);

/**
 * Which of its model's tensors a range is, for a mapping of a model.
 */
enum lapis_code lapis_mapping_tensor(const struct lapis_mapping *mapping, size_t range, size_t *out);

/**
 * The bytes of a range, to be read until lapis_unmap: afterwards reading them faults. LAPIS_ON_DEVICE on a CUDA device.
 * length may be NULL.
 */
enum lapis_code lapis_mapping_bytes(const struct lapis_mapping *mapping,
                                    size_t range,
                                    const void **out,
                                    size_t *length);

/**
 * The bytes of a range, to be read and written until lapis_unmap: afterwards touching them faults. LAPIS_READ_ONLY if
 * they were mapped for reading, LAPIS_ON_DEVICE on a CUDA device. length may be NULL.
 */
enum lapis_code lapis_mapping_bytes_mut(const struct lapis_mapping *mapping,
                                        size_t range,
                                        void **out,
                                        size_t *length);

/**
 * The device address of a range, a CUdeviceptr, for kernels until lapis_unmap. LAPIS_UNSUPPORTED where the device isn't
 * a CUDA device. length may be NULL.
 */
enum lapis_code lapis_mapping_device_ptr(const struct lapis_mapping *mapping,
                                         size_t range,
                                         uint64_t *out,
                                         size_t *length);

/**
 * Copies length bytes of a range, from its byte offset on, to target, on any device.
 */
enum lapis_code lapis_mapping_copy_to_host(const struct lapis_mapping *mapping,
                                           size_t range,
                                           uint64_t offset,
                                           void *target,
                                           size_t length);

/**
 * Copies length bytes at source over a range, from its byte offset on, on any device.
 */
enum lapis_code lapis_mapping_copy_from_host(const struct lapis_mapping *mapping,
                                             size_t range,
                                             uint64_t offset,
                                             const void *source,
                                             size_t length);

/**
 * What it cost. size: sizeof(lapis_map_stats).
 */
enum lapis_code lapis_mapping_stats(const struct lapis_mapping *mapping,
                                    struct lapis_map_stats *out,
                                    size_t size);

/**
 * Ends a mapping. On a CUDA device it waits first for all work of this process in the device's primary context. The
 * handle is closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_unmap(struct lapis_mapping *mapping);

/**
 * Ends a mapping once the GPU has done what stream holds now, and returns at once. stream: a live CUstream or
 * cudaStream_t of the device's primary context, or NULL for its default stream. Where the device isn't a CUDA device, it
 * ends at once. The handle is closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_unmap_after(struct lapis_mapping *mapping,
                                  void *stream);

/**
 * Says that ranges will be mapped soon, in this order. Returns at once. Those of a higher priority are fetched first.
 * within_us: after how many microseconds it is too late to begin; 0: never.
 */
enum lapis_code lapis_prefetch(const struct lapis_client *client,
                               const struct lapis_range *ranges,
                               size_t count,
                               uint8_t priority,
                               uint64_t within_us);

/**
 * Takes prefetches of ranges back, as far as they have not begun.
 */
enum lapis_code lapis_cancel_prefetch(const struct lapis_client *client,
                                      const struct lapis_range *ranges,
                                      size_t count);

/**
 * Says how ranges will be used, which changes what is evicted first and nothing else. advice: a lapis_advice.
 */
enum lapis_code lapis_advise(const struct lapis_client *client,
                             const struct lapis_range *ranges,
                             size_t count,
                             int advice);

/**
 * Writes ranges of allocated memory down to the NVMe tier, and leaves them where they are as well. Waits up to wait_us
 * microseconds until all is written.
 */
enum lapis_code lapis_flush(const struct lapis_client *client,
                            const struct lapis_range *ranges,
                            size_t count,
                            uint64_t wait_us);

/**
 * Declares in which order ranges are going to be mapped: once, or if cyclic over and over. Returns at once; the first
 * steps are fetched from then on.
 */
enum lapis_code lapis_plan_set(const struct lapis_client *client,
                               const struct lapis_step *steps,
                               size_t count,
                               bool cyclic,
                               struct lapis_plan **out);

/**
 * Takes a plan back.
 */
enum lapis_code lapis_plan_end(struct lapis_plan *plan);

/**
 * Takes down what this client maps from now on, in order, on all threads.
 */
enum lapis_code lapis_record(const struct lapis_client *client, struct lapis_recording **out);

/**
 * Ends a recording, and declares that the same will be mapped again: once, or if cyclic over and over. The recording is
 * closed whatever is returned, except LAPIS_BUSY.
 */
enum lapis_code lapis_recording_plan(struct lapis_recording *recording,
                                     bool cyclic,
                                     struct lapis_plan **out);

/**
 * Forgets a recording.
 */
enum lapis_code lapis_recording_drop(struct lapis_recording *recording);

/**
 * Opens a .safetensors file, a .safetensors.index.json with its shards, a .gguf file, or a directory that has one of these.
 */
enum lapis_code lapis_open_model(const struct lapis_client *client,
                                 const char *path,
                                 struct lapis_model **out);

/**
 * How many layers it has.
 */
enum lapis_code lapis_model_layers(const struct lapis_model *model, size_t *out);

/**
 * How many tensors it has.
 */
enum lapis_code lapis_model_tensors(const struct lapis_model *model, size_t *out);

/**
 * One of its layers, in the order of execution. size: sizeof(lapis_layer).
 */
enum lapis_code lapis_model_layer(const struct lapis_model *model,
                                  size_t layer,
                                  struct lapis_layer *out,
                                  size_t size);

/**
 * One of its tensors. size: sizeof(lapis_tensor).
 */
enum lapis_code lapis_model_tensor(const struct lapis_model *model,
                                   size_t tensor,
                                   struct lapis_tensor *out,
                                   size_t size);

/**
 * The number of the tensor with this name.
 */
enum lapis_code lapis_model_find(const struct lapis_model *model, const char *name, size_t *out);

/**
 * Brings all tensors of a layer to VRAM, one range each; lapis_mapping_tensor says which. Empty tensors have none.
 */
enum lapis_code lapis_model_map_layer(const struct lapis_model *model,
                                      size_t layer,
                                      uint64_t wait_us,
                                      struct lapis_mapping **out);

/**
 * Brings bytes of one tensor to VRAM: length of them from its byte offset on, or with UINT64_MAX all from there. So a
 * tensor larger than VRAM can be used piece by piece.
 */
enum lapis_code lapis_model_map_tensor(const struct lapis_model *model,
                                       size_t tensor,
                                       uint64_t offset,
                                       uint64_t length,
                                       uint64_t wait_us,
                                       struct lapis_mapping **out);

/**
 * Says that a layer will be mapped soon. Returns at once.
 */
enum lapis_code lapis_model_prefetch_layer(const struct lapis_model *model, size_t layer);

/**
 * Declares that the model's layers are going to be mapped in order: once, or if cyclic over and over.
 */
enum lapis_code lapis_model_plan(const struct lapis_model *model, bool cyclic, struct lapis_plan **out);

/**
 * Closes a model. Mappings of it stay.
 */
enum lapis_code lapis_model_close(struct lapis_model *model);

/**
 * The daemon's counters, as of now. size: sizeof(lapis_stats).
 */
enum lapis_code lapis_client_stats(const struct lapis_client *client, struct lapis_stats *out, size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LAPIS_H */
