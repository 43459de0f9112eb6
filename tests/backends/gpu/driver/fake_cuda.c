/* The functions of libcuda.so.1 that halfbyte calls. Launches are written down instead of made. */
#include <stdint.h>
#include <string.h>

typedef struct { int id, pad, value; char rest[60]; } Attribute;
typedef struct {
    unsigned grid[3], threads[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
} Configuration;

typedef struct {
    uint64_t function, context, stream;
    uint32_t grid[3], threads[3], shared, overlaps, size;
    uint64_t words[64];
} Launch;

Launch launches[1024];
int made = 0;
int fails_at = -1; /* the launch that is refused */
int stack_depth = 0, loads = 0;
__thread void* current = 0;
static void* stack[16];

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int index) { *device = index; return index > 7; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uint64_t)(0x1000 + device); return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 97 ? 232448 : 0; return device > 7; }
int cuCtxGetCurrent(void** context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void* context) { stack[stack_depth++] = current; current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = current; current = stack[--stack_depth]; return 0; }
int cuModuleLoadData(void** module, const void* image) { loads++; *module = (void*)image; return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    (void)module;
    *function = (void*)(uint64_t)(0x5000 + strlen(name));
    return 0;
}
int cuFuncSetAttribute(void* function, int which, int value) { return !function || which != 8 || value > 232448; }
int cuGetErrorString(int status, const char** text) { (void)status; *text = "refused by the test"; return 0; }
int cuLaunchKernelEx(const Configuration* c, void* function, void** parameters, void** extra) {
    if (made == fails_at) return 9;
    if (parameters || (uint64_t)extra[0] != 1 || (uint64_t)extra[2] != 2 || extra[4]) return 1;
    Launch* l = &launches[made++];
    l->function = (uint64_t)function;
    l->context = (uint64_t)current;
    l->stream = (uint64_t)c->stream;
    memcpy(l->grid, c->grid, sizeof l->grid);
    memcpy(l->threads, c->threads, sizeof l->threads);
    l->shared = c->shared;
    l->overlaps = c->count == 1 && c->attributes[0].id == 6 && c->attributes[0].value == 1;
    l->size = (uint32_t)*(uint64_t*)extra[3];
    memcpy(l->words, extra[1], l->size);
    return 0;
}
