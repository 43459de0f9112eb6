// A matrix from a file, or from memory, to packed codes and scale bytes in another file: quantized, hashed and written
// in pieces that stay in the cache, in one call. And arrays that are hashed while they are written.
#include "../direct.h"
#include "../kernels.h"
#include "../recipe.h"
#include "writing.h"
#include <algorithm>
#include <cstring>

#if !defined(_WIN32)
#include <cerrno>
#include <unistd.h>
#endif

extern "C" {
int hb_quantize(const Recipe* recipe, int isa, const void* x, int64_t rows, int64_t columns, float given,
                uint8_t* codes, uint8_t* scales, float* stored, float* multiplier);
int hb_sha256_pieces(int isa, int arrays, const uint8_t* const* data, const int64_t* counts, int64_t bytes,
                     uint8_t* const* digests);
}

namespace {

const int64_t STEP = 1 << 18;  // bytes of the source at a time: a part of a second-level cache
const int64_t TOGETHER = 16;   // leaves that are hashed and written at a time
const int64_t DIGEST = 32;

bool hash_leaves(int isa, const uint8_t* data, int64_t leaves, int64_t leaf, uint8_t* digests) {
    return leaves == 0 || hb_sha256_pieces(isa, 1, &data, &leaves, leaf, &digests);
}

// One output. Bytes are gathered until there are enough leaves to hash together; then they are written.
struct Sink {
    int isa, file;
    int64_t leaf;
    int64_t place;  // in the file, of the first byte of `buffer`
    uint8_t *digests, *buffer;
    int64_t held = 0;

    static int64_t room(int64_t leaf, int64_t step) { return (TOGETHER + 1) * leaf + step; }

    uint8_t* end() { return buffer + held; }

    // Takes in bytes that were put at `end()`. Returns an error of the system, or 0.
    int add(int64_t bytes) {
        held += bytes;
        const int64_t together = TOGETHER * leaf;
        return held < together ? 0 : pass_on(held / together * together, held / together * together);
    }

    // Hashes whole leaves and writes what is left. The bytes after the last whole leaf stay at the front of `buffer`.
    int finish() { return pass_on(held / leaf * leaf, held); }

    int pass_on(int64_t hashed, int64_t written) {
        hash_leaves(isa, buffer, hashed / leaf, leaf, digests);
        const int error = write_fully(file, buffer, written, place);
        held -= hashed;
        std::memmove(buffer, buffer + hashed, (size_t)held);
        digests += hashed / leaf * DIGEST;
        place += hashed;
        return error;
    }
};

struct Encoding {
    const Recipe* recipe;
    const uint8_t* held;  // the matrix, or null: it is read from `source`
    int64_t offset;       // in the source, of its first byte
    int64_t bytes;        // of the matrix: whole blocks
    int32_t source, target;
    int64_t codes_at, scales_at;  // in the target
    int64_t leaf;                 // bytes of a leaf of the hashes; the outputs begin with a leaf
    uint8_t *code_digests, *scale_digests;
    uint8_t* scratch;  // hb_encoding_room bytes
    float amax;        // of all that share the scale; negative: blocks need none
    int32_t isa;
    // Results.
    int64_t done;       // bytes that were read
    int32_t error;      // of reading or writing, by the system's number
    uint8_t* tails[2];  // the bytes of each output after its last whole leaf, in the scratch memory
};

enum Ended : int { ENCODED = 0, LEFT_TO_REFERENCE = 1, NOT_READ = 2, NOT_WRITTEN = 3 };

int64_t block_bytes(const Recipe& recipe) { return recipe.block * (recipe.dtype == FP32 ? 4 : 2); }

int64_t code_bytes(const Recipe& recipe) {
    return recipe.route >= MX_BLOCKS && recipe.mx_element == MX_E4M3 ? recipe.block : recipe.block / 2;
}

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Reads bytes of the source. Returns false, with `done` and `error` set, if it has fewer.
bool read_piece(Encoding& e, uint8_t* into, int64_t wanted) {
#if !defined(_WIN32)
    for (int64_t filled = 0; filled < wanted;) {
        const ssize_t got = pread(e.source, into + filled, (size_t)(wanted - filled), (off_t)(e.offset + e.done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) e.error = errno;
        if (got <= 0) return false;
        filled += got;
        e.done += got;
    }
    return true;
#else
    (void)e, (void)into, (void)wanted;
    return false;
#endif
}

}  // namespace

extern "C" {

int64_t hb_sizeof_encoding() { return sizeof(Encoding); }

// Bytes of scratch memory that `hb_encode` needs.
int64_t hb_encoding_room(const Recipe* recipe, int64_t leaf) {
    const int64_t blocks = STEP / block_bytes(*recipe);
    return STEP + rounded(Sink::room(leaf, blocks * code_bytes(*recipe))) + rounded(Sink::room(leaf, blocks));
}

// Encodes a matrix. If this returns LEFT_TO_REFERENCE, it holds something that only the reference describes, and what
// was written is not valid.
int hb_encode(Encoding* e) {
    const Recipe& recipe = *e->recipe;
    const int64_t size = block_bytes(recipe), step = STEP / size * size, width = code_bytes(recipe);
    const int64_t code_room = rounded(Sink::room(e->leaf, step / size * width));
    Sink codes{e->isa, e->target, e->leaf, e->codes_at, e->code_digests, e->scratch + STEP};
    Sink scales{e->isa, e->target, e->leaf, e->scales_at, e->scale_digests, e->scratch + STEP + code_room};
    e->done = 0;
    e->error = 0;
    for (int64_t at = 0; at < e->bytes; at += step) {
        const int64_t some = std::min(step, e->bytes - at), blocks = some / size;
        const uint8_t* x = e->held ? e->held + at : e->scratch;
        if (!e->held && !read_piece(*e, e->scratch, some)) return NOT_READ;
        float stored, multiplier;
        if (hb_quantize(&recipe, e->isa, x, 1, blocks, e->amax, codes.end(), scales.end(), &stored, &multiplier))
            return LEFT_TO_REFERENCE;
        e->error = codes.add(blocks * width);
        if (!e->error) e->error = scales.add(blocks);
        if (e->error) return NOT_WRITTEN;
    }
    e->error = codes.finish();
    if (!e->error) e->error = scales.finish();
    e->tails[0] = codes.buffer;
    e->tails[1] = scales.buffer;
    return e->error ? NOT_WRITTEN : ENCODED;
}

// Writes arrays to positions of a file and hashes their leaves: `counts[i]` whole ones, after `skips[i]` bytes. Returns
// the system's number for an error, or 0.
int hb_write_hashed(int isa, int file, int arrays, const uint8_t* const* data, const int64_t* sizes,
                    const int64_t* offsets, const int64_t* skips, const int64_t* counts, int64_t leaf,
                    uint8_t* const* digests) {
    for (int i = 0; i < arrays; ++i) {
        int64_t begin = 0, done = 0;
        do {
            const int64_t some = std::min(TOGETHER, counts[i] - done);
            hash_leaves(isa, data[i] + skips[i] + done * leaf, some, leaf, digests[i] + done * DIGEST);
            done += some;
            const int64_t end = done < counts[i] ? skips[i] + done * leaf : sizes[i];
            if (const int error = write_fully(file, data[i] + begin, end - begin, offsets[i] + begin)) return error;
            begin = end;
        } while (done < counts[i]);
    }
    return 0;
}

}  // extern "C"
