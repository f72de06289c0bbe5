// What is read from logits: sums, draws, logprobs and their slopes.
#include "tiles.hpp"

namespace motet {
namespace {

constexpr int64_t BLOCK = 256;  // tokens that are added up before the sum over blocks

struct Scaled {
    const float* logits;
    V temperature;
    bool divided;
    V at(int64_t i, int64_t end) const {
        const V x = load_first(logits + i, end - i);
        return divided ? div(x, temperature) : x;
    }
};

float one(const float* logits, int64_t token, float temperature) {
    return temperature == 1.0f ? logits[token] : logits[token] / temperature;
}

float largest_of(const float* logits, int64_t n) {
    V largest = set1(-INFINITY);
    for (int64_t i = 0; i < n; i += 16)
        largest = max(select(first(n - i), load_first(logits + i, n - i), set1(-INFINITY)), largest);
    return max_lanes(largest);
}

}  // namespace

int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

void row_sum(const float* logits, int64_t n, float temperature, RowSum* out, double* blocks, float* weights) {
    const Scaled scaled{logits, set1(temperature), temperature != 1.0f};
    // before the temperature, which keeps the order; NaN shows in the sum
    const float best = largest_of(logits, n), peak = temperature == 1.0f ? best : best / temperature;
    double total = 0.0, products = 0.0;
    const V p = set1(peak);
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int64_t to = least(from + BLOCK, n);
        V sum = zero(), product = zero();
        for (int64_t i = from; i < to; i += 16) {
            const V y = sub(scaled.at(i, to), p);
            const Mask inside = first(to - i);
            const V e = select(inside, exp(y), zero());
            sum = add(sum, e);
            product = fma(e, select(less(y, set1(-88.0f)), zero(), select(inside, y, zero())), product);
            if (weights) store_first(weights + i, to - i, e);
        }
        const double own = static_cast<double>(sum_lanes(sum));
        if (blocks) blocks[from / BLOCK] = own;
        total += own;
        products += static_cast<double>(sum_lanes(product));
    }
    out->peak = peak;
    out->log_total = log_one(static_cast<float>(total));
    out->entropy = out->log_total - static_cast<float>(products / total);
    out->usable = std::isfinite(peak) && std::isfinite(total) ? 1 : 0;
    out->total = total;
}

int64_t most_likely(const float* logits, int64_t n) {
    const float best = largest_of(logits, n);
    for (int64_t i = 0; i < n; i++)
        if (logits[i] == best) return i;
    return 0;
}

int64_t draw(const float* logits, int64_t n, float temperature, const RowSum& sum, const double* blocks, double uniform) {
    const double target = uniform * sum.total;
    double before = 0.0, end = 0.0;
    int64_t last = 0, chosen = -1;  // the last block that weighs anything
    for (int64_t b = 0; b < blocks_of(n) && chosen < 0; b++) {
        end = before + blocks[b];
        if (blocks[b] > 0) last = b;
        if (target < end)
            chosen = b;
        else
            before = end;
    }
    if (chosen < 0) {
        chosen = last;
        before = target;  // rounding: the last token that weighs anything
    }
    const int64_t from = chosen * BLOCK, to = least(from + BLOCK, n);
    const Scaled scaled{logits, set1(temperature), temperature != 1.0f};
    float weights[BLOCK];
    for (int64_t i = from; i < to; i += 16) store(weights + (i - from), exp(sub(scaled.at(i, to), set1(sum.peak))));
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

void logprob_slope(float* weights, int64_t n, float temperature, const RowSum& sum, int64_t token) {
    const V share = set1(static_cast<float>(1.0 / sum.total)), t = set1(temperature);
    for (int64_t i = 0; i < n; i += 16) {
        V y = sub(zero(), mul(load_first(weights + i, n - i), share));
        if (token >= i && token < i + 16) y = add(y, select(range(token - i, token - i + 1), set1(1.0f), zero()));
        store_first(weights + i, n - i, temperature != 1.0f ? div(y, t) : y);
    }
}

}  // namespace motet
