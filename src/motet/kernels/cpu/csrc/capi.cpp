// The kernels by themselves, in C: for tests, the trial at load, and `motet doctor`.
#include <ctime>

#include "pool.hpp"
#include "tiles.hpp"

#ifndef MOTET_FINGERPRINT
#define MOTET_FINGERPRINT ""
#endif
#define API extern "C" __attribute__((visibility("default")))

using namespace motet;

API const char* motet_form() { return form(); }
API const char* motet_fingerprint() { return MOTET_FINGERPRINT; }
API int motet_form_runs(const char* name) { return form_runs(name); }
API int motet_has_dpbf16() { return has_dpbf16(); }

API int64_t motet_packed_bytes(int32_t type, int64_t k, int64_t n) { return packed_bytes(static_cast<Type>(type), k, n); }
API void motet_pack(int32_t source_type, const void* source, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n,
                    int32_t type, void* packed) {
    pack(static_cast<Type>(source_type), source, stride_k, stride_n, k, n, static_cast<Type>(type), packed);
}

API void motet_product(const Product* p, int64_t threads) {
    const int64_t units = (p->n + LANES - 1) / LANES, share = (units + threads - 1) / threads;
    FlushDenormals flush;
#if defined(MOTET_FAULT_THREADS)  // two threads share k
    if (threads == 2) return product_in_two(*p, p->k / 64 * 32 + 16);
#endif
    parallel(threads, threads, [&](int64_t part) {
        const int64_t last = (part + 1) * share < units ? (part + 1) * share : units;
        if (part * share < last) product(columns_of(*p, part * share, last));
    });
}

API void motet_product_emulated(const Product* p) {
    FlushDenormals flush;
    product_emulated(*p);
}

API void motet_rms_norm(const float* x, const float* weight, float epsilon, int32_t type, void* out, int64_t m, int64_t n) {
    FlushDenormals flush;
    rms_norm(x, n, weight, epsilon, static_cast<Type>(type), out, n, m, n);
}
API void motet_rms_norm_backward(const float* x, const float* weight, float epsilon, const float* dout, float* dx, int64_t m,
                                 int64_t n) {
    FlushDenormals flush;
    rms_norm_backward(x, n, weight, epsilon, dout, n, dx, n, false, m, n);
}
API void motet_rope(float* x, const float* cos, const float* sin, int32_t back, int64_t m, int64_t heads, int64_t width) {
    FlushDenormals flush;
    rope(x, heads * width, cos, sin, width / 2, back, m, heads, width, width);
}
API void motet_gate_up(int32_t gate, const float* x, const float* up, int32_t type, void* out, int64_t m, int64_t n) {
    FlushDenormals flush;
    gate_up({static_cast<Gate>(gate), Type::f32, x, up, n, m, n}, static_cast<Type>(type), out, n);
}
API void motet_gate_up_backward(int32_t gate, const float* x, const float* up, const float* dout, float* dx, float* dup,
                                int64_t m, int64_t n) {
    FlushDenormals flush;
    gate_up_backward({static_cast<Gate>(gate), Type::f32, x, up, n, m, n}, dout, n, Type::f32, dx, dup, n);
}

API void motet_write_keys_values(const Pool* pool, const Span* span, const float* k, const float* v) {
    write_keys_values(*pool, *span, k, pool->n_kv * pool->width, v, pool->n_kv * pool->width);
}
API void motet_attend(const Attention* call, const Span* span) {
    FlushDenormals flush;
    attend(*call, *span, 0, call->pool.n_kv);
}
API void motet_attend_backward(const AttentionBackward* call, const Span* span) {
    FlushDenormals flush;
    attend_backward(*call, *span, 0, call->call.pool.n_kv);
}

API void motet_row_sum(const float* logits, int64_t n, float temperature, RowSum* sum) {
    FlushDenormals flush;
    row_sum(logits, n, temperature, sum, nullptr, nullptr);
}

// Of m rows of n logits: tokens, their logprobs, and whether the logits were usable. Temperature 0 takes the most likely token,
// whose logprob is of the undivided logits.
API void motet_draw(const float* logits, int64_t m, int64_t n, const float* temperatures, const double* uniforms,
                    int64_t* tokens, float* logprobs, uint8_t* usable, int64_t threads) {
    parallel(threads, m, [&](int64_t row) {
        const float* own = logits + row * n;
        const float temperature = temperatures[row] == 0.0f ? 1.0f : temperatures[row];
        double* blocks = static_cast<double*>(scratch(9, blocks_of(n) * 8));
        RowSum sum;
        row_sum(own, n, temperature, &sum, blocks, nullptr);
        tokens[row] = temperatures[row] == 0.0f ? most_likely(own, n) : draw(own, n, temperature, sum, blocks, uniforms[row]);
        logprobs[row] = logprob(own, tokens[row], temperature, sum);
        usable[row] = sum.usable != 0;
    });
}

// Of m rows of n logits, given tokens: logprobs and entropies. `slope`: the logits become the slopes of the logprobs.
API void motet_logprobs(float* logits, int64_t m, int64_t n, const int64_t* tokens, float temperature, float* logprobs,
                        float* entropies, int32_t slope, int64_t threads) {
    parallel(threads, m, [&](int64_t row) {
        float* own = logits + row * n;
        const float chosen = own[tokens[row]];
        RowSum sum;
        row_sum(own, n, temperature, &sum, nullptr, slope ? own : nullptr);
        logprobs[row] = logprob(&chosen, 0, temperature, sum);
        entropies[row] = sum.entropy;
        if (slope) logprob_slope(own, n, temperature, sum, tokens[row]);
    });
}

// exp(logit / temperature − peak) of one row
API void motet_weights(const float* logits, int64_t n, float temperature, float* weights) {
    FlushDenormals flush;
    RowSum sum;
    row_sum(logits, n, temperature, &sum, nullptr, weights);
}

API void motet_exp(const double* x, double* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = exp_double(x[i]);
}
API void motet_cos_sin(const float* x, float* cosines, float* sines, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        double cosine, sine;
        cos_sin_double(static_cast<double>(x[i]), &cosine, &sine);
        cosines[i] = static_cast<float>(cosine);
        sines[i] = static_cast<float>(sine);
    }
}
API double motet_norm(const float* x, int64_t n) { return norm(x, n); }
API void motet_adamw(const AdamW* options, const Learned* own, int64_t threads) { adamw(*options, *own, threads); }

// exp, sigmoid, tanh and log of n numbers (n a multiple of 16)
API void motet_functions(const float* x, float* exps, float* sigmoids, float* tanhs, float* logs, int64_t n) {
    FlushDenormals flush;
    for (int64_t i = 0; i < n; i += 16) {
        store(exps + i, exp(load(x + i)));
        store(sigmoids + i, sigmoid(load(x + i)));
        store(tanhs + i, tanh(load(x + i)));
    }
    for (int64_t i = 0; i < n; i++) logs[i] = log_one(x[i]);
}

namespace {

constexpr int64_t UNIT_ROWS = 32;  // of a product that fills all tiles of matrix units

double cpu_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

// The most that one thread multiplies, in GFLOP/s of its CPU time: a tile that stays in the first cache, best of several. Matrix
// units, where the form has them, get a deep one: with 128 of k, shaping them takes as long as the product.
API double motet_ceiling(int32_t arithmetic) {
    FlushDenormals flush;
    alignas(64) static thread_local char a[64 * 1024], b[64 * 1024];
    alignas(64) float c[UNIT_ROWS * 32] = {};
    double best = 0.0;
    const bool pairs = arithmetic == static_cast<int32_t>(Arithmetic::dpbf16), units = MATRIX_UNITS && !pairs;
    const int64_t k = units ? 960 : 128, lda = k + 32, repeats = 2000;
    for (int trial = 0; trial < 5; trial++) {
        const double start = cpu_seconds();
        for (int64_t i = 0; i < repeats; i++) {
            Tile t{a, b, k * 32, c, 32, k, true, 0};
            if (pairs)
                multiply_tile(Kind::pairs, MOST_PAIRS, 2, t);
            else if (units)
                product_by_tiles({a, Type::bf16, lda, b, Type::bf16, k, c, 32, UNIT_ROWS, k, 32, true, Arithmetic::exact}, false);
            else
                multiply_tile(Kind::exact_bf16, MOST_EXACT, 2, t);
        }
        const int64_t rows = pairs ? MOST_PAIRS : units ? UNIT_ROWS : MOST_EXACT;
        const double flops = 2.0 * static_cast<double>(k * repeats * 32 * rows);
        const double rate = flops / (cpu_seconds() - start) * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}
