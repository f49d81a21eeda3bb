/* Maps and unmaps again and again: leaks SOCKET COUNT. Nothing may be left of it. */
#include "check.h"

#include <dirent.h>
#include <malloc.h>
#include <unistd.h>

static size_t lines(const char *path) {
    FILE *file = fopen(path, "r");
    IS(file != NULL);
    size_t count = 0;
    for (int c; (c = getc(file)) != EOF;) count += c == '\n';
    fclose(file);
    return count;
}

static size_t descriptors(void) {
    DIR *directory = opendir("/proc/self/fd");
    IS(directory != NULL);
    size_t count = 0;
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count;
}

static void map(lapis_client *client, lapis_allocation *memory, long count) {
    for (long i = 0; i < count; i++) {
        lapis_range range = {memory, (uint64_t)(i % 8) * 65536, 65536};
        lapis_mapping *mapping;
        OK(lapis_map(client, &range, 1, i % 2 ? LAPIS_READ : LAPIS_WRITE, WAIT, &mapping));
        OK(lapis_unmap(mapping));
        if (i % 100 == 0) {
            lapis_allocation *other;
            OK(lapis_allocate(client, 65536, &other));
            OK(lapis_allocation_free(other));
            GIVES(LAPIS_BAD_HANDLE, lapis_unmap(mapping));
        }
    }
}

int main(int argc, char **argv) {
    IS(argc == 3);
    lapis_client *client = connected(argv[1]);
    lapis_allocation *memory;
    OK(lapis_allocate(client, 8 * 65536, &memory));
    map(client, memory, 1000);
    size_t heap = mallinfo2().uordblks, maps = lines("/proc/self/maps"), open = descriptors();
    map(client, memory, atol(argv[2]));
    size_t heap_after = mallinfo2().uordblks, maps_after = lines("/proc/self/maps");
    if (heap_after > heap + 16384 || maps_after > maps + 4 || descriptors() != open) {
        fprintf(stderr, "heap %zu then %zu, maps %zu then %zu\n", heap, heap_after, maps, maps_after);
        return 1;
    }
    lapis_stats stats;
    OK(lapis_client_stats(client, &stats, sizeof stats));
    IS(stats.mappings == 0 && stats.allocations == 1);
    OK(lapis_allocation_free(memory));
    OK(lapis_client_close(client));
    puts("no leaks");
    return 0;
}
