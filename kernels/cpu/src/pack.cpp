#include "pack.h"

#include <cstring>

#include "linear_kernels.h"
#include "memory.h"
#include "pool.h"

namespace {

// One tile. A step of one output takes 32 bits: a float, or two bf16.
void pack_tile(const PackJob& job, const tb_segment& segment, int tile, char* to) {
  const tb_packed& w = *job.w;
  uint32_t* out = reinterpret_cast<uint32_t*>(to);
  const int steps = int(segment.tile_bytes / (4 * TB_TILE_N));
  const int whole = w.dtype == TB_F32 ? w.k : w.k / 2;
  const char* rows[TB_TILE_N];
  for (int j = 0; j < TB_TILE_N; ++j) {
    rows[j] = job.row(segment, tile, j, w.dtype == TB_F32 ? 4 : 2);
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

size_t plain_tile_bytes(const PackJob& job, int) {
  return size_t(job.dtype == TB_F32 ? job.k : (job.k + 1) / 2) * TB_TILE_N * 4;
}

float bias_of(const PackJob& job, int64_t n) {
  for (int b = 0; b < job.blocks; ++b) {
    if (n >= job.rows[b]) {
      n -= job.rows[b];
      continue;
    }
    const void* bias = job.bias[b];
    if (!bias) return 0.0f;
    if (job.bias_dtype == TB_F32) return static_cast<const float*>(bias)[n];
    return tb_bf16_to_f32(static_cast<const uint16_t*>(bias)[n]);
  }
  return 0.0f;
}

void pack_share(void* ctx, int index, int) {
  const PackJob& job = *static_cast<const PackJob*>(ctx);
  const tb_packed& w = *job.w;
  const int shares = tb_threads(), begin = tb_share(w.tiles, index, shares), end = tb_share(w.tiles, index + 1, shares);
  for (int s = 0; s < w.segments; ++s) {
    const tb_segment& segment = w.segment[s];
    for (int t = begin > segment.tile ? begin : segment.tile; t < end && t < segment.tile + segment.tiles; ++t) {
      const int tile = t - segment.tile;
      job.pack_tile(job, segment, tile, const_cast<char*>(segment.data) + tile * segment.tile_bytes);
      float* bias = const_cast<float*>(w.bias) + size_t(t) * TB_TILE_N;
      for (int j = 0; w.bias && j < TB_TILE_N; ++j) {
        const int n = tile * TB_TILE_N + j;
        bias[j] = n < segment.n ? bias_of(job, segment.first + n) : 0.0f;
      }
    }
  }
}

}  // namespace

const char* PackJob::row(const tb_segment& segment, int tile, int j, size_t size) const {
  int64_t n = int64_t(tile) * TB_TILE_N + j;
  if (n >= segment.n) return nullptr;
  n += segment.first;
  for (int b = 0; b < blocks; ++b) {
    if (n < rows[b]) return static_cast<const char*>(src[b]) + n * ld[b] * size;
    n -= rows[b];
  }
  return nullptr;
}

// Blocks of one format that follow each other are one segment. Returns their number; 0 where a size is out of range.
static int lay_out(const PackJob& job, tb_segment* segment) {
  constexpr int64_t kMost = INT32_MAX - 63;
  int count = 0;
  int64_t n = 0;
  if (job.k < 1 || job.k > kMost) return 0;
  for (int b = 0; b < job.blocks; ++b) {
    const int format = job.formats ? job.formats[b] : job.format;
    if (job.rows[b] < 1 || job.rows[b] > kMost - n) return 0;
    if (!count || segment[count - 1].format != format) {
      segment[count++] = {format, 0, 0, int(n), 0, job.tile_bytes(job, format), nullptr};
    }
    segment[count - 1].n += int(job.rows[b]);
    n += job.rows[b];
  }
  int64_t tiles = 0;
  for (int s = 0; s < count; ++s) {
    segment[s].tile = int(tiles);
    segment[s].tiles = (segment[s].n + TB_TILE_N - 1) / TB_TILE_N;
    tiles += segment[s].tiles;
  }
  return tiles <= INT32_MAX / TB_TILE_N ? count : 0;
}

tb_packed* tb_pack_job(PackJob* job) {
  auto* segment = new tb_segment[job->blocks > 0 ? job->blocks : 1]();
  const int count = lay_out(*job, segment);
  const tb_segment& last = segment[count > 0 ? count - 1 : 0];
  size_t bytes = 0;
  for (int s = 0; s < count; ++s) bytes += segment[s].tile_bytes * segment[s].tiles;
  const int tiles = last.tile + last.tiles;
  const size_t all = bytes + (job->bias ? size_t(tiles) * TB_TILE_N * 4 : 0);
  char* memory = count ? static_cast<char*>(tb_alloc(all)) : nullptr;
  if (!memory) {
    delete[] segment;
    return nullptr;
  }
  const float* bias = job->bias ? reinterpret_cast<float*>(memory + bytes) : nullptr;
  for (int s = 0; s < count; ++s) {
    segment[s].data = memory;
    memory += segment[s].tile_bytes * segment[s].tiles;
  }
  job->w = new tb_packed{last.first + last.n, int(job->k), job->dtype, tiles, job->input, count, segment, bias, all};
  tb_run(tb_threads(), pack_share, job);
  return job->w;
}

extern "C" {

tb_packed* tb_pack(int dtype, int blocks, const void* const* src, const int64_t* rows, const int64_t* ld, int64_t k,
                   const void* const* bias) {
  PackJob job{dtype, dtype, dtype, blocks, src, rows, ld, k, bias, nullptr, TB_PLAIN, TB_VALUES, plain_tile_bytes, pack_tile};
  return tb_pack_job(&job);
}

void tb_pack_free(tb_packed* w) {
  if (!w) return;
  tb_free(const_cast<char*>(w->segment->data));
  delete[] w->segment;
  delete w;
}

size_t tb_packed_bytes(const tb_packed* w) { return w->bytes; }

}  // extern "C"
