// Which experts a row chooses, and what they count for.
#include <vector>

#include "simd.hpp"

namespace motet {
namespace {

// Of the sum that shares are parts of: all exponentials, or those of the chosen.
struct Total {
    float peak, sum;
};

Total total_of(const float* logits, int64_t n, int64_t k, bool among_chosen, const int32_t* chosen) {
    float peak = logits[chosen[0]], sum = 0.0f;
    for (int64_t j = 1; j < k; j++) peak = logits[chosen[j]] > peak ? logits[chosen[j]] : peak;
    for (int64_t i = 0; i < (among_chosen ? k : n); i++) sum = sum + exp_one(logits[among_chosen ? chosen[i] : i] - peak);
    return {peak, sum};
}

}  // namespace

void choose(const float* logits, int64_t n, int64_t k, bool among_chosen, int32_t* chosen, float* shares) {
    std::vector<char> taken(size_t(n), 0);
    for (int64_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; e++)
            if (!taken[size_t(e)] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[size_t(best)] = 1;
    }
    for (int64_t e = 0, j = 0; e < n; e++)
        if (taken[size_t(e)]) chosen[j++] = static_cast<int32_t>(e);
    const Total total = total_of(logits, n, k, among_chosen, chosen);
    for (int64_t j = 0; j < k; j++) shares[j] = exp_one(logits[chosen[j]] - total.peak) / total.sum;
}

void choose_backward(const float* logits, int64_t n, int64_t k, bool among_chosen, const int32_t* chosen, const float* shares,
                     const float* dshares, float* dlogits) {
    const Total total = total_of(logits, n, k, among_chosen, chosen);
    float along = 0.0f;
    for (int64_t j = 0; j < k; j++) along = along + shares[j] * dshares[j];
    for (int64_t e = 0; e < n; e++) dlogits[e] = among_chosen ? 0.0f : -(exp_one(logits[e] - total.peak) / total.sum * along);
    for (int64_t j = 0; j < k; j++) dlogits[chosen[j]] = shares[j] * (dshares[j] - along);
}

float dot(const float* x, const float* y, int64_t n) {
    V sum = zero();
    for (int64_t i = 0; i < n; i += 16) sum = fma(load_first(x + i, n - i), load_first(y + i, n - i), sum);
    return sum_lanes(sum);
}

}  // namespace motet
