// What a linear's instruction-set versions share. Internal: other kernels use linear.h.
#pragma once
#include "linear.h"

// Sums are taken over this many steps, and those sums added up in order: rounding errors stay small where k is large. With bf16
// weights, whose own rounding is much larger, seldom.
enum { TB_FOLD_F32 = 128, TB_FOLD_BF16 = 512 };

// A block of the product: rows of prepared activations times a range of tiles, over `steps` steps of k.
typedef struct tb_block {
  const char* w;       // the first tile's first step
  size_t tile_bytes;   // from one tile to the next
  int tiles, steps;    // a step is one k (f32) or two (bf16); a multiple of TB_FOLD_... but in the last block over k
  const void* x;       // [m] rows; at least `steps` steps each, zero-padded. float32, or bf16 for kernels with native_bf16
  size_t ldx;          // in elements
  int m;
  float* partial;      // [tiles][m][32]: sums so far, where k is done in several blocks; else NULL
  int first, last;     // of the blocks over k
  void* y;             // the first tile's first output
  size_t ldy;
  int n;               // outputs that exist from there on
  const float* bias;   // the first tile's first output's, or NULL
  int out_dtype, store;
} tb_block;

typedef struct tb_linear_kernels {
  void (*f32)(const tb_block*);
  void (*bf16)(const tb_block*);
  int native_bf16;     // bf16 takes bf16 activations, not float32
  int row_group;       // rows of the largest register tile: blocks of rows are multiples of it
  size_t cache_bytes;  // of a core's second-level cache for activations
} tb_linear_kernels;

#ifdef __cplusplus
extern "C" {
#endif
extern const tb_linear_kernels tb_linear_scalar, tb_linear_avx2, tb_linear_avx512, tb_linear_avx512bf16, tb_linear_amx;
#ifdef __cplusplus
}
#endif

static inline float tb_bf16_to_f32(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

// To nearest even; NaN stays NaN.
static inline uint16_t tb_f32_to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
