// Attention over keys and values in units of 16 keys.
#include "tiles.hpp"

namespace motet {
namespace {

constexpr int64_t TILE_ROWS = 12;  // query rows of a tile, unless one token has more heads

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

char* unit_of(const Pool& pool, void* memory, const Span& span, int64_t head, int64_t unit) {
    const int64_t key = unit * LANES, slot = key / pool.block;
    if (slot >= span.n_table || span.blocks[slot] < 0 || span.blocks[slot] >= pool.n_blocks) std::abort();
    const int64_t rows = (span.blocks[slot] * pool.n_kv + head) * pool.block + key % pool.block;
    return static_cast<char*>(memory) + rows * pool.width * bytes_of(pool.type);
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

void copy_block(const Pool& pool, int64_t from, int64_t to) {
    const int64_t bytes = pool.n_kv * pool.block * pool.width * bytes_of(pool.type);
    if (from < 0 || to < 0 || from >= pool.n_blocks || to >= pool.n_blocks) std::abort();
    void* const memories[] = {pool.keys, pool.values};
    for (void* memory : memories)
        std::memcpy(static_cast<char*>(memory) + to * bytes, static_cast<char*>(memory) + from * bytes, bytes);
}

namespace {

// One KV head of a span.
template <Kind K>
struct Attend {
    const Attention& call;
    const Span& span;
    int64_t head;
    int64_t width, fold;

    static constexpr int ROWS = most_rows(K, 2);    // of a tile of weights
    static constexpr int QUERIES = most_rows(K, 1);  // and of queries

    void scores(const char* q, int64_t rows, int64_t unit, float* out, int64_t ld) const {
        for (int64_t r = 0; r < rows; r += QUERIES) {  // as they are packed
            const int64_t n = least(QUERIES, rows - r);
            Tile t{q + r * packed_row(K, width), unit_of(call.pool, call.pool.keys, span, head, unit), 0, out + r * ld, ld, width, false, 0};
            multiply_tile(K, n, 1, t);
        }
    }

    // out += weights [rows][k of the unit] · values
    void mix(const float* weights, int64_t ld, int64_t rows, const char* values, int64_t k, float* out) const {
        const int64_t step = LANES * LANES * bytes_of(call.pool.type), units = width / LANES;
        alignas(64) float packed[ROWS * LANES];  // a line for each row
        bf16 rounded[ROWS * LANES];
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t n = least(ROWS, rows - r);
            if (call.pool.type == Type::bf16) {
                for (int64_t i = 0; i < n; i++) store_bf16(rounded + i * LANES, load(weights + (r + i) * ld));
                pack_rows<K>(Type::bf16, rounded, LANES, n, k, packed);
            } else
                pack_rows<K>(Type::f32, weights + r * ld, ld, n, k, packed);
            int64_t u = 0;
            for (; u + 2 <= units; u += 2)
                multiply_tile(K, n, 2, Tile{packed, values + u * step, step, out + r * width + u * LANES, width, k, true, 0});
            if (u < units)
                multiply_tile(K, n, 1, Tile{packed, values + u * step, step, out + r * width + u * LANES, width, k, true, 0});
        }
    }

    // The same for a unit of which keys [from, to) are in reach of all rows.
    void mix_part(float* weights, int64_t ld, int64_t rows, int64_t unit, int64_t from, int64_t to, float* out) const {
        const char* values = unit_of(call.pool, call.pool.values, span, head, unit);
#if defined(MOTET_FAULT_MASK)  // keys out of reach are multiplied by zero
        return mix(weights, ld, rows, values, LANES, out);
#endif
        if (from == 0) return mix(weights, ld, rows, values, to, out);
        const int64_t bytes = bytes_of(call.pool.type), size = LANES * width;
        char* copy = static_cast<char*>(scratch(4, size * bytes));
        std::memcpy(copy, values, size * bytes);
        for (int64_t i = 0; i < size; i++) {
            const int64_t within = i % (LANES * LANES);
            const int64_t key = bytes == 2 ? within / 32 * 2 + within % 2 : within / LANES;
            if (key < from || key >= to) std::memset(copy + i * bytes, 0, bytes);
        }
        mix(weights, ld, rows, copy, LANES, out);
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
        for (int64_t u = unit0; u < unit1; u++) scores(q, rows, u, weights + (u - unit0) * LANES, ld);
        std::memset(out, 0, rows * width * 4);
        float peaks[64], totals[64];
        for (int64_t r = 0; r < rows; r++)
            soften(weights + r * ld, unit0, ld / LANES, begin + r / fold, r % fold, &peaks[r], &totals[r]);
        // units that all rows read whole; each token reads those at its edges by itself
        const int64_t whole0 = (low(begin + count - 1) + LANES - 1) / LANES, whole1 = (begin + 1) / LANES;
        for (int64_t i = 0; i < count; i++) edges(weights, ld, i, begin + i, unit0, unit0, least(whole0, unit1), out);
        for (int64_t u = whole0; u < whole1; u++)
            mix(weights + (u - unit0) * LANES, ld, rows, unit_of(call.pool, call.pool.values, span, head, u), LANES, out);
        for (int64_t i = 0; i < count; i++) edges(weights, ld, i, begin + i, unit0, most(whole0, whole1), unit1, out);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = span.first_row + first + r / fold, query_head = head * fold + r % fold;
            float* to = call.out + row * call.ldo + query_head * width;
            for (int64_t e = 0; e < width; e += 16) store(to + e, div(load(out + r * width + e), set1(totals[r])));
            if (call.log_sums) call.log_sums[row * call.pool.n_kv * fold + query_head] = peaks[r] + log_one(totals[r]);
        }
    }

    void edges(float* weights, int64_t ld, int64_t i, int64_t position, int64_t unit0, int64_t from, int64_t to, float* out) const {
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
        for (int64_t r = 0; r < rows; r += QUERIES) {
            const void* from = half ? static_cast<const void*>(rounded + r * width) : plain + r * width;
            pack_rows<K>(call.pool.type, from, width, least(QUERIES, rows - r), width, out + r * packed_row(K, width));
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

template <Kind K>
void attend_heads(const Attention& call, const Span& span, int64_t first_head, int64_t last_head) {
    for (int64_t h = first_head; h < last_head; h++) Attend<K>{call, span, h, call.pool.width, call.fold}.run();
}

}  // namespace

void attend(const Attention& call, const Span& span, int64_t first_head, int64_t last_head) {
    if (call.pool.width % LANES || call.pool.block % LANES || call.fold > 64) std::abort();
    if (call.pool.type == Type::f32)
        attend_heads<Kind::exact_f32>(call, span, first_head, last_head);
    else if (call.arithmetic == Arithmetic::exact)
        attend_heads<Kind::exact_bf16>(call, span, first_head, last_head);
    else
        attend_heads<Kind::pairs>(call, span, first_head, last_head);
}

}  // namespace motet
