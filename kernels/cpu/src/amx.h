// AMX's tile registers, as the _amx files use them: 8 of 16 rows x 64 bytes. Numbers of tiles must be constants.
//   0 ... 3   sums, float32 or int32 [16][16]
//   4, 5      rows of the left factor: [16][32] bfloat16 or [16][64] int8
//   6, 7      the right factor, the 4 bytes of a column side by side: [16 pairs][16][2] or [16 fours][16][4]
// A product of full tiles takes 16 cycles and does 16 x 16 x 32 (int8: 64) multiplications; order and rounding of a row's sums do not
// depend on other rows (Intel SDM, TDPBF16PS: even and odd values of k apart, then both to the sum so far; subnormals count as zero).
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// `low` and `high` rows of the left factor's two tiles and of their sums; none: 0.
inline void use_tiles(int low, int high) {
  TileShapes shapes;
  const int rows[8] = {low, low, high, high, low, high, 16, 16};
  for (int i = 0; i < 8; i++) {
    shapes.rows[i] = (uint8_t)rows[i];
    shapes.bytes[i] = rows[i] ? 64 : 0;
  }
  asm volatile("" : : "r"(&shapes) : "memory");  // the intrinsic names only the first bytes as its input
  _tile_loadconfig(&shapes);
}

}  // namespace
