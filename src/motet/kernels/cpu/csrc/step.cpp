// What a step computes beside its passes: functions of losses, angles of positions, and the norm of a gradient. In doubles, by
// additions, multiplications and divisions alone, so that one rounding to fp32 at the end hides what a polynomial lacks.
#include "simd.hpp"

namespace motet {
namespace {

double bits_to_double(uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}

double power_of_two(int64_t n) { return bits_to_double(static_cast<uint64_t>(n + 1023) << 52); }  // −1022 … 1023

// The nearest whole number of |x| < 2^51, ties to even.
double nearest(double x) {
    const double large = 6755399441055744.0;  // 1.5 · 2^52
    return (x + large) - large;
}

struct Factorials {
    double inverse[22];
    constexpr Factorials() : inverse() {
        double product = 1.0;
        for (int i = 0; i < 22; i++) {
            inverse[i] = 1.0 / product;
            product *= i + 1;
        }
    }
};
constexpr Factorials FACTORIALS;

}  // namespace

double exp_double(double x) {
    if (x != x) return x;
    if (x > 709.0) return static_cast<double>(INFINITY);
    if (x < -708.0) return 0.0;
    const double n = nearest(x * 1.44269504088896338700e+00);
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;  // ln 2 in two parts (fdlibm)
    double p = FACTORIALS.inverse[14];
    for (int i = 13; i >= 0; i--) p = p * r + FACTORIALS.inverse[i];  // Taylor on |r| ≤ ln 2 / 2
    return p * power_of_two(static_cast<int64_t>(n));
}

void cos_sin_double(double x, double* cosine, double* sine) {
    const double n = nearest(x * 6.36619772367581382433e-01);
    double r = x - n * 1.57079632673412561417e+00;  // π / 2 in parts of 33 bits (fdlibm)
    r = (r - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    const double square = -r * r;
    double c = FACTORIALS.inverse[20], s = FACTORIALS.inverse[21];
    for (int i = 18; i >= 0; i -= 2) {  // Taylor on |r| ≤ π / 4
        c = c * square + FACTORIALS.inverse[i];
        s = s * square + FACTORIALS.inverse[i + 1];
    }
    s = r * s;
    const int64_t quarter = static_cast<int64_t>(n) & 3;
    *cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
    *sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
}

double norm(const float* x, int64_t n) {
    double lanes[16] = {};
    const auto add = [&](int64_t i, int64_t lane) {
        const double each = static_cast<double>(x[i + lane]);
        lanes[lane] += each * each;
    };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int64_t lane = 0; lane < 16; lane++) add(i, lane);
    for (int64_t lane = 0; i + lane < n; lane++) add(i, lane);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return std::sqrt(lanes[0]);
}

}  // namespace motet
