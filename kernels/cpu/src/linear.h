// y = x W^T + bias from packed weights.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum tb_dtype { TB_F32 = 0, TB_BF16 = 1 };

// What happens to a result (float32, bias included) before it is stored: nothing, or y's present value is added (in float32).
enum tb_store { TB_SET = 0, TB_ADD = 1 };

enum { TB_TILE_N = 32 };  // outputs in one tile of packed weights

// Layouts of weights: as they came, int8 with a scale per output, or a type of GGUF's.
enum tb_format { TB_PLAIN = 0, TB_I8, TB_Q4_0, TB_Q4_1, TB_Q5_0, TB_Q5_1, TB_Q8_0, TB_Q4_K, TB_Q5_K, TB_Q6_K, TB_FORMATS };

// What the products of a layer read: rows of its dtype, or int8 made of them (quant.h).
enum tb_input { TB_VALUES = 0, TB_INT8_ROWS = 1, TB_INT8_BLOCKS = 2 };

// Tiles of one format that follow each other: outputs first ... first + n, the last tile padded.
typedef struct tb_segment {
  int format, tile, tiles, first, n;
  size_t tile_bytes;
  const char* data;    // 64-byte aligned
} tb_segment;

// Weights in tiles of 32 outputs, each tile one contiguous stream, zero-padded in both directions:
//   TB_PLAIN, TB_BF16   [tiles][pairs][32][2]   pairs = ceil(k / 2)
//   TB_PLAIN, TB_F32    [tiles][k][32]
//   others              quant_layout.h
typedef struct tb_packed {
  int n, k, dtype;     // outputs, inputs, enum tb_dtype (of the activations, and of plain weights)
  int tiles;           // of all segments
  int input;           // enum tb_input
  int segments;        // 1 where all outputs are of one format; tile t then starts at output 32 t
  tb_segment* segment;
  const float* bias;   // [tiles * 32], by tile, or NULL
  size_t bytes;        // of weights, scales and bias
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
// Quantised layers: see quant.h. Plain ones: every output is a float32 sum in one order, whatever m, the row's position, the number of threads and the split into parts: over
// 128 k (bf16: 1024; pairs at once on avx512bf16; all k in tiles of 32 on amx), ascending, and then over those sums, ascending; last the bias. bfloat16 outputs are rounded to nearest even, once. x and y must not overlap.
void tb_linear(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store);

// The same for outputs of tiles tile_begin <= t < tile_end only, on the calling thread: one worker's share, for use inside a task.
// y points to output 0 (not to the share's first): output j of row i goes to y[i * ldy + j].
// Quantised layers quantise x in each call: where there are several, tb_quantised_part (quant.h) spares that.
void tb_linear_part(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store,
                    int tile_begin, int tile_end);

// y[i, k] = row ids[i] of the matrix as it is stored (dequantised: scale * integer, plus minimum, in float32), rounded to dtype; on the
// pool. ids are not checked.
void tb_packed_rows(const tb_packed* w, const int64_t* ids, int rows, int dtype, void* y);
void tb_packed_row(const tb_packed* w, int64_t id, int dtype, void* y);  // one, on the calling thread

// The tiles of worker `index` of `count`: the split that tb_linear, and the packing (first touch), use.
static inline int tb_share(int tiles, int index, int count) { return (int)((int64_t)tiles * index / count); }

#ifdef __cplusplus
}
#endif
