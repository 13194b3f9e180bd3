// Quantised products for AMX: int8 rows in tiles; integer sums are exact, so they are the same as AVX512-VNNI's. The other formats, whose
// scales are of 16 or 32 k, as with AVX512-VNNI.
#include <immintrin.h>

#include "memory.h"
#include "quant_kernels.h"

#define TB_PREFETCH_BYTES 4096

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "amx.h"

namespace {
#include "linear_avx512.h"
#include "linear_vector.h"
#include "linear_tiles.h"

constexpr int kFoldSteps = TB_FOLD_INT8 / 4;

struct Part {
  const tb_block& b;
  int row, m, tile;

  const char* weights() const { return b.w + tile * b.tile_bytes; }
  const char* head() const { return static_cast<const char*>(b.x) + row * b.ldx; }
  const char* x() const { return head() + 64; }  // k <= TB_FOLD_INT8: tb_x_header

  void store(const int32_t (*sums)[TB_TILE_N]) const {
    const float* scales = reinterpret_cast<const float*>(weights() + b.steps * kStep);
    const __m512 low = V::load(scales), high = V::load(scales + 16);
    for (int i = 0; i < m; ++i) {
      float scale;
      int32_t start;
      memcpy(&scale, head() + i * b.ldx, 4);
      memcpy(&start, head() + i * b.ldx + 4, 4);
      const __m512i negative = _mm512_set1_epi32(start);
      const __m512 a = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[i]), negative));
      const __m512 c = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[i] + 16), negative));
      const __m512 by = _mm512_set1_ps(scale);
      store_outputs(Place{&b, tile, row + i}, _mm512_mul_ps(_mm512_mul_ps(a, low), by), _mm512_mul_ps(_mm512_mul_ps(c, high), by));
    }
  }
};

template <bool Two>
void multiply(const Part& p, bool fetch) {
  const char *w = p.weights(), *x = p.x();
  zero_sums();
  const int whole = p.b.steps / kTileSteps * kTileSteps;
  for (int s = 0; s < whole; s += kTileSteps, w += kTileSteps * kStep, x += 64) {
    if (fetch) ask_for(w);
    TB_MULTIPLY(_tile_dpbsud, Two, x, p.b.ldx, w);
  }
  if (whole < p.b.steps) {
    const Rest rest(x, p.b.ldx, p.m, w, p.b.steps - whole);
    TB_MULTIPLY(_tile_dpbsud, Two, rest.x[0], size_t(64), rest.w);
  }
  alignas(64) int32_t sums[2 * kTileRows][TB_TILE_N];
  TB_EACH_SUM(Two, _tile_stored, sums[0], TB_TILE_N);
  p.store(sums);
}

void multiply_pair(const Part& p) {
  const Part next{p.b, p.row, p.m, p.tile + 1};
  const char *w = p.weights(), *v = next.weights(), *x = p.x();
  zero_sums();
  for (int s = 0; s < p.b.steps; s += kTileSteps, w += kTileSteps * kStep, v += kTileSteps * kStep, x += 64) {
    ask_for(w);
    ask_for(v);
    TB_MULTIPLY_PAIR(_tile_dpbsud, x, p.b.ldx, w, v);
  }
  alignas(64) int32_t sums[2 * kTileRows][TB_TILE_N];
  TB_EACH_SUM(true, _tile_stored, sums[0], TB_TILE_N);
  p.store(sums);
  next.store(sums + kTileRows);
}

void tiles(const tb_block* b) {
  if (b->steps > kFoldSteps) return tb_quant_avx512vnni.product[TB_I8](b);
  for (int row = 0; row < b->m; row += 2 * kTileRows) {
    const int m = b->m - row < 2 * kTileRows ? b->m - row : 2 * kTileRows;
    const bool two = m > kTileRows, pairs = b->m <= kTileRows && b->steps % kTileSteps == 0;
    use_tiles(two ? kTileRows : m, two ? m - kTileRows : m);
    for (int t = 0; t < b->tiles; ++t) {
      const Part part{*b, row, m, t};
      if (two) multiply<true>(part, row == 0);
      else if (pairs && t + 1 < b->tiles) multiply_pair(part), ++t;
      else multiply<false>(part, row == 0);
    }
  }
  _tile_release();
}

}  // namespace

extern "C" void (*const tb_int8_tiles)(const tb_block*) = tiles;

#else
extern "C" void (*const tb_int8_tiles)(const tb_block*) = nullptr;
#endif
