// Runs the kernels on fixed numbers and prints a digest of what each gives: `tests/kernels/cpu/test_native_bits.py` compares processors.
#include <cstdio>
#include <vector>

#include "kernels.hpp"

using namespace motet;

namespace {

uint64_t state = 1;

float uniform() {  // in [−1, 1), without a library
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(static_cast<int64_t>(state) >> 40) / 8388608.0f;
}

std::vector<float> numbers(int64_t n, float scale = 1.0f) {
    std::vector<float> made(n);
    for (float& each : made) each = uniform() * scale;
    return made;
}

template <class T>
void show(const char* name, const std::vector<T>& found) {
    uint64_t digest = 14695981039346656037ull;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(found.data());
    for (size_t i = 0; i < found.size() * sizeof(T); i++) digest = (digest ^ bytes[i]) * 1099511628211ull;
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(digest));
}

void products() {
    const int64_t m = 13, k = 95, n = 70;
    const std::vector<float> a = numbers(m * k), b = numbers(n * k);
    std::vector<bf16> half_a(m * k), half_b(n * k);
    to_bf16(a.data(), half_a.data(), m * k);
    to_bf16(b.data(), half_b.data(), n * k);
    for (int way = 0; way < 4; way++) {  // fp32, bf16, pairs of bf16, emulated matrix units
        const Type type = way ? Type::bf16 : Type::f32;
        const void *left = way ? static_cast<const void*>(half_a.data()) : a.data();
        const void *right = way ? static_cast<const void*>(half_b.data()) : b.data();
        std::vector<char> packed(packed_bytes(type, k, n));
        pack(type, right, 1, k, k, n, type, packed.data());
        std::vector<float> c(m * n);
        Product p{left, type, k, packed.data(), type, k, c.data(), n, m, k, n, false, way == 2 ? Arithmetic::dpbf16 : Arithmetic::exact};
        if (way == 3) {
            p.k = 64;
            product_by_tiles(p, true);
            show("tiles", c);
            product(p);
        } else
            product(p);
        show("product", c);
    }
}

void rows() {
    const int64_t m = 5, n = 83;
    const std::vector<float> x = numbers(m * n, 3), y = numbers(m * n, 3), weight = numbers(n);
    std::vector<float> out(m * n), other(m * n);
    rms_norm(x.data(), n, weight.data(), 1e-5f, Type::f32, out.data(), n, m, n);
    show("norm", out);
    rms_norm_backward(x.data(), n, weight.data(), 1e-5f, y.data(), n, out.data(), n, false, m, n);
    show("norm back", out);
    gate_up({Gate::silu, Type::f32, x.data(), y.data(), n, m, n}, Type::f32, out.data(), n);
    show("gate", out);
    gate_up_backward({Gate::gelu_tanh, Type::f32, x.data(), y.data(), n, m, n}, x.data(), n, Type::f32, out.data(), other.data(), n);
    show("gate back", out);
}

void logits() {
    const int64_t n = 1003;
    std::vector<float> row = numbers(n, 12), weights(n);
    std::vector<double> blocks(blocks_of(n));
    std::vector<int64_t> tokens;
    RowSum sum;
    row_sum(row.data(), n, 0.7f, &sum, blocks.data(), weights.data());
    show("row sum", std::vector<float>{sum.peak, sum.log_total, sum.entropy});
    for (int i = 0; i < 100; i++) tokens.push_back(draw(row.data(), n, 0.7f, sum, blocks.data(), i / 100.0));
    show("draws", tokens);
    logprob_slope(weights.data(), n, 0.7f, sum, 17);
    show("slope", weights);
}

void step() {
    const int64_t n = 999;
    std::vector<float> master = numbers(n), gradient = numbers(n), mean(n), square(n);
    for (int64_t i = 1; i < 4; i++) adamw({0.01f, 0.9f, 0.99f, 1e-8f, 0.1f, i}, master.data(), gradient.data(), mean.data(), square.data(), n, 1);
    show("adamw", master);
    std::vector<double> found{norm(gradient.data(), n)};
    for (float each : gradient) {
        double cosine, sine;
        cos_sin_double(each * 30000.0, &cosine, &sine);
        for (double one : {exp_double(each * 40.0), cosine, sine}) found.push_back(one);
    }
    show("functions", found);
}

}  // namespace

int main() {
    FlushDenormals flush;
    products();
    rows();
    logits();
    step();
}
