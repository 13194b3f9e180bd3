// Linear kernels for AMX: tiles of bfloat16 products, summed in float32 over all of k at once. float32 weights: as with AVX512.
#include <immintrin.h>

#include "linear_kernels.h"
#include "memory.h"

#define TB_PREFETCH_BYTES 1024

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "amx.h"
extern "C" const int tb_amx_compiled = 1;

namespace {
#include "linear_avx512.h"
#include "linear_vector.h"
#include "linear_tiles.h"

// Steps step ... step + steps of rows row ... row + m (m <= 32) times one tile of weights. Sums come from `before`, or are new; they go to
// `after`, or are results.
struct Part {
  const tb_block& b;
  int row, m, tile, step, steps;
  const float* before;
  float* after;

  const char* weights() const { return b.w + tile * b.tile_bytes + step * kStep; }
  const char* x() const { return static_cast<const char*>(b.x) + size_t(row) * b.ldx * 2 + step * 4; }

  // Where sums can go as they are; else NULL.
  float* direct() const {
    if (b.out_dtype != TB_F32 || b.store != TB_SET || b.bias || !whole_tile(Place{&b, tile, row})) return nullptr;
    return static_cast<float*>(b.y) + row * b.ldy + tile * TB_TILE_N;
  }

  void store(const float (*sums)[TB_TILE_N]) const {
    for (int i = 0; i < m; ++i) store_outputs(Place{&b, tile, row + i}, V::load(sums[i]), V::load(sums[i] + 16));
  }
};

// Two: more than 16 rows. fetch: weights come from memory, and are asked for ahead.
template <bool Two>
void multiply(const Part& p, bool fetch) {
  const size_t row_bytes = p.b.ldx * 2;
  const char *w = p.weights(), *x = p.x();
  if (p.before) TB_EACH_SUM(Two, _tile_loadd, p.before, TB_TILE_N);
  else zero_sums();
  const int whole = p.steps / kTileSteps * kTileSteps;
  for (int s = 0; s < whole; s += kTileSteps, w += kTileSteps * kStep, x += 64) {
    if (fetch) ask_for(w);
    TB_MULTIPLY(_tile_dpbf16ps, Two, x, row_bytes, w);
  }
  if (whole < p.steps) {
    const Rest rest(x, row_bytes, p.m, w, p.steps - whole);
    TB_MULTIPLY(_tile_dpbf16ps, Two, rest.x[0], size_t(64), rest.w);
  }
  if (p.after) {
    TB_EACH_SUM(Two, _tile_stored, p.after, TB_TILE_N);
  } else if (float* y = p.direct()) {
    TB_EACH_SUM(Two, _tile_stored, y, p.b.ldy);
  } else {
    alignas(64) float sums[2 * kTileRows][TB_TILE_N];
    TB_EACH_SUM(Two, _tile_stored, sums[0], TB_TILE_N);
    p.store(sums);
  }
}

// All of k of up to 16 rows and two tiles, whose weights come from memory.
void multiply_pair(const Part& p) {
  const Part next{p.b, p.row, p.m, p.tile + 1, 0, p.steps, nullptr, nullptr};
  const char *w = p.weights(), *v = next.weights(), *x = p.x();
  zero_sums();
  for (int s = 0; s < p.steps; s += kTileSteps, w += kTileSteps * kStep, v += kTileSteps * kStep, x += 64) {
    ask_for(w);
    ask_for(v);
    TB_MULTIPLY_PAIR(_tile_dpbf16ps, x, p.b.ldx * 2, w, v);
  }
  alignas(64) float sums[2 * kTileRows][TB_TILE_N];
  TB_EACH_SUM(true, _tile_stored, sums[0], TB_TILE_N);
  p.store(sums);
  next.store(sums + kTileRows);
}

// A group of rows times all tiles, over all steps.
void few_rows(const tb_block* b) {
  const bool two = b->m > kTileRows;
  const bool pairs = !two && b->first && b->last && b->steps % kTileSteps == 0;
  use_tiles(two ? kTileRows : b->m, two ? b->m - kTileRows : b->m);
  for (int t = 0; t < b->tiles; ++t) {
    float* sums = b->partial ? b->partial + size_t(t) * b->m * TB_TILE_N : nullptr;
    const Part part{*b, 0, b->m, t, 0, b->steps, b->first ? nullptr : sums, b->last ? nullptr : sums};
    if (two) multiply<true>(part, true);
    else if (pairs && t + 1 < b->tiles) multiply_pair(part), ++t;
    else multiply<false>(part, true);
  }
}

// Steps of 32 rows that stay in the first-level cache while weights stream through it.
constexpr int kNearSteps = 160;

// 32 rows at a time run through all tiles, whose weights stay in the second-level cache for the next ones.
void many_rows(const tb_block* b) {
  const int pieces = (b->steps + kNearSteps - 1) / kNearSteps;
  const int piece = ((b->steps + pieces - 1) / pieces + kTileSteps - 1) / kTileSteps * kTileSteps;
  constexpr size_t kSums = 2 * kTileRows * TB_TILE_N;
  float* between = static_cast<float*>(tb_scratch(SUMS_SLOT, b->tiles * kSums * sizeof(float)));
  for (int row = 0; row < b->m; row += 2 * kTileRows) {
    const int m = b->m - row < 2 * kTileRows ? b->m - row : 2 * kTileRows;
    const bool two = m > kTileRows;
    use_tiles(two ? kTileRows : m, two ? m - kTileRows : m);
    for (int step = 0; step < b->steps; step += piece) {
      const int steps = piece < b->steps - step ? piece : b->steps - step;
      const bool last = step + steps == b->steps;
      for (int t = 0; t < b->tiles; ++t) {
        float* sums = b->partial ? b->partial + (size_t(t) * b->m + row) * TB_TILE_N : nullptr;
        float* own = between + t * kSums;
        const Part part{*b, row, m, t, step, steps, step ? own : b->first ? nullptr : sums, !last ? own : b->last ? nullptr : sums};
        if (two) multiply<true>(part, row == 0);
        else multiply<false>(part, row == 0);
      }
    }
  }
}

void tiles(const tb_block* b) {
  if (b->m <= 2 * kTileRows) few_rows(b);
  else many_rows(b);
  _tile_release();
}

}  // namespace

extern "C" const tb_linear_kernels tb_linear_amx = {block<F32>, tiles, 1, 32, size_t(1) << 20};

#else
extern "C" const int tb_amx_compiled = 0;
extern "C" const tb_linear_kernels tb_linear_amx = {};
#endif
