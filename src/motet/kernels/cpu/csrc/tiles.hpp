// Products of R rows by U units of columns in registers. R rows of A come packed by lines of 64 bytes:
// [16 of k][R][16] fp32, or for pairs [32 of k][R][32] bf16.
#pragma once
#include <cstdlib>

#include "simd.hpp"

namespace motet {

struct Tile {
    const void* a;   // packed rows
    const char* b;   // the first unit
    int64_t b_step;  // bytes from one unit to the next
    float* c;
    int64_t ldc;
    int64_t k;
    bool add;
    int64_t ahead;  // bytes ahead of B that are fetched
};

enum class Kind { exact_bf16, exact_f32, pairs };

// C (+)= A · B of 1 to `most_rows` rows and 1, 2 or 4 units.
void multiply_tile(Kind kind, int64_t rows, int64_t units, const Tile& tile);

void product_emulated(const Product& p);  // with emulated matrix units: for tests

void product_in_two(const Product& p, int64_t k);  // for planted faults alone

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory of this thread; `place` tells users of one thread apart.
inline void* scratch(int place, int64_t bytes) {
    static thread_local Scratch held[10];
    return held[place].at_least(bytes);
}

// The row of a pool, of `width` numbers, at which a unit of a span's keys begins.
inline int64_t row_of(const Pool& pool, const Span& span, int64_t head, int64_t unit) {
    const int64_t key = unit * LANES, slot = key / pool.block;
    if (slot >= span.n_table || span.blocks[slot] < 0 || span.blocks[slot] >= pool.n_blocks) std::abort();
    return (span.blocks[slot] * pool.n_kv + head) * pool.block + key % pool.block;
}

// Rows of a tile by two units: as many as registers hold; by one unit twice as many, by four half as many.
#if defined(MOTET_AVX512)
constexpr int MOST_EXACT = 6, MOST_PAIRS = 12;
#else
constexpr int MOST_EXACT = 2, MOST_PAIRS = 2;
#endif

constexpr int most_rows(Kind kind, int64_t units) {
    return (kind == Kind::pairs ? MOST_PAIRS : MOST_EXACT) * 2 / static_cast<int>(units);
}

// Bytes of a packed row.
inline int64_t packed_row(Kind kind, int64_t k) { return kind == Kind::pairs ? round_up(k, 32) * 2 : round_up(k, 16) * 4; }

// Packs rows of A for a tile; the end of the last line stays undefined.
template <Kind K>
inline void pack_rows(Type type, const void* a, int64_t lda, int64_t rows, int64_t k, void* out) {
    for (int64_t r = 0; r < rows; r++) {
        if constexpr (K == Kind::pairs) {
            const bf16* row = static_cast<const bf16*>(a) + r * lda;
            bf16* o = static_cast<bf16*>(out) + r * 32;
            int64_t i = 0;
            for (; i + 32 <= k; i += 32, o += rows * 32) std::memcpy(o, row + i, 64);
            if (i < k) std::memcpy(o, row + i, (k - i) * 2);
        } else {
            float* o = static_cast<float*>(out) + r * 16;
            for (int64_t i = 0; i < k; i += 16, o += rows * 16) store(o, load_type(type, a, r * lda + i, k - i));
        }
    }
}

}  // namespace
}  // namespace motet
