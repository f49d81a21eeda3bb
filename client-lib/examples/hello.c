/*
 * The same ten lines in each language: hello.rs, hello.c, hello.cpp, hello.py.
 *
 * cc hello.c $(pkg-config --cflags --libs lapis) && LAPIS_SOCKET=/tmp/lapis.sock ./a.out
 */
#include <lapis.h>
#include <stdio.h>
#include <stdlib.h>

static void check(lapis_code code) {
    if (code == LAPIS_OK) return;
    fprintf(stderr, "error %d: %s\n", code, lapis_last_message());
    exit(1);
}

int main(void) {
    lapis_client *client;
    lapis_allocation *memory;
    lapis_mapping *mapping;
    char text[14];

    check(lapis_connect(NULL, &client));
    check(lapis_allocate(client, 64 << 20, &memory));
    lapis_range range = {memory, 0, sizeof text};
    check(lapis_map(client, &range, 1, LAPIS_WRITE, LAPIS_WAIT_DEFAULT, &mapping));
    check(lapis_mapping_copy_from_host(mapping, 0, 0, "hello, tiers!\n", sizeof text));
    check(lapis_unmap(mapping));
    check(lapis_advise(client, &range, 1, LAPIS_ADVICE_DONT_NEED));
    check(lapis_map(client, &range, 1, LAPIS_READ, LAPIS_WAIT_DEFAULT, &mapping));
    check(lapis_mapping_copy_to_host(mapping, 0, 0, text, sizeof text));
    fwrite(text, 1, sizeof text, stdout);
    check(lapis_unmap(mapping));
    check(lapis_allocation_free(memory));
    check(lapis_client_close(client));
    return 0;
}
