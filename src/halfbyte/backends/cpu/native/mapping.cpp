// Windows: parts of files that are mapped into memory, so that kernels read the page cache itself and nothing is copied.
//
// A page of a mapping that cannot be read raises SIGBUS: the file was cut, or the disk failed. For addresses in a window
// the handler puts zeros in place of the page and marks the window as damaged; the caller asks for the mark when it gives
// the window back. All other addresses go to the handler that was there before.
#include <cstdint>

#if defined(__linux__)
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace {

struct Window {
    std::atomic<bool> used{false}, damaged{false};
    std::atomic<uintptr_t> start{0};
    size_t length = 0;  // whole pages
    size_t skipped = 0;  // bytes before the first one that was asked for
};

constexpr int WINDOWS = 4096;
Window windows[WINDOWS];
struct sigaction before;
const uintptr_t PAGE = (uintptr_t)sysconf(_SC_PAGESIZE);

void handle(int signal, siginfo_t* info, void* context) {
    const uintptr_t address = (uintptr_t)info->si_addr, page = address / PAGE * PAGE;
    for (Window& window : windows) {
        const uintptr_t start = window.start.load(std::memory_order_acquire);
        if (!start || address < start || address >= start + window.length) continue;
        const int saved = errno;
        void* zeros = mmap((void*)page, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        errno = saved;
        if (zeros == MAP_FAILED) break;
        window.damaged.store(true, std::memory_order_release);
        return;
    }
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    else {  // end the process, as without us
        sigaction(SIGBUS, &before, nullptr);
        raise(signal);
    }
}

void install() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

int reserve() {
    for (int number = 0; number < WINDOWS; ++number) {
        bool free = false;
        if (windows[number].used.compare_exchange_strong(free, true)) return number;
    }
    return -1;
}

}  // namespace
#endif

extern "C" {

uint32_t hb_amax(int isa, const void* x, int64_t n, int dtype);  // exports.cpp

// Maps `bytes` bytes of a file from `offset` on. Returns the number of the window and its address; or -errno, and
// -ENODATA for a file that ends before. With `size`, that of an element, also the bits of the largest magnitude.
int hb_map(int file, int64_t offset, int64_t bytes, int isa, int dtype, int size, const uint8_t** address,
           uint32_t* amax) {
#if defined(__linux__)
    static std::once_flag once;
    std::call_once(once, install);
    struct stat status;
    if (fstat(file, &status)) return -errno;
    if (status.st_size < offset + bytes) return -ENODATA;
    const int number = reserve();
    if (number < 0) return -EMFILE;
    Window& window = windows[number];
    window.skipped = (size_t)(offset % (int64_t)PAGE);
    window.length = (window.skipped + (size_t)bytes + PAGE - 1) / PAGE * PAGE;
    void* mapped = mmap(nullptr, window.length, PROT_READ, MAP_SHARED, file, (off_t)(offset - (int64_t)window.skipped));
    if (mapped == MAP_FAILED) {
        const int error = errno;
        window.used.store(false);
        return -error;
    }
    window.damaged.store(false);
    window.start.store((uintptr_t)mapped, std::memory_order_release);
    // All pages at once, with read-ahead. What cannot be read is found by the kernels, as below, if not here.
    madvise(mapped, window.length, MADV_POPULATE_READ);
    *address = (const uint8_t*)mapped + window.skipped;
    if (size) *amax = hb_amax(isa, *address, bytes / size, dtype);
    return number;
#else
    (void)file, (void)offset, (void)bytes, (void)isa, (void)dtype, (void)size, (void)address, (void)amax;
    return -1;
#endif
}

// Gives a window back. Returns 1 if some page of it could not be read and was replaced by zeros.
int hb_unmap(int number) {
#if defined(__linux__)
    Window& window = windows[number];
    const uintptr_t start = window.start.exchange(0);
    munmap((void*)start, window.length);
    const int damaged = window.damaged.load(std::memory_order_acquire);
    window.used.store(false);
    return damaged;
#else
    (void)number;
    return 0;
#endif
}

}  // extern "C"
