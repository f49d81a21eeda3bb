/* What happens when the daemon goes: gone SOCKET. Says "mapped", waits for a line, and then uses what it has. */
#include "check.h"

int main(int argc, char **argv) {
    IS(argc == 2);
    lapis_client *client = connected(argv[1]);
    lapis_allocation *memory;
    OK(lapis_allocate(client, 100, &memory));
    lapis_range range = {memory, 0, 100};
    lapis_mapping *mapping, *other;
    OK(lapis_map(client, &range, 1, LAPIS_WRITE, WAIT, &mapping));
    OK(lapis_mapping_copy_from_host(mapping, 0, 0, "kept", 4));
    lapis_recording *recording;
    OK(lapis_record(client, &recording));
    puts("mapped");
    fflush(stdout);
    IS(getchar() == '\n');

    GIVES(LAPIS_DISCONNECTED, lapis_client_stats(client, &(lapis_stats){0}, sizeof(lapis_stats)));
    lapis_error error;
    OK(lapis_last_error(&error, sizeof error));
    IS(error.retryable);
    char text[4];
    OK(lapis_mapping_copy_to_host(mapping, 0, 0, text, 4));
    IS(memcmp(text, "kept", 4) == 0);
    lapis_range rest = {memory, 50, 10};
    GIVES(LAPIS_CONFLICT, lapis_map(client, &rest, 1, LAPIS_READ, 0, &other));
    GIVES(LAPIS_DISCONNECTED, lapis_allocate(client, 1, &(lapis_allocation *){0}));
    GIVES(LAPIS_DISCONNECTED, lapis_prefetch(client, &range, 1, 0, 0));
    GIVES(LAPIS_DISCONNECTED, lapis_flush(client, &range, 1, WAIT));
    GIVES(LAPIS_DISCONNECTED, lapis_recording_plan(recording, true, &(lapis_plan *){0}));
    GIVES(LAPIS_DISCONNECTED, lapis_unmap(mapping));
    GIVES(LAPIS_BAD_HANDLE, lapis_unmap(mapping));
    GIVES(LAPIS_DISCONNECTED, lapis_map(client, &range, 1, LAPIS_READ, 0, &other));
    OK(lapis_allocation_free(memory));
    OK(lapis_client_close(client));
    GIVES(LAPIS_CONNECT, lapis_connect(argv[1], &client));
    puts("gone");
    return 0;
}
