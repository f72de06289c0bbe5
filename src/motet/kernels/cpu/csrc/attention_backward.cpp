// Gradients of attention. Numbers are rounded to the pool's type as in the forward pass; sums are fp32, in the order of
// Arithmetic::exact whatever the forward pass had.
#include "tiles.hpp"

namespace motet {
namespace {

constexpr int64_t TILE_ROWS = 48;  // query rows of a tile, unless one token has more heads
constexpr Kind F32 = Kind::exact_f32;

float* floats(int place, int64_t n) { return static_cast<float*>(scratch(place, n * 4)); }

// One KV head of a span, its keys and values written out in fp32.
struct Backward {
    const AttentionBackward& back;
    const Attention& call;
    const Span& span;
    int64_t head, width, fold, n_units;
    float *keys, *key_rows, *values;  // [unit][width][16] · [unit][width / 16][16 keys][16] · [unit][width][16]
    float *dkeys, *dvalues;           // [unit][width][16], the sums of this span

    int64_t size() const { return width * LANES; }  // numbers of a unit

    V round_lanes(V x) const { return call.pool.type == Type::f32 ? x : to_bf16_and_back(x); }

    // Numbers of keys [0, end of the span); zeros after them, whatever the pool has there.
    void read_pool() {
        const int64_t end = span.first_position + span.n_rows;
        n_units = (end + LANES - 1) / LANES;
        keys = floats(1, n_units * size());
        key_rows = floats(2, n_units * size());
        values = floats(3, n_units * size());
        dkeys = floats(4, n_units * size());
        dvalues = floats(5, n_units * size());
        std::memset(dkeys, 0, n_units * size() * 4);
        for (int64_t u = 0; u < n_units; u++) {
            float *own_keys = keys + u * size(), *own_rows = key_rows + u * size(), *own_values = values + u * size();
            read_unit(row_of(call.pool, span, head, u) * width, own_keys, dvalues + u * size());
            const int64_t left = end - u * LANES;  // keys that are there
            for (int64_t e = 0; e < width; e++)
                store(own_keys + e * LANES, select(first(left), load(own_keys + e * LANES), zero()));
            for (int64_t e = 0; e < width; e += LANES) {
                float* value_rows = dvalues + u * size() + e * LANES;
                for (int64_t j = left; j < LANES; j++) store(value_rows + j * LANES, zero());
                turn(own_keys + e * LANES, LANES, own_rows + e * LANES, LANES);
                turn(value_rows, LANES, own_values + e * LANES, LANES);
            }
        }
        std::memset(dvalues, 0, n_units * size() * 4);
    }

    // A unit's keys [width][16] and values [width / 16][16 keys][16] in fp32.
    void read_unit(int64_t place, float* key, float* value) const {
        if (call.pool.type == Type::f32) {
            std::memcpy(key, static_cast<const float*>(call.pool.keys) + place, size() * 4);
            std::memcpy(value, static_cast<const float*>(call.pool.values) + place, size() * 4);
            return;
        }
        const bf16 *k = static_cast<const bf16*>(call.pool.keys) + place, *v = static_cast<const bf16*>(call.pool.values) + place;
        for (int64_t pair = 0; pair < size() / 32; pair++) {
            store(key + pair * 32, even(k + pair * 32));
            store(key + pair * 32 + LANES, odd(k + pair * 32));
            store(value + pair * 32, even(v + pair * 32));
            store(value + pair * 32 + LANES, odd(v + pair * 32));
        }
    }

    int64_t low(int64_t position) const { return call.window ? most(0, position + 1 - call.window) : 0; }

    // C [rows][16 · units] (+)= packed rows · a unit of B
    static void multiply(const float* packed, int64_t rows, int64_t k, const float* b, float* c, int64_t ldc, int64_t columns,
                         bool keep) {
        const int64_t line = round_up(k, LANES);
        for (int64_t r = 0; r < rows; r += MOST_EXACT) {
            const int64_t n = least(MOST_EXACT, rows - r);
            for (int64_t u = 0; u < columns; u += 2)
                multiply_tile(F32, n, least(2, columns - u), Tile{packed + r * line, reinterpret_cast<const char*>(b + u * k * LANES),
                                                                  k * LANES * 4, c + r * ldc + u * LANES, ldc, k, keep, 0});
        }
    }

    // Where the tile for `multiply` has a line of a row.
    static float* line_of(float* tiles, int64_t row, int64_t rows, int64_t k, int64_t i) {
        const int64_t first = row / MOST_EXACT * MOST_EXACT, n = least(MOST_EXACT, rows - first);
        return tiles + first * round_up(k, LANES) + i * n + (row - first) * LANES;
    }

    // Rows [k] of x for `multiply`; k is a multiple of 16.
    static void pack_tiles(const float* x, int64_t rows, int64_t k, float* out) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < k; i += LANES) store(line_of(out, r, rows, k, i), load(x + r * k + i));
    }

    // The columns of x [k][rows], a multiple of 16 of them. What follows x is read too, and its numbers are never used.
    static void pack_turned(const float* x, int64_t rows, int64_t k, float* out) {
        float block[LANES * LANES];
        for (int64_t i = 0; i < k; i += LANES)
            for (int64_t r = 0; r < rows; r += LANES) {
                turn(x + i * rows + r, rows, block, LANES);
                for (int64_t j = 0; j < LANES; j++) store(line_of(out, r + j, rows, k, i), load(block + j * LANES));
            }
    }

    // Tokens [first, first + count) of the span.
    void tokens(int64_t first, int64_t count) const {
        const int64_t rows = count * fold, begin = span.first_position + first, n = rows * width;
        const int64_t turned = width * round_up(rows, LANES);
        float* memory = floats(6, n * 5 + turned * 2 + rows * 3 * LANES);
        float *q = memory, *slope = q + n, *q_tiles = slope + n, *slope_tiles = q_tiles + n, *q_turned = slope_tiles + n;
        float *slope_turned = q_turned + turned, *dq = slope_turned + turned, *weights = dq + n, *dweights = weights + rows * LANES;
        float* packed = dweights + rows * LANES;
        float common[TILE_ROWS + 64], log_sums[TILE_ROWS + 64];
        const int64_t heads = call.pool.n_kv * fold;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = span.first_row + first + r / fold, place = (head * fold + r % fold) * width;
            const float *out = call.out + row * call.ldo + place, *given = back.dout + row * call.ldo + place;
            V sum = zero();
            for (int64_t e = 0; e < width; e += 16) sum = fma(load(out + e), load(given + e), sum);
            common[r] = sum_lanes(sum);
            log_sums[r] = call.log_sums[row * heads + head * fold + r % fold];
            for (int64_t e = 0; e < width; e += 16) {
                store(q + r * width + e, round_lanes(load(call.q + row * call.ldq + place + e)));
                store(slope + r * width + e, round_lanes(load(given + e)));
            }
        }
        pack_tiles(q, rows, width, q_tiles);
        pack_tiles(slope, rows, width, slope_tiles);
        pack_turned(q, width, rows, q_turned);
        pack_turned(slope, width, rows, slope_turned);
        std::memset(dq, 0, n * 4);
        for (int64_t u = low(begin) / LANES; u <= (begin + count - 1) / LANES; u++) {
            multiply(q_tiles, rows, width, keys + u * size(), weights, LANES, 1, false);
            multiply(slope_tiles, rows, width, values + u * size(), dweights, LANES, 1, false);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t position = begin + r / fold;
                const Mask reach = range(most(0, low(position) - u * LANES), most(0, position + 1 - u * LANES));
                V score = mul(load(weights + r * LANES), set1(call.scale)), bend = set1(1.0f);
                if (call.softcap != 0.0f) {
                    const V t = tanh(div(score, set1(call.softcap)));
                    bend = fnma(t, t, bend);
                    score = mul(set1(call.softcap), t);
                }
                const V weight = exp(sub(score, set1(log_sums[r])));
                V d = mul(weight, sub(load(dweights + r * LANES), set1(common[r])));
                d = mul(mul(d, set1(call.scale)), bend);
                store(weights + r * LANES, round_lanes(select(reach, weight, zero())));
                store(dweights + r * LANES, round_lanes(select(reach, d, zero())));
            }
            pack_tiles(dweights, rows, LANES, packed);
            multiply(packed, rows, LANES, key_rows + u * size(), dq, width, width / LANES, true);
            multiply(q_turned, width, rows, dweights, dkeys + u * size(), LANES, 1, true);
            multiply(slope_turned, width, rows, weights, dvalues + u * size(), LANES, 1, true);
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = span.first_row + first + r / fold, place = (head * fold + r % fold) * width;
            std::memcpy(back.dq + row * back.lddq + place, dq + r * width, width * 4);
        }
    }

    // Adds the span's sums to those of the pool, as rows of keys.
    void give() const {
        const int64_t end = span.first_position + span.n_rows;
        float block[LANES * LANES];
        for (int64_t key = 0; key < end; key += LANES) {
            const int64_t row = row_of(call.pool, span, head, key / LANES) * width;
            for (int64_t e = 0; e < width; e += LANES)
                for (int part = 0; part < 2; part++) {
                    float* to = (part ? back.dv : back.dk) + row + e;
                    turn((part ? dvalues : dkeys) + key * width + e * LANES, LANES, block, LANES);
                    for (int64_t j = 0; j < least(LANES, end - key); j++)
                        store(to + j * width, add(load(to + j * width), load(block + j * LANES)));
                }
        }
    }

    void run() {
        read_pool();
        const int64_t step = most(1, TILE_ROWS / fold);
        for (int64_t i = 0; i < span.n_rows; i += step) tokens(i, least(step, span.n_rows - i));
        give();
    }
};

}  // namespace

void attend_backward(const AttentionBackward& back, const Span& span, int64_t first_head, int64_t last_head) {
    const Attention& call = back.call;
    if (call.pool.width % LANES || call.pool.block % LANES || call.fold > 64 || !call.log_sums) std::abort();
    for (int64_t h = first_head; h < last_head; h++)
        Backward{back, call, span, h, call.pool.width, call.fold, 0, nullptr, nullptr, nullptr, nullptr, nullptr}.run();
}

}  // namespace motet
