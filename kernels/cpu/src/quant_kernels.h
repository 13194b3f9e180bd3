// What a quantised product's instruction-set versions share. Internal: other kernels use quant.h.
#pragma once
#include "linear_kernels.h"
#include "quant_layout.h"

// Of a tb_block (linear_kernels.h): steps counts steps of 4 k (TB_I8) or blocks of 32 k, ldx bytes; first, last and partial aren't used.
typedef struct tb_quant_kernels {
  void (*product[TB_FORMATS])(const tb_block*);
  void (*rows)(int dtype, const void* x, int64_t k, void* q);
  void (*blocks)(int dtype, const void* x, int64_t blocks, tb_x_block* q);
} tb_quant_kernels;

// 32 k of a tile of any block format: weights [k][output] as stored, scales and minima of their parts, in float32.
struct tb_unpacked {
  uint8_t q[32][TB_TILE_N];
  float scale[2][TB_TILE_N];  // [1]: of the second 16, or the same again
  float minimum[TB_TILE_N];
};

extern "C" {
extern const tb_quant_kernels tb_quant_scalar, tb_quant_avx2, tb_quant_avx512vnni;
extern void (*const tb_int8_tiles)(const tb_block*);  // with AMX, instead of product[TB_I8]
void tb_unpack(int format, const char* header, const char* block, tb_unpacked* out);
// The same of output j alone.
void tb_unpack_row(int format, const char* header, const char* block, int j, uint8_t* q, float* scale, float* minimum);
}

static inline float tb_f16_to_f32(uint16_t v) {
  uint32_t magnitude = (uint32_t)(v & 0x7fff) << 13, bits;
  float f;
  __builtin_memcpy(&f, &magnitude, 4);
  f *= 5.192296858534828e33f;  // 2^112: exponents start elsewhere; makes subnormals right as well
  __builtin_memcpy(&bits, &f, 4);
  if ((v & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= (uint32_t)(v & 0x8000) << 16;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
