// SHA-256 of many pieces of equal length: sixteen at a time with AVX-512, the rest two at a time with the processor's
// SHA instructions.
//
// Each round of a message waits for the round before it. One message leaves half of the SHA unit idle, and two fill it.
// AVX-512 holds one message per lane, and is half as fast again.
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

// One word of each of sixteen messages.
typedef uint32_t Words __attribute__((vector_size(64)));

#define HB_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

HB_AVX512 inline Words turn(Words x, int bits) { return (x >> bits) | (x << (32 - bits)); }

// The next block of each message, transposed: word i of all messages in words[i].
HB_AVX512 inline void load_blocks(const uint8_t* data, int64_t stride, Words* words) {
    const __m512i to_big_endian = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(data + i * stride), to_big_endian);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 16; half += 8) {
            t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0x88);
            t[half + i + 4] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        words[i] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        words[i + 8] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

HB_AVX512 inline void take_blocks(Words* state, Words* w) {
    Words a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6],
          h = state[7];
#pragma GCC unroll 64
    for (int t = 0; t < 64; ++t) {
        if (t >= 16) {
            const Words p = w[(t - 15) & 15], q = w[(t - 2) & 15];
            w[t & 15] +=
                w[(t - 7) & 15] + (turn(p, 7) ^ turn(p, 18) ^ (p >> 3)) + (turn(q, 17) ^ turn(q, 19) ^ (q >> 10));
        }
        const Words one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + w[t & 15] + ROUNDS[t];
        const Words two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) | (c & (a | b)));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const Words sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += sums[i];
}

// Digests of sixteen pieces of `bytes` bytes that follow each other.
HB_AVX512 void hash_sixteen(const uint8_t* data, int64_t bytes, uint8_t* digests) {
    const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    Words state[8], words[16];
    for (int i = 0; i < 8; ++i) state[i] = Words{} + initial[i];
    for (int64_t done = 0; done < bytes; done += 64) {
        load_blocks(data + done, bytes, words);
        take_blocks(state, words);
    }
    for (Words& word : words) word = Words{};
    words[0] += 0x80000000u;
    words[14] += (uint32_t)((uint64_t)bytes * 8 >> 32);
    words[15] += (uint32_t)((uint64_t)bytes * 8);
    take_blocks(state, words);
    for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 8; ++i) {
            const uint32_t swapped = __builtin_bswap32(state[i][n]);
            std::memcpy(digests + 32 * n + 4 * i, &swapped, 4);
        }
}

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 29 & 1)) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 19 & 1);  // SSE4.1
}

}  // namespace
#endif

extern "C" {

// SHA-256 of pieces of `bytes` bytes, 32 bytes each. Each of `arrays` arrays holds `counts[i]` pieces that follow each
// other; `bytes` is a multiple of 64. isa: 2 allows AVX-512. Returns 0, with nothing done, if this machine has no SHA
// instructions.
int hb_sha256_pieces(int isa, int arrays, const uint8_t* const* data, const int64_t* counts, int64_t bytes,
                     uint8_t* const* digests) {
#if defined(HB_X86)
    static const bool available = has_sha();
    if (!available) return 0;
    for (int i = 0; i < arrays; ++i) {
        const uint8_t* at = data[i];
        uint8_t* out = digests[i];
        int64_t left = counts[i];
        for (; isa == 2 && left >= 16; left -= 16, at += 16 * bytes, out += 16 * 32) hash_sixteen(at, bytes, out);
        for (; left >= 2; left -= 2, at += 2 * bytes, out += 2 * 32) hash_pieces<2>(at, bytes, out);
        if (left) hash_pieces<1>(at, bytes, out);
    }
    return 1;
#else
    (void)isa, (void)arrays, (void)data, (void)counts, (void)bytes, (void)digests;
    return 0;
#endif
}

}  // extern "C"
