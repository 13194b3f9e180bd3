// Paged causal attention, the same bits for a row whatever batch, chunk, split or thread it is computed in.
//
//   positions of a request   0       64      128     192     256                 512
//   tiles of 64              |-------|-------|-------|-------|-- ...
//   parts of 4 tiles         |-------------------------------|-------------------|-- ...
//
// A row runs through the tiles of a part in order, with the online softmax (https://arxiv.org/abs/1805.02867): a reference, a sum and a
// weighted sum of V, in float32. The reference is the maximum of the row's first tile, and moves, with what was summed, when a tile's
// maximum is higher by more than 8 powers of two. Parts start anew and are then folded together in order. So
// parts can be computed by different threads (long contexts) or one after the other (prompts) with the same result. What a row must
// not see has weight 0; tiles and parts of which it sees nothing are left out.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "linear.h"

enum { TB_TILE = 64, TB_PART_TILES = 4, TB_PART = TB_TILE * TB_PART_TILES };

typedef struct tb_batch {
  int tokens, requests, block_size;
  const int64_t* slots;        // [tokens] where each new token's K/V is stored: block * block_size + offset
  const int32_t* query_start;  // [requests + 1]
  const int32_t* context_len;  // [requests] stored tokens, the new ones included
  const int32_t* table_start;  // [requests] where each block table starts in `blocks`
  const int32_t* blocks;
} tb_batch;

// Beside enum tb_dtype, for caches only: a token's head is a row of head_dim int8 (head_dim a multiple of 4) and then one float32 that
// they are to be multiplied with, max |x| / 127 of that row alone.
enum { TB_KV_INT8 = 16 };

// Caches are [blocks, block_size, kv_heads, row], but for those of bfloat16 that tb_kv_paired names. Those hold a block's heads one behind
// the other, each as the products read it, in pairs (32 bits) of neighbours:
//   K  [block_size / 16] groups of [head_dim / 2][16 positions] pairs of dimensions
//   V  [block_size / 2][head_dim] pairs of positions
// Who stores a request's last token at an even position leaves 0 at the odd one behind it in V: weights of a pair may be 0, what they are
// multiplied with must be finite. All else behind the end is masked or not read.
enum { TB_PAIRED_GROUP = 16 };

typedef struct tb_heads {
  int heads, kv_heads, head_dim;
  int dtype;      // of q and of the output
  int kv_dtype;   // of the caches: enum tb_dtype or TB_KV_INT8
  int window;     // 0: none
  float scale, softcap;  // softcap 0: none
} tb_heads;

// A token's head in the cache
static inline size_t tb_kv_head_bytes(const tb_heads* h) {
  return h->kv_dtype == TB_KV_INT8 ? h->head_dim + sizeof(float) : h->head_dim * (h->kv_dtype == TB_BF16 ? 2 : 4);
}

// Rows of one KV head: `tokens` consecutive tokens of one request times the query heads that share the KV head.
typedef struct tb_attention_rows {
  const tb_heads* heads;
  const void* q;  // the first token's first query head; a token's heads follow each other
  size_t q_step;  // elements from token to token
  const void* k;  // the caches, at this KV head of block 0
  const void* v;
  int paired;     // tb_kv_paired
  const int32_t* blocks;
  int block_size;
  int position, tokens;        // of the first token
  int part_begin, part_end;    // parts to go through
  const char* const* later;    // rows that are needed soon: brought into the cache in the course of the tiles. Paired: K's, then V's groups
                               // of the tile that comes behind this task's last.
  int later_rows, later_bytes;
  float *sums, *most, *total;  // [rows, width] weighted sums of V, [rows] maxima, [rows] sums of weights
} tb_attention_rows;

typedef struct tb_attention_kernel {
  int lanes;
  size_t (*scratch)(const tb_heads* heads, int rows);  // bytes
  // Goes through the parts; leaves the folded sums, most, total of each row. Untouched where a row sees nothing of them.
  void (*run)(const tb_attention_rows* rows, void* scratch);
  // Folds a later part's results into earlier ones
  void (*fold)(float* sums, float* most, float* total, const float* part_sums, float part_most, float part_total, int width);
  // y = sums / total
  void (*finish)(const float* sums, float total, void* y, int dtype, int n);
  // A row of an int8 cache from n elements of dtype
  void (*quantize)(int dtype, const void* x, void* row, int n);
  // A token's head of k and v to position `offset` of a block's head in paired caches. last: no token behind it is stored in this step.
  // NULL: the level reads none
  void (*store_pairs)(const void* k, const void* v, int dim, int offset, int last, void* to_k, void* to_v);
} tb_attention_kernel;

#ifdef __cplusplus
struct tb_attention_plan;  // the tasks of one step, shared by layers of one shape

extern "C" {
#endif

const tb_attention_kernel* tb_attention_of_level(void);

// Whether the caches are paired at the level in use. Who writes them and who reads them must be of one answer: of one level, dtype, kv_dtype,
// head_dim and block size.
int tb_kv_paired(const tb_heads* heads, int block_size);

// What a layer's K/V write needs: copies rows of k, v (a token's heads follow each other; steps from token to token, in elements) to
// their slots, cast to the caches' dtype or quantised. Then clears the rest of each request's last block if this step began it, except in
// paired caches.
void tb_write_kv(const tb_heads* heads, const tb_batch* batch, const void* k, size_t k_step, const void* v, size_t v_step,
                 void* k_cache, void* v_cache);

// Attention of q over caches that hold the new tokens already, on the pool. out: [tokens, heads, head_dim], without gaps.
void tb_attention(const tb_heads* heads, const tb_batch* batch, const void* q, size_t q_step, const void* k_cache,
                  const void* v_cache, void* out);

#ifdef __cplusplus
}

#include <stdlib.h>

// For callers inside a job of the pool: make the plan on one thread, then let every worker run its tasks in any order.
struct tb_attention_task {
  int request, kv_head, kv_heads, token, tokens, part_begin, part_end;
  int split;  // -1, or the split that it is a part of
};
struct tb_attention_split {
  int parts, rows;  // rows of all its KV heads
  size_t at;        // of its first part in `partial`
  int left;         // parts to go; the worker that finishes the last folds them
};
struct tb_attention_plan {
  int tasks, splits;
  tb_attention_task* task;
  tb_attention_split* split;
  float* partial;
  int task_room, split_room;
  size_t partial_room;
};
void tb_attention_plan_make(tb_attention_plan* plan, const tb_heads* heads, const tb_batch* batch, int threads);
void tb_attention_plan_reset(tb_attention_plan* plan);  // before it is run again
void tb_attention_plan_free(tb_attention_plan* plan);
void tb_attention_task_run(tb_attention_plan* plan, int index, const tb_heads* heads, const tb_batch* batch, const void* q,
                           size_t q_step, const void* k_cache, const void* v_cache, void* out);
// One token's k and v (its heads behind each other) to its slot; several threads may store tokens of one request.
void tb_store_kv(const tb_heads* heads, const tb_batch* batch, int token, const void* k, const void* v, void* k_cache, void* v_cache);
// What tb_store_kv will write to into the processor's cache, where that is in many places.
void tb_bring_slot(const tb_heads* heads, const tb_batch* batch, int token, const void* k_cache, const void* v_cache);
void tb_clear_rest(const tb_heads* heads, const tb_batch* batch, int request, void* k_cache, void* v_cache);
#endif
