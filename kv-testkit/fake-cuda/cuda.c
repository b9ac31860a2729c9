/* A CUDA driver over host memory, to try on any machine what is done with a real one. Not a model of its speed or of all its
 * errors, but strict where mistakes would hide: device addresses are no host addresses, every call that needs a current context
 * checks for one, copies must lie inside of allocations, and a copy is done only when its event has been asked about some
 * times, so that whoever does not wait sees old bytes.
 *
 * FAKE_CUDA, read when the driver is initialised:
 *   nodevice   cuInit answers as a driver without a device does
 *   damage=N   after N copies every event fails with "illegal address", for ever
 *   odd=N      after N questions about events one is refused as if a graph was captured, and then one context is not made current
 *   capturing  a graph is captured for ever: threads that do not say that they have no part in it are refused
 * Compiled with -DOLD it lacks cuEventQuery.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int R;
typedef uint64_t Ptr;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NO_CONTEXT = 201, NOT_READY = 600,
       DAMAGED = 700, CAPTURE = 900, RELAXED = 2 };

#define FAR ((Ptr)1 << 60)
#define POLLS 3

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long damage = -1, odd = -1;
static int damaged, nodevice, context, capturing, unpushed;
static __thread unsigned mode;
static __thread void *stack[64];
static __thread int depth;

struct block { Ptr at; size_t len; struct block *next; };
static struct block *blocks;
struct op { void *to; const void *from; size_t len; int value; uint64_t number; struct op *next; };
struct stream { struct op *first, *last; uint64_t asked, done; };
struct event { struct stream *stream; uint64_t upto; int polls; };

static int current(void) { return depth > 0 && stack[depth - 1] == &context; }

/* The host's place of a device's bytes, if they are all of one allocation. */
static char *host(Ptr at, size_t len) {
    for (struct block *b = blocks; b; b = b->next)
        if (at >= b->at && len <= b->len && at - b->at <= b->len - len) return (char *)(at - FAR);
    return NULL;
}

static R enqueue(struct stream *s, void *to, const void *from, size_t len, int value) {
    if (damaged) return DAMAGED;
    if (!to || (!from && value < 0)) return INVALID;
    struct op *op = malloc(sizeof *op);
    *op = (struct op){to, from, len, value, ++s->asked, NULL};
    if (s->last) s->last->next = op; else s->first = op;
    s->last = op;
    return OK;
}

static R drain(struct stream *s, uint64_t upto) {
    while (s->first && s->first->number <= upto) {
        struct op *op = s->first;
        if (damage == 0) damaged = 1;
        if (damaged) return DAMAGED;
        if (damage > 0) damage--;
        if (op->from) memcpy(op->to, op->from, op->len); else memset(op->to, op->value, op->len);
        s->done = op->number;
        s->first = op->next;
        if (!s->first) s->last = NULL;
        free(op);
    }
    return OK;
}

#define LOCKED(x) do { pthread_mutex_lock(&lock); R r = (x); pthread_mutex_unlock(&lock); return r; } while (0)
#define NEEDS_CONTEXT if (!current()) return NO_CONTEXT
#define NO_CAPTURE if (capturing && mode != RELAXED) return CAPTURE

R cuInit(unsigned flags) {
    const char *how = getenv("FAKE_CUDA");
    if (how && !strcmp(how, "nodevice")) nodevice = 1;
    if (how && !strncmp(how, "damage=", 7)) damage = atol(how + 7);
    if (how && !strncmp(how, "odd=", 4)) odd = atol(how + 4);
    if (how && !strcmp(how, "capturing")) capturing = 1;
    return flags ? INVALID : nodevice ? NO_DEVICE : OK;
}
R cuDriverGetVersion(int *v) { *v = 12080; return OK; }
R cuGetErrorString(R r, const char **s) {
    switch (r) {
    case NO_DEVICE: *s = "no CUDA-capable device is detected"; return OK;
    case NO_CONTEXT: *s = "invalid device context"; return OK;
    case CAPTURE: *s = "operation not permitted when stream is capturing"; return OK;
    case INVALID: *s = "invalid argument"; return OK;
    case DAMAGED: *s = "an illegal memory access was encountered"; return OK;
    default: *s = NULL; return INVALID;
    }
}
R cuDeviceGetCount(int *n) { *n = 1; return OK; }
R cuDeviceGet(int *d, int i) { if (i) return BAD_DEVICE; *d = i; return OK; }
R cuDeviceGetName(char *p, int n, int d) { (void)d; strncpy(p, "Fake GPU", n); return OK; }
R cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &context; return OK; }
R cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }
static R push(void *c) {
    if (unpushed) { unpushed = 0; return NO_CONTEXT; }
    if (depth == 64) return INVALID;
    stack[depth++] = c;
    return OK;
}
R cuCtxPushCurrent_v2(void *c) { LOCKED(push(c)); }
R cuCtxPopCurrent_v2(void **c) { if (!depth) return NO_CONTEXT; *c = stack[--depth]; return OK; }

R cuStreamCreate(struct stream **s, unsigned flags) { (void)flags; NEEDS_CONTEXT; *s = calloc(1, sizeof **s); return OK; }
static R stream_end(struct stream *s) { R r = drain(s, UINT64_MAX); free(s); return r; }
R cuStreamDestroy_v2(struct stream *s) { NEEDS_CONTEXT; LOCKED(stream_end(s)); }
R cuThreadExchangeStreamCaptureMode(unsigned *m) { unsigned was = mode; mode = *m; *m = was; return OK; }
static R stream_query(struct stream *s) { return damaged ? DAMAGED : s->first ? NOT_READY : OK; }
R cuStreamQuery(struct stream *s) { NEEDS_CONTEXT; NO_CAPTURE; LOCKED(stream_query(s)); }
R cuStreamSynchronize(struct stream *s) { NEEDS_CONTEXT; NO_CAPTURE; LOCKED(drain(s, UINT64_MAX)); }

R cuEventCreate(struct event **e, unsigned flags) { (void)flags; NEEDS_CONTEXT; *e = calloc(1, sizeof **e); return OK; }
R cuEventDestroy_v2(struct event *e) { free(e); return OK; }
static R record(struct event *e, struct stream *s) { e->stream = s; e->upto = s->asked; e->polls = 0; return OK; }
R cuEventRecord(struct event *e, struct stream *s) { NEEDS_CONTEXT; LOCKED(record(e, s)); }
#ifndef OLD
static R query(struct event *e) {
    if (damaged) return DAMAGED;
    if (odd == 0) { odd = -1; unpushed = 1; return CAPTURE; }
    if (odd > 0) odd--;
    if (!e->stream || e->stream->done >= e->upto) return OK;
    return ++e->polls < POLLS ? NOT_READY : drain(e->stream, e->upto);
}
R cuEventQuery(struct event *e) { NO_CAPTURE; LOCKED(query(e)); }
#endif

R cuMemHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; NEEDS_CONTEXT; NO_CAPTURE; *p = malloc(n); return *p ? OK : NO_MEMORY; }
R cuMemFreeHost(void *p) { NEEDS_CONTEXT; free(p); return OK; }
static R allocate(Ptr *p, size_t n) {
    struct block *b = malloc(sizeof *b);
    char *bytes = n ? malloc(n) : NULL;
    if (!bytes) return NO_MEMORY;
    memset(bytes, 0xee, n);
    *b = (struct block){(Ptr)bytes + FAR, n, blocks};
    blocks = b;
    *p = b->at;
    return OK;
}
static R release(Ptr p) {
    for (struct block **b = &blocks; *b; b = &(*b)->next)
        if ((*b)->at == p) {
            struct block *gone = *b;
            *b = gone->next;
            free((char *)(gone->at - FAR));
            free(gone);
            return OK;
        }
    return INVALID;
}
R cuMemAlloc_v2(Ptr *p, size_t n) { NEEDS_CONTEXT; NO_CAPTURE; LOCKED(allocate(p, n)); }
R cuMemFree_v2(Ptr p) { NEEDS_CONTEXT; LOCKED(release(p)); }
R cuMemsetD8Async(Ptr d, unsigned char v, size_t n, struct stream *s) { NEEDS_CONTEXT; LOCKED(enqueue(s, host(d, n), NULL, n, v)); }
R cuMemcpyDtoHAsync_v2(void *to, Ptr from, size_t n, struct stream *s) { NEEDS_CONTEXT; LOCKED(enqueue(s, to, host(from, n), n, -1)); }
R cuMemcpyHtoDAsync_v2(Ptr to, const void *from, size_t n, struct stream *s) { NEEDS_CONTEXT; LOCKED(enqueue(s, host(to, n), from, n, -1)); }
