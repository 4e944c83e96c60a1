/* What the fake NVML library knows, and how it answers: the scenario's text, its calls and their steps.
 *
 * Every answer goes through `answer_locked`: it finds the call of a device, picks the last step whose conditions hold,
 * and copies its values. All state lies behind one lock and handles point into a static table, so neither a broken
 * file nor a stale handle nor a second thread can crash the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999 };
enum { MAX_DEVICES = 160, MAX_VALUES = 1024, MAX_LATENCY_US = 60000000, MIN_MIG_SLOTS = 7 };
enum { PROCESS_COLUMNS = 4, UTILIZATION_COLUMNS = 6 };
static const double NANOSECOND = 1e-9; /* sums of decimal seconds fall short of their total by less */

typedef struct { uint64_t base; double per_second, quantum_s; } Value;
typedef struct {
    uint64_t from_call;
    double from_s;
    unsigned latency_us, type;
    int error;
    size_t first_value, num_values;
} Step;
typedef struct { char name[48]; size_t first_step, num_steps, current; int is_ordered; uint64_t num_calls; } Call;
typedef struct { /* a MIG instance has the number of its parent, a GPU 0 */
    char uuid[96], name[96], pci[96];
    unsigned parent, index, gpu_instance, compute_instance;
    size_t first_call, num_calls;
} Device;
typedef struct { void *items; size_t num, room; } Pool;
typedef struct { unsigned num, type, latency_us; uint64_t value[MAX_VALUES]; } Answer;

static Device devices[MAX_DEVICES]; /* number 0 stands for the system: nvmlInit and the versions are calls on it */
static size_t num_devices;
static Pool calls, steps, values;
static char driver_version[96], nvml_version[96], loaded_path[4096];
static struct stat loaded;
static int cuda_version, is_clock_manual, refcount;
static double started_s, advanced_s;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void acquire(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

/* A child that is forked while another thread holds the lock would wait for ever. */
__attribute__((constructor)) static void prepare_for_fork(void) { pthread_atfork(acquire, release, release); }

static double clock_s(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint64_t wall_us(void) { return (uint64_t)(1e6 * clock_s(CLOCK_REALTIME)); }
static double scenario_s(void) { return (is_clock_manual ? 0 : clock_s(CLOCK_MONOTONIC) - started_s) + advanced_s; }

static void wait_us(unsigned microseconds)
{
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000L};
    while (microseconds && nanosleep(&left, &left) && errno == EINTR) {
    }
}

/* ---- the scenario's text ---- */

static void *append(Pool *pool, size_t item_bytes)
{
    if (pool->num == pool->room) {
        size_t room = pool->room ? 2 * pool->room : 256;
        void *items = realloc(pool->items, room * item_bytes);
        if (!items)
            return NULL;
        *pool = (Pool){items, pool->num, room};
    }
    return memset((char *)pool->items + pool->num++ * item_bytes, 0, item_bytes);
}

/* device UUID PARENT INDEX GPU_INSTANCE COMPUTE_INSTANCE PCI NAME */
static int parse_device(const char *line)
{
    Device new = {.first_call = calls.num};
    int num = sscanf(line, "device %95s %u %u %u %u %95s %95[^\n]", new.uuid, &new.parent, &new.index,
                     &new.gpu_instance, &new.compute_instance, new.pci, new.name);
    if (num != 7 || num_devices == MAX_DEVICES)
        return 0;
    devices[num_devices++] = new;
    return new.parent < num_devices - 1;
}

static int parse_call(const char *line)
{
    int at = 0;
    Call *call = append(&calls, sizeof *call);
    if (!call || sscanf(line, "call %47s %n", call->name, &at) != 1 || line[at])
        return 0;
    call->first_step = steps.num;
    call->is_ordered = 1;
    devices[num_devices - 1].num_calls++;
    return 1;
}

/* step FROM_CALL FROM_S LATENCY_US ERROR TYPE BASE:PER_SECOND:QUANTUM_S... */
static int parse_step(const char *line)
{
    int at = 0, used = 0;
    Value new;
    Step *step = append(&steps, sizeof *step);
    if (!step || !calls.num || sscanf(line, "step %" SCNu64 " %lf %u %d %u %n", &step->from_call, &step->from_s,
                                      &step->latency_us, &step->error, &step->type, &at) != 5)
        return 0;
    step->first_value = values.num;
    static const char format[] = "%" SCNu64 ":%lf:%lf %n";
    for (; sscanf(line + at, format, &new.base, &new.per_second, &new.quantum_s, &used) == 3; at += used) {
        Value *value = append(&values, sizeof *value);
        if (!value || step->num_values++ == MAX_VALUES)
            return 0;
        *value = new;
    }
    Call *call = (Call *)calls.items + calls.num - 1;
    if (call->num_steps++)
        call->is_ordered &= step->from_call >= step[-1].from_call && step->from_s >= step[-1].from_s;
    return !line[at] && step->latency_us <= MAX_LATENCY_US;
}

static int parse_line(const char *line, size_t number)
{
    if (number == 1)
        return sscanf(line, "lucid-fake-nvml 1 %95s %95s %d %d", driver_version, nvml_version, &cuda_version,
                      &is_clock_manual) == 4;
    return parse_device(line) || (!strncmp(line, "call ", 5) && parse_call(line)) ||
           (!strncmp(line, "step ", 5) && parse_step(line));
}

static int parse(FILE *file, const char *path)
{
    char *line = NULL;
    size_t size = 0, number = 0;
    int code = SUCCESS;
    devices[0] = (Device){.num_calls = 0};
    num_devices = 1;
    calls.num = steps.num = values.num = 0;
    while (!code && getline(&line, &size, file) >= 0)
        if (!parse_line(line, ++number)) {
            fprintf(stderr, "fake NVML: %s, line %zu is not what scenario.py writes: %.60s\n", path, number, line);
            code = UNKNOWN;
        }
    free(line);
    return number ? code : UNKNOWN;
}

/* Call numbers and seconds go on as long as the file stays the same: a driver may go away and come back. */
static int load(void)
{
    const char *path = getenv("LUCID_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    struct stat found;
    int code = file && !fstat(fileno(file), &found) && S_ISREG(found.st_mode) ? SUCCESS : DRIVER_NOT_LOADED;
    if (!code && (strcmp(path, loaded_path) || found.st_ino != loaded.st_ino || found.st_size != loaded.st_size ||
                  memcmp(&found.st_mtim, &loaded.st_mtim, sizeof found.st_mtim))) {
        code = parse(file, path);
        snprintf(loaded_path, sizeof loaded_path, "%s", code ? "" : path);
        loaded = found;
        started_s = clock_s(CLOCK_MONOTONIC);
        advanced_s = 0;
    }
    if (file)
        fclose(file);
    return code;
}

/* ---- answers ---- */

/* What grows does so from the step's begin on; a quantum makes the seconds, and so the value, move in jumps. */
static uint64_t value_at(const Value *value, double elapsed_s)
{
    double ticks = value->quantum_s > 0 ? elapsed_s / value->quantum_s + NANOSECOND : -1;
    if (ticks >= 0 && ticks < 1e15)
        elapsed_s = (double)(int64_t)ticks * value->quantum_s;
    double growth = value->per_second * elapsed_s;
    if (!(growth > -9e18 && growth < 9e18))
        return value->base;
    return value->base + (uint64_t)(int64_t)(growth + (growth < 0 ? -0.5 : 0.5));
}

static Call *find_call(const Device *device, const char *name)
{
    Call *call = (Call *)calls.items + device->first_call;
    for (size_t left = device->num_calls; left; left--, call++)
        if (!strcmp(call->name, name))
            return call;
    return NULL;
}

/* A condition that holds goes on holding, so the search starts at the last answer; a recording has many steps. */
static const Step *find_step(Call *call, double now_s)
{
    const Step *found = NULL;
    for (size_t i = call ? call->current : 0; call && i < call->num_steps; i++) {
        const Step *step = (Step *)steps.items + call->first_step + i;
        if (call->num_calls >= step->from_call && now_s + NANOSECOND >= step->from_s) {
            found = step;
            call->current = i;
        } else if (call->is_ordered) {
            break;
        }
    }
    return found;
}

/* `unlisted` is the code of a call without a step. Values that do not fit are not given; asking for their number is no
 * call of its own: it neither counts nor takes time. */
static int answer_locked(const Device *device, const char *name, int unlisted, uint64_t max_values, Answer *got)
{
    double now_s = scenario_s();
    Call *any = find_call(device, "any"), *call = find_call(device, name);
    const Step *failure = find_step(any, now_s), *step = find_step(call, now_s);
    if (failure && failure->error)
        step = failure;
    int code = step ? step->error : unlisted;
    *got = (Answer){.num = step && !code ? (unsigned)step->num_values : 0, .type = step ? step->type : 0};
    if (got->num > max_values)
        return INSUFFICIENT_SIZE;
    got->latency_us = step ? step->latency_us : 0;
    for (unsigned i = 0; i < got->num; i++)
        got->value[i] = value_at((Value *)values.items + step->first_value + i, now_s - step->from_s);
    if (any)
        any->num_calls++;
    if (call)
        call->num_calls++;
    return code;
}

static int answer(const void *handle, const char *name, int unlisted, uint64_t max_values, Answer *got)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)devices;
    int code = SUCCESS;
    got->num = got->latency_us = 0;
    acquire();
    if (!refcount)
        code = UNINITIALIZED;
    else if (offset % sizeof(Device) || offset / sizeof(Device) >= num_devices)
        code = INVALID_ARGUMENT;
    else
        code = answer_locked(handle, name, unlisted, max_values, got);
    release();
    wait_us(got->latency_us);
    return code;
}
