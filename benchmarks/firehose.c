/* A server that sends as many tokens a second as a core can: what a client drops is then the client's.
 *
 *     cc -O2 -o firehose firehose.c && ./firehose STREAMS TOKENS PER_SECOND     # prints its port, then what it sent
 *
 * Speaks as much of OpenAI's protocol as a client needs: GET /v1/models, and POST /v1/completions, streams of which are
 * TOKENS chunks of one event each. Once STREAMS prompts have come their tokens are sent in turn, each in a segment of its own,
 * PER_SECOND in all. Then it prints "tokens seconds" and serves the next ones. Ends when stdin is closed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 512, REQUEST = 1 << 18, EVENTS = 256, FILES = 1 << 16 };

struct request {
    char *bytes;
    size_t size;
};

static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
static const char EVENT[] = "data: {\"id\":\"c\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\",\"choices\":[{"
                            "\"index\":0,\"text\":\" a\",\"logprobs\":null,\"finish_reason\":%s}],\"usage\":{"
                            "\"prompt_tokens\":1,\"completion_tokens\":%ld}}\n\n";
static struct request requests[FILES];

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static void tell(int fd, const char *bytes, size_t size) {
    if (send(fd, bytes, size, MSG_NOSIGNAL) != (ssize_t)size) die("send: the client does not read");
}

static size_t chunk(char *into, const char *data) { return sprintf(into, "%zx\r\n%s\r\n", strlen(data), data); }

/* Everything of a request there? Then how long it is. */
static size_t whole(const struct request *request) {
    const char *end = strstr(request->bytes, "\r\n\r\n"), *length = strcasestr(request->bytes, "\r\ncontent-length:");
    if (!end) return 0;
    size_t size = end + 4 - request->bytes + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
    return request->size >= size ? size : 0;
}

static void answer(int fd, const char *status, const char *body) {
    char text[LINE];
    int size = sprintf(text, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", status,
                       strlen(body), body);
    tell(fd, text, size);
}

/* Read what has come. True when it completed a prompt. */
static int heard(int fd) {
    struct request *request = &requests[fd];
    if (!request->bytes) request->bytes = calloc(1, REQUEST);
    ssize_t count = recv(fd, request->bytes + request->size, REQUEST - 1 - request->size, 0);
    if (count <= 0) {
        if (count < 0 && errno == EAGAIN) return 0;
        close(fd);
        request->size = 0;
        return 0;
    }
    request->size += count;
    request->bytes[request->size] = 0;
    if (!whole(request)) return 0;
    int asked = !strncmp(request->bytes, "POST /v1/completions ", 21);
    int prompt = asked && strstr(request->bytes, "\"stream\":true");
    if (asked && !prompt)
        answer(fd, "200 OK", "{\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"length\"}],"
                             "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}");
    else if (!prompt && !strncmp(request->bytes, "GET /v1/models ", 15))
        answer(fd, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"max_model_len\":100000}]}");
    else if (!prompt)
        answer(fd, strncmp(request->bytes, "GET /v1/completions ", 20) ? "404 Not Found" : "405 Method Not Allowed", "{}");
    request->size = 0;
    return prompt;
}

/* Seconds that it took. */
static double pour(const int *streams, long count, long tokens, double per_second) {
    char data[LINE], text[2 * LINE];
    for (long at = 0; at < count; at++) tell(streams[at], HEAD, sizeof HEAD - 1);
    double begin_s = now_s();
    for (long token = 0; token < tokens; token++) {
        sprintf(data, EVENT, token + 1 < tokens ? "null" : "\"length\"", token + 1);
        size_t size = chunk(text, data);
        for (long at = 0; at < count; at++) {
            if (at % 64 == 0)
                while (now_s() < begin_s + (token * count + at) / per_second) {}
            tell(streams[at], text, size);
        }
    }
    double ended_s = now_s();
    size_t size = chunk(text, "data: [DONE]\n\n") + sprintf(data, "0\r\n\r\n");
    strcat(text, data);
    for (long at = 0; at < count; at++) tell(streams[at], text, size);
    return ended_s - begin_s;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    long wanted = atol(argv[1]), tokens = atol(argv[2]), ready = 0;
    int *streams = calloc(wanted, sizeof *streams), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int listening = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
    if (bind(listening, (struct sockaddr *)&at, length) || listen(listening, 4096)) die("listen");
    getsockname(listening, (struct sockaddr *)&at, &length);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (int fd = 0; fd <= listening; fd += listening) {
        struct epoll_event wish = {.events = EPOLLIN, .data.fd = fd};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wish)) die("epoll_ctl: stdin must be a pipe");
    }
    for (;;) {
        struct epoll_event came[EVENTS];
        int count = epoll_wait(epoll, came, EVENTS, -1);
        for (int each = 0; each < count; each++) {
            int fd = came[each].data.fd;
            if (!fd) return 0;
            if (fd != listening) {
                if (!heard(fd)) continue;
                if (strstr(requests[fd].bytes, "\"max_tokens\":1,")) pour(&fd, 1, 1, 1e9);  // does it answer?
                else streams[ready++] = fd;
                if (ready < wanted) continue;
                printf("%ld %.3f\n", tokens * wanted, pour(streams, wanted, tokens, atof(argv[3])));
                fflush(stdout);
                ready = 0;
                continue;
            }
            while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                struct epoll_event wish = {.events = EPOLLIN, .data.fd = fd};
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                if (fd >= FILES || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wish)) die("accept");
            }
        }
    }
}
