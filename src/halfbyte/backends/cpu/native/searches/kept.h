// What a whole call builds and keeps for the next one of its thread, and the functions of the library that it calls.
#pragma once
#include "../direct.h"
#include "../searches.h"
#include <memory>
#include <vector>

extern "C" {
int hb_build_tables(const Rule* rule, int dtype, Tables* t);
int hb_fit_multipliers(const Tables* t, const float* near, float prescale, int dtype, float* out);
void hb_search(int isa, const void* x, int64_t rows, int64_t columns, int dtype, const SearchTables* t,
               const float* weights, uint8_t* scales, const Tables* tables, uint8_t* codes);
uint32_t hb_four_six(int isa, const void* x, int64_t rows, int64_t columns, int dtype, int kind, int squared,
                     const FourSixScale* s, int per_row, uint8_t* scales, const Tables* t, uint8_t* codes);
void hb_four_six_ordered(int isa, const void* x, int64_t rows, int64_t columns, int block, int dtype, int kind,
                         int measure, int peer, const FourSixScale* s, int per_row, uint8_t* scales);
int64_t hb_general(int isa, const void* x, int64_t rows, int64_t columns, int64_t row, const GeneralSearch* t,
                   uint8_t* scales, int64_t* irregular);
int64_t hb_mx_search(int isa, const void* x, int64_t rows, int64_t columns, int block, int dtype, int element,
                     const float* weights, int zero_byte, uint8_t* scales, const Tables* tables, uint8_t* codes,
                     int64_t* irregular);
}

namespace {

const int64_t CHUNK = 65536;  // blocks per step of a kernel that lists blocks, which bounds the list

// The tables of one tensor, kept for the next call with the same recipe and amax.
struct Built {
    Recipe recipe = {};
    float amax = -1.0f;
    bool searches = false;  // whether `search` is filled
    Tables tables = {};
    SearchTables search = {};
};

Built& built() {
    static thread_local std::unique_ptr<Built> kept;
    if (!kept) kept = std::make_unique<Built>();
    return *kept;
}

int64_t* listed(int64_t blocks) {
    static thread_local std::vector<int64_t> kept;
    if ((int64_t)kept.size() < blocks) kept.resize((size_t)blocks);
    return kept.data();
}

}  // namespace
