// y = x W^T + bias from packed weights.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum tb_dtype { TB_F32 = 0, TB_BF16 = 1 };

// What happens to a result (float32, bias included) before it is stored: nothing, or y's present value is added (in float32).
enum tb_store { TB_SET = 0, TB_ADD = 1 };

enum { TB_TILE_N = 32 };  // outputs in one tile of packed weights

// Weights in tiles of 32 outputs, each tile one contiguous stream, zero-padded in both directions:
//   TB_BF16   [tiles][pairs][32][2]   pairs = ceil(k / 2)
//   TB_F32    [tiles][k][32]
typedef struct tb_packed {
  int n, k, dtype;     // outputs, inputs, enum tb_dtype
  int tiles;           // ceil(n / 32)
  size_t tile_bytes;
  const char* data;    // 64-byte aligned
  const float* bias;   // [tiles * 32], or NULL
} tb_packed;

#ifdef __cplusplus
extern "C" {
#endif

// Packs `blocks` row-major matrices as one layer whose outputs follow each other. src[i]: [rows[i], k], its rows ld[i] elements
// apart, of `dtype`. bias: NULL, or for each block NULL (zeros) or rows[i] values of `dtype`. Reads the sources in place (a mapped
// file will do), on the pool, and keeps none. NULL when there is no memory or a size is not in 1 ... 2^31 - 64.
tb_packed* tb_pack(int dtype, int blocks, const void* const* src, const int64_t* rows, const int64_t* ld, int64_t k,
                   const void* const* bias);
void tb_pack_free(tb_packed* w);
size_t tb_packed_bytes(const tb_packed* w);

// y[m, n] = x[m, k] W^T + bias, on the pool. x is of w->dtype, y of out_dtype; ldx and ldy are the distances between rows in elements.
// Every output is a float32 sum in one order, whatever m, the row's position, the number of threads and the split into parts: over
// 128 k (bf16: 1024; pairs at once on avx512bf16), ascending, and then over those sums, ascending; last the bias. bfloat16 outputs are rounded to nearest even, once. x and y must not overlap.
void tb_linear(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store);

// The same for outputs of tiles tile_begin <= t < tile_end only, on the calling thread: one worker's share, for use inside a task.
// y points to output 0 (not to the share's first): output j of row i goes to y[i * ldy + j].
void tb_linear_part(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store,
                    int tile_begin, int tile_end);

// The tiles of worker `index` of `count`: the split that tb_linear, and the packing (first touch), use.
static inline int tb_share(int tiles, int index, int count) { return (int)((int64_t)tiles * index / count); }

#ifdef __cplusplus
}
#endif
