/* A stand-in for libnvidia-ml.so.1: the symbols that nvidia-ml-py calls, with the structs of nvml.h, and answers from a
 * file that a test may change while the library is in use.
 *
 * NVML_STATE names the file. One line for the driver, then one per GPU, figures separated by blanks:
 *
 *     init DRIVER
 *     status name used_MiB reserved_MiB total_MiB busy_% power_mW sm_MHz [pid:MiB ...]
 *
 * `init` and `status` are nvmlReturn_t codes: 0 is success, 9 no driver, 15 a lost GPU. A figure of `-` is not supported
 * there (3). A process of `pid:-` has no figure, as under Windows and in some containers.
 *
 * cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { GPUS = 8, PROCESSES = 16, CLOCK_SM = 1 };
static const unsigned long long MIB = 1ULL << 20;

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;

struct gpu {
    int index, status, processes;
    char name[64];
    long long used, reserved, total, busy, power, clock; /* below 0: not supported */
    nvmlProcessInfo_t process[PROCESSES];
};

static struct gpu gpus[GPUS];
static int count, init_status = DRIVER_NOT_LOADED, users;
static char driver[64];

static long long figure(const char *text) { return text == NULL || strcmp(text, "-") == 0 ? -1 : atoll(text); }

static void read_gpu(struct gpu *gpu, char *line) {
    char *rest = NULL, *word = strtok_r(line, " \n", &rest);
    gpu->index = count;
    gpu->processes = 0;
    gpu->status = word ? atoi(word) : 0;
    word = strtok_r(NULL, " \n", &rest);
    snprintf(gpu->name, sizeof gpu->name, "%s", word ? word : "");
    long long *figures[] = {&gpu->used, &gpu->reserved, &gpu->total, &gpu->busy, &gpu->power, &gpu->clock};
    for (int i = 0; i < 6; i++)
        *figures[i] = figure(strtok_r(NULL, " \n", &rest));
    while ((word = strtok_r(NULL, " \n", &rest)) != NULL && gpu->processes < PROCESSES) {
        char *colon = strchr(word, ':');
        long long held = figure(colon ? colon + 1 : NULL);
        nvmlProcessInfo_t info = {(unsigned)atoi(word), held < 0 ? ~0ULL : (unsigned long long)held * MIB, ~0U, ~0U};
        gpu->process[gpu->processes++] = info;
    }
}

static void look(void) {
    char line[512];
    const char *path = getenv("NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    count = 0;
    init_status = DRIVER_NOT_LOADED;
    if (file == NULL)
        return;
    if (fgets(line, sizeof line, file) != NULL)
        sscanf(line, "%d %63s", &init_status, driver);
    while (count < GPUS && fgets(line, sizeof line, file) != NULL) {
        read_gpu(&gpus[count], line);
        count++;
    }
    fclose(file);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    look();
    users += init_status == SUCCESS;
    return init_status;
}

nvmlReturn_t nvmlShutdown(void) {
    if (users == 0)
        return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) { return code == SUCCESS ? "Success" : "an error of the stand-in"; }

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, "%s", driver);
    return users ? SUCCESS : UNINITIALIZED;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *number) {
    *number = (unsigned)count;
    return users ? SUCCESS : UNINITIALIZED;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (!users)
        return UNINITIALIZED;
    if (index >= (unsigned)count)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

/* Reads the file again, so that each question is answered as things stand now. */
static nvmlReturn_t now(nvmlDevice_t device) {
    if (!users)
        return UNINITIALIZED;
    look();
    return device->status;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned int length) {
    nvmlReturn_t status = now(device);
    snprintf(text, length, "%s", device->name);
    return status;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int length) {
    nvmlReturn_t status = now(device);
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012d", device->index);
    return status;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t status = now(device);
    if (status || device->used < 0)
        return status ? status : NOT_SUPPORTED;
    long long reserved = device->reserved < 0 ? 0 : device->reserved;
    memory->total = (unsigned long long)device->total * MIB;
    memory->used = (unsigned long long)(device->used + reserved) * MIB; /* the first version does not tell them apart */
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t status = now(device);
    if (status || device->used < 0 || device->reserved < 0)
        return status ? status : NOT_SUPPORTED;
    if (memory->version != (sizeof(nvmlMemory_v2_t) | 2U << 24))
        return INVALID_ARGUMENT;
    memory->total = (unsigned long long)device->total * MIB;
    memory->used = (unsigned long long)device->used * MIB;
    memory->reserved = (unsigned long long)device->reserved * MIB;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    nvmlReturn_t status = now(device);
    if (status || device->busy < 0)
        return status ? status : NOT_SUPPORTED;
    rates->gpu = (unsigned)device->busy;
    rates->memory = 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    nvmlReturn_t status = now(device);
    *milliwatts = device->power < 0 ? 0 : (unsigned)device->power;
    return status ? status : device->power < 0 ? NOT_SUPPORTED : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int clock, unsigned int *mhz) {
    nvmlReturn_t status = now(device);
    *mhz = device->clock < 0 ? 0 : (unsigned)device->clock;
    return status ? status : clock != CLOCK_SM || device->clock < 0 ? NOT_SUPPORTED : SUCCESS;
}

#ifdef BEFORE_510
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *number, nvmlProcessInfo_t *found) {
#else
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *number, nvmlProcessInfo_t *found) {
#endif
    nvmlReturn_t status = now(device);
    unsigned int room = *number;
    *number = (unsigned)device->processes;
    if (status)
        return status;
    if (room < *number)
        return INSUFFICIENT_SIZE;
    memcpy(found, device->process, *number * sizeof *found);
    return SUCCESS;
}
