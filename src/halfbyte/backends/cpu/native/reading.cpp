// Reading a file and finding the largest magnitude in the same pass, while the bytes are in the cache.
#include <cstdint>

#if !defined(_WIN32)
#include <cerrno>
#include <unistd.h>
#endif

extern "C" {

uint32_t hb_amax(int isa, const void* x, int64_t n, int dtype);  // exports.cpp

// Fills `into` with `bytes` bytes of a file from `offset` on. Returns the bits of the largest magnitude of what was
// read. `done` becomes the number of bytes read, which is less if the file ended or could not be read; then `error` is
// the system's number for it, or 0.
uint32_t hb_read_amax(int isa, int file, int64_t offset, uint8_t* into, int64_t bytes, int dtype, int size,
                      int64_t* done, int* error) {
    uint32_t most = 0;
    *done = 0;
    *error = 0;
#if !defined(_WIN32)
    const int64_t STEP = 1 << 18;  // a part of a second-level cache
    int64_t seen = 0;
    while (*done < bytes) {
        const int64_t wanted = bytes - *done < STEP ? bytes - *done : STEP;
        const ssize_t got = pread(file, into + *done, (size_t)wanted, (off_t)(offset + *done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            *error = errno;
            return most;
        }
        if (got == 0) return most;
        *done += got;
        const int64_t whole = *done / size * size;  // a read may end within an element
        const uint32_t found = hb_amax(isa, into + seen, (whole - seen) / size, dtype);
        most = found > most ? found : most;
        seen = whole;
    }
#else
    (void)isa, (void)file, (void)offset, (void)into, (void)bytes, (void)dtype, (void)size;
#endif
    return most;
}

}  // extern "C"
