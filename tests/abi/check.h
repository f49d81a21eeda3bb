/* What the tests in C share: calls that must succeed, and calls that must fail with a certain code. */
#ifndef CHECK_H
#define CHECK_H

#include <lapis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIVES(expected, call)                                                                        \
    do {                                                                                             \
        int given = (call);                                                                          \
        if (given != (expected)) {                                                                   \
            fprintf(stderr, "%s:%d: %s gives %d, not %s: %s\n", __FILE__, __LINE__, #call, given,    \
                    #expected, lapis_last_message());                                                \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

#define OK(call) GIVES(LAPIS_OK, call)

#define IS(condition)                                                                                \
    do {                                                                                             \
        if (!(condition)) {                                                                          \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition);                      \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

/* The last failure's message has this in it. */
#define SAYS(text)                                                                                   \
    do {                                                                                             \
        if (strstr(lapis_last_message(), text) == NULL) {                                            \
            fprintf(stderr, "%s:%d: no \"%s\" in: %s\n", __FILE__, __LINE__, text,                   \
                    lapis_last_message());                                                           \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

#define WAIT 10000000

static inline lapis_client *connected(const char *socket) {
    lapis_client *client;
    OK(lapis_connect(socket, &client));
    IS(client != NULL);
    return client;
}

static inline int is_cuda(lapis_client *client) {
    lapis_info info;
    OK(lapis_client_info(client, &info, sizeof info));
    return info.device == LAPIS_DEVICE_CUDA;
}

#endif
