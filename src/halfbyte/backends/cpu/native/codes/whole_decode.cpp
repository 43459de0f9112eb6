// A whole call of decoding in one function: the values of the scales that occur, then the blocks.
#include "../kernels.h"
#include "../recipe.h"

namespace {

// Half or bfloat16 bits of a finite float32.
uint32_t narrow(float value, int dtype) {
    const uint32_t sign = as_bits(value) >> 31 << 15;
    const float magnitude = as_float(as_bits(value) & 0x7FFFFFFFu);
    if (dtype == BF16) return sign | as_bits(round_to_bfloat(magnitude)) >> 16;
    const float rounded = round_to_half(magnitude);
    if (rounded == std::numeric_limits<float>::infinity()) return sign | 0x7C00;
    if (rounded < 0x1p-14f) return sign | (uint32_t)(rounded * 0x1p24f);
    return sign | (as_bits(rounded) - (112u << 23)) >> 13;
}

// One row of a table of values: what every code stands for under a scale byte. Returns false if a value is not finite.
bool fill_values(const DecodeRecipe& recipe, int byte, float stored, uint8_t* row) {
    static const float MAGNITUDES[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float scale = e4m3_decode(byte);
    for (int code = 0; code < 16; ++code) {
        const bool negative = (code & 8) && (code != 8 || recipe.negative_zero);
        const float q = negative ? -MAGNITUDES[code & 7] : MAGNITUDES[code & 7];
        const float value = decoded_value(recipe.decode, q, scale, stored, recipe.top);
        if (!std::isfinite(value)) return false;
        if (recipe.dtype == FP32) {
            std::memcpy(row + code * 4, &value, 4);
            continue;
        }
        const uint32_t bits = narrow(value, recipe.dtype);  // sixteen low bytes, then sixteen high bytes
        row[code] = (uint8_t)bits;
        row[16 + code] = (uint8_t)(bits >> 8);
    }
    return true;
}

}  // namespace

extern "C" {

int64_t hb_sizeof_decode_recipe() { return sizeof(DecodeRecipe); }

// Decodes blocks by the recipe's table, or E2M1 under E4M3 scales by its formula. `stored`: the stored scale, or null.
// Returns 0; or 1 if a scale is negative or NaN or a value is not finite. Then the output is not valid.
int hb_dequantize(const DecodeRecipe* recipe, int isa, const uint8_t* codes, const uint8_t* scales, int64_t blocks,
                  const float* stored, void* out) {
    const int width = recipe->dtype == FP32 ? 4 : 2;
    if (recipe->table) {
        if (recipe->code_bits == 8) tables_of(isa)->decode_mxfp8(codes, scales, blocks, recipe->table, width, out);
        else tables_of(isa)->decode(codes, scales, blocks, recipe->block, recipe->table, width, out);
        return 0;
    }
    alignas(64) uint8_t table[128 * 64];
    bool filled[128] = {};
    const int row = 16 * width;
    const float one = stored ? *stored : 1.0f;
    for (int64_t block = 0; block < blocks; ++block) {
        const int byte = scales[block];
        if (byte >= 0x7F) return 1;
        if (filled[byte]) continue;
        if (!fill_values(*recipe, byte, one, table + byte * row)) return 1;
        filled[byte] = true;
    }
    tables_of(isa)->decode(codes, scales, blocks, recipe->block, table, width, out);
    return 0;
}

// The same for rows with a stored scale each. `failed` gets 1 for each row that is not valid.
void hb_dequantize_rows(const DecodeRecipe* recipe, int isa, const uint8_t* codes, const uint8_t* scales, int64_t rows,
                        int64_t columns, const float* stored, void* out, uint8_t* failed) {
    const int width = recipe->dtype == FP32 ? 4 : 2;
    for (int64_t row = 0, next; row < rows; row = next) {
        for (next = row + 1; next < rows && as_bits(stored[next]) == as_bits(stored[row]);) ++next;
        const int64_t at = row * columns;
        const int found =
            hb_dequantize(recipe, isa, codes + at * recipe->block / 2, scales + at, (next - row) * columns,
                          stored + row, (uint8_t*)out + at * recipe->block * width);
        std::memset(failed + row, found, (size_t)(next - row));
    }
}

}  // extern "C"
