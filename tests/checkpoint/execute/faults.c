// Stands before the C library's pread and pwrite: they transfer less than was asked, are interrupted, or fail.
// Loaded with LD_PRELOAD, so that the compiled kernels meet it as well as Python. (faulty.py)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { READ, WRITE };

long most = 0;         // bytes that a call transfers at most; 0: all
long interrupted = 0;  // every such call is interrupted; 0: none
long calls[2] = {0, 0};
long fails_at[2] = {-1, -1};  // the call, counted from 0, that fails
int fails_with[2] = {0, 0};   // the system's number for it
int ends = 0;                 // whether the call that fails transfers nothing instead: the end of a file, no room

// Returns 1 if the call is over, with its result in `got`.
static int faulty(int kind, ssize_t* got) {
    const long call = __atomic_fetch_add(&calls[kind], 1, __ATOMIC_SEQ_CST);
    *got = -1;
    if (call == fails_at[kind]) {
        errno = fails_with[kind];
        if (ends) *got = 0;
        return 1;
    }
    if (interrupted && call % interrupted == 0) {
        errno = EINTR;
        return 1;
    }
    return 0;
}

static size_t cut(size_t size) { return most && size > (size_t)most ? (size_t)most : size; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pread(int file, void* data, size_t size, off_t offset) {
    ssize_t got;
    return faulty(READ, &got) ? got : REAL(pread)(file, data, cut(size), offset);
}
ssize_t pread64(int file, void* data, size_t size, off64_t offset) { return pread(file, data, size, offset); }

ssize_t preadv(int file, const struct iovec* parts, int count, off_t offset) {
    return pread(file, parts[0].iov_base, count ? parts[0].iov_len : 0, offset);
}
ssize_t preadv64(int file, const struct iovec* parts, int count, off64_t offset) {
    return preadv(file, parts, count, offset);
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
    ssize_t got;
    return faulty(WRITE, &got) ? got : REAL(pwrite)(file, data, cut(size), offset);
}
ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) { return pwrite(file, data, size, offset); }
