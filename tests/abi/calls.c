/* Every call of lapis.h, used as it should be: calls SOCKET MODEL. */
#include "check.h"

#include <fcntl.h>
#include <unistd.h>

static void connect_with_options(const char *socket) {
    lapis_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.socket = socket;
    options.name = "calls.c";
    options.timeout_us = WAIT;
    options.leave_open_files = true;
    lapis_client *client;
    OK(lapis_connect_with(&options, &client));
    lapis_info info;
    OK(lapis_client_info(client, &info, sizeof info));
    IS(info.page_size == 65536 || info.page_size == 2 << 20);
    IS(info.session != 0 && info.vram_frames > 0 && info.protocol == 1);
    /* A program that was compiled with an older header, and one with a newer. */
    lapis_info half;
    memset(&half, 0xff, sizeof half);
    OK(lapis_client_info(client, &half, 8));
    IS(half.page_size == info.page_size && half.session == UINT64_MAX);
    struct {
        lapis_info info;
        uint64_t new_field;
    } newer = {info, 7};
    OK(lapis_client_info(client, &newer.info, sizeof newer));
    IS(newer.new_field == 0);
    OK(lapis_client_close(client));
}

static void memory(lapis_client *client) {
    const uint64_t size = 300000;
    lapis_allocation *memory;
    OK(lapis_allocate(client, size, &memory));
    uint64_t found, id;
    OK(lapis_allocation_size(memory, &found));
    IS(found == size);
    OK(lapis_allocation_id(memory, &id));

    lapis_range ranges[2] = {{memory, 1000, 100000}, {memory, 200000, 100}};
    OK(lapis_prefetch(client, ranges, 2, 1, 1000000));
    OK(lapis_cancel_prefetch(client, ranges, 2));
    OK(lapis_advise(client, ranges, 2, LAPIS_ADVICE_KEEP));

    lapis_mapping *mapping;
    OK(lapis_map(client, ranges, 2, LAPIS_WRITE, WAIT, &mapping));
    size_t count, length;
    OK(lapis_mapping_count(mapping, &count));
    IS(count == 2);
    lapis_map_stats cost;
    OK(lapis_mapping_stats(mapping, &cost, sizeof cost));
    IS(cost.pages >= 1);
    char text[100];
    OK(lapis_mapping_copy_from_host(mapping, 1, 3, "tiers", 5));
    OK(lapis_mapping_copy_to_host(mapping, 1, 0, text, sizeof text));
    IS(memcmp(text, "\0\0\0tiers\0", 9) == 0);
    void *bytes;
    if (is_cuda(client)) {
        uint64_t pointer;
        OK(lapis_mapping_device_ptr(mapping, 1, &pointer, &length));
        IS(pointer != 0 && length == 100);
    } else {
        OK(lapis_mapping_bytes_mut(mapping, 0, &bytes, &length));
        IS(length == 100000);
        memset(bytes, 'x', length);
    }
    OK(lapis_unmap(mapping));
    OK(lapis_flush(client, ranges, 2, WAIT));

    OK(lapis_map(client, ranges, 2, LAPIS_READ, WAIT, &mapping));
    if (!is_cuda(client)) {
        const void *again, *other;
        OK(lapis_mapping_bytes(mapping, 0, &again, &length));
        IS(again == bytes);
        IS(((const char *)again)[99999] == 'x');
        OK(lapis_mapping_bytes(mapping, 1, &other, NULL));
        IS(memcmp(other, "\0\0\0tiers\0", 9) == 0);
        IS((const char *)other - (const char *)again == 199000);
    }
    /* Neither the connection nor the allocation ends before its mapping. */
    OK(lapis_allocation_free(memory));
    OK(lapis_mapping_copy_to_host(mapping, 1, 3, text, 5));
    IS(memcmp(text, "tiers", 5) == 0);
    OK(lapis_unmap_after(mapping, NULL));
}

static void file(lapis_client *client, const char *path) {
    int descriptor = open(path, O_RDONLY);
    IS(descriptor >= 0);
    char plain[4096], mapped[4096];
    IS(pread(descriptor, plain, sizeof plain, 777) == sizeof plain);
    lapis_allocation *both[2];
    OK(lapis_open_file(client, descriptor, 777, sizeof plain, &both[0]));
    IS(close(descriptor) == 0);
    OK(lapis_open_path(client, path, 777, sizeof plain, &both[1]));
    lapis_range ranges[2] = {{both[0], 0, sizeof plain}, {both[1], 0, sizeof plain}};
    lapis_mapping *mapping;
    OK(lapis_map(client, ranges, 2, LAPIS_READ, WAIT, &mapping));
    for (size_t i = 0; i < 2; i++) {
        OK(lapis_mapping_copy_to_host(mapping, i, 0, mapped, sizeof mapped));
        IS(memcmp(plain, mapped, sizeof plain) == 0);
    }
    OK(lapis_unmap(mapping));
    OK(lapis_allocation_free(both[0]));
    OK(lapis_allocation_free(both[1]));
}

static uint64_t checksum(lapis_mapping *mapping, size_t range, size_t length) {
    unsigned char *bytes = malloc(length);
    OK(lapis_mapping_copy_to_host(mapping, range, 0, bytes, length));
    uint64_t sum = 1469598103934665603u;
    for (size_t i = 0; i < length; i++) sum = (sum ^ bytes[i]) * 1099511628211u;
    free(bytes);
    return sum;
}

static void model(lapis_client *client, const char *path) {
    lapis_model *model;
    OK(lapis_open_model(client, path, &model));
    size_t layers, tensors, number;
    OK(lapis_model_layers(model, &layers));
    OK(lapis_model_tensors(model, &tensors));
    IS(layers > 2 && tensors > layers);
    lapis_plan *plan;
    OK(lapis_model_plan(model, true, &plan));
    size_t seen = 0;
    for (size_t i = 0; i < layers; i++) {
        lapis_layer layer;
        OK(lapis_model_layer(model, i, &layer, sizeof layer));
        OK(lapis_model_prefetch_layer(model, i));
        lapis_mapping *mapping, *alone;
        OK(lapis_model_map_layer(model, i, WAIT, &mapping));
        size_t count;
        OK(lapis_mapping_count(mapping, &count));
        IS(count == layer.tensor_count && layer.name[0] != 0);
        for (size_t range = 0; range < count; range++) {
            OK(lapis_mapping_tensor(mapping, range, &number));
            IS(number == layer.tensors[range]);
            lapis_tensor tensor;
            OK(lapis_model_tensor(model, number, &tensor, sizeof tensor));
            size_t found;
            OK(lapis_model_find(model, tensor.name, &found));
            IS(found == number);
            uint64_t elements = 1;
            for (size_t d = 0; d < tensor.dimensions; d++) elements *= tensor.shape[d];
            IS(elements / tensor.block_elements * tensor.block_bytes == tensor.bytes);
            IS(strcmp(tensor.dtype, "BF16") == 0);
            OK(lapis_model_map_tensor(model, number, 0, UINT64_MAX, WAIT, &alone));
            IS(checksum(mapping, range, tensor.bytes) == checksum(alone, 0, tensor.bytes));
            OK(lapis_unmap(alone));
            OK(lapis_model_map_tensor(model, number, tensor.bytes - 2, 2, WAIT, &alone));
            unsigned char end[2], end_alone[2];
            OK(lapis_mapping_copy_to_host(mapping, range, tensor.bytes - 2, end, 2));
            OK(lapis_mapping_copy_to_host(alone, 0, 0, end_alone, 2));
            IS(memcmp(end, end_alone, 2) == 0);
            OK(lapis_unmap(alone));
            seen++;
        }
        OK(lapis_unmap(mapping));
    }
    IS(seen == tensors);
    OK(lapis_plan_end(plan));
    OK(lapis_model_close(model));
}

static void plans(lapis_client *client) {
    lapis_allocation *memory;
    OK(lapis_allocate(client, 262144, &memory));
    lapis_use uses[2] = {{memory, 0, 65536, LAPIS_READ}, {memory, 65536, 65536, LAPIS_WRITE}};
    lapis_step steps[2] = {{uses, 2}, {uses, 1}};
    lapis_plan *plan;
    OK(lapis_plan_set(client, steps, 2, false, &plan));
    OK(lapis_plan_end(plan));

    lapis_recording *recording, *forgotten;
    OK(lapis_record(client, &recording));
    OK(lapis_record(client, &forgotten));
    lapis_range range = {memory, 0, 65536};
    lapis_mapping *mapping;
    OK(lapis_map(client, &range, 1, LAPIS_READ, WAIT, &mapping));
    OK(lapis_unmap(mapping));
    OK(lapis_recording_plan(recording, true, &plan));
    OK(lapis_recording_drop(forgotten));
    OK(lapis_plan_end(plan));
    OK(lapis_allocation_free(memory));
}

int main(int argc, char **argv) {
    IS(argc == 3);
    IS(strchr(lapis_version(), '.') != NULL);
    connect_with_options(argv[1]);
    lapis_client *client = connected(argv[1]);
    memory(client);
    file(client, argv[2]);
    model(client, argv[2]);
    plans(client);
    lapis_stats stats;
    OK(lapis_client_stats(client, &stats, sizeof stats));
    IS(stats.sessions == 1 && stats.allocations == 0 && stats.mappings == 0);
    IS(stats.session.maps > 10 && stats.vram.capacity > 0 && stats.total.maps == stats.session.maps);
    OK(lapis_client_close(client));
    IS(lapis_last_error(NULL, 0) == LAPIS_BAD_ARGUMENT);
    puts("all calls");
    return 0;
}
