// Attention over keys and values in units of 16 keys.
#include "tiles.hpp"

namespace motet {
namespace {

constexpr int64_t TILE_ROWS = 12;  // query rows of a tile, unless one token has more heads

char* unit_of(const Pool& pool, void* memory, const Span& span, int64_t head, int64_t unit) {
    return static_cast<char*>(memory) + row_of(pool, span, head, unit) * pool.width * bytes_of(pool.type);
}

}  // namespace

void write_keys_values(const Pool& pool, const Span& span, const float* k, int64_t ldk, const float* v, int64_t ldv) {
    const int64_t width = pool.width;
    bf16* rounded = static_cast<bf16*>(scratch(7, 2 * width * 2));
    for (int64_t i = 0; i < span.n_rows; i++) {
        const int64_t position = span.first_position + i, j = position % LANES;
        for (int64_t h = 0; h < pool.n_kv; h++) {
            const float* key = k + (span.first_row + i) * ldk + h * width;
            const float* value = v + (span.first_row + i) * ldv + h * width;
            char* keys = unit_of(pool, pool.keys, span, h, position / LANES);
            char* values = unit_of(pool, pool.values, span, h, position / LANES);
            if (pool.type == Type::f32) {
                for (int64_t e = 0; e < width; e++) reinterpret_cast<float*>(keys)[e * LANES + j] = key[e];
                for (int64_t e = 0; e < width; e += LANES)
                    store(reinterpret_cast<float*>(values) + e * LANES + j * LANES, load(value + e));
                continue;
            }
            to_bf16(key, rounded, width);
            to_bf16(value, rounded + width, width);
            for (int64_t e = 0; e < width; e += 2) std::memcpy(keys + (e / 2 * 32 + j * 2) * 2, rounded + e, 4);
            for (int64_t e = 0; e < width; e++)
                reinterpret_cast<bf16*>(values)[e / LANES * 256 + j / 2 * 32 + e % LANES * 2 + j % 2] = rounded[width + e];
        }
    }
}

namespace {

// One KV head of a span.
template <Kind K>
struct Attend {
    const Attention& call;
    const Span& span;
    int64_t head, width = call.pool.width, fold = call.fold;

    // Few rows are multiplied with more units at a time: each sum waits for its last step.
    static int64_t across(int64_t rows) { return rows <= most_rows(K, 4) ? 4 : 2; }
    static int64_t rows_packed(int64_t rows) { return most_rows(K, across(rows)); }

    int64_t unit_bytes() const { return LANES * width * bytes_of(call.pool.type); }

    // Scores of units [unit, last), which lie side by side.
    void scores(const char* q, int64_t rows, int64_t unit, int64_t last, float* out, int64_t ld) const {
        const int64_t most = rows_packed(rows);
        const char* keys = unit_of(call.pool, call.pool.keys, span, head, unit);
        const int64_t ahead = unit_of(call.pool, call.pool.values, span, head, unit) - keys;  // values are read next
        while (unit < last) {
            const int64_t n = last - unit >= across(rows) ? across(rows) : 1;
            for (int64_t r = 0; r < rows; r += most)
                multiply_tile(K, least(most, rows - r), n,
                              Tile{q + r * packed_row(K, width), keys, unit_bytes(), out + r * ld, ld, width, false,
                                   ahead > 0 ? ahead - (n - 1) * unit_bytes() : ahead});
            unit += n, keys += n * unit_bytes(), out += n * LANES;
        }
    }

    // Weights [rows][keys] as `mix` reads them.
    void pack_weights(const float* weights, int64_t ld, int64_t rows, int64_t keys, char* packed) const {
        const int64_t most = rows_packed(rows);
        bf16* rounded = static_cast<bf16*>(scratch(6, rows * keys * 2));
        for (int64_t r = 0; r < rows; r += most) {
            const int64_t n = least(most, rows - r);
            char* to = packed + r * packed_row(K, keys);
            if (call.pool.type == Type::bf16) {
                for (int64_t i = 0; i < n; i++) to_bf16(weights + (r + i) * ld, rounded + i * keys, keys);
                pack_rows<K>(Type::bf16, rounded, keys, n, keys, to);
            } else
                pack_rows<K>(Type::f32, weights + r * ld, ld, n, keys, to);
        }
    }

    // out += weights · values, of k keys of a unit: the one after `before` others in the packed weights of `keys` keys
    void mix(const char* packed, int64_t keys, int64_t before, int64_t rows, const char* values, int64_t k, float* out) const {
        const int64_t step = LANES * LANES * bytes_of(call.pool.type), units = width / LANES, most = rows_packed(rows);
        for (int64_t r = 0; r < rows; r += most) {
            const int64_t n = least(most, rows - r);
            const char* a = packed + r * packed_row(K, keys);  // lines of 16 keys, or for pairs of 32
            a += K == Kind::pairs ? before / 2 * n * 64 + before % 2 * 32 : before * n * 64;
            for (int64_t u = 0; u < units;) {
                const int64_t left = units - u, together = left >= across(rows) ? across(rows) : left >= 2 ? 2 : 1;
                multiply_tile(K, n, together, Tile{a, values + u * step, step, out + r * width + u * LANES, width, k, true, 0});
                u += together;
            }
        }
    }

    // The same for weights of one unit, of which keys [from, to) are in reach of all rows.
    void mix_part(const float* weights, int64_t ld, int64_t rows, int64_t unit, int64_t from, int64_t to, float* out) const {
        const char* values = unit_of(call.pool, call.pool.values, span, head, unit);
        char* packed = static_cast<char*>(scratch(8, rows * packed_row(K, LANES)));
        pack_weights(weights, ld, rows, LANES, packed);
#if defined(MOTET_FAULT_MASK)  // keys out of reach are multiplied by zero
        return mix(packed, LANES, 0, rows, values, LANES, out);
#endif
        if (from == 0) return mix(packed, LANES, 0, rows, values, to, out);
        const int64_t bytes = bytes_of(call.pool.type), size = LANES * width;
        char* copy = static_cast<char*>(scratch(4, size * bytes));
        std::memcpy(copy, values, size * bytes);
        for (int64_t i = 0; i < size; i++) {
            const int64_t within = i % (LANES * LANES);
            const int64_t key = bytes == 2 ? within / 32 * 2 + within % 2 : within / LANES;
            if (key < from || key >= to) std::memset(copy + i * bytes, 0, bytes);
        }
        mix(packed, LANES, 0, rows, copy, LANES, out);
    }

    int64_t low(int64_t position) const { return call.window ? most(0, position + 1 - call.window) : 0; }

    // Tokens [first, first + count) of the span.
    void tokens(int64_t first, int64_t count) const {
        const int64_t rows = count * fold, begin = span.first_position + first;
        const int64_t unit0 = low(begin) / LANES, unit1 = (begin + count - 1) / LANES + 1, ld = (unit1 - unit0) * LANES;
        float* weights = static_cast<float*>(scratch(1, rows * ld * 4));
        float* out = static_cast<float*>(scratch(2, rows * width * 4));
        char* q = static_cast<char*>(scratch(3, rows * packed_row(K, width) + rows * width * 2));
        pack_queries(first, count, q);
        const int64_t of_block = call.pool.block / LANES;
        for (int64_t u = unit0, last; u < unit1; u = last) {
            last = least(unit1, (u / of_block + 1) * of_block);
            scores(q, rows, u, last, weights + (u - unit0) * LANES, ld);
        }
        std::memset(out, 0, rows * width * 4);
        float peaks[64], totals[64];
        for (int64_t r = 0; r < rows; r++)
            soften(weights + r * ld, unit0, ld / LANES, begin + r / fold, r % fold, &peaks[r], &totals[r]);
        // units that all rows read whole; each token reads those at its edges by itself
        const int64_t whole0 = (low(begin + count - 1) + LANES - 1) / LANES, whole1 = (begin + 1) / LANES;
        for (int64_t i = 0; i < count; i++) edges(weights, ld, i, begin + i, unit0, unit0, least(whole0, unit1), out);
        if (whole0 < whole1) {
            const int64_t keys = (whole1 - whole0) * LANES;
            char* packed = static_cast<char*>(scratch(9, rows * packed_row(K, keys)));
            pack_weights(weights + (whole0 - unit0) * LANES, ld, rows, keys, packed);
            for (int64_t u = whole0; u < whole1; u++)
                mix(packed, keys, u - whole0, rows, unit_of(call.pool, call.pool.values, span, head, u), LANES, out);
        }
        for (int64_t i = 0; i < count; i++) edges(weights, ld, i, begin + i, unit0, most(whole0, whole1), unit1, out);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = span.first_row + first + r / fold, query_head = head * fold + r % fold;
            float* to = call.out + row * call.ldo + query_head * width;
            for (int64_t e = 0; e < width; e += 16) store(to + e, div(load(out + r * width + e), set1(totals[r])));
            if (call.log_sums) call.log_sums[row * call.pool.n_kv * fold + query_head] = peaks[r] + log_one(totals[r]);
        }
    }

    void edges(const float* weights, int64_t ld, int64_t i, int64_t position, int64_t unit0, int64_t from, int64_t to, float* out) const {
        const int64_t lowest = low(position);
        for (int64_t u = from; u < to; u++) {
            const int64_t a = most(lowest - u * LANES, 0), b = least(position + 1 - u * LANES, LANES);
            if (a >= b) continue;
            mix_part(weights + i * fold * ld + (u - unit0) * LANES, ld, fold, u, a, b, out + i * fold * width);
        }
    }

    void pack_queries(int64_t first, int64_t count, char* out) const {
        const int64_t rows = count * fold;
        float* plain = static_cast<float*>(scratch(5, rows * width * 4));
        bf16* rounded = static_cast<bf16*>(scratch(6, rows * width * 2));
        for (int64_t r = 0; r < rows; r++) {
            const float* q = call.q + (span.first_row + first + r / fold) * call.ldq + (head * fold + r % fold) * width;
            std::memcpy(plain + r * width, q, width * 4);
        }
        const bool half = call.pool.type == Type::bf16;
        if (half) to_bf16(plain, rounded, rows * width);
        for (int64_t r = 0; r < rows; r += rows_packed(rows)) {
            const void* from = half ? static_cast<const void*>(rounded + r * width) : plain + r * width;
            pack_rows<K>(call.pool.type, from, width, least(rows_packed(rows), rows - r), width, out + r * packed_row(K, width));
        }
    }

    // Scores to weights, in place: exp(score − peak), 0 out of reach.
    void soften(float* row, int64_t unit0, int64_t units, int64_t position, int64_t folded, float* peak, float* total) const {
        const int64_t from = low(position) - unit0 * LANES, to = position + 1 - unit0 * LANES;
        V largest = set1(-INFINITY);
        for (int64_t u = 0; u < units; u++) {
            V s = mul(load(row + u * LANES), set1(call.scale));
            if (call.softcap != 0.0f) s = mul(set1(call.softcap), tanh(div(s, set1(call.softcap))));
            s = select(range(most(0, from - u * LANES), most(0, to - u * LANES)), s, set1(-INFINITY));
            store(row + u * LANES, s);
            largest = max(s, largest);
        }
        float best = max_lanes(largest);
        const float* sink = call.sinks ? call.sinks + head * fold + folded : nullptr;
        if (sink && *sink > best) best = *sink;
        V sum = zero();
        for (int64_t u = 0; u < units; u++) {
            const V e = select(range(most(0, from - u * LANES), most(0, to - u * LANES)),
                               exp(sub(load(row + u * LANES), set1(best))), zero());
            store(row + u * LANES, e);
            sum = add(sum, e);
        }
        *peak = best;
        *total = sum_lanes(sum);
        if (sink) *total = *total + exp_one(*sink - best);
    }

    void run() const {
        const int64_t tokens_of_tile = most(1, TILE_ROWS / fold);
        for (int64_t i = 0; i < span.n_rows; i += tokens_of_tile) tokens(i, least(tokens_of_tile, span.n_rows - i));
    }
};

}  // namespace

void attend(const Attention& call, const Span& span, int64_t first_head, int64_t last_head) {
    if (call.pool.width % LANES || call.pool.block % LANES || call.fold > 64) std::abort();
    for (int64_t h = first_head; h < last_head; h++)
        if (call.pool.type == Type::f32)
            Attend<Kind::exact_f32>{call, span, h}.run();
        else if (call.arithmetic == Arithmetic::exact)
            Attend<Kind::exact_bf16>{call, span, h}.run();
        else
            Attend<Kind::pairs>{call, span, h}.run();
}

}  // namespace motet
