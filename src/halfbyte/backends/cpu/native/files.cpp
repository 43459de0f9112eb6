// Reading a file and finding the largest magnitude in the same pass, while the bytes are in the cache; and writing
// several parts of a file in one call.
#include "codes/writing.h"
#include <algorithm>
#include <cerrno>

#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/vfs.h>
#endif

int write_fully(int file, const uint8_t* data, int64_t size, int64_t offset) {
#if !defined(_WIN32)
    for (int64_t done = 0; done < size;) {
        const ssize_t got = pwrite(file, data + done, (size_t)(size - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENOSPC;  // no error, and no room: it would be so for ever
        done += got;
    }
    return 0;
#else
    (void)file, (void)data, (void)size, (void)offset;
    return ENOSYS;
#endif
}

extern "C" {

uint32_t hb_amax(int isa, const void* x, int64_t n, int dtype);  // exports.cpp

// Reads `bytes` bytes of a file from `offset` on; elements have `size` bytes. `into` has room for `room` of them, a
// multiple of `size`: where it ends, reading goes on at its start. Returns the number of bytes read, which is less if
// the file ended or could not be read; then `error` is the system's number for it, or 0. `most` becomes the bits of the
// largest magnitude of what was read.
int64_t hb_read_amax(int isa, int file, int64_t offset, uint8_t* into, int64_t room, int64_t bytes, int dtype, int size,
                     uint32_t* most, int* error) {
    int64_t done = 0, seen = 0, start = 0;  // `start`: what was read up to there is no longer in the room
    *most = 0;
    *error = 0;
#if !defined(_WIN32)
    const int64_t STEP = 1 << 18;  // a part of a second-level cache
    while (done < bytes) {
        if (seen - start == room) start = seen;
        const int64_t wanted = std::min({bytes - done, STEP, room - (done - start)});
        const ssize_t got = pread(file, into + (done - start), (size_t)wanted, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) *error = errno;
        if (got <= 0) break;
        done += got;
        const int64_t whole = done / size * size;  // a read may end within an element
        const uint32_t found = hb_amax(isa, into + (seen - start), (whole - seen) / size, dtype);
        *most = found > *most ? found : *most;
        seen = whole;
    }
#else
    (void)isa, (void)file, (void)offset, (void)into, (void)room, (void)bytes, (void)dtype, (void)size;
#endif
    return done;
}

// Whether a file lies in a file system of this machine that keeps what was read in the page cache: to read it again at
// once is then a copy of memory. Others (networks, FUSE) may fetch the bytes anew.
int hb_is_cached_here(int file) {
#if defined(__linux__)
    struct statfs found;
    if (fstatfs(file, &found)) return 0;
    switch ((uint32_t)found.f_type) {
        case 0x01021994u:  // tmpfs
        case 0x0000EF53u:  // ext2, ext3, ext4
        case 0x58465342u:  // XFS
        case 0x9123683Eu:  // Btrfs
        case 0xF2F52010u:  // F2FS
        case 0x794C7630u:  // overlayfs
            return 1;
    }
#else
    (void)file;
#endif
    return 0;
}

// Writes parts of a file one after the other. Returns the system's number for an error, or 0.
int hb_write_parts(int file, int count, const uint8_t* const* data, const int64_t* sizes, const int64_t* offsets) {
    for (int part = 0; part < count; ++part)
        if (const int error = write_fully(file, data[part], sizes[part], offsets[part])) return error;
    return 0;
}

}  // extern "C"
