// Products of R rows by U units of columns in registers. Rows of A come packed: [k][R] fp32, or [pair][R][2] bf16.
#pragma once
#include <cstdlib>

#include "simd.hpp"

namespace motet {
namespace {

// Memory of this thread that grows and stays; `place` tells users of one thread apart.
inline void* scratch(int place, int64_t bytes) {
    struct Held {
        void* memory[12] = {};
        int64_t size[12] = {};
        ~Held() {
            for (void* each : memory) std::free(each);
        }
    };
    static thread_local Held held;
    if (held.size[place] < bytes) {
        std::free(held.memory[place]);
        held.size[place] = (bytes + 4095) / 4096 * 4096;
        held.memory[place] = std::aligned_alloc(64, static_cast<size_t>(held.size[place]));
        if (!held.memory[place]) std::abort();
    }
    return held.memory[place];
}

struct Tile {
    const void* a;  // packed rows
    const char* b;  // the first unit
    int64_t b_step;  // bytes from one unit to the next
    float* c;
    int64_t ldc;
    int64_t k;
    bool add;
};

inline V fold(bool fresh, const float* c, V sum) { return add(fresh ? zero() : load(c), sum); }

template <Type B, int U>
inline void load_pair(const char* b, int64_t step, int64_t pair, V (&even_U)[U], V (&odd_U)[U]) {
#pragma GCC unroll 2
    for (int u = 0; u < U; u++) {
        if constexpr (B == Type::bf16) {
            const bf16* p = reinterpret_cast<const bf16*>(b + u * step) + pair * 32;
            even_U[u] = even(p);
            odd_U[u] = odd(p);
        } else {
            const float* p = reinterpret_cast<const float*>(b + u * step) + pair * 32;
            even_U[u] = load(p);
            odd_U[u] = load(p + 16);
        }
    }
}

// Sums of k numbers from zero, in the order of Arithmetic::exact, at most 32: even and odd ones apart.
template <Type B, int R, int U>
inline __attribute__((always_inline)) void sum_exact(const float* a, const char* b, int64_t step, int64_t k, V (&e)[R][U], V (&o)[R][U]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) e[r][u] = o[r][u] = zero();
    const int64_t pairs = k / 2;
    for (int64_t i = 0; i < pairs; i++, a += 2 * R) {
        V be[U], bo[U];
        load_pair<B, U>(b, step, i, be, bo);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++) e[r][u] = fma(set1(a[r]), be[u], e[r][u]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++) o[r][u] = fma(set1(a[R + r]), bo[u], o[r][u]);
    }
    if (k % 2) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++) {
                V b_even;
                if constexpr (B == Type::bf16)
                    b_even = even(reinterpret_cast<const bf16*>(b + u * step) + pairs * 32);
                else
                    b_even = load(reinterpret_cast<const float*>(b + u * step) + pairs * 32);
                e[r][u] = fma(set1(a[r]), b_even, e[r][u]);
            }
    }
}

template <Type B, int R, int U>
void tile_exact(const Tile& t) {
    const float* a = static_cast<const float*>(t.a);
    const int64_t bytes = (B == Type::bf16 ? 2 : 4) * 16;
    for (int64_t k = 0; k < t.k; k += 32) {
        V e[R][U], o[R][U];
        sum_exact<B, R, U>(a + k * R, t.b + k * bytes, t.b_step, t.k - k < 32 ? t.k - k : 32, e, o);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++) {
                float* c = t.c + r * t.ldc + u * 16;
                store(c, fold(k == 0 && !t.add, c, add(e[r][u], o[r][u])));
            }
    }
}


#if defined(MOTET_AVX512)
#define MOTET_DPBF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

template <int R, int U>
MOTET_DPBF16 void tile_pairs_native(const Tile& t) {
    const uint32_t* a = static_cast<const uint32_t*>(t.a);
    __m512 c[R][U];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) c[r][u] = t.add ? _mm512_loadu_ps(t.c + r * t.ldc + u * 16) : _mm512_setzero_ps();
    for (int64_t i = 0; i < t.k / 2; i++, a += R) {
        __m512i b[U];
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) b[u] = _mm512_loadu_si512(t.b + u * t.b_step + i * 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++)
                c[r][u] = _mm512_dpbf16_ps(c[r][u], (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r])), (__m512bh)b[u]);
    }
    if (t.k % 2) {
        const __m512i half = _mm512_set1_epi32(0xffff);
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) {
            const __m512i b = _mm512_and_si512(half, _mm512_loadu_si512(t.b + u * t.b_step + t.k / 2 * 64));
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                c[r][u] = _mm512_dpbf16_ps(c[r][u], (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r] & 0xffffu)), (__m512bh)b);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) _mm512_storeu_ps(t.c + r * t.ldc + u * 16, c[r][u]);
}
#endif

// vdpbf16ps as processors compute it: the second product of a pair is added first, each with one rounding.
template <int R, int U>
void tile_pairs_in_order(const Tile& t) {
    const uint32_t* a = static_cast<const uint32_t*>(t.a);
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) {
            float* out = t.c + r * t.ldc + u * 16;
            const bf16* b = reinterpret_cast<const bf16*>(t.b + u * t.b_step);
            V c = t.add ? load(out) : zero();
            for (int64_t i = 0; i < t.k / 2; i++) {
                const uint32_t pair = a[i * R + r];
                c = fma(set1(bits_to_float(pair & 0xffff0000u)), odd(b + i * 32), c);
                c = fma(set1(bits_to_float(pair << 16)), even(b + i * 32), c);
            }
            if (t.k % 2) {
                c = fma(zero(), zero(), c);
                c = fma(set1(bits_to_float(a[t.k / 2 * R + r] << 16)), even(b + t.k / 2 * 32), c);
            }
            store(out, c);
        }
}

enum class Kind { exact_bf16, exact_f32, pairs };

template <Kind K, int R, int U>
inline void tile(const Tile& t) {
    if constexpr (K == Kind::exact_bf16)
        tile_exact<Type::bf16, R, U>(t);
    else if constexpr (K == Kind::exact_f32)
        tile_exact<Type::f32, R, U>(t);
    else {
#if defined(MOTET_AVX512)
        static const bool native = has_dpbf16();
        if (native) return tile_pairs_native<R, U>(t);
#endif
        tile_pairs_in_order<R, U>(t);
    }
}

// Rows of a tile by U units: as many as registers hold.
#if defined(MOTET_AVX512)
constexpr int MOST_EXACT = 6, MOST_PAIRS = 12;
#else
constexpr int MOST_EXACT = 2, MOST_PAIRS = 2;
#endif

template <Kind K, int U, int R>
inline void tile_of(int64_t rows, const Tile& t) {
    if (rows == R) return tile<K, R, U>(t);
    if constexpr (R > 1) tile_of<K, U, R - 1>(rows, t);
}

constexpr int most_rows(Kind kind) { return kind == Kind::pairs ? MOST_PAIRS : MOST_EXACT; }

// Packs rows of A for a tile: [k][rows] fp32, or for pairs [pair][rows] of two bf16.
template <Kind K>
inline void pack_rows(Type type, const void* a, int64_t lda, int64_t rows, int64_t k, void* out) {
    if constexpr (K == Kind::pairs) {
        uint32_t* o = static_cast<uint32_t*>(out);
        for (int64_t r = 0; r < rows; r++) {
            const bf16* row = static_cast<const bf16*>(a) + r * lda;
            for (int64_t i = 0; i < k / 2; i++) {
                uint32_t pair;
                std::memcpy(&pair, row + 2 * i, 4);
                o[i * rows + r] = pair;
            }
            if (k % 2) o[k / 2 * rows + r] = row[k - 1];
        }
    } else {
        float* o = static_cast<float*>(out);
        for (int64_t r = 0; r < rows; r++) {
            if (type == Type::f32) {
                const float* row = static_cast<const float*>(a) + r * lda;
                for (int64_t i = 0; i < k; i++) o[i * rows + r] = row[i];
            } else {
                const bf16* row = static_cast<const bf16*>(a) + r * lda;
                for (int64_t i = 0; i < k; i++) o[i * rows + r] = from_bf16(row[i]);
            }
        }
    }
}

}  // namespace
}  // namespace motet
