/* The floor for a client: N requests at once, every read stamped by the kernel, nothing decoded.
 *
 *     cc -O2 -o baseline baseline.c && ./baseline 127.0.0.1 8001 1000 request.http
 *
 * `request.http` holds one request, head and body. Connections are open and accepted before the first send, as
 * loadgen's are: to send is a tenth cheaper while nobody at the other end watches the socket yet. A read
 * counts when it holds the start of an event with JSON in it. The answer's end is the last chunk of the chunked
 * encoding. Prints the medians of TTFT and TPOT over the requests as JSON.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 16, EVENTS = 256, REQUEST_LIMIT = 1 << 20, ACCEPTED_US = 100 };

struct stream {
    int fd;
    long reads;
    double sent_ns, first_ns, last_ns;
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double ns(const struct timespec *at) { return at->tv_sec * 1e9 + at->tv_nsec; }

static double now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return ns(&at);
}

static int opened(const struct sockaddr_in *to) {
    int on = 1, stamps = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)to, sizeof *to)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &stamps, sizeof stamps);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* One read: its size as recvmsg gives it, and the kernel's stamp of its last byte. */
static ssize_t take(int fd, char *buffer, double *stamp_ns) {
    char control[256];
    struct iovec space = {buffer, BUFFER};
    struct msghdr message = {.msg_iov = &space, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &message, 0);
    if (got <= 0) return got;
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    for (; part; part = CMSG_NXTHDR(&message, part))
        if (part->cmsg_type == SCM_TIMESTAMPING)
            *stamp_ns = ns(&((struct scm_timestamping *)CMSG_DATA(part))->ts[0]);
    return got;
}

static int ended(const char *buffer, ssize_t size) { return size >= 5 && !memcmp(buffer + size - 5, "0\r\n\r\n", 5); }

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, long n) {
    qsort(values, n, sizeof *values, ascending);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "baseline ADDRESS PORT N REQUEST_FILE\n");
        return 2;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
    inet_pton(AF_INET, argv[1], &to.sin_addr);
    long n = atol(argv[3]), left = n;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    char *request = malloc(REQUEST_LIMIT), *buffer = malloc(BUFFER);
    FILE *file = fopen(argv[4], "rb");
    if (!file) die(argv[4]);
    ssize_t size = fread(request, 1, REQUEST_LIMIT, file);
    struct stream *streams = calloc(n, sizeof *streams);
    int poll = epoll_create1(EPOLL_CLOEXEC);
    for (long i = 0; i < n; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &streams[i]};
        streams[i].fd = opened(&to);
        epoll_ctl(poll, EPOLL_CTL_ADD, streams[i].fd, &event);
    }
    usleep(n * ACCEPTED_US);
    for (long i = 0; i < n; i++) {
        streams[i].sent_ns = now_ns();
        if (send(streams[i].fd, request, size, 0) != size) die("send");
    }
    struct epoll_event ready[EVENTS];
    while (left) {
        int count = epoll_wait(poll, ready, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            struct stream *stream = ready[i].data.ptr;
            double stamp_ns = 0;
            ssize_t got = take(stream->fd, buffer, &stamp_ns);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) die("read before the end");
            if (memmem(buffer, got, "data: {", 7)) {
                if (!stream->reads++) stream->first_ns = stamp_ns;
                stream->last_ns = stamp_ns;
            }
            if (ended(buffer, got)) {
                close(stream->fd);
                left--;
            }
        }
    }
    double *ttft = calloc(n, sizeof *ttft), *tpot = calloc(n, sizeof *tpot);
    for (long i = 0; i < n; i++) {
        ttft[i] = (streams[i].first_ns - streams[i].sent_ns) / 1e6;
        tpot[i] = streams[i].reads > 1 ? (streams[i].last_ns - streams[i].first_ns) / (streams[i].reads - 1) / 1e6 : 0;
    }
    printf("{\"ttft_ms\": %.4f, \"tpot_ms\": %.5f}\n", median(ttft, n), median(tpot, n));
    return 0;
}
