// Tiles of products in registers. The sums of a row and a column never leave their lane, in the order of kernels.hpp.
#include "tiles.hpp"

#define EACH(i, n) _Pragma("GCC unroll 24") for (int i = 0; i < n; i++)  // for sums that stay in registers

namespace motet {
namespace {

inline V fold(bool fresh, const float* c, V sum) { return add(fresh ? zero() : load(c), sum); }

// How far ahead of a place in its unit B is fetched: from the end of a unit on, where the tile's next columns begin.
inline int64_t fetched(const Tile& t, int64_t place, int units) {
    return t.ahead && place + t.ahead >= t.b_step ? t.ahead + (units - 1) * t.b_step : t.ahead;
}

template <Type B, int U>
inline void load_pair(const char* b, int64_t step, int64_t pair, int64_t ahead, V (&even_U)[U], V (&odd_U)[U]) {
    EACH(u, U) {
        if constexpr (B == Type::bf16) {
            const bf16* p = reinterpret_cast<const bf16*>(b + u * step) + pair * 32;
            __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead);
            even_U[u] = even(p);
            odd_U[u] = odd(p);
        } else {
            const float* p = reinterpret_cast<const float*>(b + u * step) + pair * 32;
            __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead);
            __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead + 64);
            even_U[u] = load(p);
            odd_U[u] = load(p + 16);
        }
    }
}

// Adds k numbers (at most 16: a line of A) to even and odd sums.
template <Type B, int R, int U>
inline __attribute__((always_inline)) void add_line(const float* a, const char* b, int64_t step, int64_t k, int64_t ahead,
                                                    V (&e)[R][U], V (&o)[R][U]) {
    for (int64_t i = 0; i < k / 2; i++) {
        V be[U], bo[U];
        load_pair<B, U>(b, step, i, ahead, be, bo);
        EACH(r, R) EACH(u, U) e[r][u] = fma(set1(a[r * 16 + 2 * i]), be[u], e[r][u]);
        EACH(r, R) EACH(u, U) o[r][u] = fma(set1(a[r * 16 + 2 * i + 1]), bo[u], o[r][u]);
    }
    if (k % 2 == 0) return;
    EACH(u, U) {
        V be;
        if constexpr (B == Type::bf16)
            be = even(reinterpret_cast<const bf16*>(b + u * step) + k / 2 * 32);
        else
            be = load(reinterpret_cast<const float*>(b + u * step) + k / 2 * 32);
        EACH(r, R) e[r][u] = fma(set1(a[r * 16 + k - 1]), be, e[r][u]);
    }
}

template <Type B, int R, int U>
void tile_exact(const Tile& t) {
    const float* a = static_cast<const float*>(t.a);
    const char* b = t.b;
    constexpr int64_t bytes = (B == Type::bf16 ? 2 : 4) * 16 * 16;  // of a line's part of a unit
    for (int64_t k = 0; k < t.k; k += 32) {
        V e[R][U], o[R][U];
        EACH(r, R) EACH(u, U) e[r][u] = o[r][u] = zero();
        const int64_t left = t.k - k < 32 ? t.k - k : 32;
        for (int64_t i = 0; i < left; i += 16, a += R * 16, b += bytes)
            add_line<B, R, U>(a, b, t.b_step, left - i < 16 ? left - i : 16, fetched(t, b - t.b, U), e, o);
        EACH(r, R) EACH(u, U) {
            float* c = t.c + r * t.ldc + u * 16;
            store(c, fold(k == 0 && !t.add, c, add(e[r][u], o[r][u])));
        }
    }
}

// Where a pair of the first row is.
template <int R>
inline const uint32_t* pair_of(const void* a, int64_t pair) {
    return static_cast<const uint32_t*>(a) + pair / 16 * 16 * R + pair % 16;
}

#if defined(MOTET_AVX512)
#define MOTET_DPBF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

template <int R, int U>
MOTET_DPBF16 void tile_pairs_native(const Tile& t) {
    const uint32_t* a = static_cast<const uint32_t*>(t.a);
    __m512 c[R][U];
    EACH(r, R) EACH(u, U) c[r][u] = t.add ? _mm512_loadu_ps(t.c + r * t.ldc + u * 16) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < t.k / 2; pair += 16, a += R * 16) {
        const int64_t left = t.k / 2 - pair < 16 ? t.k / 2 - pair : 16, ahead = fetched(t, pair * 64, U);
        for (int64_t i = 0; i < left; i++) {
            __m512i b[U];
            EACH(u, U) {
                const char* line = t.b + u * t.b_step + (pair + i) * 64;
                b[u] = _mm512_loadu_si512(line);
                _mm_prefetch(line + ahead, _MM_HINT_T0);
            }
            EACH(r, R) EACH(u, U) {
                const __m512i both = _mm512_set1_epi32(static_cast<int>(a[r * 16 + i]));
                c[r][u] = _mm512_dpbf16_ps(c[r][u], (__m512bh)both, (__m512bh)b[u]);
            }
        }
    }
    if (t.k % 2) {
        const __m512i half = _mm512_set1_epi32(0xffff);
        const uint32_t* last = pair_of<R>(t.a, t.k / 2);
        EACH(u, U) {
            const __m512i b = _mm512_and_si512(half, _mm512_loadu_si512(t.b + u * t.b_step + t.k / 2 * 64));
            EACH(r, R)
                c[r][u] = _mm512_dpbf16_ps(c[r][u], (__m512bh)_mm512_set1_epi32(static_cast<int>(last[r * 16] & 0xffffu)), (__m512bh)b);
        }
    }
    EACH(r, R) EACH(u, U) _mm512_storeu_ps(t.c + r * t.ldc + u * 16, c[r][u]);
}
#endif

// vdpbf16ps as processors compute it: the second product of a pair is added first, each with one rounding.
template <int R, int U>
void tile_pairs_in_order(const Tile& t) {
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) {
            float* out = t.c + r * t.ldc + u * 16;
            const bf16* b = reinterpret_cast<const bf16*>(t.b + u * t.b_step);
            V c = t.add ? load(out) : zero();
            for (int64_t i = 0; i < t.k / 2; i++) {
                const uint32_t pair = pair_of<R>(t.a, i)[r * 16];
                c = fma(set1(bits_to_float(pair & 0xffff0000u)), odd(b + i * 32), c);
                c = fma(set1(bits_to_float(pair << 16)), even(b + i * 32), c);
            }
            if (t.k % 2) {
                c = fma(zero(), zero(), c);
                c = fma(set1(bits_to_float(pair_of<R>(t.a, t.k / 2)[r * 16] << 16)), even(b + t.k / 2 * 32), c);
            }
            store(out, c);
        }
}

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

template <Kind K, int U, int R>
void tile_of(int64_t rows, const Tile& t) {
    if (rows == R) return tile<K, R, U>(t);
    if constexpr (R > 1) tile_of<K, U, R - 1>(rows, t);
}

template <Kind K>
void tile_of_kind(int64_t rows, int64_t units, const Tile& t) {
    if (units == 4)
        tile_of<K, 4, most_rows(K, 4)>(rows, t);
    else if (units == 2)
        tile_of<K, 2, most_rows(K, 2)>(rows, t);
    else
        tile_of<K, 1, most_rows(K, 1)>(rows, t);
}

}  // namespace

void multiply_tile(Kind kind, int64_t rows, int64_t units, const Tile& t) {
    if (kind == Kind::exact_bf16)
        tile_of_kind<Kind::exact_bf16>(rows, units, t);
    else if (kind == Kind::exact_f32)
        tile_of_kind<Kind::exact_f32>(rows, units, t);
    else
        tile_of_kind<Kind::pairs>(rows, units, t);
}

}  // namespace motet
