// Launches the kernels of a program by the CUDA driver, in one call from Python. Nothing of CUDA is needed to build it:
// Python finds the driver's functions and hands over their addresses.
//
// A program is an array of 64-bit words (backends/gpu/driver/cuda.py writes it):
//     address of Entries, context, number of launches; then for each launch
//     function, grid x, grid y, threads, bytes of shared memory, overlaps, number of parameters; then for each
//     parameter slot, offset
// A parameter is the slot's value plus the offset. Slot 0 holds 0. The words are only read, and everything that changes
// is on the stack: so any number of threads may launch the same program.
#include <stddef.h>
#include <stdint.h>

namespace {

struct Attribute {  // CUlaunchAttribute
    int id;
    int pad;
    int value;
    char rest[60];
};

struct Configuration {  // CUlaunchConfig
    unsigned grid[3];
    unsigned threads[3];
    unsigned shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};

struct Entries {
    int (*launch)(const Configuration*, void* function, void** parameters, void** extra);
    int (*get_current)(void** context);
    int (*push)(void* context);
    int (*pop)(void** context);
};

const int SLOTS = 6;
const int MOST_PARAMETERS = 64;
const int INVALID_VALUE = 1;                      // CUDA_ERROR_INVALID_VALUE
const int PROGRAMMATIC_STREAM_SERIALIZATION = 6;  // CU_LAUNCH_ATTRIBUTE_...
void* const BUFFER_POINTER = (void*)1;            // CU_LAUNCH_PARAM_BUFFER_POINTER
void* const BUFFER_SIZE = (void*)2;               // CU_LAUNCH_PARAM_BUFFER_SIZE

int launch_all(const Entries* driver, const uint64_t* word, uint64_t launches, void* stream, const uint64_t* slots) {
    for (uint64_t i = 0; i < launches; i++) {
        const uint64_t count = word[6];
        if (count > MOST_PARAMETERS) return INVALID_VALUE;
        uint64_t parameters[MOST_PARAMETERS];
        for (uint64_t k = 0; k < count; k++) {
            const uint64_t slot = word[7 + 2 * k];
            if (slot > SLOTS) return INVALID_VALUE;
            parameters[k] = slots[slot] + word[8 + 2 * k];
        }
        size_t size = 8 * count;
        void* extra[] = {BUFFER_POINTER, parameters, BUFFER_SIZE, &size, nullptr};
        Attribute overlaps = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1, {}};
        const Configuration configuration = {
            {(unsigned)word[1], (unsigned)word[2], 1},
            {(unsigned)word[3], 1, 1},
            (unsigned)word[4],
            stream,
            &overlaps,
            word[5] ? 1u : 0u,
        };
        const int status = driver->launch(&configuration, (void*)word[0], nullptr, extra);
        if (status != 0) return status;
        word += 7 + 2 * count;
    }
    return 0;
}

}  // namespace

extern "C" {

// The driver's status: 0, or the number of the error at which it stopped.
int hb_cuda_launch(uint64_t program, uint64_t stream, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                   uint64_t f) {
    const uint64_t* word = (const uint64_t*)program;
    const Entries* driver = (const Entries*)word[0];
    const uint64_t slots[SLOTS + 1] = {0, a, b, c, d, e, f};
    // A thread that has not used CUDA yet has no context, and one that works on another device has another one.
    void *context = (void*)word[1], *current = nullptr;
    int status = driver->get_current(&current);
    const bool foreign = status == 0 && current != context;
    if (foreign) status = driver->push(context);
    if (status != 0) return status;
    status = launch_all(driver, word + 3, word[2], (void*)stream, slots);
    if (foreign) driver->pop(&current);
    return status;
}
}
