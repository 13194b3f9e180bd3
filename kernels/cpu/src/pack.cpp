#include <cstring>

#include "linear.h"
#include "linear_kernels.h"
#include "memory.h"
#include "pool.h"

namespace {

struct Job {
  tb_packed* w;
  float* bias;  // w->bias
  int blocks;
  const void* const* src;
  const int64_t* rows;
  const int64_t* ld;
  const void* const* sources_of_bias;
};

template <typename Element>
const Element* row_of(const Job& job, int64_t n) {
  for (int b = 0; b < job.blocks; ++b) {
    if (n < job.rows[b]) return static_cast<const Element*>(job.src[b]) + n * job.ld[b];
    n -= job.rows[b];
  }
  return nullptr;
}

float bias_of(const Job& job, int64_t n) {
  for (int b = 0; b < job.blocks; ++b) {
    if (n >= job.rows[b]) {
      n -= job.rows[b];
      continue;
    }
    const void* bias = job.sources_of_bias[b];
    if (!bias) return 0.0f;
    if (job.w->dtype == TB_F32) return static_cast<const float*>(bias)[n];
    return tb_bf16_to_f32(static_cast<const uint16_t*>(bias)[n]);
  }
  return 0.0f;
}

// One tile. Element is what one step of one output takes: a float, or two bf16 in 32 bits.
void pack_tile(const Job& job, int tile) {
  const tb_packed& w = *job.w;
  uint32_t* out = reinterpret_cast<uint32_t*>(const_cast<char*>(w.data) + tile * w.tile_bytes);
  const int steps = int(w.tile_bytes / (4 * TB_TILE_N));
  const int whole = w.dtype == TB_F32 ? w.k : w.k / 2;
  const char* rows[TB_TILE_N];
  for (int j = 0; j < TB_TILE_N; ++j) {
    int64_t n = int64_t(tile) * TB_TILE_N + j;
    rows[j] = w.dtype == TB_F32 ? reinterpret_cast<const char*>(row_of<float>(job, n))
                                : reinterpret_cast<const char*>(row_of<uint16_t>(job, n));
  }
  constexpr int kChunk = 16;  // steps of all rows at a time: one line of each source
  for (int begin = 0; begin < whole; begin += kChunk) {
    int end = begin + kChunk < whole ? begin + kChunk : whole;
    for (int j = 0; j < TB_TILE_N; ++j) {
      for (int s = begin; s < end; ++s) {
        uint32_t v = 0;
        if (rows[j]) memcpy(&v, rows[j] + size_t(s) * 4, 4);
        out[size_t(s) * TB_TILE_N + j] = v;
      }
    }
  }
  if (whole == steps) return;
  for (int j = 0; j < TB_TILE_N; ++j) {  // an odd k's last one: the pair's second half is zero
    uint16_t v = 0;
    if (rows[j]) memcpy(&v, rows[j] + size_t(whole) * 4, 2);
    out[size_t(whole) * TB_TILE_N + j] = v;
  }
}

void pack_share(void* ctx, int index, int) {
  const Job& job = *static_cast<const Job*>(ctx);
  const int shares = tb_threads();
  const int end = tb_share(job.w->tiles, index + 1, shares);
  for (int t = tb_share(job.w->tiles, index, shares); t < end; ++t) {
    pack_tile(job, t);
    for (int j = 0; job.bias && j < TB_TILE_N; ++j) {
      job.bias[t * TB_TILE_N + j] = bias_of(job, int64_t(t) * TB_TILE_N + j);
    }
  }
}

}  // namespace

extern "C" {

tb_packed* tb_pack(int dtype, int blocks, const void* const* src, const int64_t* rows, const int64_t* ld, int64_t k,
                   const void* const* bias) {
  constexpr int64_t kMost = INT32_MAX - 63;
  int64_t n = 0;
  for (int b = 0; b < blocks; ++b) {
    if (rows[b] < 1 || rows[b] > kMost) return nullptr;
    n += rows[b];
  }
  if (n < 1 || n > kMost || k < 1 || k > kMost) return nullptr;
  const int tiles = int((n + TB_TILE_N - 1) / TB_TILE_N);
  const size_t steps = dtype == TB_F32 ? k : (k + 1) / 2;
  const size_t tile_bytes = steps * TB_TILE_N * 4;
  char* memory = static_cast<char*>(tb_alloc(tile_bytes * tiles + (bias ? size_t(tiles) * TB_TILE_N * 4 : 0)));
  if (!memory) return nullptr;
  float* packed_bias = bias ? reinterpret_cast<float*>(memory + tile_bytes * tiles) : nullptr;
  auto* w = new tb_packed{int(n), int(k), dtype, tiles, tile_bytes, memory, packed_bias};
  Job job{w, packed_bias, blocks, src, rows, ld, bias};
  tb_run(tb_threads(), pack_share, &job);
  return w;
}

void tb_pack_free(tb_packed* w) {
  if (!w) return;
  tb_free(const_cast<char*>(w->data));
  delete w;
}

size_t tb_packed_bytes(const tb_packed* w) {
  return w->tile_bytes * w->tiles + (w->bias ? size_t(w->tiles) * TB_TILE_N * 4 : 0);
}

}  // extern "C"
