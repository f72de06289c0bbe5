// A decoder's passes in one call each: forward over packed rows, backward to the gradients of adapters.
//
// The structures are plain C and are filled by motet/kernels/cpu/plan.py, field for field. Every function returns null, or a
// sentence that says what is wrong; nothing was computed then, or a part where memory was short.
#pragma once
#include "kernels.hpp"

namespace motet {

struct Weight {          // of k inputs and n outputs; gate and up, or queries, keys and values, lie side by side
    const void* forward;  // packed [k × n]
    const void* rows;     // [n × k] as torch has it, of the plan's type: gradients pack a part when they read it; may be null
    const void* back;     // else packed [n × k]; null where nothing is trained
    const float* bias;    // [n] or null
    int64_t k, n;
};

struct Layer {
    const float *norm_in, *norm_mlp;         // [width] of what attention and MLP read, or null
    const float *norm_attended, *norm_done;  // [width] of what they give, or null
    const float *norm_q, *norm_k;            // [head_width], or [all heads] (`norms_whole`), or null
    const float *cosines, *sines;            // [positions × rotated / 2], or null: no rotation
    Weight linears[4];                       // queries keys values, output, gate up, down
    Weight router;                           // one output for each expert
    const Weight* experts;                   // [n_experts][gate up, down] in the place of both linears, or null
    int64_t window;                          // 0: none
    float scale, softcap;                    // of attention's scores; softcap 0: none
};

struct Plan {
    int64_t n_layers, width, heads, kv_heads, head_width, inner, vocabulary, positions;
    int64_t rotated;      // numbers of a head that are rotated, from its first
    int64_t norms_whole;  // norms of queries and keys go over all heads at once
    int64_t n_experts, n_chosen, among_chosen;  // see `choose`; 0 where there are none
    int32_t type, arithmetic, gate;
    float epsilon;
    float embedding_scale;  // embeddings are multiplied with it
    float residual;         // what attention and MLP give is multiplied with it
    const Layer* layers;
    const float* norm_out;
    const void* embedding;      // [vocabulary × width]
    const float* query_scales;  // [positions] that rotated queries are multiplied with, or null
    Weight head;
};

struct Part {                 // an adapted layer among fused ones
    int64_t first, n;         // its columns
    int64_t b, b_back;        // where B is, packed [rank × n] and [n × rank], in bytes of `Adapter::packed`
    int64_t flat;             // where B [rank × n] and its gradient begin in an adapter's vectors
};

struct Lora {  // adapters on one fused product
    int64_t rank, columns;  // columns of A, filled up with zeros
    int64_t a, a_back;      // where A is, packed [k × columns] and [columns × k]
    int64_t flat;           // where A [k × columns] and its gradient begin
    const Part* parts;
    int64_t n_parts;  // 0 where none is adapted
};

struct Adapter {
    const Lora* linears;  // [n_layers × 4], of all adapters of one layout
    char* packed;
};

struct Run {  // rows [first, last) have an adapter
    int64_t first, last;
    const Adapter* adapter;
    float scaling;     // what the gradient of A is multiplied with
    void* gradient;    // added to; null where nothing is trained
    int64_t* largest;  // null where `gradient` is in fp32; else it is in whole multiples of 2⁻⁴⁴, and this the largest added
};

struct Pass {
    int64_t n_rows, n_spans, n_writes, n_runs, threads;
    const int64_t *tokens, *positions;  // [n_rows]
    const Span* spans;                  // rows that attend; rows of none get zeros
    const Span* writes;                 // rows whose keys and values go to blocks
    const Run* runs;                    // in the order of their rows, apart from each other
    void* const *keys, *const *values;  // the pool of each layer; null where one pool of the pass serves all
    int64_t n_blocks, block;
    void* kept;       // for the backward pass, `motet_kept_bytes` of it; null where there is none
    int64_t recompute;  // keep the inputs of layers alone
    float* hidden;    // [n_rows × width]
};

}  // namespace motet

#define MOTET_CALL extern "C" __attribute__((visibility("default")))

MOTET_CALL int64_t motet_kept_bytes(const motet::Plan* plan, const motet::Pass* pass);
// What the calling thread needs beside, in a backward pass as in a forward pass.
MOTET_CALL int64_t motet_scratch_bytes(const motet::Plan* plan, const motet::Pass* pass);
// Packs an adapter's matrices, which lie in `flat`; those of backward passes only if `backward`.
MOTET_CALL void motet_pack_adapter(const motet::Plan* plan, const motet::Adapter* adapter, const void* flat, int32_t backward,
                                   int64_t threads);
MOTET_CALL const char* motet_forward(const motet::Plan* plan, const motet::Pass* pass);
MOTET_CALL const char* motet_backward(const motet::Plan* plan, const motet::Pass* pass, const float* slope);
MOTET_CALL const char* motet_head(const motet::Plan* plan, const float* hidden, int64_t rows, float* logits, int64_t threads);
MOTET_CALL const char* motet_head_back(const motet::Plan* plan, const float* slope, int64_t rows, float* out, int64_t threads);
