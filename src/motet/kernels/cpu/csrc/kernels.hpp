// Kernels of Motet for CPUs: every function computes rows by themselves, in one order that no number of rows, threads or
// neighbours changes.
//
// One library is built for each form of the code (portable, avx2, avx512, amx) from the same sources; all give the same bits.
// A function here runs on the calling thread. Threads share work by rows or by columns (see pool.hpp), never by k.
// Every caller holds a `FlushDenormals` while it computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace motet {

using bf16 = uint16_t;

enum class Type : int32_t { f32 = 0, bf16 = 1 };
inline int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// How products add up (see `product`).
enum class Arithmetic : int32_t { exact = 0, dpbf16 = 1 };

#if defined(MOTET_AMX)
constexpr bool MATRIX_UNITS = true;
#else
constexpr bool MATRIX_UNITS = false;
#endif
constexpr int64_t LANES = 16;  // columns of a unit, keys of a unit

// Flushes denormals to zero on this thread, and gives the caller's mode back.
class FlushDenormals {
 public:
    FlushDenormals();
    ~FlushDenormals();

 private:
    uint64_t before_;
};

const char* form();            // "portable", "avx2", "avx512", "amx"
bool form_runs(const char* form);  // whether this processor has the instructions of a form
bool amx_runs();               // whether there are matrix units, and the system lets this process use them
bool has_dpbf16();             // whether the processor multiplies in pairs itself; else `dpbf16` is computed in its order, slowly
int64_t round_up(int64_t n, int64_t multiple);

// Memory of a thread that stays with it for the next call; much that a long pass needed goes back when a short one comes.
class Scratch {
 public:
    ~Scratch() { std::free(memory_); }
    void* at_least(int64_t bytes) {
        if (bytes > size_ || (size_ > (int64_t{16} << 20) && bytes < size_ / 4)) {
            std::free(memory_);
            size_ = 0;
            memory_ = std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 4096)));
            if (!memory_) throw std::bad_alloc();
            size_ = round_up(bytes, 4096);
        }
        return memory_;
    }

 private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

// ---- products ---------------------------------------------------------------------------------------------------------

// A packed matrix B [k × n]: units of 16 columns, the last one filled up with zeros.
//   bf16: [unit][pair of k][16 columns][2]   (the last pair of an odd k is filled up with a zero)
//   f32:  [unit][k][16 columns]
int64_t packed_bytes(Type type, int64_t k, int64_t n);

// Packs B, whose element (k, n) is source[k * stride_k + n * stride_n]. A frozen weight [outputs, inputs] of torch is
// stride_k = 1, stride_n = inputs for x · Wᵀ, and stride_k = inputs, stride_n = 1 for dy · W.
void pack(Type source_type, const void* source, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, Type type,
          void* packed);

// C[m × n] = A · B, or C += A · B. A has rows of k numbers, `lda` apart. fp32 sums.
//   exact:  for each 32 of k from the first: even = 0, odd = 0; even = fma(a[2i], b[2i], even), odd = fma(a[2i+1], b[2i+1],
//           odd) for i upwards; C = C + (even + odd). C starts as 0 if `add` is false.
//   dpbf16: for each pair i upwards C = dp(C, a[2i], a[2i+1], b[2i], b[2i+1]), as vdpbf16ps does; bf16 only.
// Types: bf16 · bf16, f32 · f32, and f32 · bf16 (exact only; A is used as it is). An odd k ends with half a pair; the other
// half is not read as a number. Columns lie in lanes: nothing moves from one row or column to another.
struct Product {
    const void* a;
    Type a_type;
    int64_t lda;
    const void* b;  // packed
    Type b_type;
    int64_t b_k;  // the k that B was packed with, at least k: a product may stop before B ends
    float* c;
    int64_t ldc;
    int64_t m, k, n;
    bool add;
    Arithmetic arithmetic;
};
void product(const Product& p);
// An exact product of bf16 by bf16 by matrix units, the processor's or emulated; k is even and below 32, or a multiple of 32.
void product_by_tiles(const Product& p, bool emulated);

// The columns of units [first, last) of p: what one of several threads computes.
Product columns_of(const Product& p, int64_t first_unit, int64_t last_unit);

// ---- rows: x is fp32 [m][n], rows `ld` apart ------------------------------------------------------------------------------

void to_bf16(const float* x, bf16* out, int64_t n);  // to the nearest, ties to even
void add_rows(float* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor = 1.0f);  // x += factor · y
// x [m × n] += factor · yᵀ, in two roundings; y has whole squares of 16 × 16, some of whose numbers are not used.
void add_turned(float* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor);
// x [m × n] += factor · y, or its transpose as above, in whole multiples of 2⁻⁴⁴; returns the largest magnitude of those added.
// One that is NaN, or 2⁶² or more, adds nothing and counts as 2⁶².
int64_t add_rows_whole(int64_t* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n);
int64_t add_turned_whole(int64_t* x, int64_t ldx, const float* y, int64_t ldy, int64_t m, int64_t n, float factor);
void embed(Type type, const void* table, const int64_t* tokens, float scale, float* out, int64_t ldo, int64_t m, int64_t n);

// out = x / rms(x) · weight; weight may be null.
void rms_norm(const float* x, int64_t ldx, const float* weight, float epsilon, Type out_type, void* out, int64_t ldo,
              int64_t m, int64_t n);
// dx = or += (`add`) the gradient, from x and the gradient of out.
void rms_norm_backward(const float* x, int64_t ldx, const float* weight, float epsilon, const float* dout, int64_t ldd,
                       float* dx, int64_t lddx, bool add, int64_t m, int64_t n);

// Rotates halves of the first `rotated` numbers of `heads` heads of each row in place. cos, sin: [m][rotated / 2] fp32, `ldt`
// apart. `back`: the transpose.
void rope(float* x, int64_t ldx, const float* cos, const float* sin, int64_t ldt, bool back, int64_t m, int64_t heads,
          int64_t width, int64_t rotated);

enum class Gate : int32_t { silu = 0, gelu_tanh = 1 };
struct Gates {  // x and up [m][n], rows `ld` apart
    Gate gate;
    Type type;
    const void *x, *up;
    int64_t ld, m, n;
};
// out = gate(x) · up
void gate_up(const Gates& gates, Type out_type, void* out, int64_t ldo);
// dx and dup, rows `lddx` apart, from the gradient of out; out, as of `gate_up`, or null.
void gate_up_backward(const Gates& gates, const float* dout, int64_t ldd, Type out_type, void* dx, void* dup, int64_t lddx,
                      void* out = nullptr, int64_t ldo = 0);

// ---- experts ----------------------------------------------------------------------------------------------------------------

// The k largest of a row's n logits, of equals the first, in the order of their numbers, and the share of each in the sum of all
// exponentials, or of the chosen ones alone.
void choose(const float* logits, int64_t n, int64_t k, bool among_chosen, int32_t* chosen, float* shares);
void choose_backward(const float* logits, int64_t n, int64_t k, bool among_chosen, const int32_t* chosen, const float* shares,
                     const float* dshares, float* dlogits);
float dot(const float* x, const float* y, int64_t n);

// ---- attention: keys and values in units of 16 keys ---------------------------------------------------------------------------

// A pool has blocks of `block` keys (a multiple of 16). The unit u of a block and a KV head begins at element
// ((block · n_kv + head) · block + 16 u) · width of its pool:
//   keys:   a packed B [width × 16 keys]     bf16 [width / 2][16 keys][2]           f32 [width][16 keys]
//   values: a packed B [16 keys × width]     bf16 [width / 16][8 pairs][16][2]      f32 [width / 16][16 keys][16]
// so that a pool takes as much memory as plain rows do. width is a multiple of 16.
struct Pool {
    Type type;
    void* keys;
    void* values;
    int64_t n_blocks;  // for bounds
    int64_t block, n_kv, width;
};

// A run of rows of one sequence: row `first_row` + i is at position `first_position` + i and reads keys [0, position], or the
// last `window` of them. blocks [n_table]: which block of the pool has keys [block · i, block · (i + 1)).
struct Span {
    int64_t first_row, n_rows, first_position;
    const int32_t* blocks;
    int64_t n_table;
};

// Puts keys and values (fp32 [rows][n_kv · width]) of a span's rows into the pool.
void write_keys_values(const Pool& pool, const Span& span, const float* k, int64_t ldk, const float* v, int64_t ldv);

struct Attention {
    Pool pool;
    Arithmetic arithmetic;  // queries and weights are rounded to the pool's type first
    int64_t fold;           // query heads of a KV head; query head h reads KV head h / fold
    float scale, softcap;   // softcap 0: none
    int64_t window;         // 0: none
    const float* sinks;     // [heads] or null
    const float* q;         // fp32 [rows][heads · width], rotated
    int64_t ldq;
    float* out;  // fp32 [rows][heads · width]
    int64_t ldo;
    float* log_sums;  // fp32 [rows][heads]: of each row's exponentials, for the backward pass; may be null
};
// Order, for each row and head: scores in units of 16 keys, times scale; their largest; weights exp(score − largest), their sum
// in 16 lanes over units, the lanes added as a tree; out = Σ over units (a product that starts from zero for each) / sum.
// Keys out of a row's reach are left out, never multiplied by zero. Heads [first_head, last_head) are KV heads.
void attend(const Attention& call, const Span& span, int64_t first_head, int64_t last_head);

struct AttentionBackward {
    Attention call;       // with out and log_sums of the forward pass
    const float* dout;    // as out
    float* dq;            // fp32 as q, set
    int64_t lddq;
    float* dk;            // fp32 [block][n_kv][block keys][width] in the places of the pool, rows of keys; added to
    float* dv;
};
// Rows in order, so that a span's sums begin at its first row. Heads as in `attend`.
void attend_backward(const AttentionBackward& call, const Span& span, int64_t first_head, int64_t last_head);

// ---- logits ------------------------------------------------------------------------------------------------------------

// Of a row of n logits, divided by a temperature.
struct RowSum {
    float peak;       // the largest of logit / temperature
    float log_total;  // log Σ exp(logit / temperature − peak); a logprob is (logit / temperature − peak) − log_total
    float entropy;    // nats
    int32_t usable;   // 0 where a logit is NaN, or the peak is infinite
    double total;     // Σ exp(logit / temperature − peak): in blocks of 256, and blocks in order
};
int64_t blocks_of(int64_t n);
// blocks [blocks_of(n)]: their sums; weights [n]: the exponentials, perhaps in the place of the logits. Both may be null.
void row_sum(const float* logits, int64_t n, float temperature, RowSum* sum, double* blocks, float* weights);
int64_t most_likely(const float* logits, int64_t n);  // the first place of the largest
// The token at which the cumulative exponentials pass uniform · total: block by block, then within one.
int64_t draw(const float* logits, int64_t n, float temperature, const RowSum& sum, const double* blocks, double uniform);
float logprob(const float* logits, int64_t token, float temperature, const RowSum& sum);
// weights [n], as `row_sum` gives them, become d logprob(token) / d logits = (onehot − p) / temperature.
void logprob_slope(float* weights, int64_t n, float temperature, const RowSum& sum, int64_t token);

// ---- beside the passes -----------------------------------------------------------------------------------------------

double exp_double(double x);  // ∞ above 709, 0 below −708
void cos_sin_double(double x, double* cosine, double* sine);  // |x| < 2^20
double norm(const float* x, int64_t n);  // Euclidean: squares in 16 lanes of doubles, then a tree

// ---- optimizer ---------------------------------------------------------------------------------------------------------

struct AdamW {
    float lr, beta1, beta2, epsilon, weight_decay;
    float factor;  // of the gradient, which is clipped so
    int64_t step;  // from 1
};
struct Learned {  // vectors of one adapter
    float *master, *gradient, *mean, *square;
    void* copy;  // gets the new masters, the first `scaled` of them times `scaling`: a multiple of 16
    Type type;   // of the copy
    float scaling;
    int64_t scaled, n;
};
// One step in one pass over memory; clears the gradient.
void adamw(const AdamW& options, const Learned& own, int64_t threads);

}  // namespace motet
