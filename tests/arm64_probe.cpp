// Runs the kernels of a compiled library on fixed inputs and prints one hash per kernel. tests/arm64.py compares the
// output for arm64 with that for this machine.
//
//     probe LIBRARY INSTRUCTION_SET
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <vector>
#include "../src/halfbyte/backends/cpu/native/searches.h"

static void* library;
static int isa;

template <class Function>
static Function* find(const char* name) {
    void* found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "the library has no %s\n", name);
        exit(2);
    }
    return (Function*)found;
}

static void print_hash(const char* name, int dtype, const void* data, size_t bytes) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ ((const uint8_t*)data)[i]) * 0x100000001B3u;
    printf("%s %d %016llx\n", name, dtype, (unsigned long long)hash);
}

constexpr int64_t ROWS = 48, COLUMNS = 20, BLOCKS = ROWS * COLUMNS, ELEMENTS = BLOCKS * 16;

// Numbers of many magnitudes, with zeros of both signs and whole blocks of zeros. All are exact in the dtype.
static std::vector<uint8_t> make_input(int dtype) {
    const int width = dtype == FP32 ? 4 : 2;
    std::vector<uint8_t> bytes(ELEMENTS * width);
    uint32_t state = 1;
    for (int64_t i = 0; i < ELEMENTS; ++i) {
        state = state * 1664525u + 1013904223u;
        const uint32_t octaves = (uint32_t)(i / 16 % 7) + (state >> 29), sign = state >> 28 & 1;
        uint32_t bits = sign << 31 | (118 + octaves) << 23 | (state >> 5 & 0x7FFFFF);
        if (i / 16 % 31 == 5 || (state & 0xFF) == 0) bits &= 0x80000000;
        if (dtype == BF16) bits >>= 16;
        if (dtype == FP16) bits = bits << 1 ? sign << 15 | (6 + octaves) << 10 | (state >> 5 & 0x3FF) : sign << 15;
        std::memcpy(&bytes[i * width], &bits, width);
    }
    return bytes;
}

struct Outputs {
    std::vector<uint8_t> codes = std::vector<uint8_t>(ELEMENTS), scales = std::vector<uint8_t>(BLOCKS);
    std::vector<int64_t> irregular = std::vector<int64_t>(BLOCKS);

    void print(const char* name, int dtype) {
        print_hash(name, dtype, codes.data(), codes.size());
        print_hash(name, dtype, scales.data(), scales.size());
        *this = {};
    }
};

// TransformerEngine's formulas for a tensor with this amax.
struct Numbers {
    float factor, inverse;
    Rule rule = {};
    SearchTables search = {};
    Tables tables;

    Numbers(float amax, int dtype) : factor(448.0f * 6.0f / amax), inverse(1.0f / factor) {
        rule.factor = factor;
        rule.amax = amax;
        rule.for_zero_byte = -1;
        rule.for_zero = -1.0f;
        search.first = 1;
        int exponent;
        std::frexp(inverse, &exponent);
        search.prescale = std::ldexp(1.0f, 1 - exponent);
        search.unit = inverse * search.prescale;
        search.to_scale = 1.0f / (6.0f * search.unit);
        for (int byte = 0; byte < 127; ++byte) {
            const float reciprocal = 1.0f / (e4m3_decode(byte) * inverse), most = std::numeric_limits<float>::max();
            rule.constant[byte] = reciprocal < most ? reciprocal : most;
            search.multiplier[byte] = std::ldexp(rule.constant[byte], exponent - 1);
            search.scale[byte] = e4m3_decode(byte) * search.unit;
        }
        std::memset(&tables, 0, sizeof tables);
        if (find<int(const Rule*, int, Tables*)>("hb_build_tables")(&rule, dtype, &tables)) exit(3);
        for (float& scale : tables.scale) scale = 1.0f;
    }
};

static void run_plain(const uint8_t* x, int dtype, Numbers& n, Outputs& out) {
    using Plain = int64_t(int, const void*, int64_t, int, int, const Tables*, uint8_t*, uint8_t*, int64_t*);
    print_hash("tables", dtype, &n.tables, sizeof n.tables);
    for (int block : {16, 32}) {
        find<Plain>("hb_plain")(isa, x, ELEMENTS / block, block, dtype, &n.tables, out.codes.data(), out.scales.data(),
                                out.irregular.data());
        out.print("plain", dtype);
    }
    using Mxfp8 = int64_t(int, const void*, int64_t, int, const Tables*, uint8_t*, uint8_t*, int64_t*);
    find<Mxfp8>("hb_mxfp8")(isa, x, ELEMENTS / 32, dtype, &n.tables, out.codes.data(), out.scales.data(),
                            out.irregular.data());
    out.print("mxfp8", dtype);
    using DirectRows = void(int, const void*, int64_t, int64_t, int, int, const float*, uint8_t*, uint8_t*);
    const std::vector<float> factors(ROWS, n.factor);
    find<DirectRows>("hb_direct_rows")(isa, x, ROWS, COLUMNS, dtype, 0, factors.data(), out.codes.data(),
                                       out.scales.data());
    std::vector<float> values(ELEMENTS), table(256 * 16);
    for (int i = 0; i < 256 * 16; ++i) table[i] = (float)i;
    using Decode = void(int, const uint8_t*, const uint8_t*, int64_t, int, const void*, int, void*);
    find<Decode>("hb_decode")(isa, out.codes.data(), out.scales.data(), BLOCKS, 16, table.data(), 4, values.data());
    print_hash("decode", dtype, values.data(), values.size() * 4);
    out.print("direct rows", dtype);
    std::vector<float> matrix(256);
    for (int i = 0; i < 256; ++i) matrix[i] = (__builtin_parity(i / 16 & i % 16) ? -0.1f : 0.1f) * (float)(1 + i % 3);
    using Rotate = void(int, const void*, int64_t, int, const float*, void*);
    find<Rotate>("hb_rotate")(isa, x, BLOCKS, dtype, matrix.data(), values.data());
    print_hash("rotate", dtype, values.data(), values.size() * (dtype == FP32 ? 4 : 2));
}

static void run_four_six(const uint8_t* x, int dtype, Numbers& n, Outputs& out) {
    const FourSixScale scale = {n.factor, n.inverse, n.rule.amax, 6.0f * 448.0f};
    using FourSix = uint32_t(int, const void*, int64_t, int64_t, int, int, int, const FourSixScale*, int, uint8_t*,
                             const Tables*, uint8_t*);
    using Ordered =
        void(int, const void*, int64_t, int64_t, int, int, int, int, int, const FourSixScale*, int, uint8_t*);
    for (int kind = 0; kind < 3; ++kind)
        for (int squared = 0; squared < 2; ++squared) {
            find<FourSix>("hb_four_six")(isa, x, ROWS, COLUMNS, dtype, kind, squared, &scale, 0, out.scales.data(),
                                         &n.tables, out.codes.data());
            out.print("four_six", dtype);
            find<Ordered>("hb_four_six_ordered")(isa, x, ROWS, COLUMNS, 16, dtype, kind, squared, kind == 0, &scale, 0,
                                                 out.scales.data());
            out.print("four_six_ordered", dtype);
        }
}

static void run_searches(const uint8_t* x, int dtype, Numbers& n, Outputs& out) {
    std::vector<float> weights(COLUMNS * 16), triangles(COLUMNS * 136), bounds;
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = 1.0f + (float)(i % 13);
    for (int64_t c = 0; c < COLUMNS; ++c) {
        for (int i = 0, at = 0; i < 16; ++i)
            for (int j = i; j < 16; ++j, ++at) triangles[c * 136 + at] = i == j ? 2.0f : 2.0f / (float)(8 + j - i + c);
        for (float bound : {-1.0f, 32.0f, 0.0f}) bounds.push_back(bound);
    }
    using Search = void(int, const void*, int64_t, int64_t, int, const SearchTables*, const float*, uint8_t*,
                        const Tables*, uint8_t*);
    for (const float* w : {(const float*)nullptr, (const float*)weights.data()}) {
        find<Search>("hb_search")(isa, x, ROWS, COLUMNS, dtype, &n.search, w, out.scales.data(), &n.tables,
                                  out.codes.data());
        out.print("search", dtype);
    }
    using Hessian = void(int, const void*, int64_t, int64_t, int, const SearchTables*, const float*, const float*, int,
                         uint8_t*, const Tables*, uint8_t*);
    find<Hessian>("hb_hessian")(isa, x, ROWS, COLUMNS, dtype, &n.search, triangles.data(), bounds.data(), 1,
                                out.scales.data(), &n.tables, out.codes.data());
    out.print("hessian", dtype);
    using MxSearch = int64_t(int, const void*, int64_t, int64_t, int, int, int, const float*, int, uint8_t*,
                             const Tables*, uint8_t*, int64_t*);
    for (int element : {MX_E2M1, MX_E2M1_DOWN, MX_E4M3}) {
        find<MxSearch>("hb_mx_search")(isa, x, ROWS, COLUMNS / 2, 32, dtype, element, nullptr, 0, out.scales.data(),
                                       &n.tables, out.codes.data(), out.irregular.data());
        out.print("mx_search", dtype);
    }
}

static void run_peers(const uint8_t* x, int dtype, Numbers& n, Outputs& out) {
    SweepTables sweep = {};
    sweep.ascending = sweep.regular = 1;
    sweep.unit = n.inverse;
    PeerSearch peer = {16, dtype, 126, 0, {}, nullptr};
    std::vector<float> value(256), constant(256);
    for (int byte = 0; byte < 127; ++byte) {
        value[byte] = e4m3_decode(byte);
        peer.value[byte] = value[byte] * 0.0625f;
        constant[byte] = n.rule.constant[byte];
        if (byte == 0) continue;
        sweep.scale[byte - 1] = value[byte] * n.inverse;
        sweep.byte[byte - 1] = (uint8_t)byte;
    }
    using Sweep = void(int, const void*, int64_t, int, int, const SweepTables*, uint8_t*);
    find<Sweep>("hb_sweep")(isa, x, BLOCKS, 16, dtype, &sweep, out.scales.data());
    out.print("sweep", dtype);
    const StaticScale still = {n.factor, n.inverse, 448.0f, n.rule.amax / 6.0f, 0x1p-9f};
    using Static = void(int, const void*, int64_t, int, int, const StaticScale*, uint8_t*);
    find<Static>("hb_static_four_six")(isa, x, BLOCKS, 16, dtype, &still, out.scales.data());
    out.print("static_four_six", dtype);
    std::fill(out.scales.begin(), out.scales.end(), (uint8_t)72);
    using Peer = void(int, const void*, int64_t, int64_t, const PeerSearch*, uint8_t*);
    find<Peer>("hb_peer_search")(isa, x, ROWS, COLUMNS, &peer, out.scales.data());
    out.print("peer_search", dtype);
    GeneralSearch any = {16, dtype, EVEN, SQUARES, 0, 1, 126, 0, 0, 0, 0, 6.0f, 0.25f, value.data(), constant.data()};
    any.prescale = &n.search.prescale;
    any.unit = &n.search.unit;
    using General = int64_t(int, const void*, int64_t, int64_t, int64_t, const GeneralSearch*, uint8_t*, int64_t*);
    for (int element : {EVEN, DOWN, WRAPPED}) {
        any.element = element;
        find<General>("hb_general")(isa, x, ROWS, COLUMNS, 0, &any, out.scales.data(), out.irregular.data());
        out.print("general", dtype);
    }
}

int main(int count, char** arguments) {
    library = count == 3 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    if (!library) {
        fprintf(stderr, "usage: probe LIBRARY INSTRUCTION_SET (%s)\n", count == 3 ? dlerror() : "two arguments");
        return 2;
    }
    isa = atoi(arguments[2]);
    const float sum = find<float(float, float, float)>("hb_multiply_add")(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, -1.0f);
    print_hash("multiply_add", FP32, &sum, sizeof sum);
    for (int dtype : {BF16, FP16, FP32}) {
        const std::vector<uint8_t> x = make_input(dtype);
        using Amax = uint32_t(int, const void*, int64_t, int);
        const uint32_t amax = find<Amax>("hb_amax")(isa, x.data(), ELEMENTS, dtype);
        print_hash("amax", dtype, &amax, sizeof amax);
        Numbers* n = new Numbers(magnitude_value(amax, dtype), dtype);
        Outputs out;
        run_plain(x.data(), dtype, *n, out);
        run_four_six(x.data(), dtype, *n, out);
        run_searches(x.data(), dtype, *n, out);
        run_peers(x.data(), dtype, *n, out);
        delete n;
    }
}
