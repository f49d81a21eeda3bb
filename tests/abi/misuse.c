/* Every call of lapis.h, used as it should not be: misuse SOCKET MODEL. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static lapis_client *client;
static lapis_allocation *memory;
static lapis_mapping *mapping;
static lapis_range range;

static void nulls(const char *socket) {
    lapis_client *none = (lapis_client *)&none;
    GIVES(LAPIS_BAD_ARGUMENT, lapis_connect(socket, NULL));
    SAYS("out is NULL");
    GIVES(LAPIS_BAD_ARGUMENT, lapis_connect_with(NULL, NULL));
    lapis_options options = {0};
    GIVES(LAPIS_BAD_ARGUMENT, lapis_connect_with(&options, &none));
    SAYS("set it to sizeof(lapis_options)");
    IS(none == NULL);
    lapis_allocation *allocation;
    GIVES(LAPIS_BAD_HANDLE, lapis_allocate(NULL, 1, &allocation));
    SAYS("NULL where a lapis_client belongs");
    GIVES(LAPIS_BAD_ARGUMENT, lapis_allocate(client, 1, NULL));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_open_path(client, NULL, 0, 1, &allocation));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_open_file(client, -1, 0, 1, &allocation));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_open_file(client, 12345, 0, 1, &allocation));
    lapis_mapping *other;
    GIVES(LAPIS_BAD_ARGUMENT, lapis_map(client, NULL, 1, LAPIS_READ, 0, &other));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_map(client, &range, 1, 17, 0, &other));
    SAYS("17 is no lapis_access");
    GIVES(LAPIS_BAD_ARGUMENT, lapis_map(client, &range, 1, -1, 0, &other));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_map(client, &range, 1, LAPIS_READ, 0, NULL));
    lapis_range nowhere = {NULL, 0, 1};
    GIVES(LAPIS_BAD_HANDLE, lapis_map(client, &nowhere, 1, LAPIS_READ, 0, &other));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_advise(client, &range, 1, 5));
    GIVES(LAPIS_BAD_HANDLE, lapis_prefetch(NULL, &range, 1, 0, 0));
    GIVES(LAPIS_BAD_HANDLE, lapis_mapping_bytes(NULL, 0, &(const void *){0}, NULL));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_mapping_bytes(mapping, 0, NULL, NULL));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_mapping_copy_to_host(mapping, 0, 0, NULL, 1));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_mapping_copy_from_host(mapping, 0, 0, NULL, 1));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_client_stats(client, NULL, sizeof(lapis_stats)));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_client_stats(client, &(lapis_stats){0}, 0));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_client_stats(client, &(lapis_stats){0}, SIZE_MAX));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_open_model(client, NULL, &(lapis_model *){0}));
    lapis_plan *plan;
    GIVES(LAPIS_BAD_ARGUMENT, lapis_plan_set(client, NULL, 1, true, &plan));
    lapis_step step = {NULL, 1};
    GIVES(LAPIS_BAD_ARGUMENT, lapis_plan_set(client, &step, 1, true, &plan));
    GIVES(LAPIS_BAD_HANDLE, lapis_recording_plan(NULL, true, &plan));
    OK(lapis_unmap(NULL));
    OK(lapis_unmap_after(NULL, NULL));
    OK(lapis_allocation_free(NULL));
    OK(lapis_client_close(NULL));
    OK(lapis_plan_end(NULL));
    OK(lapis_recording_drop(NULL));
    OK(lapis_model_close(NULL));
    options.size = sizeof options;
    options.socket = socket;
    options.name = "\xff";
    GIVES(LAPIS_BAD_ARGUMENT, lapis_connect_with(&options, &none));
    SAYS("options.name is not UTF-8");
}

static void handles(const char *socket) {
    lapis_allocation *freed;
    OK(lapis_allocate(client, 1, &freed));
    OK(lapis_allocation_free(freed));
    GIVES(LAPIS_BAD_HANDLE, lapis_allocation_free(freed));
    SAYS("a handle that was closed where a lapis_allocation belongs");
    uint64_t size;
    GIVES(LAPIS_BAD_HANDLE, lapis_allocation_size(freed, &size));
    lapis_range gone = {freed, 0, 1};
    GIVES(LAPIS_BAD_HANDLE, lapis_map(client, &gone, 1, LAPIS_READ, 0, &(lapis_mapping *){0}));

    lapis_mapping *unmapped;
    lapis_allocation *other;
    OK(lapis_allocate(client, 1, &other));
    lapis_range one = {other, 0, 1};
    OK(lapis_map(client, &one, 1, LAPIS_READ, WAIT, &unmapped));
    OK(lapis_unmap(unmapped));
    GIVES(LAPIS_BAD_HANDLE, lapis_unmap(unmapped));
    GIVES(LAPIS_BAD_HANDLE, lapis_unmap_after(unmapped, NULL));
    char byte;
    GIVES(LAPIS_BAD_HANDLE, lapis_mapping_copy_to_host(unmapped, 0, 0, &byte, 1));
    OK(lapis_allocation_free(other));

    lapis_client *closed = connected(socket);
    lapis_range foreign = range;
    GIVES(LAPIS_FOREIGN, lapis_map(closed, &foreign, 1, LAPIS_READ, 0, &unmapped));
    OK(lapis_client_close(closed));
    GIVES(LAPIS_BAD_HANDLE, lapis_client_close(closed));
    GIVES(LAPIS_BAD_HANDLE, lapis_allocate(closed, 1, &freed));
    GIVES(LAPIS_BAD_HANDLE, lapis_client_stats(closed, &(lapis_stats){0}, sizeof(lapis_stats)));
    /* Of another kind. */
    GIVES(LAPIS_BAD_HANDLE, lapis_allocation_free((lapis_allocation *)client));
    SAYS("a lapis_client where a lapis_allocation belongs");
    GIVES(LAPIS_BAD_HANDLE, lapis_client_close((lapis_client *)memory));
    GIVES(LAPIS_BAD_HANDLE, lapis_client_close((lapis_client *)&byte));
    GIVES(LAPIS_BAD_HANDLE, lapis_client_close((lapis_client *)(uintptr_t)1));
}

static void sizes(const char *path) {
    lapis_allocation *allocation;
    GIVES(LAPIS_BAD_REQUEST, lapis_allocate(client, 0, &allocation));
    GIVES(LAPIS_TOO_MANY, lapis_allocate(client, 1ull << 50, &allocation));
    GIVES(LAPIS_OUT_OF_MEMORY, lapis_allocate(client, 1ull << 36, &allocation));
    lapis_error error;
    lapis_last_error(&error, sizeof error);
    IS(error.code == LAPIS_OUT_OF_MEMORY && error.retryable && error.limit != 0);
    lapis_allocate(client, UINT64_MAX, &allocation);
    IS(lapis_last_error(&error, sizeof error) == LAPIS_OK && error.code != LAPIS_OK && allocation == NULL);
    GIVES(LAPIS_OUT_OF_RANGE, lapis_open_path(client, path, UINT64_MAX, 1, &allocation));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_open_path(client, path, 0, UINT64_MAX, &allocation));
    GIVES(LAPIS_OPEN, lapis_open_path(client, "/nowhere/at/all", 0, 1, &allocation));
    GIVES(LAPIS_OPEN, lapis_open_path(client, "", 0, 1, &allocation));

    lapis_mapping *other;
    const lapis_range wrong[] = {
        {memory, 0, UINT64_MAX}, {memory, UINT64_MAX, UINT64_MAX}, {memory, 100001, 0}, {memory, 0, 100001}};
    for (size_t i = 0; i < 4; i++) {
        GIVES(LAPIS_OUT_OF_RANGE, lapis_map(client, &wrong[i], 1, LAPIS_READ, 0, &other));
        IS(other == NULL);
        GIVES(LAPIS_OUT_OF_RANGE, lapis_prefetch(client, &wrong[i], 1, 0, 0));
        GIVES(LAPIS_OUT_OF_RANGE, lapis_flush(client, &wrong[i], 1, 0));
    }
    GIVES(LAPIS_TOO_LARGE, lapis_map(client, &range, SIZE_MAX, LAPIS_READ, 0, &other));
    GIVES(LAPIS_TOO_LARGE, lapis_prefetch(client, &range, SIZE_MAX / sizeof range, 0, 0));
    lapis_plan *plan;
    lapis_step step = {NULL, SIZE_MAX};
    GIVES(LAPIS_TOO_LARGE, lapis_plan_set(client, &step, 1, true, &plan));
    GIVES(LAPIS_TOO_LARGE, lapis_plan_set(client, &step, SIZE_MAX, true, &plan));

    char bytes[64] = {0};
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_copy_to_host(mapping, 0, 90000, bytes, SIZE_MAX));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_copy_to_host(mapping, 0, UINT64_MAX, bytes, 2));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_copy_to_host(mapping, 0, 99999, bytes, 2));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_copy_from_host(mapping, 0, 0, bytes, SIZE_MAX));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_copy_to_host(mapping, 1, 0, bytes, 1));
    SAYS("range 1 of a mapping that has 1");
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_bytes(mapping, SIZE_MAX, &(const void *){0}, NULL));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_device_ptr(mapping, 1, &(uint64_t){0}, NULL));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_mapping_tensor(mapping, 0, &(size_t){0}));
    /* No bytes at all are no error. */
    OK(lapis_mapping_copy_to_host(mapping, 0, 100000, NULL, 0));
    OK(lapis_map(client, NULL, 0, LAPIS_READ, 0, &other));
    OK(lapis_unmap(other));
}

static void models(const char *path) {
    lapis_model *model;
    GIVES(LAPIS_MODEL, lapis_open_model(client, "/nowhere", &model));
    GIVES(LAPIS_MODEL, lapis_open_model(client, "/", &model));
    IS(model == NULL);
    OK(lapis_open_model(client, path, &model));
    lapis_mapping *other;
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_map_layer(model, 1000, 0, &other));
    SAYS("layer 1000 of a model that has");
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_layer(model, SIZE_MAX, &(lapis_layer){0}, sizeof(lapis_layer)));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_tensor(model, SIZE_MAX, &(lapis_tensor){0}, sizeof(lapis_tensor)));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_prefetch_layer(model, SIZE_MAX));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_map_tensor(model, SIZE_MAX, 0, 1, 0, &other));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_map_tensor(model, 0, UINT64_MAX, 1, 0, &other));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_map_tensor(model, 0, UINT64_MAX, UINT64_MAX, 0, &other));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_map_tensor(model, 0, 0, 1ull << 60, 0, &other));
    GIVES(LAPIS_OUT_OF_RANGE, lapis_model_find(model, "no.such.tensor", &(size_t){0}));
    GIVES(LAPIS_BAD_ARGUMENT, lapis_model_find(model, NULL, &(size_t){0}));
    OK(lapis_model_map_layer(model, 0, WAIT, &other));
    char byte = 0;
    GIVES(LAPIS_READ_ONLY, lapis_mapping_copy_from_host(other, 0, 0, &byte, 1));
    GIVES(LAPIS_READ_ONLY, lapis_mapping_bytes_mut(other, 0, &(void *){0}, NULL));
    OK(lapis_model_close(model));
    OK(lapis_mapping_copy_to_host(other, 0, 0, &byte, 1));
    OK(lapis_unmap(other));
    GIVES(LAPIS_BAD_HANDLE, lapis_model_close(model));
}

static volatile int signals;

static void count_signal(int number) {
    (void)number;
    signals++;
}

static void conflicts(void) {
    lapis_mapping *other;
    GIVES(LAPIS_CONFLICT, lapis_map(client, &range, 1, LAPIS_READ, 0, &other));
    lapis_error error;
    lapis_last_error(&error, sizeof error);
    IS(error.retryable);
    GIVES(LAPIS_IN_USE, lapis_flush(client, &range, 1, 0));
    if (is_cuda(client)) {
        GIVES(LAPIS_ON_DEVICE, lapis_mapping_bytes(mapping, 0, &(const void *){0}, NULL));
        GIVES(LAPIS_ON_DEVICE, lapis_mapping_bytes_mut(mapping, 0, &(void *){0}, NULL));
    } else {
        GIVES(LAPIS_UNSUPPORTED, lapis_mapping_device_ptr(mapping, 0, &(uint64_t){0}, NULL));
    }
    /* VRAM is full, and nobody makes room. */
    lapis_info info;
    OK(lapis_client_info(client, &info, sizeof info));
    uint64_t all = (uint64_t)info.mapped_pages_max * info.page_size;
    lapis_allocation *large;
    OK(lapis_allocate(client, all, &large));
    lapis_range half = {large, 0, all};
    GIVES(LAPIS_TIMED_OUT, lapis_map(client, &half, 1, LAPIS_READ, 1000, &other));
    /* Signals, whose handlers don't restart system calls, end no wait. */
    struct sigaction act = {.sa_handler = count_signal}, before;
    struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    IS(sigaction(SIGALRM, &act, &before) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    GIVES(LAPIS_TIMED_OUT, lapis_map(client, &half, 1, LAPIS_READ, 300000, &other));
    for (int i = 0; i < 300; i++) OK(lapis_client_stats(client, &(lapis_stats){0}, sizeof(lapis_stats)));
    IS(setitimer(ITIMER_REAL, &never, NULL) == 0 && sigaction(SIGALRM, &before, NULL) == 0);
    IS(signals > 20);
    OK(lapis_allocation_free(large));
}

/* A fork has nothing of its parent's, and can connect. */
static void forks(const char *socket) {
    pid_t child = fork();
    IS(child >= 0);
    if (child == 0) {
        char byte = 1;
        GIVES(LAPIS_FORKED, lapis_client_stats(client, &(lapis_stats){0}, sizeof(lapis_stats)));
        SAYS("connect again in the child");
        GIVES(LAPIS_FORKED, lapis_map(client, &range, 1, LAPIS_READ, 0, &(lapis_mapping *){0}));
        GIVES(LAPIS_FORKED, lapis_mapping_copy_to_host(mapping, 0, 0, &byte, 1));
        GIVES(LAPIS_FORKED, lapis_unmap(mapping));
        GIVES(LAPIS_FORKED, lapis_allocation_free(memory));
        GIVES(LAPIS_FORKED, lapis_client_close(client));
        if (!is_cuda(connected(socket))) {
            lapis_client *own = connected(socket);
            lapis_allocation *bytes;
            OK(lapis_allocate(own, 10, &bytes));
            lapis_range ten = {bytes, 0, 10};
            lapis_mapping *mine;
            OK(lapis_map(own, &ten, 1, LAPIS_WRITE, WAIT, &mine));
            OK(lapis_mapping_copy_from_host(mine, 0, 0, "0123456789", 10));
            OK(lapis_unmap(mine));
            OK(lapis_allocation_free(bytes));
            OK(lapis_client_close(own));
        }
        _exit(0);
    }
    int status;
    IS(waitpid(child, &status, 0) == child && status == 0);
    char text[5];
    OK(lapis_mapping_copy_to_host(mapping, 0, 0, text, 5));
    IS(memcmp(text, "still", 5) == 0);
}

/* One thread copies while another ends the mapping: the copy is whole, or told that the handle is closed. */
static void *copies(void *count) {
    static _Thread_local char bytes[100000];
    for (;;) {
        int code = lapis_mapping_copy_to_host(mapping, 0, 0, bytes, sizeof bytes);
        if (code == LAPIS_BAD_HANDLE) return NULL;
        OK(code);
        IS(memcmp(bytes, "still", 5) == 0);
        __atomic_add_fetch((long *)count, 1, __ATOMIC_RELAXED);
    }
}

static void threads(void) {
    pthread_t all[4];
    long count = 0;
    for (int i = 0; i < 4; i++) IS(pthread_create(&all[i], NULL, copies, &count) == 0);
    while (__atomic_load_n(&count, __ATOMIC_RELAXED) < 100) usleep(100);
    int code;
    while ((code = lapis_unmap(mapping)) == LAPIS_BUSY) SAYS("another thread is in a call with this lapis_mapping");
    OK(code);
    for (int i = 0; i < 4; i++) IS(pthread_join(all[i], NULL) == 0);
}

int main(int argc, char **argv) {
    IS(argc == 3);
    IS(lapis_last_message()[0] == 0);
    client = connected(argv[1]);
    OK(lapis_allocate(client, 100000, &memory));
    range = (lapis_range){memory, 0, 100000};
    OK(lapis_map(client, &range, 1, LAPIS_WRITE, WAIT, &mapping));
    OK(lapis_mapping_copy_from_host(mapping, 0, 0, "still here", 10));
    nulls(argv[1]);
    handles(argv[1]);
    sizes(argv[2]);
    models(argv[2]);
    conflicts();
    forks(argv[1]);
    threads();
    GIVES(LAPIS_CONNECT, lapis_connect("/nowhere/s", &(lapis_client *){0}));
    SAYS("/nowhere/s");
    OK(lapis_allocation_free(memory));
    OK(lapis_client_close(client));
    puts("all misuse");
    return 0;
}
