// Quantised layers: activations are quantised, blocks of rows and tiles go to the kernels of the instruction set in use.
#include "quant.h"

#include "dispatch.h"
#include "memory.h"
#include "pool.h"
#include "quant_kernels.h"

namespace {

#if defined(TB_X86)
tb_quant_kernels with_tiles() {
  tb_quant_kernels made = tb_quant_avx512vnni;
  made.product[TB_I8] = tb_int8_tiles;
  return made;
}
#endif

const tb_quant_kernels& kernels() {
#if defined(TB_X86)
  static const tb_quant_kernels amx = with_tiles();
  if (tb_isa() == TB_AMX) return amx;
  if (tb_isa() >= TB_AVX512VNNI) return tb_quant_avx512vnni;
  if (tb_isa() >= TB_AVX2) return tb_quant_avx2;
#endif
  return tb_quant_scalar;
}

size_t element(int dtype) { return dtype == TB_F32 ? 4 : 2; }

constexpr int kRowGroup = 32;                        // rows of the largest register tile, or a few of them
constexpr size_t kCacheBytes = size_t(256) << 10;    // of a core's second-level cache for activations
constexpr size_t kBufferBytes = size_t(64) << 20;    // of quantised activations at a time

struct Product {
  const tb_packed* w;
  const char* q;
  size_t row_bytes;
  char* y;
  size_t ldy;
  int m, out_dtype, store;
};

int rows_at_once(const Product& p) {
  if (p.m <= kRowGroup || p.m * p.row_bytes <= kCacheBytes) return p.m;
  int rows = int(kCacheBytes / p.row_bytes) / kRowGroup * kRowGroup;
  if (rows < kRowGroup) rows = kRowGroup;
  const int pieces = (p.m + rows - 1) / rows, even = (p.m + pieces - 1) / pieces;
  return (even + kRowGroup - 1) / kRowGroup * kRowGroup;
}

void compute(const Product& p, const tb_quant_kernels& use, int row, int rows, int begin, int end) {
  const tb_packed& w = *p.w;
  for (int s = 0; s < w.segments; ++s) {
    const tb_segment& segment = w.segment[s];
    const int first = begin > segment.tile ? begin : segment.tile;
    const int last = end < segment.tile + segment.tiles ? end : segment.tile + segment.tiles;
    if (first >= last) continue;
    const int skipped = (first - segment.tile) * TB_TILE_N;
    tb_block b{};
    b.w = segment.data + (first - segment.tile) * segment.tile_bytes;
    b.tile_bytes = segment.tile_bytes;
    b.tiles = last - first;
    b.steps = segment.format == TB_I8 ? (w.k + 3) / 4 : w.k / 32;
    b.x = p.q + row * p.row_bytes;
    b.ldx = p.row_bytes;
    b.m = rows;
    b.y = p.y + (row * p.ldy + segment.first + skipped) * element(p.out_dtype);
    b.ldy = p.ldy;
    b.n = segment.n - skipped;
    b.bias = w.bias ? w.bias + size_t(first) * TB_TILE_N : nullptr;
    b.out_dtype = p.out_dtype;
    b.store = p.store;
    use.product[segment.format](&b);
  }
}

struct Job {
  Product p;
  const tb_quant_kernels* use;
  int rows, shares;
};

void run_task(void* ctx, int index, int) {
  const Job& job = *static_cast<const Job*>(ctx);
  const int share = index % job.shares, row = index / job.shares * job.rows;
  const int begin = tb_share(job.p.w->tiles, share, job.shares), end = tb_share(job.p.w->tiles, share + 1, job.shares);
  if (begin < end) compute(job.p, *job.use, row, job.rows < job.p.m - row ? job.rows : job.p.m - row, begin, end);
}

struct Inputs {
  const tb_packed* w;
  const char* x;
  size_t step;  // bytes between rows
  char* q;
  size_t row_bytes;
  int m, shares;
};

void quantise_share(void* ctx, int index, int) {
  const Inputs& in = *static_cast<const Inputs*>(ctx);
  const int end = tb_share(in.m, index + 1, in.shares);
  for (int i = tb_share(in.m, index, in.shares); i < end; ++i) {
    tb_quantise(in.w->input, in.w->dtype, in.x + i * in.step, in.w->k, in.q + i * in.row_bytes);
  }
}

struct Gather {
  const tb_packed* w;
  const int64_t* ids;
  char* y;
  size_t row_bytes;
  int rows, dtype, shares;
};

void gather_share(void* ctx, int index, int) {
  const Gather& g = *static_cast<const Gather*>(ctx);
  const int end = tb_share(g.rows, index + 1, g.shares);
  for (int i = tb_share(g.rows, index, g.shares); i < end; ++i) tb_packed_row(g.w, g.ids[i], g.dtype, g.y + i * g.row_bytes);
}

// One value after the other of a row, rounded to dtype.
struct Values {
  int dtype;
  void* y;
  void set(int64_t at, float v) const {
    if (dtype == TB_F32) static_cast<float*>(y)[at] = v;
    else static_cast<uint16_t*>(y)[at] = tb_f32_to_bf16(v);
  }
};

void plain_row(const tb_packed& w, const char* tile, int j, const Values& out) {
  for (int k = 0; k < w.k; ++k) {
    if (w.dtype == TB_F32) out.set(k, reinterpret_cast<const float*>(tile)[size_t(k) * TB_TILE_N + j]);
    else out.set(k, tb_bf16_to_f32(reinterpret_cast<const uint16_t*>(tile)[size_t(k / 2) * 2 * TB_TILE_N + 2 * j + k % 2]));
  }
}

void int8_row(const tb_packed& w, const char* tile, int j, const Values& out) {
  const size_t steps = (size_t(w.k) + 3) / 4;
  const float scale = reinterpret_cast<const float*>(tile + steps * 4 * TB_TILE_N)[j];
  for (int k = 0; k < w.k; ++k) {
    const int u = static_cast<uint8_t>(tile[size_t(k / 4) * 4 * TB_TILE_N + 4 * j + k % 4]);
    out.set(k, scale * float(u - 128));
  }
}

void block_row(const tb_packed& w, int format, const char* tile, int j, const Values& out) {
  const tb_layout& l = tb_layouts[format];
  const int zero = l.shift < 0 ? 0 : 1 << l.shift;
  for (int block = 0; block < w.k / 32; block += l.blocks) {
    const char* header = tile;
    tile += tb_header_bytes(l);
    for (int s = 0; s < l.blocks; ++s, tile += tb_block_bytes(l)) {
      uint8_t q[32];
      float scale[2], minimum;
      tb_unpack_row(format, header, tile, j, q, scale, &minimum);
      for (int k = 0; k < 32; ++k) {
        const float v = scale[k / 16] * float(q[k] - zero);
        out.set(int64_t(block + s) * 32 + k, l.minimum ? v + minimum : v);
      }
    }
  }
}

}  // namespace

extern "C" {

size_t tb_input_bytes(int input, int64_t k) {
  if (input == TB_INT8_ROWS) return tb_x_header(k) + tb_round_up(k, 64);
  return tb_round_up(k / 32 * sizeof(tb_x_block), 64);
}

void tb_quantise(int input, int dtype, const void* x, int64_t k, void* q) {
  if (input == TB_INT8_ROWS) kernels().rows(dtype, x, k, q);
  else kernels().blocks(dtype, x, k / 32, static_cast<tb_x_block*>(q));
}

void tb_quantise_blocks(int dtype, const void* x, int64_t begin, int64_t n, void* q) {
  kernels().blocks(dtype, x, n / 32, static_cast<tb_x_block*>(q) + begin / 32);
}

void tb_quantised_part(const tb_packed* w, const void* q, size_t row_bytes, void* y, size_t ldy, int m, int out_dtype, int store,
                       int tile_begin, int tile_end) {
  const Product p{w, static_cast<const char*>(q), row_bytes, static_cast<char*>(y), ldy, m, out_dtype, store};
  const tb_quant_kernels& use = kernels();
  const int rows = rows_at_once(p);
  for (int row = 0; row < m; row += rows) compute(p, use, row, rows < m - row ? rows : m - row, tile_begin, tile_end);
}

void tb_quantised_linear(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store) {
  const size_t row_bytes = tb_input_bytes(w->input, w->k);
  const int shares = tb_threads();
  int most = int(kBufferBytes / row_bytes < size_t(m) ? kBufferBytes / row_bytes : m);
  if (most < kRowGroup) most = kRowGroup < m ? kRowGroup : m;
  char* q = static_cast<char*>(tb_scratch(0, row_bytes * most));
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
  for (int row = 0; row < m; row += most) {
    const int count = most < m - row ? most : m - row;
    Inputs in{w, from + row * ldx * element(w->dtype), ldx * element(w->dtype), q, row_bytes, count, count < 4 ? 1 : shares};
    if (in.shares == 1) quantise_share(&in, 0, 0);
    else tb_run(shares, quantise_share, &in);
    Job job{{w, q, row_bytes, to + row * ldy * element(out_dtype), ldy, count, out_dtype, store}, &kernels(), 0, shares};
    job.rows = rows_at_once(job.p);
    tb_run((count + job.rows - 1) / job.rows * shares, run_task, &job);
  }
}

void tb_packed_row(const tb_packed* w, int64_t id, int dtype, void* y) {
  const tb_segment* segment = w->segment;
  while (id >= segment->first + segment->n) ++segment;
  id -= segment->first;
  const char* tile = segment->data + id / TB_TILE_N * segment->tile_bytes;
  const Values out{dtype, y};
  const int j = int(id % TB_TILE_N);
  if (segment->format == TB_PLAIN) plain_row(*w, tile, j, out);
  else if (segment->format == TB_I8) int8_row(*w, tile, j, out);
  else block_row(*w, segment->format, tile, j, out);
}

void tb_packed_rows(const tb_packed* w, const int64_t* ids, int rows, int dtype, void* y) {
  if (rows <= 0) return;
  Gather g{w, ids, static_cast<char*>(y), w->k * element(dtype), rows, dtype, rows < 4 ? 1 : tb_threads()};
  if (g.shares == 1) gather_share(&g, 0, 0);
  else tb_run(g.shares, gather_share, &g);
}

}  // extern "C"
