// Products of quantised weights (tb_packed whose input is not TB_VALUES) with int8 activations.
//
//   TB_INT8_ROWS    weights int8 with a scale per output. A row of x has one scale. Integer sums are exact, and become float32 every
//                   65536 k, ascending: y = (sum * weight scale) * scale of x + bias
//   TB_INT8_BLOCKS  GGUF's types: a scale, in some types a minimum, for 32 or 16 weights. x has a scale for every 32 k. Integer sums of
//                   a block are exact; over blocks, ascending, in float32: y = fma(sum * scale of x, scale, y), and in types with a
//                   minimum y = fma(minimum, scale of x * sum of x, y); last the bias (no fused operations on TB_SCALAR)
//
// A scale of x is max|x| / 127, its integers x * (127 / max|x|) to nearest even. Below 2^-96 a maximum counts as 0: integers and scale
// are 0. Where it is not finite the scale is NaN, and with it the results of that row alone.
#pragma once
#include "linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// Beside enum tb_dtype, for sources of tb_pack_int8 only: a row is k int8, and from the next multiple of 4 on the float32 that they are
// multiplied with; ld counts bytes.
enum { TB_STORED_INT8 = 17 };

// As tb_pack, but biases are float32, and dtype is the activations'.
// The sources are of dtype `source`; a row's scale is max|w| / 127, rounding as that of activations.
tb_packed* tb_pack_int8(int dtype, int source, int blocks, const void* const* src, const int64_t* rows, const int64_t* ld, int64_t k,
                        const void* const* bias);
// src[i]: blocks of GGUF's type formats[i] (enum tb_format, not TB_PLAIN or TB_I8), ld[i] bytes from row to row; k a multiple of 32 (K
// types: 256), else NULL. Outputs of different types start at a tile of their own.
tb_packed* tb_pack_gguf(int dtype, int blocks, const int* formats, const void* const* src, const int64_t* rows, const int64_t* ld,
                        int64_t k, const void* const* bias);
// Bytes of one row of k weights in a file; 0 where k does not fit the type.
size_t tb_gguf_row_bytes(int format, int64_t k);

// Bytes from one quantised row of k to the next (a multiple of 64).
size_t tb_input_bytes(int input, int64_t k);
// One row, of dtype, on the calling thread. q: tb_input_bytes(input, k) bytes; what a row gets depends on it alone.
void tb_quantise(int input, int dtype, const void* x, int64_t k, void* q);
// Columns begin ... begin + n of a row of TB_INT8_BLOCKS; both multiples of 32. x points to column `begin`, q to the row's start.
void tb_quantise_blocks(int dtype, const void* x, int64_t begin, int64_t n, void* q);

// tb_linear_part for rows that are quantised already, row_bytes apart.
void tb_quantised_part(const tb_packed* w, const void* q, size_t row_bytes, void* y, size_t ldy, int m, int out_dtype, int store,
                       int tile_begin, int tile_end);
// tb_linear calls this: the rows are quantised on the pool, then multiplied.
void tb_quantised_linear(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store);

#ifdef __cplusplus
}
#endif
