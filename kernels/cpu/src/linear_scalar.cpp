// Linear kernels in plain C++: the fallback for every machine.
#include "linear_kernels.h"

namespace {

void finish(const tb_block* b, const float* sum, int row, int tile) {
  int base = tile * TB_TILE_N, count = b->n - base < TB_TILE_N ? b->n - base : TB_TILE_N;
  size_t at = row * b->ldy + base;
  float* yf = static_cast<float*>(b->y) + at;
  uint16_t* yh = static_cast<uint16_t*>(b->y) + at;
  for (int j = 0; j < count; ++j) {
    float v = b->bias ? sum[j] + b->bias[base + j] : sum[j];
    if (b->out_dtype == TB_F32) {
      yf[j] = b->store == TB_ADD ? yf[j] + v : v;
    } else {
      yh[j] = tb_f32_to_bf16(b->store == TB_ADD ? tb_bf16_to_f32(yh[j]) + v : v);
    }
  }
}

// sum += steps begin ... end of one row and tile
template <bool Bf16>
void add_steps(float* sum, const char* tile, const float* x, int begin, int end) {
  if (Bf16) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(tile) + size_t(begin) * 2 * TB_TILE_N;
    for (int s = begin; s < end; ++s, w += 2 * TB_TILE_N) {
      for (int j = 0; j < TB_TILE_N; ++j) sum[j] += tb_bf16_to_f32(w[2 * j]) * x[2 * s];
      for (int j = 0; j < TB_TILE_N; ++j) sum[j] += tb_bf16_to_f32(w[2 * j + 1]) * x[2 * s + 1];
    }
  } else {
    const float* w = reinterpret_cast<const float*>(tile) + size_t(begin) * TB_TILE_N;
    for (int s = begin; s < end; ++s, w += TB_TILE_N) {
      for (int j = 0; j < TB_TILE_N; ++j) sum[j] += w[j] * x[s];
    }
  }
}

template <bool Bf16>
void block(const tb_block* b) {
  constexpr int kFold = Bf16 ? TB_FOLD_BF16 : TB_FOLD_F32;
  for (int t = 0; t < b->tiles; ++t) {
    for (int i = 0; i < b->m; ++i) {
      const float* x = static_cast<const float*>(b->x) + i * b->ldx;
      float own[TB_TILE_N];
      float* total = b->partial ? b->partial + (size_t(t) * b->m + i) * TB_TILE_N : own;
      for (int begin = 0; begin < b->steps; begin += kFold) {
        float sum[TB_TILE_N] = {};
        add_steps<Bf16>(sum, b->w + t * b->tile_bytes, x, begin, begin + kFold < b->steps ? begin + kFold : b->steps);
        const bool fresh = b->first && begin == 0;
        for (int j = 0; j < TB_TILE_N; ++j) total[j] = fresh ? sum[j] : total[j] + sum[j];
      }
      if (b->last) finish(b, total, i, t);
    }
  }
}

}  // namespace

extern "C" const tb_linear_kernels tb_linear_scalar = {block<false>, block<true>, 0, 12, size_t(256) << 10};
