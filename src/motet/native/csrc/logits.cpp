// What is read from logits: sums, draws, logprobs and their slopes.
#include "simd.hpp"

namespace motet {
namespace {

constexpr int64_t BLOCK = 256;  // tokens that are added up before the sum over blocks

V scaled(const float* logits, int64_t i, int64_t n, V temperature, bool divided) {
    const V x = load_first(logits + i, n - i);
    return divided ? div(x, temperature) : x;
}

// Σ exp(x − peak) of one block: 16 lanes, then a tree.
double block_sum(const float* logits, int64_t from, int64_t n, float temperature, float peak) {
    const int64_t to = from + BLOCK < n ? from + BLOCK : n;
    V sum = zero();
    for (int64_t i = from; i < to; i += 16) {
        const V e = exp(sub(scaled(logits, i, to, set1(temperature), temperature != 1.0f), set1(peak)));
        sum = add(sum, select(first(to - i), e, zero()));
    }
    return static_cast<double>(sum_lanes(sum));
}

float one(const float* logits, int64_t token, float temperature) {
    return temperature == 1.0f ? logits[token] : logits[token] / temperature;
}

}  // namespace

void row_sum(const float* logits, int64_t n, float temperature, RowSum* out) {
    const V t = set1(temperature), low = set1(-INFINITY);
    const bool divided = temperature != 1.0f;
    V largest = low;
    for (int64_t i = 0; i < n; i += 16) {
        const V x = scaled(logits, i, n, t, divided);
        largest = max(select(first(n - i), x, low), largest);  // NaN shows in the sum
    }
    const float peak = max_lanes(largest);
    double total = 0.0, products = 0.0;
    const V p = set1(peak);
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int64_t to = from + BLOCK < n ? from + BLOCK : n;
        V sum = zero(), product = zero();
        for (int64_t i = from; i < to; i += 16) {
            const V y = sub(scaled(logits, i, to, t, divided), p);
            const Mask inside = first(to - i);
            const V e = select(inside, exp(y), zero());
            sum = add(sum, e);
            product = fma(e, select(less(y, set1(-88.0f)), zero(), select(inside, y, zero())), product);
        }
        total += static_cast<double>(sum_lanes(sum));
        products += static_cast<double>(sum_lanes(product));
    }
    out->peak = peak;
    out->log_total = log_one(static_cast<float>(total));
    out->entropy = out->log_total - static_cast<float>(products / total);
    out->usable = std::isfinite(peak) && std::isfinite(total) ? 1 : 0;
    out->best = 0;
    for (int64_t i = 0; i < n; i++)
        if (one(logits, i, temperature) == peak) {
            out->best = static_cast<int32_t>(i);
            break;
        }
}

int64_t draw(const float* logits, int64_t n, float temperature, const RowSum& sum, double uniform) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    double total = 0.0;
    for (int64_t b = 0; b < blocks; b++) total += block_sum(logits, b * BLOCK, n, temperature, sum.peak);
    const double target = uniform * total;
    double before = 0.0, end = 0.0;
    int64_t last = 0, chosen = -1;  // the last block that weighs anything
    for (int64_t b = 0; b < blocks && chosen < 0; b++) {
        const double each = block_sum(logits, b * BLOCK, n, temperature, sum.peak);
        end = before + each;
        if (each > 0) last = b;
        if (target < end)
            chosen = b;
        else
            before = end;
    }
    if (chosen < 0) {
        chosen = last;
        before = target;  // rounding: the last token that weighs anything
    }
    const int64_t from = chosen * BLOCK, to = from + BLOCK < n ? from + BLOCK : n;
    float weights[BLOCK];
    for (int64_t i = from; i < to; i += 16)
        store(weights + (i - from), exp(sub(scaled(logits, i, to, set1(temperature), temperature != 1.0f), set1(sum.peak))));
    int64_t token = from;
    double within = before;
    for (int64_t i = from; i < to; i++) {
        if (!(weights[i - from] > 0)) continue;
        token = i;
        within += static_cast<double>(weights[i - from]);
        if (target < within) break;
    }
    return token;
}

float logprob(const float* logits, int64_t token, float temperature, const RowSum& sum) {
    return (one(logits, token, temperature) - sum.peak) - sum.log_total;
}

void logprob_slope(const float* logits, int64_t n, float temperature, const RowSum& sum, int64_t token, float slope,
                   Type out_type, void* out) {
    const V t = set1(temperature), factor = set1(slope / temperature), p = set1(sum.peak), l = set1(sum.log_total);
    for (int64_t i = 0; i < n; i += 16) {
        const V probability = exp(sub(sub(scaled(logits, i, n, t, temperature != 1.0f), p), l));
        V target = zero();
        if (token >= i && token < i + 16) target = select(range(token - i, token - i + 1), set1(1.0f), zero());
        const V y = mul(factor, sub(target, probability));
        if (out_type == Type::f32)
            store_first(static_cast<float*>(out) + i, n - i, y);
        else
            store_bf16_first(static_cast<bf16*>(out) + i, n - i, y);
    }
}

}  // namespace motet
