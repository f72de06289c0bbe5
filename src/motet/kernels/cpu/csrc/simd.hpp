// Sixteen fp32 lanes, with the same bits in every form: IEEE operations, explicit FMA, integer tricks, own polynomials.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.hpp"

#if defined(MOTET_AVX512) || defined(MOTET_AVX2)
#include <immintrin.h>
#endif

namespace motet {
namespace {

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// To the nearest, ties to even. Denormals become zero, a NaN stays one.
inline bf16 to_bf16_one(float value) {
    uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x00800000u) return static_cast<bf16>((bits & 0x80000000u) >> 16);
    if (magnitude > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(bf16 value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

#if defined(MOTET_AVX512)

struct V {
    __m512 v;
};
using Mask = __mmask16;

inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V root(V a) { return {_mm512_sqrt_ps(a.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V fnma(V a, V b, V c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one of them is NaN
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V round(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Mask less(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline Mask first(int64_t n) { return n >= 16 ? 0xffff : static_cast<Mask>((1u << n) - 1u); }
inline Mask range(int64_t from, int64_t to) { return static_cast<Mask>(first(to) & ~first(from)); }
inline V select(Mask m, V yes, V no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
inline V load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store_first(float* p, int64_t n, V a) { _mm512_mask_storeu_ps(p, first(n), a.v); }
// 2^n of whole numbers −126 … 127
inline V power_of_two(V n) {
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}
inline V from_bf16s(const bf16* p) {
    __m512i i = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 16))};
}
inline __m256i round_bf16(V a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const Mask tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    const Mask nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    r = _mm512_mask_srli_epi32(r, tiny, _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x80000000u))), 16);
    r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(r);
}
inline void store_bf16(bf16* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
// Adds the first n lanes, whole numbers below 2⁶³.
inline void add_integers(int64_t* p, int64_t n, V a) {
    const Mask m = first(n);
    const __m512i low = _mm512_cvtps_epi64(_mm512_castps512_ps256(a.v)), high = _mm512_cvtps_epi64(_mm512_extractf32x8_ps(a.v, 1));
    const __mmask8 m_low = static_cast<__mmask8>(m), m_high = static_cast<__mmask8>(m >> 8);
    _mm512_mask_storeu_epi64(p, m_low, _mm512_add_epi64(_mm512_maskz_loadu_epi64(m_low, p), low));
    _mm512_mask_storeu_epi64(p + 8, m_high, _mm512_add_epi64(_mm512_maskz_loadu_epi64(m_high, p + 8), high));
}
inline V even(const bf16* pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16))};
}
inline V odd(const bf16* pairs) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// Two rows of 16 numbers as 16 pairs.
inline void pair_up(const bf16* low, const bf16* high, uint32_t* out) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    _mm512_storeu_si512(out, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}

inline V to_bf16_and_back(V a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(a)), 16))};
}
// The transpose of 16 × 16 numbers, in rows `ld` and `ldt` apart.
inline void turn(const float* from, int64_t ld, float* to, int64_t ldt) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * ld);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)  // a[i + j]: numbers j, j + 4, j + 8 and j + 12 of four rows
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + 2 + j]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512 upper = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), lower = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
        const __m512 upper_odd = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
        const __m512 lower_odd = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_ps(to + j * ldt, _mm512_shuffle_f32x4(upper, lower, 0x88));
        _mm512_storeu_ps(to + (4 + j) * ldt, _mm512_shuffle_f32x4(upper_odd, lower_odd, 0x88));
        _mm512_storeu_ps(to + (8 + j) * ldt, _mm512_shuffle_f32x4(upper, lower, 0xdd));
        _mm512_storeu_ps(to + (12 + j) * ldt, _mm512_shuffle_f32x4(upper_odd, lower_odd, 0xdd));
    }
}

#elif defined(MOTET_AVX2)

struct V {
    __m256 a, b;
};
struct Mask {
    __m256 a, b;
};

inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V root(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V fnma(V x, V y, V z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V round(V x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Mask less(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline Mask range(int64_t from, int64_t to) {
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    const __m256i begin = _mm256_set1_epi32(static_cast<int>(from < 0 ? 0 : from > 16 ? 16 : from) - 1);
    const __m256i end = _mm256_set1_epi32(static_cast<int>(to < 0 ? 0 : to > 16 ? 16 : to));
    auto within = [&](__m256i i) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(i, begin), _mm256_cmpgt_epi32(end, i)));
    };
    return {within(low), within(high)};
}
inline Mask first(int64_t n) { return range(0, n); }
inline V select(Mask m, V yes, V no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
inline V load_first(const float* p, int64_t n) {
    const Mask m = first(n);
    return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
}
inline void store_first(float* p, int64_t n, V x) {
    const Mask m = first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}
inline V power_of_two(V n) {
    auto half = [](__m256 x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
    };
    return {half(n.a), half(n.b)};
}
inline V from_bf16s(const bf16* p) {
    auto half = [](const bf16* q) {
        const __m256i i = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(i, 16));
    };
    return {half(p), half(p + 8)};
}
inline __m128i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    r = _mm256_blendv_epi8(r, sign, tiny);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    r = _mm256_srli_epi32(r, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
inline void store_bf16(bf16* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), round_bf16(x.b));
}
inline __m256i load_pairs(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline V even(const bf16* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p + 16), 16))};
}
inline V odd(const bf16* p) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), high)),
            _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p + 16), high))};
}

#else

struct V {
    float v[16];
};
struct Mask {
    bool v[16];
};

template <class F>
inline V each(F&& f) {
    V out;
    for (int i = 0; i < 16; i++) out.v[i] = f(i);
    return out;
}
inline V load(const float* p) { return each([&](int i) { return p[i]; }); }
inline void store(float* p, V a) { std::memcpy(p, a.v, 64); }
inline V set1(float x) { return each([&](int) { return x; }); }
inline V zero() { return set1(0.0f); }
inline V add(V a, V b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline V sub(V a, V b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline V mul(V a, V b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline V div(V a, V b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline V root(V a) { return each([&](int i) { return std::sqrt(a.v[i]); }); }
inline V fma(V a, V b, V c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
inline V fnma(V a, V b, V c) { return each([&](int i) { return std::fma(-a.v[i], b.v[i], c.v[i]); }); }
inline V max(V a, V b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline V min(V a, V b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline V round(V a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Mask range(int64_t from, int64_t to) {
    Mask m;
    for (int i = 0; i < 16; i++) m.v[i] = i >= from && i < to;
    return m;
}
inline Mask first(int64_t n) { return range(0, n); }
inline Mask less(V a, V b) {
    Mask m;
    for (int i = 0; i < 16; i++) m.v[i] = a.v[i] < b.v[i];
    return m;
}
inline V select(Mask m, V yes, V no) { return each([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; }); }
inline V load_first(const float* p, int64_t n) { return each([&](int i) { return i < n ? p[i] : 0.0f; }); }
inline void store_first(float* p, int64_t n, V a) { std::memcpy(p, a.v, static_cast<size_t>(n < 16 ? n : 16) * 4); }
inline V power_of_two(V n) {
    return each([&](int i) { return bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
inline V from_bf16s(const bf16* p) { return each([&](int i) { return from_bf16(p[i]); }); }
inline void store_bf16(bf16* p, V a) {
    for (int i = 0; i < 16; i++) p[i] = to_bf16_one(a.v[i]);
}
inline V even(const bf16* pairs) { return each([&](int i) { return from_bf16(pairs[2 * i]); }); }
inline V odd(const bf16* pairs) { return each([&](int i) { return from_bf16(pairs[2 * i + 1]); }); }

#endif

#if !defined(MOTET_AVX512)
inline void add_integers(int64_t* p, int64_t n, V a) {
    float lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < (n < 16 ? n : 16); i++) p[i] += static_cast<int64_t>(lanes[i]);
}
inline void pair_up(const bf16* low, const bf16* high, uint32_t* out) {
    for (int i = 0; i < 16; i++) out[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
}
inline V to_bf16_and_back(V a) {
    bf16 half[16];
    store_bf16(half, a);
    return from_bf16s(half);
}
inline void turn(const float* from, int64_t ld, float* to, int64_t ldt) {
    for (int64_t i = 0; i < 16; i++)
        for (int64_t j = 0; j < 16; j++) to[j * ldt + i] = from[i * ld + j];
}
#endif

inline void store_bf16_first(bf16* p, int64_t n, V a) {
    if (n >= 16) return store_bf16(p, a);
    bf16 whole[16];
    store_bf16(whole, a);
    std::memcpy(p, whole, static_cast<size_t>(n) * 2);
}

inline V load_bf16_first(const bf16* p, int64_t n) {
    if (n >= 16) return from_bf16s(p);
    bf16 whole[16] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * 2);
    return from_bf16s(whole);
}

inline __attribute__((always_inline)) V load_type(Type type, const void* x, int64_t place, int64_t n) {
    return type == Type::f32 ? load_first(static_cast<const float*>(x) + place, n)
                             : load_bf16_first(static_cast<const bf16*>(x) + place, n);
}

// The lanes added as a tree: i with i + 8, then 4, 2, 1.
inline float sum_lanes(V a) {
    float x[16];
    store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] + x[i + half];
    return x[0];
}

// The largest lane; NaN where a lane is.
inline float max_lanes(V a) {
    float x[16], largest;
    store(x, a);
    largest = x[0];
    for (int i = 1; i < 16; i++) largest = (x[i] > largest || x[i] != x[i]) ? x[i] : largest;
    return largest;
}

// e^x within 2 units of the last place; 0 below −87.3, +∞ above 88.7, NaN of NaN. Degree 6 on |r| ≤ ln 2 / 2 (Cephes).
inline V exp(V x) {
    const V low = set1(-87.33654f), high = set1(88.72283f);
    V y = max(low, min(high, x));  // NaN passes: it is the second operand
    V n = round(mul(y, set1(1.44269504f)));
    n = min(n, set1(127.0f));
    n = max(n, set1(-126.0f));
    V r = fnma(n, set1(0.693359375f), y);
    r = fnma(n, set1(-2.12194440e-4f), r);
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    p = mul(p, power_of_two(n));
    p = select(less(x, low), zero(), p);
    return select(less(high, x), set1(INFINITY), p);
}

inline float exp_one(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// ln x of a positive normal number (Cephes); +∞ and NaN of themselves.
inline float log_one(float x) {
    if (!(x < INFINITY)) return x;
    uint32_t bits = float_to_bits(x);
    float e = static_cast<float>(static_cast<int32_t>(bits >> 23) - 126);
    float m = bits_to_float((bits & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
    if (m < 0.707106781f) {
        e = e - 1.0f;
        m = m + m;
    }
    m = m - 1.0f;
    const float square = m * m;
    const float c[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                       -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    float p = 7.0376836292e-2f;
    for (float each : c) p = std::fma(p, m, each);
    float y = p * m * square;
    y = std::fma(e, -2.12194440e-4f, y);
    y = std::fma(-0.5f, square, y);
    return std::fma(e, 0.693359375f, m + y);
}

// 1 / (1 + e^−x)
inline V sigmoid(V x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// 1 − 2 / (e^2x + 1)
inline V tanh(V x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

}  // namespace
}  // namespace motet
