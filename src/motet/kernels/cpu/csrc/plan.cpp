#include "plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace motet {
namespace {

enum Linear { QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3 };
constexpr int64_t ROWS = 16;      // rows of a part of a call on rows
constexpr int64_t TALL = 256;     // products of so many rows are shared by rows, of fewer by columns
constexpr int64_t TILE = MATRIX_UNITS ? 32 : 12;  // rows that such parts are a multiple of
constexpr int64_t TALL_TILES = MATRIX_UNITS ? 8 : 12;
constexpr int64_t DEEP = MATRIX_UNITS ? 3072 : 768;  // of k at a time, a multiple of 32, where there are many rows
constexpr int64_t BLOCK_TILES = MATRIX_UNITS ? 4 : 6;  // of a block, whose numbers stay in the cache for the next product
constexpr int64_t PACKED = 3072;  // rows of a weight that are packed at a time, where gradients read them
constexpr int64_t STRIP = 64;     // of them, rows of a thread's part
constexpr int64_t UNITS = 6;     // units of columns of a part, at least
constexpr int64_t CHUNK = 128;    // columns of a gradient that are made at a time

// ---- memory ---------------------------------------------------------------------------------------------------------------

// Hands out parts of a piece of memory, or only counts them where there is none yet.
class Carver {
 public:
    explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
    template <class T>
    T* take(int64_t n) {
        T* here = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += round_up(n * int64_t(sizeof(T)), 64);
        return here;
    }
    void* take_bytes(int64_t n) { return take<char>(n); }
    int64_t used() const { return used_; }

 private:
    char* base_;
    int64_t used_ = 0;
};

thread_local Scratch scratch;    // of a pass
thread_local Scratch head_room;  // of a product of the head
thread_local Scratch part_room;  // of a part of one
thread_local Scratch block_room;
thread_local Scratch turned_room;

int64_t attended(const Plan& plan) { return plan.heads * plan.head_width; }
int64_t keys_wide(const Plan& plan) { return plan.kv_heads * plan.head_width; }
int64_t joint(const Plan& plan) { return attended(plan) + 2 * keys_wide(plan); }
int64_t computed(const Plan& plan) { return plan.n_experts ? plan.n_chosen : 1; }  // MLPs of a row
Type type_of(const Plan& plan) { return Type(plan.type); }
Arithmetic arithmetic_of(const Plan& plan) { return Arithmetic(plan.arithmetic); }
const void* at(Type type, const void* x, int64_t place) { return static_cast<const char*>(x) + place * bytes_of(type); }
void* at(Type type, void* x, int64_t place) { return static_cast<char*>(x) + place * bytes_of(type); }

void write_typed(Type type, const float* from, void* to, int64_t n) {
    if (type == Type::bf16) return to_bf16(from, static_cast<bf16*>(to), n);
    std::memcpy(to, from, size_t(n) * 4);
}

// Bytes of the room that `pack_back` needs.
int64_t back_bytes(Type type, const Weight& w) { return w.rows ? packed_bytes(type, std::min(PACKED, w.n), w.k) : 0; }

// What the backward pass reads of a layer.
struct Kept {
    float *qkv, *plain, *out, *log_sums, *x_mid;
    float *of_attention, *of_mlp;  // what attention and MLP gave, before norms
    float* router;  // logits
    void* gate_up;
    float* inner[4];  // products with A of each fused linear

    Kept(Carver& memory, const Plan& plan, int64_t rows, const int64_t* columns) {
        bool normed = plan.layers[0].norm_q != nullptr;
        qkv = memory.take<float>(rows * joint(plan));
        plain = memory.take<float>(normed ? rows * joint(plan) : 0);  // before norms of queries and keys
        out = memory.take<float>(rows * attended(plan));
        log_sums = memory.take<float>(rows * plan.heads);
        x_mid = memory.take<float>(rows * plan.width);
        of_attention = memory.take<float>(plan.layers[0].norm_attended ? rows * plan.width : 0);
        of_mlp = memory.take<float>(plan.layers[0].norm_done ? rows * plan.width : 0);
        router = memory.take<float>(rows * plan.n_experts);
        gate_up = memory.take_bytes(rows * computed(plan) * 2 * plan.inner * bytes_of(type_of(plan)));
        for (int i = 0; i < 4; i++) inner[i] = memory.take<float>(rows * columns[i]);
    }
};

struct Rows {  // of a run or a span, few enough for a part of a call
    int64_t of, first, n;
};

void cut(std::vector<Rows>& rows, int64_t of, int64_t first, int64_t n, int64_t step = ROWS) {
    for (int64_t done = 0; done < n; done += step) rows.push_back({of, first + done, std::min(step, n - done)});
}

// Rows that go through a stretch of a layer together: all of a short pass, or few enough of a long one that they stay in the cache.
struct Block {
    int64_t first, n, threads;
    float* y;  // room for what a product gives
    void* a;   // and for what it reads
};

// Which rows the experts of a layer compute: a choice of a row has a place among the rows of all experts, expert by expert.
struct Routed {
    const int64_t k;
    std::vector<int32_t> chosen;
    std::vector<float> shares;
    std::vector<int64_t> place, choice;  // of a choice [rows × k], and back
    std::vector<Rows> parts;

    Routed(const Plan& plan, int64_t rows, const float* logits)
        : k(plan.n_chosen), chosen(size_t(rows * k)), shares(chosen.size()), place(chosen.size()), choice(chosen.size()) {
        const int64_t n = plan.n_experts;
        for (int64_t row = 0; row < rows; row++)
            choose(logits + row * n, n, k, plan.among_chosen, &chosen[size_t(row * k)], &shares[size_t(row * k)]);
        std::vector<int64_t> next(size_t(n + 1), 0);
        for (int32_t expert : chosen) next[size_t(expert) + 1]++;
        for (int64_t e = 0; e < n; e++) {
            cut(parts, e, next[size_t(e)], next[size_t(e) + 1]);
            next[size_t(e) + 1] += next[size_t(e)];
        }
        for (size_t i = 0; i < chosen.size(); i++) {
            place[i] = next[size_t(chosen[i])]++;
            choice[size_t(place[i])] = int64_t(i);
        }
    }
    int64_t row_at(int64_t at) const { return choice[size_t(at)] / k; }
};

// A pass under way and its memory.
class Call {
 public:
    const Plan& plan;
    const Pass& pass;
    const Type type;
    const Arithmetic arithmetic;
    int64_t columns[4] = {0, 0, 0, 0};  // the widest A of each fused linear
    std::vector<Rows> span_rows;
    std::vector<int64_t> learners, later;  // the first run of each gradient, and the next one of the same
    float *x, *y;
    void *a, *narrow, *keys, *values;
    void* chosen_typed;  // rows of experts
    float* chosen;
    // backward
    float *dx = nullptr, *dy, *din, *ds, *dk, *dv;
    float* drouter;
    void *dy_typed, *down_typed, *ds_typed, *drouter_typed, *packed;

    Call(const Plan& plan, const Pass& pass) : plan(plan), pass(pass), type(type_of(plan)), arithmetic(arithmetic_of(plan)) {
        for (int64_t r = 0; r < pass.n_runs; r++)
            for (int64_t i = 0; i < plan.n_layers * 4; i++)
                columns[i % 4] = std::max(columns[i % 4], pass.runs[r].adapter->linears[i].columns);
        std::map<void*, int64_t> last;
        later.assign(size_t(pass.n_runs), pass.n_runs);
        for (int64_t r = 0; r < pass.n_runs; r++) {
            if (!pass.runs[r].gradient) continue;
            const auto [known, fresh] = last.try_emplace(pass.runs[r].gradient, r);
            if (fresh)
                learners.push_back(r);
            else
                later[size_t(known->second)] = r;
            known->second = r;
        }
        for (int64_t s = 0; s < pass.n_spans; s++) cut(span_rows, s, 0, pass.spans[s].n_rows);
    }

    void carve(Carver& memory, bool backward) {
        int64_t rows = pass.n_rows, size = bytes_of(type), inner = *std::max_element(columns, columns + 4);
        int64_t in = widest_in(), out = std::max(widest_out(), 2 * plan.inner * computed(plan));
        bool whole = !tall() || plan.n_experts;  // else blocks have room of their own
        int64_t by_experts = plan.n_experts ? rows * plan.n_chosen * expert_wide() : 0;
        int64_t pool = pass.keys ? 0 : pass.n_blocks * pass.block * keys_wide(plan);
        x = memory.take<float>(rows * plan.width);
        y = memory.take<float>(whole && (!backward || pass.recompute) ? rows * out : 0);
        a = memory.take_bytes(whole || backward ? rows * in * size : 0);
        narrow = memory.take_bytes(rows * inner * size);
        keys = memory.take_bytes(pool * size);
        values = memory.take_bytes(pool * size);
        chosen_typed = memory.take_bytes(by_experts * size);
        chosen = memory.take<float>(by_experts);
        if (!backward) return;
        dx = memory.take<float>(rows * plan.width);
        dy = memory.take<float>(rows * std::max(joint(plan), plan.width));
        dy_typed = memory.take_bytes(rows * out * size);
        down_typed = memory.take_bytes(rows * plan.width * size);
        din = memory.take<float>(rows * in);
        ds = memory.take<float>(rows * inner);
        ds_typed = memory.take_bytes(rows * inner * size);
        dk = memory.take<float>(pool);
        dv = memory.take<float>(pool);
        drouter = memory.take<float>(rows * plan.n_experts);
        drouter_typed = memory.take_bytes(rows * plan.n_experts * size);
        int64_t largest = 0;
        for (int64_t layer = 0; layer < plan.n_layers; layer++)
            for (const Weight& w : plan.layers[layer].linears) largest = std::max(largest, back_bytes(type, w));
        packed = memory.take_bytes(largest);
    }

    // Whether threads share blocks: there are some tiles for each.
    bool tall() const { return pass.n_rows >= std::max(TALL, 2 * TILE * pass.threads); }
    int64_t widest_in() const { return std::max({plan.width, attended(plan), plan.inner}); }
    int64_t widest_out() const { return std::max({joint(plan), 2 * plan.inner, plan.width}); }
    Block all() const { return {0, pass.n_rows, pass.threads, y, a}; }

    // f(part) for each part; threads share them.
    template <class F>
    void shared(int64_t parts, F&& f) const {
        parallel(pass.threads, parts, std::forward<F>(f));
    }

    // f(first, n) on some of the rows each
    template <class F>
    void by_rows(const Block& of, F&& f) const {
        parallel(of.threads, (of.n + ROWS - 1) / ROWS,
                 [&](int64_t part) { f(of.first + part * ROWS, std::min(ROWS, of.n - part * ROWS)); });
    }

    // f(block): threads share the blocks of a long pass, and each op of a short one.
    template <class F>
    void by_blocks(F&& f) const {
        if (!tall()) return f(all());
        const int64_t tiles = (pass.n_rows + TILE - 1) / TILE, least = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
        const int64_t blocks = std::min(round_up(least, pass.threads), tiles);
        shared(blocks, [&](int64_t part) {
            const int64_t first = tiles * part / blocks * TILE, n = std::min(tiles * (part + 1) / blocks * TILE, pass.n_rows) - first;
            const int64_t outputs = round_up(n * widest_out() * 4, 64);
            char* memory = static_cast<char*>(block_room.at_least(outputs + n * widest_in() * bytes_of(type)));
            f(Block{first, n, 1, reinterpret_cast<float*>(memory), memory + outputs});
        });
    }

    // f(run, first, n) on some of the block's rows of a run each
    template <class F>
    void by_runs(const Block& of, F&& f) const {
        const int64_t step = of.threads == 1 ? of.n : std::clamp(of.n / of.threads / (4 * ROWS), int64_t{1}, int64_t{16}) * ROWS;
        std::vector<Rows> parts;
        for (int64_t r = 0; r < pass.n_runs; r++) {
            const int64_t first = std::max(pass.runs[r].first, of.first), last = std::min(pass.runs[r].last, of.first + of.n);
            cut(parts, r, first, last - first, step);
        }
        parallel(of.threads, int64_t(parts.size()), [&](int64_t part) {
            const Rows& own = parts[size_t(part)];
            f(pass.runs[own.of], own.first, own.n);
        });
    }

    void typed(const float* from, int64_t ldf, void* to, int64_t ldt, int64_t rows, int64_t n) const {
        for (int64_t row = 0; row < rows; row++) write_typed(type, from + row * ldf, at(type, to, row * ldt), n);
    }

    // C [m × n] (+)= A [m × k] · B, in the type of the plan
    Product times(const void* a, int64_t lda, const void* b, int64_t b_k, float* c, int64_t ldc, int64_t m, int64_t k, int64_t n,
                  bool add = false) const {
        return {a, type, lda, b, type, b_k, c, ldc, m, k, n, add, arithmetic};
    }

    // Rows of a block, in the type of the plan.
    void typed_rows(const Block& of, const float* from, void* to, int64_t n) const {
        by_rows(of, [&](int64_t row, int64_t m) { typed(from + row * n, n, at(type, to, (row - of.first) * n), n, m, n); });
    }

    // What attention and MLP read of the stream: its norm, where there is one. `to` is the block's.
    void norm(const Block& of, const float* from, const float* weight, void* to) const {
        const int64_t n = plan.width;
        if (!weight) return typed_rows(of, from, to, n);
        by_rows(of, [&](int64_t row, int64_t m) {
            rms_norm(from + row * n, n, weight, plan.epsilon, type, at(type, to, (row - of.first) * n), n, m, n);
        });
    }

    Gates gates(const Kept& kept, int64_t first, int64_t m) const {
        const void* from = at(type, kept.gate_up, first * 2 * plan.inner);
        return {Gate(plan.gate), type, from, at(type, from, plan.inner), 2 * plan.inner, m, plan.inner};
    }

    int64_t expert_wide() const { return std::max(plan.width, plan.inner); }
    void forward_layer(int64_t layer, Kept& kept);
    void backward_layer(int64_t layer, Kept& kept, const float* x_in);

 private:
    void product_of(const Block& of, const Product& p) const;
    void linear(const Block& of, int64_t layer, int which, float* to, bool add, float* inner) const;
    void add_linear(const Block& of, int64_t layer, int which, const float* norm, float* before, float* inner) const;
    void slope_of_added(const Block& of, const float* norm, const float* before, void* to) const;
    Attention written(int64_t layer, const Kept& kept) const;
    void attention(int64_t layer, Kept& kept) const;
    void rotate(const Block& of, const Layer& layer, Kept& kept) const;
    void rope_rows(const Layer& layer, float* rows, bool back, int64_t first, int64_t m) const;
    template <class Before, class After>
    void linear_back(int64_t layer, int which, const void* slope, float* inner, float* whole, bool wanted, Before&& before,
                     After&& after);
    void gradients(int64_t layer, int which, const void* slope, const float* inner);
    void attention_back(int64_t layer, Kept& kept);
    void experts(const Layer& layer, Kept& kept) const;
    void experts_back(const Layer& layer, Kept& kept, const float* slope) const;
    // f(place, weight, heads, numbers of each) for queries and for keys of each row that has norms of heads; n numbers are rows
    template <class F>
    void by_head_norms(const Layer& layer, int64_t n, F&& f) const {
        const int64_t q = attended(plan), k = keys_wide(plan), e = plan.head_width;
        for (int64_t row = 0; layer.norm_q && row < n; row += joint(plan)) {
            f(row, layer.norm_q, plan.norms_whole ? 1 : plan.heads, plan.norms_whole ? q : e);
            f(row + q, layer.norm_k, plan.norms_whole ? 1 : plan.kv_heads, plan.norms_whole ? k : e);
        }
    }
    // f(weights, first, n) on some of the rows of each expert
    template <class F>
    void by_experts(const Layer& layer, const Routed& routed, F&& f) const {
        shared(int64_t(routed.parts.size()), [&](int64_t part) {
            const Rows& own = routed.parts[size_t(part)];
            f(layer.experts + own.of * 2, own.first, own.n);
        });
    }
};

// The same sums, with columns that stay near.
void product_by_depth(const Product& p) {
    for (int64_t first = 0; first < p.k; first += DEEP) {
        Product some = p;
        some.a = at(p.a_type, p.a, first);
        some.b = at(p.b_type, p.b, first * LANES);
        some.k = std::min(DEEP, p.k - first);
        some.add = p.add || first > 0;
        product(some);
    }
}

// Threads share few rows by columns, and many by rows, so that a thread's part of A stays near it.
void shared_product(const Product& p, int64_t threads) {
    const int64_t units = (p.n + LANES - 1) / LANES, tiles = (p.m + TILE - 1) / TILE;
    const int64_t tall = p.m >= TALL ? (tiles + TALL_TILES - 1) / TALL_TILES : 1;
    const int64_t few = tall > 1 ? (2 * threads + tall - 1) / tall : 4 * threads;  // parts of columns
    const int64_t wide = threads == 1 ? 1 : std::max<int64_t>(1, std::min(units / UNITS, tall > 1 && few < 3 ? 1 : few));
    parallel(threads, tall * wide, [&](int64_t part) {
        const int64_t down = part / wide, across = part % wide;
        Product own = wide > 1 ? columns_of(p, units * across / wide, units * (across + 1) / wide) : p;
        if (tall == 1) return product(own);
        const int64_t top = tiles * down / tall * TILE;
        own.a = at(p.a_type, p.a, top * p.lda);
        own.c = own.c + top * p.ldc;
        own.m = std::min(tiles * (down + 1) / tall * TILE, p.m) - top;
        product_by_depth(own);
    });
}

void Call::product_of(const Block& of, const Product& p) const { tall() ? product_by_depth(p) : shared_product(p, of.threads); }

// Rows [first, first + deep) of W, for products of gradients: so that no second copy of it stays.
void pack_back(const Weight& w, Type type, int64_t first, int64_t deep, int64_t threads, void* room) {
    const int64_t unit = packed_bytes(type, deep, LANES) / bytes_of(type);
    parallel(threads, (deep + STRIP - 1) / STRIP, [&](int64_t part) {
        const int64_t row = part * STRIP, n = std::min(STRIP, deep - row);
        for (int64_t column = 0; column < w.k; column += LANES)
            pack(type, at(type, w.rows, (first + row) * w.k + column), w.k, 1, n, std::min(LANES, w.k - column), type,
                 at(type, room, column / LANES * unit + row * LANES));
    });
}

// ---- forward ------------------------------------------------------------------------------------------------------------------

// A fused linear of the block's `a` [rows × k] with its bias and the adapters of each row; `inner` gets the products with A. `to`
// is the block's, `inner` the pass's.
void Call::linear(const Block& of, int64_t layer, int which, float* to, bool add, float* inner) const {
    const Weight& w = plan.layers[layer].linears[which];
    const int64_t wide = columns[which];
    product_of(of, times(of.a, w.k, w.forward, w.k, to, w.n, of.n, w.k, w.n, add));
    if (w.bias)
        by_rows(of, [&](int64_t row, int64_t m) { add_rows(to + (row - of.first) * w.n, w.n, w.bias, 0, m, w.n); });
    if (!wide) return;
    by_runs(of, [&](const Run& run, int64_t first, int64_t n) {
        const Lora& lora = run.adapter->linears[layer * 4 + which];
        if (!lora.n_parts) return;
        float* s = inner + first * wide;
        void* s_typed = at(type, narrow, first * *std::max_element(columns, columns + 4));  // blocks may be at other linears
        const int64_t row = first - of.first;
        product(times(at(type, of.a, row * w.k), w.k, run.adapter->packed + lora.a, w.k, s, wide, n, w.k, lora.columns));
        typed(s, wide, s_typed, wide, n, lora.columns);
        for (int64_t p = 0; p < lora.n_parts; p++) {
            const Part& b = lora.parts[p];
            const void *narrow_part = at(type, s_typed, p * lora.rank), *packed = run.adapter->packed + b.b;
            product(times(narrow_part, wide, packed, lora.rank, to + row * w.n + b.first, w.n, n, lora.rank, b.n, true));
        }
    });
}

// Adds to the stream a linear of `a`: through a norm where there is one, and multiplied as the plan says.
void Call::add_linear(const Block& of, int64_t layer, int which, const float* norm, float* before, float* inner) const {
    const int64_t n = plan.width;
    if (!norm && plan.residual == 1.0f) return linear(of, layer, which, x + of.first * n, true, inner);
    float* given = norm ? before + of.first * n : of.y;
    linear(of, layer, which, given, false, inner);
    by_rows(of, [&](int64_t row, int64_t m) {
        const int64_t place = (row - of.first) * n;
        if (norm) rms_norm(given + place, n, norm, plan.epsilon, Type::f32, of.y + place, n, m, n);
        add_rows(x + row * n, n, of.y + place, n, m, n, plan.residual);
    });
}

void Call::rope_rows(const Layer& layer, float* rows, bool back, int64_t first, int64_t m) const {
    const int64_t n = joint(plan), half = plan.rotated / 2, heads = plan.heads + plan.kv_heads;
    for (int64_t row = 0; row < m; row++) {
        const int64_t position = pass.positions[first + row], angles = position * half;
        float* own = rows + row * n;
        if (layer.cosines)
            rope(own, n, layer.cosines + angles, layer.sines + angles, half, back, 1, heads, plan.head_width, plan.rotated);
        for (int64_t i = 0; plan.query_scales && i < attended(plan); i++) own[i] *= plan.query_scales[position];
    }
}

// Norms of heads, where there are any, and rotation, of queries and keys.
void Call::rotate(const Block& of, const Layer& layer, Kept& kept) const {
    const int64_t n = joint(plan);
    by_rows(of, [&](int64_t first, int64_t m) {
        float* rows = kept.qkv + first * n;
        if (layer.norm_q) std::memcpy(kept.plain + first * n, rows, size_t(m * n) * 4);
        by_head_norms(layer, m * n, [&](int64_t place, const float* weight, int64_t heads, int64_t wide) {
            const float* from = kept.plain + first * n + place;
            rms_norm(from, wide, weight, plan.epsilon, Type::f32, rows + place, wide, heads, wide);
        });
        rope_rows(layer, rows, false, first, m);
    });
}

// Writes keys and values, and says what is to be attended.
Attention Call::written(int64_t layer, const Kept& kept) const {
    const int64_t n = joint(plan), wide = attended(plan);
    void *keys = pass.keys ? pass.keys[layer] : this->keys, *values = pass.keys ? pass.values[layer] : this->values;
    const Pool pool{type, keys, values, pass.n_blocks, pass.block, plan.kv_heads, plan.head_width};
    shared(pass.n_writes, [&](int64_t part) {
        write_keys_values(pool, pass.writes[part], kept.qkv + wide, n, kept.qkv + wide + keys_wide(plan), n);
    });
    const Layer& of = plan.layers[layer];
    return {pool, arithmetic, plan.heads / plan.kv_heads, of.scale, of.softcap, of.window, nullptr, kept.qkv, n, kept.out, wide,
            kept.log_sums};
}

void Call::attention(int64_t layer, Kept& kept) const {
    const Attention call = written(layer, kept);
    std::memset(kept.out, 0, size_t(pass.n_rows * attended(plan)) * 4);
    shared(int64_t(span_rows.size()) * plan.kv_heads, [&](int64_t part) {
        const Rows& own = span_rows[part / plan.kv_heads];
        Span span = pass.spans[own.of];
        span.first_row += own.first, span.first_position += own.first, span.n_rows = own.n;
        attend(call, span, part % plan.kv_heads, part % plan.kv_heads + 1);
    });
}

// Experts of `a`, added to the stream in the order of their numbers.
void Call::experts(const Layer& layer, Kept& kept) const {
    const int64_t width = plan.width, inner = plan.inner, n = plan.n_experts, wide = expert_wide();
    shared_product(times(a, width, layer.router.forward, width, kept.router, n, pass.n_rows, width, n), pass.threads);
    const Routed routed(plan, pass.n_rows, kept.router);
    by_experts(layer, routed, [&](const Weight* w, int64_t first, int64_t m) {
        float *both = y + first * 2 * inner, *given = chosen + first * wide;
        void* in = at(type, chosen_typed, first * wide);
        for (int64_t i = 0; i < m; i++)
            std::memcpy(at(type, in, i * wide), at(type, a, routed.row_at(first + i) * width), size_t(width * bytes_of(type)));
        product(times(in, wide, w[0].forward, width, both, 2 * inner, m, width, 2 * inner));
        typed(both, 2 * inner, at(type, kept.gate_up, first * 2 * inner), 2 * inner, m, 2 * inner);
        gate_up({Gate(plan.gate), Type::f32, both, both + inner, 2 * inner, m, inner}, type, in, wide);
        product(times(in, wide, w[1].forward, inner, given, wide, m, inner, width));
    });
    by_rows(all(), [&](int64_t row, int64_t m) {
        for (int64_t i = row * routed.k; i < (row + m) * routed.k; i++)
            add_rows(x + i / routed.k * width, width, chosen + routed.place[size_t(i)] * wide, wide, 1, width, routed.shares[size_t(i)]);
    });
}

void Call::forward_layer(int64_t index, Kept& kept) {
    const Layer& layer = plan.layers[index];
    const int64_t wide = attended(plan), inner = plan.inner, width = plan.width;
    by_blocks([&](const Block& of) {
        norm(of, x, layer.norm_in, of.a);
        linear(of, index, QKV, kept.qkv + of.first * joint(plan), false, kept.inner[QKV]);
        rotate(of, layer, kept);
    });
    attention(index, kept);
    by_blocks([&](const Block& of) {
        typed_rows(of, kept.out, of.a, wide);
        add_linear(of, index, OUT, layer.norm_attended, kept.of_attention, kept.inner[OUT]);
        std::memcpy(kept.x_mid + of.first * width, x + of.first * width, size_t(of.n * width) * 4);
        if (layer.experts) return;
        norm(of, x, layer.norm_mlp, of.a);
        linear(of, index, GATE_UP, of.y, false, kept.inner[GATE_UP]);
        by_rows(of, [&](int64_t row, int64_t m) {
            const float* own = of.y + (row - of.first) * 2 * inner;
            typed(own, 2 * inner, at(type, kept.gate_up, row * 2 * inner), 2 * inner, m, 2 * inner);
            gate_up({Gate(plan.gate), Type::f32, own, own + inner, 2 * inner, m, inner}, type,
                    at(type, of.a, (row - of.first) * inner), inner);
        });
        add_linear(of, index, DOWN, layer.norm_done, kept.of_mlp, kept.inner[DOWN]);
    });
    if (!layer.experts) return;
    norm(all(), x, layer.norm_mlp, a);
    experts(layer, kept);
}

// ---- backward -----------------------------------------------------------------------------------------------------------------

void transpose(Type type, const void* from, int64_t ld, int64_t rows, int64_t columns, void* to) {
    auto copy = [&](auto* source, auto* target) {
        for (int64_t first = 0; first < rows; first += 16)
            for (int64_t column = 0; column < columns; column++)
                for (int64_t row = first; row < std::min(rows, first + 16); row++)
                    target[column * rows + row] = source[row * ld + column];
    };
    if (type == Type::bf16)
        copy(static_cast<const bf16*>(from), static_cast<bf16*>(to));
    else
        copy(static_cast<const float*>(from), static_cast<float*>(to));
}

void raise(int64_t* largest, int64_t number) {
    int64_t before = __atomic_load_n(largest, __ATOMIC_RELAXED);
    while (before < number && !__atomic_compare_exchange_n(largest, &before, number, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// Adds the gradients of A and B of all runs on a fused linear. Each is a sum over a run's rows from its first; both are products of
// a narrow transpose with wide rows.
void Call::gradients(int64_t layer, int which, const void* slope, const float* inner) {
    const Weight& w = plan.layers[layer].linears[which];
    const int64_t wide = columns[which], size = bytes_of(type), narrow = round_up(pass.n_rows * wide * size, 64);
    char* turned = static_cast<char*>(turned_room.at_least(2 * narrow));
    auto lora_of = [&](int64_t r) -> const Lora& { return pass.runs[r].adapter->linears[layer * 4 + which]; };
    std::vector<Rows> parts;  // of A, or of B with its number: the first run of a gradient, its first column, how many
    std::vector<int64_t> numbers;
    auto cut_columns = [&](int64_t r, int64_t number, int64_t n) {
        cut(parts, r, 0, n, CHUNK);
        numbers.resize(parts.size(), number);
    };
    for (int64_t r : learners) {
        if (lora_of(r).n_parts) cut_columns(r, -1, w.k);
        for (int64_t p = 0; p < lora_of(r).n_parts; p++) cut_columns(r, p, lora_of(r).parts[p].n);
    }
    shared(2 * pass.n_runs, [&](int64_t part) {
        const Run& run = pass.runs[part / 2];
        const int64_t rows = run.last - run.first, n = lora_of(part / 2).columns, first = run.first * wide;
        if (!lora_of(part / 2).n_parts || !run.gradient) return;
        if (part % 2) return transpose(type, at(type, ds_typed, first), wide, rows, n, turned + narrow + first * size);
        void* s = part_room.at_least(rows * n * size);
        typed(inner + first, wide, s, n, rows, n);
        transpose(type, s, n, rows, n, turned + first * size);
    });
    shared(int64_t(parts.size()), [&](int64_t part) {
        const Rows& own = parts[size_t(part)];
        const int64_t number = numbers[size_t(part)];
        for (int64_t r = own.of; r < pass.n_runs; r = later[size_t(r)]) {
            const Run& run = pass.runs[r];
            const Lora& lora = lora_of(r);
            const Part& b = lora.parts[std::max(number, int64_t{0})];
            const bool of_a = number < 0;
            const int64_t rows = run.last - run.first, m = of_a ? lora.columns : lora.rank, ld = of_a ? w.k : w.n;
            const int64_t room = round_up(round_up(rows, 2) * CHUNK * size, 64);
            char* memory = static_cast<char*>(part_room.at_least(room + round_up(m, LANES) * CHUNK * 4));
            float* c = reinterpret_cast<float*>(memory + room);
            const char* left = turned + (of_a ? narrow : number * lora.rank * rows * size) + run.first * wide * size;
            pack(type, at(type, of_a ? a : slope, run.first * ld + (of_a ? 0 : b.first) + own.first), ld, 1, rows, own.n, type, memory);
            product(times(left, rows, memory, rows, c, CHUNK, m, rows, own.n));
            const int64_t place = of_a ? lora.flat + own.first * m : b.flat + own.first;
            if (run.largest) {
                int64_t* to = static_cast<int64_t*>(run.gradient) + place;
                raise(run.largest, of_a ? add_turned_whole(to, m, c, CHUNK, own.n, m, run.scaling)
                                        : add_rows_whole(to, b.n, c, CHUNK, m, own.n));
                continue;
            }
            float* to = static_cast<float*>(run.gradient) + place;
            if (of_a)
                add_turned(to, m, c, CHUNK, own.n, m, run.scaling);
            else
                add_rows(to, b.n, c, CHUNK, m, own.n);
        }
    });
}

// From the gradient of what a fused linear gave, which `before(block)` puts in `slope`, to one of its input, where `wanted`:
// `after(block, gradient)` gets it, and it is in `whole` where that is there. `a` is the input, once all blocks are through.
template <class Before, class After>
void Call::linear_back(int64_t layer, int which, const void* slope, float* inner, float* whole, bool wanted, Before&& before,
                       After&& after) {
    const Weight& w = plan.layers[layer].linears[which];
    const int64_t wide = columns[which], step = wanted && w.rows ? PACKED : w.n;
    if (!tall() || step < w.n) whole = din;
    for (int64_t from = 0; from < w.n; from += step) {
        const int64_t deep = std::min(step, w.n - from);
        if (wanted && w.rows) pack_back(w, type, from, deep, pass.threads, packed);
        by_blocks([&](const Block& of) {
            float* to = whole ? whole + of.first * w.k : of.y;
            if (!from) before(of);
            const void *own = at(type, slope, of.first * w.n + from), *b = w.rows ? packed : w.back;
            if (wanted) product_of(of, times(own, w.n, b, deep, to, w.k, of.n, deep, w.k, from > 0));
            if (from + deep < w.n) return;
            by_runs(of, [&](const Run& run, int64_t first, int64_t n) {
                const Lora& lora = run.adapter->linears[layer * 4 + which];
                if (!lora.n_parts) return;
                float* narrow = ds + first * wide;
                void* narrow_typed = at(type, ds_typed, first * wide);
                for (int64_t row = 0; row < n; row++) std::memset(narrow + row * wide, 0, size_t(lora.columns) * 4);
                for (int64_t p = 0; p < lora.n_parts; p++) {
                    const Part& part = lora.parts[p];
                    const void *own = at(type, slope, first * w.n + part.first), *b_back = run.adapter->packed + part.b_back;
                    product(times(own, w.n, b_back, part.n, narrow + p * lora.rank, wide, n, part.n, lora.rank));
                }
                typed(narrow, wide, narrow_typed, wide, n, lora.columns);
                float* out = to + (first - of.first) * w.k;
                const void* a_back = run.adapter->packed + lora.a_back;
                if (wanted) product(times(narrow_typed, wide, a_back, lora.columns, out, w.k, n, lora.columns, w.k, true));
            });
            after(of, to);
        });
    }
    if (wide) gradients(layer, which, slope, inner);
}

// From the gradient of attention's output, `din`, to one of the fused queries, keys and values, in `dy`.
void Call::attention_back(int64_t layer, Kept& kept) {
    const int64_t n = joint(plan), wide = attended(plan), e = plan.head_width, kv = plan.kv_heads;
    const Layer& own = plan.layers[layer];
    const int64_t of_block = kv * pass.block * e;
    const AttentionBackward call{written(layer, kept), din, dy, n, dk, dv};
    shared(pass.n_blocks, [&](int64_t block) {
        std::memset(dk + block * of_block, 0, size_t(of_block) * 4);
        std::memset(dv + block * of_block, 0, size_t(of_block) * 4);
    });
    std::memset(dy, 0, size_t(pass.n_rows * n) * 4);
    shared(pass.n_spans * kv, [&](int64_t part) { attend_backward(call, pass.spans[part / kv], part % kv, part % kv + 1); });
    shared(kv, [&](int64_t head) {  // a row that several sequences read gets their gradients in their order
        for (int64_t w = 0; w < pass.n_writes; w++) {
            const Span& span = pass.writes[w];
            for (int64_t i = 0; i < span.n_rows; i++) {
                int64_t key = span.first_position + i;
                int64_t place = ((span.blocks[key / pass.block] * kv + head) * pass.block + key % pass.block) * e;
                float* row = dy + (span.first_row + i) * n + wide + head * e;
                add_rows(row, e, dk + place, e, 1, e);
                add_rows(row + kv * e, e, dv + place, e, 1, e);
            }
        }
    });
    by_rows(all(), [&](int64_t first, int64_t m) {
        float* rows = dy + first * n;
        rope_rows(own, rows, true, first, m);
        float* slope = static_cast<float*>(part_room.at_least(wide * 4));
        by_head_norms(own, m * n, [&](int64_t place, const float* weight, int64_t heads, int64_t each) {
            std::memcpy(slope, rows + place, size_t(heads * each) * 4);
            const float* from = kept.plain + first * n + place;
            rms_norm_backward(from, each, weight, plan.epsilon, slope, each, rows + place, each, false, heads, each);
        });
    });
}

// From the gradient of what experts gave to one of their input, in `din`, through their shares too.
void Call::experts_back(const Layer& layer, Kept& kept, const float* slope) const {
    const int64_t width = plan.width, inner = plan.inner, n = plan.n_experts, wide = expert_wide();
    const Routed routed(plan, pass.n_rows, kept.router);
    std::vector<float> dshares(routed.shares.size());
    by_experts(layer, routed, [&](const Weight* w, int64_t first, int64_t m) {
        float* given = chosen + first * wide;
        void *in = at(type, chosen_typed, first * wide), *dboth = at(type, dy_typed, first * 2 * inner);
        const Gates both = gates(kept, first, m);
        for (int64_t i = 0; i < m; i++)
            typed(slope + routed.row_at(first + i) * width, width, at(type, in, i * wide), wide, 1, width);
        product(times(in, wide, w[1].back, width, given, wide, m, width, inner));
        float* mixed = static_cast<float*>(part_room.at_least(m * inner * 4));
        gate_up(both, Type::f32, mixed, inner);
        for (int64_t i = 0; i < m; i++) {
            const size_t choice = size_t(routed.choice[size_t(first + i)]);
            dshares[choice] = dot(mixed + i * inner, given + i * wide, inner);
            for (int64_t e = 0; e < inner; e++) given[i * wide + e] *= routed.shares[choice];
        }
        gate_up_backward(both, given, wide, type, dboth, at(type, dboth, inner), 2 * inner);
        product(times(dboth, 2 * inner, w[0].back, 2 * inner, given, wide, m, 2 * inner, width));
    });
    by_rows(all(), [&](int64_t first, int64_t m) {
        std::memset(din + first * width, 0, size_t(m * width) * 4);
        for (int64_t row = first; row < first + m; row++) {
            const size_t i = size_t(row * routed.k);
            for (size_t j = i; j < i + size_t(routed.k); j++)
                add_rows(din + row * width, width, chosen + routed.place[j] * wide, wide, 1, width);
            choose_backward(kept.router + row * n, n, routed.k, plan.among_chosen, &routed.chosen[i], &routed.shares[i],
                            &dshares[i], drouter + row * n);
        }
        typed(drouter + first * n, n, at(type, drouter_typed, first * n), n, m, n);
    });
    shared_product(times(drouter_typed, n, layer.router.back, n, din, width, pass.n_rows, n, width, true), pass.threads);
}

// From the gradient of the stream to one of what `add_linear` multiplied, for products.
void Call::slope_of_added(const Block& of, const float* norm, const float* before, void* to) const {
    const int64_t n = plan.width;
    by_rows(of, [&](int64_t row, int64_t m) {
        const int64_t place = row * n;
        const float* slope = dx + place;
        if (norm || plan.residual != 1.0f) {
            std::memset(dy + place, 0, size_t(m * n) * 4);
            add_rows(dy + place, n, dx + place, n, m, n, plan.residual);
            if (norm) rms_norm_backward(before + place, n, norm, plan.epsilon, dy + place, n, dy + place, n, false, m, n);
            slope = dy + place;
        }
        typed(slope, n, at(type, to, place), n, m, n);
    });
}

void Call::backward_layer(int64_t index, Kept& kept, const float* x_in) {
    const Layer& layer = plan.layers[index];
    const int64_t wide = attended(plan), inner = plan.inner, width = plan.width, n = joint(plan);
    auto through_norm = [&](const Block& of, const float* slope, const float* from, const float* weight) {
        by_rows(of, [&](int64_t row, int64_t m) {
            const float* own = slope + (row - of.first) * width;
            if (!weight) return add_rows(dx + row * width, width, own, width, m, width);
            rms_norm_backward(from + row * width, width, weight, plan.epsilon, own, width, dx + row * width, width, true, m, width);
        });
    };
    if (layer.experts) {
        experts_back(layer, kept, dx);
        through_norm(all(), din, kept.x_mid, layer.norm_mlp);
    } else {
        linear_back(
            index, DOWN, down_typed, kept.inner[DOWN], nullptr, true,
            [&](const Block& of) { slope_of_added(of, layer.norm_done, kept.of_mlp, down_typed); },
            [&](const Block& of, const float* slope) {
                by_rows(of, [&](int64_t row, int64_t m) {
                    void* to = at(type, dy_typed, row * 2 * inner);
                    gate_up_backward(gates(kept, row, m), slope + (row - of.first) * inner, inner, type, to, at(type, to, inner),
                                     2 * inner, at(type, a, row * inner), inner);
                });
            });
        linear_back(
            index, GATE_UP, dy_typed, kept.inner[GATE_UP], nullptr, true,
            [&](const Block& of) { norm(of, kept.x_mid, layer.norm_mlp, at(type, a, of.first * width)); },
            [&](const Block& of, const float* slope) { through_norm(of, slope, kept.x_mid, layer.norm_mlp); });
    }
    linear_back(
        index, OUT, down_typed, kept.inner[OUT], din, true,
        [&](const Block& of) {
            typed_rows(of, kept.out, at(type, a, of.first * wide), wide);
            slope_of_added(of, layer.norm_attended, kept.of_attention, down_typed);
        },
        [](const Block&, const float*) {});
    attention_back(index, kept);
    linear_back(
        index, QKV, dy_typed, kept.inner[QKV], nullptr, index > 0,
        [&](const Block& of) {
            norm(of, x_in, layer.norm_in, at(type, a, of.first * width));
            typed_rows(of, dy, at(type, dy_typed, of.first * n), n);
        },
        [&](const Block& of, const float* slope) {
            if (index) through_norm(of, slope, x_in, layer.norm_in);
        });
}

// ---- what a caller may ask ----------------------------------------------------------------------------------------------------

const char* fault_in_spans(const Pass& pass, const Span* spans, int64_t n) {
    for (int64_t s = 0; s < n; s++) {
        const Span& span = spans[s];
        if (span.n_rows < 1 || span.first_row < 0 || span.first_row + span.n_rows > pass.n_rows) return "a span has rows that are not there";
        if (span.first_position < 0 || span.n_table < 1 || span.first_position + span.n_rows > span.n_table * pass.block)
            return "a span has positions beyond its blocks";
        for (int64_t i = 0; i < span.n_table; i++)
            if (span.blocks[i] < 0 || span.blocks[i] >= pass.n_blocks) return "a span has a block that is not there";
    }
    return nullptr;
}

const char* fault_in(const Plan& plan, const Pass& pass) {
    if (pass.n_rows < 1 || pass.threads < 1 || pass.block < 1) return "a pass needs rows, threads and a size of blocks";
    for (int64_t row = 0; row < pass.n_rows; row++) {
        if (pass.tokens[row] < 0 || pass.tokens[row] >= plan.vocabulary) return "a token is outside the vocabulary";
        if (pass.positions[row] < 0 || pass.positions[row] >= plan.positions) return "a position is beyond the longest sequence";
    }
    if (pass.block % LANES || plan.head_width % LANES || plan.heads % plan.kv_heads || plan.heads / plan.kv_heads > 64)
        return "blocks and heads need a multiple of 16, and at most 64 query heads for each of keys";
    int64_t last = 0;
    for (int64_t r = 0; r < pass.n_runs; r++) {
        const Run& run = pass.runs[r];
        if (run.first < last || run.last <= run.first || run.last > pass.n_rows) return "runs of adapters are out of order";
        last = run.last;
    }
    const char* fault = fault_in_spans(pass, pass.spans, pass.n_spans);
    return fault ? fault : fault_in_spans(pass, pass.writes, pass.n_writes);
}

// The memory of a pass: what one layer needs, and what is kept of all of them.
struct Memory {
    std::vector<float*> x_in;  // of each layer, and after the last
    std::vector<Kept> kept;

    Memory(Carver& memory, const Call& call) {
        const Plan& plan = call.plan;
        for (int64_t layer = 0; layer <= plan.n_layers; layer++) {
            x_in.push_back(memory.take<float>(call.pass.n_rows * plan.width));
            if (!call.pass.recompute && layer < plan.n_layers) kept.emplace_back(memory, plan, call.pass.n_rows, call.columns);
        }
    }
};

// Carves a call's memory, and that of one layer where it is not kept; gives the bytes too.
std::pair<Kept, int64_t> carved(Call& call, bool backward, void* base) {
    const bool kept_elsewhere = call.pass.kept && !call.pass.recompute;
    Carver memory(base);
    call.carve(memory, backward);
    Kept one(memory, call.plan, kept_elsewhere ? 0 : call.pass.n_rows, call.columns);
    return {one, memory.used()};
}

Kept prepare(Call& call, bool backward) {
    return carved(call, backward, scratch.at_least(carved(call, backward, nullptr).second)).first;
}

void forward(const Plan& plan, const Pass& pass) {
    FlushDenormals flush;
    Call call(plan, pass);
    Kept one = prepare(call, false);
    Carver carver(pass.kept);
    Memory memory(carver, call);
    const int64_t width = plan.width, bytes = pass.n_rows * width * 4;
    call.by_rows(call.all(), [&](int64_t row, int64_t m) {
        embed(call.type, plan.embedding, pass.tokens + row, plan.embedding_scale, call.x + row * width, width, m, width);
    });
    for (int64_t layer = 0; layer < plan.n_layers; layer++) {
        if (pass.kept) std::memcpy(memory.x_in[layer], call.x, size_t(bytes));
        call.forward_layer(layer, pass.kept && !pass.recompute ? memory.kept[layer] : one);
    }
    if (pass.kept) std::memcpy(memory.x_in[plan.n_layers], call.x, size_t(bytes));
    call.by_rows(call.all(), [&](int64_t row, int64_t m) {
        rms_norm(call.x + row * width, width, plan.norm_out, plan.epsilon, Type::f32, pass.hidden + row * width, width, m, width);
    });
}

void backward(const Plan& plan, const Pass& pass, const float* slope) {
    FlushDenormals flush;
    Call call(plan, pass);
    Kept one = prepare(call, true);
    Carver carver(pass.kept);
    Memory memory(carver, call);
    const int64_t width = plan.width;
    call.by_rows(call.all(), [&](int64_t row, int64_t m) {
        rms_norm_backward(memory.x_in[plan.n_layers] + row * width, width, plan.norm_out, plan.epsilon, slope + row * width, width,
                          call.dx + row * width, width, false, m, width);
    });
    for (int64_t layer = plan.n_layers - 1; layer >= 0; layer--) {
        if (pass.recompute) {
            std::memcpy(call.x, memory.x_in[layer], size_t(pass.n_rows * width) * 4);
            call.forward_layer(layer, one);
        }
        call.backward_layer(layer, pass.recompute ? one : memory.kept[layer], memory.x_in[layer]);
    }
}

const char* head_product(const Plan& plan, const float* in, int64_t rows, float* out, int64_t threads, bool back) {
    const Weight& w = plan.head;
    if (rows < 1 || threads < 1) return "a product needs rows and threads";
    if (back && !w.rows && !w.back) return "the head was not packed for this";
    FlushDenormals flush;
    const Type type = type_of(plan);
    const int64_t k = back ? w.n : w.k, bytes = round_up(rows * k * bytes_of(type), 64);
    char* typed = static_cast<char*>(head_room.at_least(bytes + (back ? back_bytes(type, w) : 0)));
    parallel(threads, rows, [&](int64_t row) { write_typed(type, in + row * k, at(type, typed, row * k), k); });
    const bool unpacked = back && w.rows;
    const void* b = unpacked ? typed + bytes : back ? w.back : w.forward;
    for (int64_t first = 0, n = back ? w.k : w.n, step = unpacked ? PACKED : k; first < k; first += step) {
        const int64_t deep = std::min(step, k - first);
        if (unpacked) pack_back(w, type, first, deep, threads, typed + bytes);
        shared_product({at(type, typed, first), type, k, b, type, deep, out, n, rows, deep, n, first > 0, arithmetic_of(plan)}, threads);
    }
    return nullptr;
}

template <class F>
const char* guarded(F&& f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return "there is not enough memory for a pass";
    } catch (const std::exception&) {
        return "a thread of a pass failed";
    }
}

}  // namespace
}  // namespace motet

using namespace motet;

int64_t motet_kept_bytes(const Plan* plan, const Pass* pass) {
    Carver carver(nullptr);
    Memory memory(carver, Call(*plan, *pass));
    return carver.used();
}

int64_t motet_scratch_bytes(const Plan* plan, const Pass* pass) {
    Call forth(*plan, *pass), back(*plan, *pass);
    const int64_t of_row = forth.widest_out() * 4 + forth.widest_in() * bytes_of(forth.type);
    const int64_t blocks = forth.tall() ? pass->threads * BLOCK_TILES * TILE * of_row : 0;
    return std::max(carved(forth, false, nullptr).second, carved(back, true, nullptr).second) + blocks;
}

void motet_pack_adapter(const Plan* plan, const Adapter* adapter, const void* flat, int32_t backward, int64_t threads) {
    struct Matrix {
        int64_t flat, k, n, to, back;
    };
    std::vector<Matrix> all;
    for (int64_t i = 0; i < plan->n_layers * 4; i++) {
        const Lora& lora = adapter->linears[i];
        if (lora.n_parts) all.push_back({lora.flat, plan->layers[i / 4].linears[i % 4].k, lora.columns, lora.a, lora.a_back});
        for (int64_t p = 0; p < lora.n_parts; p++)
            all.push_back({lora.parts[p].flat, lora.rank, lora.parts[p].n, lora.parts[p].b, lora.parts[p].b_back});
    }
    const Type type = type_of(*plan);
    parallel(threads, int64_t(all.size()), [&](int64_t part) {
        const Matrix& own = all[size_t(part)];
        const void* from = at(type, flat, own.flat);
        pack(type, from, own.n, 1, own.k, own.n, type, adapter->packed + own.to);
        if (backward) pack(type, from, 1, own.n, own.n, own.k, type, adapter->packed + own.back);
    });
}

const char* motet_forward(const Plan* plan, const Pass* pass) {
    return guarded([&]() -> const char* {
        if (const char* fault = fault_in(*plan, *pass)) return fault;
        forward(*plan, *pass);
        return nullptr;
    });
}

const char* motet_backward(const Plan* plan, const Pass* pass, const float* slope) {
    return guarded([&]() -> const char* {
        if (const char* fault = fault_in(*plan, *pass)) return fault;
        if (!pass->kept || pass->keys) return "a pass without what was kept of it has no backward pass";
        const Weight& first = plan->layers[0].linears[0];
        if (!first.rows && !first.back) return "the weights were not packed for a backward pass";
        backward(*plan, *pass, slope);
        return nullptr;
    });
}

const char* motet_head(const Plan* plan, const float* hidden, int64_t rows, float* logits, int64_t threads) {
    return guarded([&] { return head_product(*plan, hidden, rows, logits, threads, false); });
}

const char* motet_head_back(const Plan* plan, const float* slope, int64_t rows, float* out, int64_t threads) {
    return guarded([&] { return head_product(*plan, slope, rows, out, threads, true); });
}
