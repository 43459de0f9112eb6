// SHA-256 of many pieces of equal length, two at a time, with the processor's SHA instructions.
//
// Each round waits for the round before it, so one message leaves half of the unit idle. Two messages fill it.
#include <cstdint>
#include <cstring>

#if defined(HB_X86)
#include <cpuid.h>
#include <immintrin.h>

namespace {

constexpr uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The eight words A to H of a message, in the order that the instructions want.
struct State {
    __m128i abef, cdgh;
};

__attribute__((target("sha,sse4.1"))) State initial() {
    return {_mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
            _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};
}

// Takes one block of 64 bytes from each of N messages.
template <int N>
__attribute__((target("sha,sse4.1"), always_inline)) inline void take_block(State* states, const uint8_t* const* data) {
    const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[N], cdgh[N], words[N][4];
    for (int n = 0; n < N; ++n) {
        abef[n] = states[n].abef;
        cdgh[n] = states[n].cdgh;
        for (int i = 0; i < 4; ++i)
            words[n][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(data[n] + 16 * i)), to_big_endian);
    }
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {  // four rounds each
        const __m128i constants = _mm_loadu_si128((const __m128i*)(ROUNDS + 4 * group));
        for (int n = 0; n < N; ++n) {
            __m128i* w = words[n];
            const int now = group % 4, next = (group + 1) % 4, before = (group + 3) % 4;
            const __m128i sum = _mm_add_epi32(w[now], constants);
            cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], sum);
            if (group >= 3 && group < 15) {  // finish the words of the next group
                const __m128i part = _mm_add_epi32(w[next], _mm_alignr_epi8(w[now], w[before], 4));
                w[next] = _mm_sha256msg2_epu32(part, w[now]);
            }
            abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(sum, 0x0E));
            if (group >= 1 && group < 13) w[before] = _mm_sha256msg1_epu32(w[before], w[now]);
        }
    }
    for (int n = 0; n < N; ++n) {
        states[n].abef = _mm_add_epi32(states[n].abef, abef[n]);
        states[n].cdgh = _mm_add_epi32(states[n].cdgh, cdgh[n]);
    }
}

__attribute__((target("sha,sse4.1"))) void write_digest(const State& state, uint8_t* out) {
    alignas(16) uint32_t abef[4], cdgh[4];
    _mm_store_si128((__m128i*)abef, state.abef);
    _mm_store_si128((__m128i*)cdgh, state.cdgh);
    const uint32_t words[8] = {abef[3], abef[2], cdgh[3], cdgh[2], abef[1], abef[0], cdgh[1], cdgh[0]};
    for (int i = 0; i < 8; ++i) {
        const uint32_t swapped = __builtin_bswap32(words[i]);
        std::memcpy(out + 4 * i, &swapped, 4);
    }
}

// Digests of N pieces of `bytes` bytes that follow each other; `bytes` is a multiple of 64.
template <int N>
__attribute__((target("sha,sse4.1"))) void hash_pieces(const uint8_t* data, int64_t bytes, uint8_t* digests) {
    State states[N];
    const uint8_t* at[N];
    uint8_t padding[64] = {0x80};
    for (int i = 0; i < 8; ++i) padding[56 + i] = (uint8_t)((uint64_t)bytes * 8 >> (56 - 8 * i));
    for (int n = 0; n < N; ++n) {
        states[n] = initial();
        at[n] = data + n * bytes;
    }
    for (int64_t done = 0; done < bytes; done += 64) {
        take_block<N>(states, at);
        for (int n = 0; n < N; ++n) at[n] += 64;
    }
    for (int n = 0; n < N; ++n) at[n] = padding;
    take_block<N>(states, at);
    for (int n = 0; n < N; ++n) write_digest(states[n], digests + 32 * n);
}

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 29 & 1)) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 19 & 1);  // SSE4.1
}

}  // namespace
#endif

extern "C" {

// SHA-256 of `count` pieces of `bytes` bytes that follow each other, 32 bytes each. `bytes` is a multiple of 64.
// Returns 0, with nothing done, if this machine has no SHA instructions.
int hb_sha256_pieces(const uint8_t* data, int64_t count, int64_t bytes, uint8_t* digests) {
#if defined(HB_X86)
    static const bool available = has_sha();
    if (!available) return 0;
    int64_t piece = 0;
    for (; piece + 2 <= count; piece += 2) hash_pieces<2>(data + piece * bytes, bytes, digests + piece * 32);
    if (piece < count) hash_pieces<1>(data + piece * bytes, bytes, digests + piece * 32);
    return 1;
#else
    (void)data, (void)count, (void)bytes, (void)digests;
    return 0;
#endif
}

}  // extern "C"
