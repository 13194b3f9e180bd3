// How quantised weights and activations lie in memory. Internal.
//
// A tile's weights are unsigned bytes (value + 2^shift), the 4 of one step of k side by side, so that a vector holds steps of as many
// outputs as it has 32-bit lanes. A tile of TB_I8: [ceil(k / 4)][32][4], then float32 scales [32]. The other formats, for every `blocks`
// x 32 k:
//   header   blocks == 8 only: the super-blocks' scales fp16 [32], and minima fp16 [32] where there are some
//   and for each 32 k:
//     8 bits         [8 steps][32][4]
//     4, 5, 6 bits   low 4 bits [4][32][4]: a byte holds steps 2 i (low) and 2 i + 1 (high)
//     5 bits         fifth bits [32][4]: bit s of a byte is step s's
//     6 bits         upper bits [2][32][4]: bits 2 s, 2 s + 1 of a byte are those of step s, of the first 16 k and of the second
//     scales         blocks == 1: scales fp16 [32], minima fp16 [32] where there are some; blocks == 8: scales, minima uint8 [2][32], or
//                    (6 bits) scales int8 [2][32], of the first 16 k and of the second
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "linear.h"

struct tb_layout {
  int bits, shift;  // shift: -1 where weights are unsigned
  bool minimum;
  int blocks;       // of 32 k, that share a header
  int part;         // k that share a scale
};

static constexpr tb_layout tb_layouts[TB_FORMATS] = {
    {0, 0, false, 0, 0},   {8, 7, false, 1, 0},  {4, 3, false, 1, 32}, {4, -1, true, 1, 32}, {5, 4, false, 1, 32},
    {5, -1, true, 1, 32},  {8, 7, false, 1, 32}, {4, -1, true, 8, 32}, {5, -1, true, 8, 32}, {6, 5, false, 8, 16},
};

static constexpr int tb_high_offset = 512;  // of the upper bits' planes
static constexpr int tb_weight_bytes(const tb_layout& l) {
  return l.bits == 8 ? 1024 : l.bits == 6 ? 768 : l.bits == 5 ? 640 : 512;
}
static constexpr int tb_block_bytes(const tb_layout& l) {
  return tb_weight_bytes(l) + (l.blocks == 1 && l.minimum ? 128 : 64);
}
static constexpr int tb_header_bytes(const tb_layout& l) { return l.blocks == 1 ? 0 : l.minimum ? 128 : 64; }

// Activations. TB_INT8_BLOCKS: k / 32 of these a row.
struct tb_x_block {
  int8_t q[32];
  float scale;
  float sum;         // scale * sum of q
  int32_t negative;  // - sum of q
  int32_t half[2];   // - sums of the first 16 and of the second
};
static_assert(sizeof(tb_x_block) == 52, "no padding");

// TB_INT8_ROWS: float32 scale, int32 -128 * sum of q for every TB_FOLD_INT8 k, then from tb_x_header(k) on int8 q, zero up to a multiple
// of 64.
enum { TB_FOLD_INT8 = 65536 };
static constexpr size_t tb_round_up(size_t v, size_t to) { return (v + to - 1) / to * to; }
static constexpr size_t tb_x_header(int64_t k) {
  return tb_round_up(4 + 4 * ((size_t(k) + TB_FOLD_INT8 - 1) / TB_FOLD_INT8), 64);
}
