/* A stand-in for libnvidia-ml.so.1 that answers from a scenario, for tests on machines without a GPU.
 *
 * nvmlInit reads the flat text file that the environment variable LUCID_FAKE_NVML names; scenario.py writes it and
 * says what a scenario can hold. Here are the functions of NVML; answers.h finds what they give.
 *
 * It has no soname: a process that opened it by its path gets the machine's own driver when it asks for that by name.
 *
 * Numbers of errors and layouts of structures are those of the documented interface:
 * https://docs.nvidia.com/deploy/nvml-api/
 */
#include "answers.h"

#define API __attribute__((visibility("default")))

/* Give the first `num` values in `width` bytes each; the low bytes come first on every machine this is built for. */
static int give(const void *handle, const char *name, size_t width, size_t num, void *target)
{
    Answer got;
    int code = target ? answer(handle, name, NOT_SUPPORTED, MAX_VALUES, &got) : INVALID_ARGUMENT;
    for (size_t i = 0; !code && i < num; i++)
        memcpy((char *)target + i * width, &got.value[i], width);
    return code;
}

static int give_pair(const void *handle, const char *name, unsigned *first, unsigned *second)
{
    unsigned both[2];
    int code = first && second ? give(handle, name, sizeof *both, 2, both) : INVALID_ARGUMENT;
    if (!code) {
        *first = both[0];
        *second = both[1];
    }
    return code;
}

/* Copy what the scenario says about a device itself, unless `name` is listed with an error. */
static int look(const void *handle, const char *name, const void *target, Device *found)
{
    Answer got;
    int code = target ? answer(handle, name, SUCCESS, MAX_VALUES, &got) : INVALID_ARGUMENT;
    acquire();
    if (!code)
        *found = *(const Device *)handle;
    release();
    return code;
}

typedef struct { const char *uuid, *address; unsigned parent, index; } Key;

static int read_address(const char *text, unsigned address[3])
{
    return sscanf(text, "%x:%x:%x", address, address + 1, address + 2) == 3;
}

static int is_wanted(const Device *device, const Key *key)
{
    unsigned own[3], other[3];
    if (key->uuid)
        return !strcmp(device->uuid, key->uuid);
    if (key->address)
        return read_address(device->pci, own) && read_address(key->address, other) && !memcmp(own, other, sizeof own);
    return device->parent == key->parent && device->index == key->index;
}

static int give_handle(Key key, int missing, void **handle)
{
    Device *found = NULL, ignored;
    acquire();
    int code = refcount ? missing : UNINITIALIZED;
    for (size_t i = 1; i < num_devices && !found; i++)
        found = is_wanted(&devices[i], &key) ? &devices[i] : NULL;
    release();
    if (!found || (code = look(found, "handle", handle, &ignored)))
        return code;
    *handle = found;
    return SUCCESS;
}

/* What a device or the system is: a number that only some have, or a text. */
#define NUMBER(declaration, handle, call, expression, is_known) \
    API int declaration                                         \
    {                                                           \
        Device found;                                           \
        int code = look(handle, call, number, &found);          \
        if (code || !(is_known))                                \
            return code ? code : NOT_SUPPORTED;                 \
        *number = (expression);                                 \
        return SUCCESS;                                         \
    }
#define TEXT(declaration, handle, call, source)                 \
    API int declaration                                         \
    {                                                           \
        Device found;                                           \
        int code = look(handle, call, text, &found);            \
        if (code || strlen(source) >= size)                     \
            return code ? code : INSUFFICIENT_SIZE;             \
        strcpy(text, source);                                   \
        return SUCCESS;                                         \
    }

/* ---- NVML: the system ---- */

API int nvmlInitWithFlags(unsigned flags)
{
    Answer got = {.type = flags};
    acquire();
    int code = refcount ? SUCCESS : load();
    if (!refcount && !code)
        code = answer_locked(devices, "init", SUCCESS, MAX_VALUES, &got);
    refcount += !code;
    release();
    wait_us(got.latency_us);
    return code;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void)
{
    acquire();
    int code = refcount ? SUCCESS : UNINITIALIZED;
    refcount -= !code;
    release();
    return code;
}

API const char *nvmlErrorString(int code)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "The operating system has blocked the request",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
    };
    return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "Unknown Error";
}

static unsigned count_children(size_t parent)
{
    unsigned num = 0;
    acquire();
    for (size_t i = 1; i < num_devices; i++)
        num += devices[i].parent == parent;
    release();
    return num;
}

TEXT(nvmlSystemGetDriverVersion(char *text, unsigned size), devices, "driver_version", driver_version)
TEXT(nvmlSystemGetNVMLVersion(char *text, unsigned size), devices, "nvml_version", nvml_version)
NUMBER(nvmlSystemGetCudaDriverVersion(int *number), devices, "cuda_driver_version", cuda_version, 1)
NUMBER(nvmlSystemGetCudaDriverVersion_v2(int *number), devices, "cuda_driver_version", cuda_version, 1)
NUMBER(nvmlDeviceGetCount_v2(unsigned *number), devices, "device_count", count_children(0), 1)

/* ---- NVML: which device ---- */

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    return give_handle((Key){.index = index}, INVALID_ARGUMENT, handle);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    return uuid ? give_handle((Key){.uuid = uuid}, NOT_FOUND, handle) : INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle)
{
    return address ? give_handle((Key){.address = address}, NOT_FOUND, handle) : INVALID_ARGUMENT;
}

TEXT(nvmlDeviceGetName(void *device, char *text, unsigned size), device, "name", found.name)
TEXT(nvmlDeviceGetUUID(void *device, char *text, unsigned size), device, "uuid", found.uuid)
NUMBER(nvmlDeviceGetIndex(void *device, unsigned *number), device, "index", found.index, 1)

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } PciInfo;

API int nvmlDeviceGetPciInfo_v3(void *device, PciInfo *info)
{
    Device found;
    unsigned at[3];
    int code = look(device, "pci_info", info, &found);
    if (code || !read_address(found.pci, at))
        return code ? code : NOT_SUPPORTED;
    *info = (PciInfo){.domain = at[0], .bus = at[1], .device = at[2]};
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", at[0] & 0xffff, at[1] & 0xff, at[2] & 0xff);
    snprintf(info->text, sizeof info->text, "%08X:%02X:%02X.0", at[0], at[1] & 0xff, at[2] & 0xff);
    return SUCCESS;
}

/* ---- NVML: MIG ---- */

static size_t number_of(const void *device) { return (size_t)((const Device *)device - devices); }

/* A GPU in MIG mode has slots, of which some may be empty. */
static unsigned mig_slots(const void *device)
{
    unsigned num = count_children(number_of(device));
    return num && num < MIN_MIG_SLOTS ? MIN_MIG_SLOTS : num;
}

NUMBER(nvmlDeviceIsMigDeviceHandle(void *device, unsigned *number), device, "mig", found.parent != 0, 1)
NUMBER(nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *number), device, "mig", mig_slots(device), 1)
NUMBER(nvmlDeviceGetGpuInstanceId(void *device, unsigned *number), device, "mig", found.gpu_instance, found.parent)
NUMBER(nvmlDeviceGetComputeInstanceId(void *device, unsigned *number), device, "mig", found.compute_instance,
       found.parent)
NUMBER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **number), device, "mig", &devices[found.parent],
       found.parent)

API int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **handle)
{
    Device found;
    int code = look(device, "mig", handle, &found);
    return code ? code : give_handle((Key){.parent = (unsigned)number_of(device), .index = index}, NOT_FOUND, handle);
}

/* ---- NVML: readings ---- */

#define READ(function, call, type, num) \
    API int function(void *device, type *target) { return give(device, call, sizeof *target, num, target); }
#define READ_PAIR(function, call) \
    API int function(void *device, unsigned *now, unsigned *pending) { return give_pair(device, call, now, pending); }

READ(nvmlDeviceGetMemoryInfo, "memory", uint64_t, 3)
READ(nvmlDeviceGetBAR1MemoryInfo, "bar1", uint64_t, 3)
READ(nvmlDeviceGetUtilizationRates, "utilization", unsigned, 2)
READ(nvmlDeviceGetPowerUsage, "power_usage", unsigned, 1)
READ(nvmlDeviceGetEnforcedPowerLimit, "enforced_power_limit", unsigned, 1)
READ(nvmlDeviceGetTotalEnergyConsumption, "energy", uint64_t, 1)
READ(nvmlDeviceGetCurrentClocksEventReasons, "reasons", uint64_t, 1)
READ(nvmlDeviceGetCurrentClocksThrottleReasons, "reasons", uint64_t, 1)
READ(nvmlDeviceGetPerformanceState, "performance_state", unsigned, 1)
READ(nvmlDeviceGetPersistenceMode, "persistence_mode", unsigned, 1)
READ_PAIR(nvmlDeviceGetEccMode, "ecc_mode")
READ_PAIR(nvmlDeviceGetMigMode, "mig_mode")

typedef struct { unsigned version; uint64_t total_reserved_free_used[4]; } MemoryV2;

API int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory)
{
    if (memory && memory->version != (sizeof *memory | 2u << 24))
        return FUNCTION_NOT_FOUND; /* what drivers answer to a plain 2 */
    return give(device, "memory_v2", sizeof(uint64_t), 4, memory ? memory->total_reserved_free_used : NULL);
}

API int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *clock)
{
    static const char *const names[] = {"clock_graphics", "clock_sm", "clock_memory", "clock_video"};
    return type < 4 ? give(device, names[type], sizeof *clock, 1, clock) : INVALID_ARGUMENT;
}

API int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *temperature)
{
    return sensor ? INVALID_ARGUMENT : give(device, "temperature", sizeof *temperature, 1, temperature);
}

typedef struct { unsigned version, sensor, temperature; } Temperature;

API int nvmlDeviceGetTemperatureV(void *device, Temperature *reading)
{
    if (reading && reading->version != (sizeof *reading | 1u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    return reading ? nvmlDeviceGetTemperature(device, reading->sensor, &reading->temperature) : INVALID_ARGUMENT;
}

typedef struct { unsigned id, scope; int64_t timestamp_us, latency_us; unsigned type; int code; uint64_t value; } Field;

API int nvmlDeviceGetFieldValues(void *device, int num, Field *fields)
{
    Device found;
    int code = look(device, "field_values", num > 0 ? fields : NULL, &found);
    for (Field *field = fields; !code && field < fields + num; field++) {
        char name[48];
        Answer got;
        snprintf(name, sizeof name, "field:%u", field->id);
        field->code = answer(device, name, NOT_SUPPORTED, MAX_VALUES, &got);
        field->timestamp_us = (int64_t)wall_us();
        field->latency_us = got.latency_us;
        field->type = field->code ? field->type : got.type;
        field->value = field->code ? field->value : got.value[0];
    }
    return code;
}

/* ---- NVML: processes ---- */

typedef struct { unsigned pid; uint64_t used_bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned pid; uint64_t time_us; unsigned sm, memory, encoder, decoder; } Utilization;

/* NVML's way with lists: too little room gives Insufficient Size and the number of rows. */
static int give_rows(void *device, const char *name, unsigned columns, const void *rows, unsigned *count, Answer *got)
{
    if (!count)
        return INVALID_ARGUMENT;
    int code = answer(device, name, NOT_SUPPORTED, rows ? (uint64_t)*count * columns : 0, got);
    if (!code || code == INSUFFICIENT_SIZE)
        *count = got->num / columns;
    return code;
}

static int give_processes(void *device, const char *name, unsigned *count, Process *rows)
{
    Answer got;
    int code = give_rows(device, name, PROCESS_COLUMNS, rows, count, &got);
    const uint64_t *row = got.value;
    for (unsigned i = 0; !code && i < *count; i++, row += PROCESS_COLUMNS)
        rows[i] = (Process){(unsigned)row[0], row[1], (unsigned)row[2], (unsigned)row[3]};
    return code;
}

#define PROCESSES(function, call) \
    API int function(void *device, unsigned *count, Process *rows) { return give_processes(device, call, count, rows); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute_processes")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics_processes")

API int nvmlDeviceGetProcessUtilization(void *device, Utilization *rows, unsigned *count, uint64_t last_seen_us)
{
    Answer got;
    (void)last_seen_us; /* every sample is newer */
    int code = give_rows(device, "process_utilization", UTILIZATION_COLUMNS, rows, count, &got);
    const uint64_t *row = got.value;
    for (unsigned i = 0; !code && i < *count; i++, row += UTILIZATION_COLUMNS)
        rows[i] = (Utilization){(unsigned)row[0], row[5] ? row[5] : wall_us(), (unsigned)row[1], (unsigned)row[2],
                                (unsigned)row[3], (unsigned)row[4]};
    return code;
}

/* ---- for tests in the same process ---- */

/* Let the seconds of the scenario jump forward. */
API void lucid_fake_advance(double seconds)
{
    acquire();
    advanced_s += seconds > 0 ? seconds : 0;
    release();
}

/* Return how often a listed call was made on a device, or on the system with the uuid ""; -1 if it is not listed. */
API int64_t lucid_fake_num_calls(const char *uuid, const char *name)
{
    int64_t num = -1;
    acquire();
    for (size_t i = 0; uuid && name && i < num_devices; i++) {
        const Call *call = strcmp(devices[i].uuid, uuid) ? NULL : find_call(&devices[i], name);
        num = call ? (int64_t)call->num_calls : num;
    }
    release();
    return num;
}
