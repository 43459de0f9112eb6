// Reading a file into the memory of a device, through a ring of small pinned buffers that stay in the cache.
// One call reads a whole tensor, so that threads of Python do not meet at its lock after every buffer.
#include <cstddef>
#include <cstdint>

#if !defined(_WIN32)
#include <cerrno>
#include <unistd.h>
#endif

extern "C" {

uint32_t hb_amax(int isa, const void* x, int64_t n, int dtype);  // exports.cpp

typedef void* Event;
typedef int (*Copy)(void* device, const void* host, size_t bytes, int kind, void* stream);
typedef int (*Record)(Event event, void* stream);
typedef int (*Wait)(Event event);

// Functions of the CUDA runtime. All return 0 if they succeed.
struct DeviceFunctions {
    Copy copy;      // cudaMemcpyAsync
    Record record;  // cudaEventRecord
    Wait wait;      // cudaEventSynchronize
};

struct Ring {
    uint8_t* memory;
    int64_t step;   // bytes of a buffer
    int64_t count;  // buffers
    Event* events;  // one per buffer: recorded after the copy from it
    int64_t next;   // the buffer to use next
};

int64_t hb_sizeof_device_functions() { return sizeof(DeviceFunctions); }
int64_t hb_sizeof_ring() { return sizeof(Ring); }

// Queues copies of `bytes` bytes of a file, from `offset` on, to `device`. Returns how many bytes were read: fewer if
// the file ended. `failed` becomes 0, errno of a read, or minus an error of CUDA. If `size`, the bytes of an element of
// `dtype`, is not 0, `most` becomes the bits of the largest magnitude.
int64_t hb_read_to_device(const DeviceFunctions* cuda, Ring* ring, int file, int64_t offset, uint8_t* device,
                          int64_t bytes, void* stream, int isa, int dtype, int size, uint32_t* most, int32_t* failed) {
    const int HOST_TO_DEVICE = 1;
    int64_t done = 0;
    *failed = 0;
    *most = 0;
#if !defined(_WIN32)
    while (done < bytes) {
        uint8_t* buffer = ring->memory + ring->next * ring->step;
        Event event = ring->events[ring->next];
        ring->next = (ring->next + 1) % ring->count;
        if (int error = cuda->wait(event)) {
            *failed = -error;
            return done;
        }
        const int64_t wanted = bytes - done < ring->step ? bytes - done : ring->step;
        int64_t filled = 0;
        while (filled < wanted) {
            const off_t place = (off_t)(offset + done + filled);
            const ssize_t got = pread(file, buffer + filled, (size_t)(wanted - filled), place);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) *failed = errno;
            if (got <= 0) return done + filled;
            filled += got;
        }
        // The copy only reads the buffer, so that it may run while this thread reads it too.
        int error = cuda->copy(device + done, buffer, (size_t)wanted, HOST_TO_DEVICE, stream);
        if (!error) error = cuda->record(event, stream);
        if (error) {
            *failed = -error;
            return done;
        }
        if (size) {
            const uint32_t found = hb_amax(isa, buffer, wanted / size, dtype);
            *most = found > *most ? found : *most;
        }
        done += wanted;
    }
#else
    (void)cuda, (void)ring, (void)file, (void)offset, (void)device, (void)bytes, (void)stream;
    (void)isa, (void)dtype, (void)size;
#endif
    return done;
}

}  // extern "C"
