// Cuts a linear layer into blocks that fit the caches, and hands them to the kernels of the instruction set in use.
#include "linear.h"

#include <cstring>

#include "dispatch.h"
#include "linear_kernels.h"
#include "memory.h"
#include "pool.h"
#include "quant.h"

namespace {

const tb_linear_kernels& kernels() {
#if defined(TB_X86)
  switch (tb_isa()) {
    case TB_AMX: return tb_linear_amx;
    case TB_AVX512BF16: return tb_linear_avx512bf16;
    case TB_AVX512VNNI:
    case TB_AVX512: return tb_linear_avx512;
    case TB_AVX2: return tb_linear_avx2;
    default: break;
  }
#endif
  return tb_linear_scalar;
}

struct Linear {
  const tb_packed* w;
  const char* x;
  size_t ldx;
  char* y;
  size_t ldy;
  int m, out_dtype, store;
};

constexpr int kSteps = 1024;     // longest block over k where activations don't fit as they are
constexpr int kPartialTiles = 16;  // tiles whose partial sums are kept at a time
constexpr size_t kUneven = 2048; // bytes: rows that are a multiple of it apart share a few sets of the first-level cache

size_t element(int dtype) { return dtype == TB_F32 ? 4 : 2; }

int round_up(int v, int to) { return (v + to - 1) / to * to; }

// Rows row ... row + m, steps step ... step + steps of x as a kernel takes them: as they are where possible, else a copy.
void prepare(tb_block* b, const Linear& l, const tb_linear_kernels& use, int row, int step, bool copy) {
  const bool bf16 = l.w->dtype == TB_BF16, widen = bf16 && !use.native_bf16;
  const int per_step = bf16 ? 2 : 1;
  const size_t size = element(l.w->dtype), from = size_t(step) * per_step;
  const char* src = l.x + (row * l.ldx + from) * size;
  const int wanted = b->steps * per_step;
  const int given = wanted < l.w->k - int(from) ? wanted : l.w->k - int(from);
  if (!widen && !copy && given == wanted) {
    b->x = src;
    b->ldx = l.ldx;
    return;
  }
  const size_t out_size = widen ? 4 : size;
  b->ldx = round_up(wanted, 32) + 32;  // rows not a power of two apart: they would share a few cache sets
  char* out = static_cast<char*>(tb_scratch(0, b->ldx * out_size * b->m));
  b->x = out;
  for (int i = 0; i < b->m; ++i, src += l.ldx * size, out += b->ldx * out_size) {
    if (widen) {
      for (int j = 0; j < given; ++j) {
        uint16_t v;
        memcpy(&v, src + 2 * j, 2);
        reinterpret_cast<float*>(out)[j] = tb_bf16_to_f32(v);
      }
    } else {
      memcpy(out, src, given * size);
    }
    memset(out + given * out_size, 0, (wanted - given) * out_size);
  }
}

struct Plan {
  int rows;    // a block's
  int steps;   // a block's
  int blocks;  // over k
  bool copy;   // activations are copied, as their rows are too far apart
};

Plan make_plan(const Linear& l, const tb_linear_kernels& use) {
  const bool bf16 = l.w->dtype == TB_BF16;
  const int steps = bf16 ? (l.w->k + 1) / 2 : l.w->k;
  const size_t step_bytes = bf16 && !use.native_bf16 ? 8 : 4;
  const int group = use.row_group;
  const bool copy = l.m > group && l.ldx * element(l.w->dtype) % kUneven == 0;
  if (l.m <= group || l.m * step_bytes * steps <= use.cache_bytes) return {l.m, steps, 1, copy};
  const int blocks = (steps + kSteps - 1) / kSteps;
  const int block_steps = round_up((steps + blocks - 1) / blocks, bf16 ? TB_FOLD_BF16 : TB_FOLD_F32);
  int rows = int(use.cache_bytes / (step_bytes * block_steps)) / group * group;
  if (rows < group) rows = group;
  const int row_blocks = (l.m + rows - 1) / rows;
  rows = round_up((l.m + row_blocks - 1) / row_blocks, group);
  return {rows, block_steps, (steps + block_steps - 1) / block_steps, copy};
}

void compute(const Linear& l, const tb_linear_kernels& use, const Plan& plan, int row, int rows, int tile, int tiles) {
  const tb_packed& w = *l.w;
  const int all_steps = w.dtype == TB_BF16 ? (w.k + 1) / 2 : w.k;
  tb_block b{};
  b.tile_bytes = w.segment->tile_bytes;
  b.m = rows;
  b.ldy = l.ldy;
  b.out_dtype = l.out_dtype;
  b.store = l.store;
  const int group = plan.blocks > 1 ? kPartialTiles : tiles;
  for (int t = tile; t < tile + tiles; t += group) {
    b.tiles = group < tile + tiles - t ? group : tile + tiles - t;
    b.y = l.y + (row * l.ldy + size_t(t) * TB_TILE_N) * element(l.out_dtype);
    b.n = w.n - t * TB_TILE_N;
    b.bias = w.bias ? w.bias + size_t(t) * TB_TILE_N : nullptr;
    if (plan.blocks > 1) {
      b.partial = static_cast<float*>(tb_scratch(1, size_t(b.tiles) * rows * TB_TILE_N * sizeof(float)));
    }
    for (int step = 0; step < all_steps; step += plan.steps) {
      b.steps = plan.steps < all_steps - step ? plan.steps : all_steps - step;
      b.first = step == 0;
      b.last = step + b.steps == all_steps;
      b.w = w.segment->data + t * b.tile_bytes + size_t(step) * TB_TILE_N * 4;
      prepare(&b, l, use, row, step, plan.copy);
      (w.dtype == TB_BF16 ? use.bf16 : use.f32)(&b);
    }
  }
}

struct Job {
  Linear l;
  const tb_linear_kernels* use;
  Plan plan;
  int shares;
};

void run_task(void* ctx, int index, int) {
  const Job& job = *static_cast<const Job*>(ctx);
  const int share = index % job.shares, row = index / job.shares * job.plan.rows;
  const int begin = tb_share(job.l.w->tiles, share, job.shares), end = tb_share(job.l.w->tiles, share + 1, job.shares);
  const int rows = job.plan.rows < job.l.m - row ? job.plan.rows : job.l.m - row;
  if (begin < end) compute(job.l, *job.use, job.plan, row, rows, begin, end - begin);
}

}  // namespace

extern "C" {

void tb_linear(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store) {
  if (m <= 0) return;
  if (w->input != TB_VALUES) return tb_quantised_linear(w, x, ldx, y, ldy, m, out_dtype, store);
  Job job{{w, static_cast<const char*>(x), ldx, static_cast<char*>(y), ldy, m, out_dtype, store}, &kernels(), {}, tb_threads()};
  job.plan = make_plan(job.l, *job.use);
  const int row_blocks = (m + job.plan.rows - 1) / job.plan.rows;
  tb_run(row_blocks * job.shares, run_task, &job);
}

void tb_linear_part(const tb_packed* w, const void* x, size_t ldx, void* y, size_t ldy, int m, int out_dtype, int store,
                    int tile_begin, int tile_end) {
  if (m <= 0 || tile_begin >= tile_end) return;
  if (w->input != TB_VALUES) {
    const size_t row = tb_input_bytes(w->input, w->k);
    char* q = static_cast<char*>(tb_scratch(0, row * m));
    for (int i = 0; i < m; ++i) {
      tb_quantise(w->input, w->dtype, static_cast<const char*>(x) + i * ldx * element(w->dtype), w->k, q + i * row);
    }
    return tb_quantised_part(w, q, row, y, ldy, m, out_dtype, store, tile_begin, tile_end);
  }
  const Linear l{w, static_cast<const char*>(x), ldx, static_cast<char*>(y), ldy, m, out_dtype, store};
  const tb_linear_kernels& use = kernels();
  const Plan plan = make_plan(l, use);
  for (int row = 0; row < m; row += plan.rows) {
    compute(l, use, plan, row, plan.rows < m - row ? plan.rows : m - row, tile_begin, tile_end - tile_begin);
  }
}

}  // extern "C"
