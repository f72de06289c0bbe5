// Kernels that go over rows: norms, rotary positions, gates, AdamW. And the mode of the processor.
#include <algorithm>

#include "pool.hpp"
#include "simd.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace motet {

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(static_cast<unsigned>(before_) | 0x8040u); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(static_cast<unsigned>(before_)); }
#elif defined(__aarch64__)
FlushDenormals::FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t{1} << 24)));
}
FlushDenormals::~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }
#else
FlushDenormals::FlushDenormals() : before_(0) {}
FlushDenormals::~FlushDenormals() {}
#endif

const char* form() {
#if defined(MOTET_AMX)
    return "amx";
#elif defined(MOTET_AVX512)
    return "avx512";
#elif defined(MOTET_AVX2)
    return "avx2";
#else
    return "portable";
#endif
}

bool form_runs(const char* form) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!std::strcmp(form, "avx2")) return avx2;
    if (!std::strcmp(form, "avx512") || !std::strcmp(form, "amx"))
        return (form[1] == 'v' || amx_runs()) && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    return !std::strcmp(form, "portable");
}

bool has_dpbf16() {
#if defined(MOTET_AVX512)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
#else
    return false;
#endif
}

#if defined(MOTET_AVX512)
// The processor's own instruction rounds as `store_bf16` does.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))) static int64_t to_bf16_lines(const float* x, bf16* out,
                                                                                                      int64_t n) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
    return i;
}
#endif

void to_bf16(const float* x, bf16* out, int64_t n) {
    int64_t done = 0;
#if defined(MOTET_AVX512)
    static const bool native = has_dpbf16();
    if (native) done = to_bf16_lines(x, out, n);
#endif
    for (int64_t i = done; i < n; i += 16) store_bf16_first(out + i, n - i, load_first(x + i, n - i));
}

void add_rows(float* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor) {
    for (int64_t r = 0; r < m; r++)
        for (int64_t i = 0; i < n; i += 16) {
            float* p = x + r * ldx + i;
            store_first(p, n - i, fma(set1(factor), load_first(y + r * ldy + i, n - i), load_first(p, n - i)));
        }
}

void add_turned(float* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor) {
    float square[LANES * LANES];
    for (int64_t i = 0; i < m; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            turn(y + j * ldy + i, ldy, square, LANES);
            for (int64_t r = i; r < std::min(m, i + LANES); r++) {
                float* p = x + r * ldx + j;
                store_first(p, n - j, add(load_first(p, n - j), mul(set1(factor), load(square + (r - i) * LANES))));
            }
        }
}

namespace {

// Adds the first n lanes to x; returns the larger of `most` and their magnitudes.
inline __attribute__((always_inline)) V add_whole(int64_t* x, int64_t n, V y, V most) {
    const V unfit = set1(0x1p62f), numbers = round(mul(y, set1(0x1p44f)));
    const V size = max(numbers, sub(zero(), numbers));
    const Mask fits = less(size, unfit);
    add_integers(x, n, select(fits, numbers, zero()));
    return max(most, select(first(n), select(fits, size, unfit), zero()));
}

}  // namespace

int64_t add_rows_whole(int64_t* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n) {
    V most = zero();
    for (int64_t r = 0; r < m; r++)
        for (int64_t i = 0; i < n; i += LANES) most = add_whole(x + r * ldx + i, n - i, load_first(y + r * ldy + i, n - i), most);
    return static_cast<int64_t>(max_lanes(most));
}

int64_t add_turned_whole(int64_t* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor) {
    float square[LANES * LANES];
    V most = zero();
    for (int64_t i = 0; i < m; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            turn(y + j * ldy + i, ldy, square, LANES);
            for (int64_t r = i; r < std::min(m, i + LANES); r++)
                most = add_whole(x + r * ldx + j, n - j, mul(set1(factor), load(square + (r - i) * LANES)), most);
        }
    return static_cast<int64_t>(max_lanes(most));
}

void embed(Type type, const void* table, const int64_t* tokens, float scale, float* out, int64_t ldo, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r++)
        for (int64_t i = 0; i < n; i += 16) {
            const V x = load_type(type, table, tokens[r] * n + i, n - i);
            store_first(out + r * ldo + i, n - i, mul(x, set1(scale)));
        }
}

namespace {

// Σ f(i) over units of a row, in four chains of units, then lanes as a tree.
template <class F>
float sum_row(int64_t n, F&& f) {
    V a = zero(), b = zero(), c = zero(), d = zero();
    int64_t i = 0;
    for (; i + 48 < n; i += 64) a = f(i, a), b = f(i + 16, b), c = f(i + 32, c), d = f(i + 48, d);
    if (i < n) a = f(i, a);
    if (i + 16 < n) b = f(i + 16, b);
    if (i + 32 < n) c = f(i + 32, c);
    return sum_lanes(add(add(a, b), add(c, d)));
}

float inverse_rms(const float* x, float epsilon, int64_t n) {
    const float squares = sum_row(n, [&](int64_t i, V sum) {
        const V each = load_first(x + i, n - i);
        return fma(each, each, sum);
    });
    return 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
}

inline __attribute__((always_inline)) void store_type(Type type, void* out, int64_t place, int64_t n, V x) {
    if (type == Type::f32)
        store_first(static_cast<float*>(out) + place, n, x);
    else
        store_bf16_first(static_cast<bf16*>(out) + place, n, x);
}

}  // namespace

void rms_norm(const float* x, int64_t ldx, const float* weight, float epsilon, Type out_type, void* out, int64_t ldo,
              int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r++) {
        const float* row = x + r * ldx;
        const float scale = inverse_rms(row, epsilon, n);
        for (int64_t i = 0; i < n; i += 16) {
            V y = mul(load_first(row + i, n - i), set1(scale));
            if (weight) y = mul(y, load_first(weight + i, n - i));
            store_type(out_type, out, r * ldo + i, n - i, y);
        }
    }
}

void rms_norm_backward(const float* x, int64_t ldx, const float* weight, float epsilon, const float* dout, int64_t ldd,
                       float* dx, int64_t lddx, bool keep, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r++) {
        const float *row = x + r * ldx, *slope = dout + r * ldd;
        float* out = dx + r * lddx;
        const float scale = inverse_rms(row, epsilon, n);
        auto weighted = [&](int64_t i) {
            const V each = load_first(slope + i, n - i);
            return weight ? mul(each, load_first(weight + i, n - i)) : each;
        };
        const float along = sum_row(n, [&](int64_t i, V sum) {
            return fma(weighted(i), mul(load_first(row + i, n - i), set1(scale)), sum);
        });
        const V mean = set1(along / static_cast<float>(n));
        for (int64_t i = 0; i < n; i += 16) {
            const V normal = mul(load_first(row + i, n - i), set1(scale));
            V each = mul(fnma(normal, mean, weighted(i)), set1(scale));
            if (keep) each = add(load_first(out + i, n - i), each);
            store_first(out + i, n - i, each);
        }
    }
}

void rope(float* x, int64_t ldx, const float* cos, const float* sin, int64_t ldt, bool back, int64_t m, int64_t heads,
          int64_t width, int64_t rotated) {
    const int64_t half = rotated / 2;
    for (int64_t r = 0; r < m; r++)
        for (int64_t h = 0; h < heads; h++) {
            float* head = x + r * ldx + h * width;
            for (int64_t i = 0; i < half; i += 16) {
                const V c = load_first(cos + r * ldt + i, half - i);
                V s = load_first(sin + r * ldt + i, half - i);
                if (back) s = sub(zero(), s);
                const V a = load_first(head + i, half - i), b = load_first(head + half + i, half - i);
                store_first(head + i, half - i, fnma(b, s, mul(a, c)));
                store_first(head + half + i, half - i, fma(a, s, mul(b, c)));
            }
        }
}

namespace {

// gate(x), and its slope where wanted
struct Gated {
    V value, slope;
};

template <Gate G>
inline __attribute__((always_inline)) Gated gated(V x) {
    if constexpr (G == Gate::silu) {
        const V s = sigmoid(x);
        return {mul(x, s), mul(s, fma(x, sub(set1(1.0f), s), set1(1.0f)))};
    } else {
        const V c = set1(0.7978845608f), k = set1(0.044715f);
        const V square = mul(x, x);
        const V t = tanh(mul(c, mul(x, fma(k, square, set1(1.0f)))));
        const V half = mul(set1(0.5f), add(set1(1.0f), t));
        const V inner = mul(c, fma(set1(3.0f * 0.044715f), square, set1(1.0f)));
        const V outer = mul(mul(set1(0.5f), x), fnma(t, t, set1(1.0f)));
        return {mul(x, half), fma(outer, inner, half)};
    }
}

// What is wanted of out (`out`) and the gradients (`dout`).
template <Gate G, Type T>
void gates_of(const Gates& g, const float* dout, int64_t ldd, Type type, void* dx, void* dup, int64_t lddx, void* out, int64_t ldo) {
    for (int64_t r = 0; r < g.m; r++)
        for (int64_t i = 0; i < g.n; i += 16) {
            const int64_t left = g.n - i, place = r * g.ld + i;
            const Gated own = gated<G>(load_type(T, g.x, place, left));
            const V u = load_type(T, g.up, place, left);
            if (out) store_type(type, out, r * ldo + i, left, mul(own.value, u));
            if (!dout) continue;
            const V d = load_first(dout + r * ldd + i, left);
            store_type(type, dx, r * lddx + i, left, mul(mul(d, u), own.slope));
            store_type(type, dup, r * lddx + i, left, mul(d, own.value));
        }
}

}  // namespace

void gate_up(const Gates& gates, Type out_type, void* out, int64_t ldo) {
    gate_up_backward(gates, nullptr, 0, out_type, nullptr, nullptr, 0, out, ldo);
}

void gate_up_backward(const Gates& g, const float* dout, int64_t ldd, Type type, void* dx, void* dup, int64_t lddx, void* out,
                      int64_t ldo) {
    const bool whole = g.type == Type::f32;
    constexpr auto silu = gates_of<Gate::silu, Type::f32>, half_silu = gates_of<Gate::silu, Type::bf16>;
    constexpr auto gelu = gates_of<Gate::gelu_tanh, Type::f32>, half_gelu = gates_of<Gate::gelu_tanh, Type::bf16>;
    const auto compute = g.gate == Gate::silu ? (whole ? silu : half_silu) : (whole ? gelu : half_gelu);
    compute(g, dout, ldd, type, dx, dup, lddx, out, ldo);
}

// As torch.optim.AdamW with `fused`; the corrections are computed in doubles, once.
void adamw(const AdamW& o, const Learned& own, int64_t threads) {
    double power1 = 1.0, power2 = 1.0;
    for (int64_t i = 0; i < o.step; i++) {
        power1 *= static_cast<double>(o.beta1);
        power2 *= static_cast<double>(o.beta2);
    }
    const V step = set1(static_cast<float>(static_cast<double>(o.lr) / (1.0 - power1)));
    const V correction = set1(static_cast<float>(std::sqrt(1.0 - power2)));
    const V decay = set1(static_cast<float>(1.0 - static_cast<double>(o.lr) * static_cast<double>(o.weight_decay)));
    const V rest1 = set1(1.0f - o.beta1), rest2 = set1(1.0f - o.beta2);
    constexpr int64_t PART = int64_t{1} << 16;  // numbers
    parallel(threads, (own.n + PART - 1) / PART, [&](int64_t part) {
        for (int64_t i = part * PART; i < std::min(own.n, (part + 1) * PART); i += 16) {
            const int64_t left = own.n - i;
            const V g = mul(load_first(own.gradient + i, left), set1(o.factor));
            V m = load_first(own.mean + i, left), v = load_first(own.square + i, left);
            m = fma(rest1, sub(g, m), m);
            v = fma(rest2, mul(g, g), mul(set1(o.beta2), v));
            const V size = add(div(root(v), correction), set1(o.epsilon));
            const V p = sub(mul(load_first(own.master + i, left), decay), div(mul(step, m), size));
            store_first(own.master + i, left, p);
            store_first(own.mean + i, left, m);
            store_first(own.square + i, left, v);
            store_first(own.gradient + i, left, zero());
            store_type(own.type, own.copy, i, left, mul(p, set1(i < own.scaled ? own.scaling : 1.0f)));
        }
    });
}

}  // namespace motet
