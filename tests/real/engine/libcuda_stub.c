/* A CUDA driver library for a machine without a GPU: it reports no device.
 *
 * SGLang's kernels link to libcuda.so.1 even when the server runs on the CPU, so importing them fails without a driver.
 * Error numbers are those of CUresult in NVIDIA's cuda.h: 100 is CUDA_ERROR_NO_DEVICE, 500 is CUDA_ERROR_NOT_FOUND. */
#include <stddef.h>

#define NO_DEVICE 100
#define NOT_FOUND 500

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no CUDA device"; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
    *function = NULL;
    return NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status) {
    *function = NULL;
    return NOT_FOUND;
}
int cuPointerGetAttribute(void *data, int attribute, unsigned long pointer) { return NO_DEVICE; }
