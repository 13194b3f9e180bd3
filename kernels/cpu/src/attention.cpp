#include "attention.h"

#include <string.h>

#include "dispatch.h"
#include "elementwise.h"
#include "memory.h"
#include "pool.h"

extern const tb_attention_kernel tb_attention_scalar;
#if defined(TB_X86)
extern const tb_attention_kernel tb_attention_avx2, tb_attention_avx512, tb_attention_avx512bf16, tb_attention_amx;
#endif

const tb_attention_kernel* tb_attention_of_level(void) {
#if defined(TB_X86)
  switch (tb_isa()) {
    case TB_AVX2: return &tb_attention_avx2;
    case TB_AVX512:
    case TB_AVX512VNNI: return &tb_attention_avx512;
    case TB_AVX512BF16: return &tb_attention_avx512bf16;
    case TB_AMX: return &tb_attention_amx;
  }
#endif
  return &tb_attention_scalar;
}

int tb_kv_paired(const tb_heads* h, int block_size) {
  return tb_attention_of_level()->store_pairs && h->dtype == TB_BF16 && h->kv_dtype == TB_BF16 && h->head_dim % 16 == 0 &&
         block_size % TB_PAIRED_GROUP == 0;
}

namespace {

enum { ROWS_AT_ONCE = 192, SLOT = 2, SOON_SLOT = 4, MOST_SOON = 1024 };

size_t width_of(int dtype) { return dtype == TB_BF16 ? 2 : 4; }
int padded(int n) { return (n + 15) / 16 * 16; }

int first_seen(const tb_heads* h, int position) {
  return h->window && position >= h->window ? position - h->window + 1 : 0;
}

template <class T>
void reserve(T*& at, int& room, int count) {
  if (count <= room) return;
  room = count > 2 * room ? count : 2 * room;
  at = (T*)realloc(at, room * sizeof(T));
  if (!at) abort();
}

// Tokens of one request that a task takes: the last first, as they see most.
int tokens_at_once(const tb_heads* h) {
  const int group = h->heads / h->kv_heads;
  return group >= ROWS_AT_ONCE ? 1 : ROWS_AT_ONCE / group;
}

void add_tasks(tb_attention_plan* plan, const tb_heads* h, const tb_batch* b, int request, int kv_head, int kv_heads, bool split) {
  const int count = b->query_start[request + 1] - b->query_start[request], start = b->context_len[request] - count;
  const int piece = tokens_at_once(h), group = h->heads / h->kv_heads;
  for (int token = (count - 1) / piece * piece; token >= 0; token -= piece) {
    const int tokens = count - token < piece ? count - token : piece;
    const int begin = first_seen(h, start + token) / TB_PART, end = (start + token + tokens - 1) / TB_PART + 1;
    const bool divide = split && end - begin > 1;
    const int parts = divide ? end - begin : 1;
    reserve(plan->task, plan->task_room, plan->tasks + parts);
    if (divide) {
      reserve(plan->split, plan->split_room, plan->splits + 1);
      plan->split[plan->splits] = {parts, tokens * group * kv_heads, 0, parts};
    }
    for (int i = 0; i < parts; i++)
      plan->task[plan->tasks++] = {request, kv_head, kv_heads, token, tokens, begin + i, divide ? begin + i + 1 : end,
                                   divide ? plan->splits : -1};
    if (divide) plan->splits++;
  }
}

size_t partial_size(int rows, int width) { return (size_t)rows * width + 2 * (size_t)padded(rows); }

// Sums, maxima and totals of some rows, one after the other.
struct Partial {
  float *sums, *most, *total;
  Partial(float* at, int rows, int width, int first = 0)
      : sums(at + (size_t)first * width), most(at + (size_t)rows * width + first), total(most + padded(rows)) {}
};

int position_of(const tb_batch* b, int request, int token) {
  return b->context_len[request] - (b->query_start[request + 1] - b->query_start[request]) + token;
}

// Where the result of a KV head's row of a task belongs.
char* target(const tb_attention_task& t, const tb_heads* h, const tb_batch* b, int kv_head, int row, void* out) {
  const int group = h->heads / h->kv_heads;
  const size_t head = (size_t)(b->query_start[t.request] + t.token + row / group) * h->heads + kv_head * group + row % group;
  return (char*)out + head * h->head_dim * width_of(h->dtype);
}

// Folds the parts of each row in order and stores the result.
void merge(const tb_attention_plan* plan, const tb_attention_task& t, const tb_heads* h, const tb_batch* b, void* out) {
  const tb_attention_kernel* kernel = tb_attention_of_level();
  const tb_attention_split& split = plan->split[t.split];
  const int width = padded(h->head_dim), group = h->heads / h->kv_heads, rows = t.tokens * group;
  const size_t size = partial_size(split.rows, width);
  const int start = position_of(b, t.request, t.token), first_part = first_seen(h, start) / TB_PART;
  for (int i = 0; i < split.rows; i++) {
    const int r = i % rows, position = start + r / group;
    const int from = first_seen(h, position) / TB_PART - first_part, to = position / TB_PART - first_part;
    const Partial all(plan->partial + split.at + from * size, split.rows, width, i);
    for (int part = from + 1; part <= to; part++) {
      const Partial next(plan->partial + split.at + part * size, split.rows, width, i);
      kernel->fold(all.sums, all.most, all.total, next.sums, *next.most, *next.total, width);
    }
    kernel->finish(all.sums, *all.total, target(t, h, b, t.kv_head + i / rows, r, out), h->dtype, h->head_dim);
  }
}

// The K and V rows that task `index` starts with, so that they can be fetched before it is taken. Only of tasks with few queries: those
// wait for memory.
int rows_of_later(const tb_attention_plan* plan, int index, const tb_heads* h, const tb_batch* b, const char* k, const char* v,
                  const char** rows, int* bytes) {
  if (index >= plan->tasks || plan->task[index].tokens > 8) return 0;
  const tb_attention_task& t = plan->task[index];
  const size_t head = tb_kv_head_bytes(h), step = h->kv_heads * head;
  const int position = position_of(b, t.request, t.token), seen = first_seen(h, position);
  const int from = t.part_begin * TB_PART > seen ? t.part_begin * TB_PART : seen;
  const int end = t.part_end * TB_PART < position + t.tokens ? t.part_end * TB_PART : position + t.tokens;
  const int32_t* blocks = b->blocks + b->table_start[t.request];
  *bytes = (int)(t.kv_heads * head);
  int count = 0;
  for (int p = from; p < end && p < from + MOST_SOON; p++) {
    const size_t at = ((size_t)blocks[p / b->block_size] * b->block_size + p % b->block_size) * step + t.kv_head * head;
    rows[count++] = k + at;
    rows[count++] = v + at;
  }
  return count;
}

// The groups of paired caches that a KV head of task `index` starts with: K's of the first tile, then V's. None behind the last task.
int groups_of_later(const tb_attention_plan* plan, int index, int head_of_task, const tb_heads* h, const tb_batch* b, const char* k,
                    const char* v, const char** groups) {
  if (index >= plan->tasks) return 0;
  const tb_attention_task& t = plan->task[index];
  const size_t bytes = tb_kv_head_bytes(h), head = b->block_size * bytes;
  const int position = position_of(b, t.request, t.token), tile = first_seen(h, position) / TB_TILE * TB_TILE;
  const int from = t.part_begin * TB_PART > tile ? t.part_begin * TB_PART : tile, count = TB_TILE / TB_PAIRED_GROUP;
  const int32_t* blocks = b->blocks + b->table_start[t.request];
  for (int i = 0; i < count; i++) {
    const int p = from + i * TB_PAIRED_GROUP < position + t.tokens ? from + i * TB_PAIRED_GROUP : from;
    const size_t at = (blocks[p / b->block_size] * (size_t)h->kv_heads + t.kv_head + head_of_task) * head + p % b->block_size * bytes;
    groups[i] = k + at;
    groups[count + i] = v + at;
  }
  return 2 * count;
}

}  // namespace

void tb_attention_plan_make(tb_attention_plan* plan, const tb_heads* h, const tb_batch* b, int threads) {
  plan->tasks = plan->splits = 0;
  int whole = 0;
  for (int r = 0; r < b->requests; r++)
    whole += (b->query_start[r + 1] - b->query_start[r] + tokens_at_once(h) - 1) / tokens_at_once(h) * h->kv_heads;
  // Too few to keep all threads busy: contexts are divided. Plenty even without it: a task takes all KV heads, whose rows are neighbours.
  const bool split = whole < 8 * threads;
  const int together = whole >= 8 * threads * h->kv_heads ? h->kv_heads : 1;
  for (int r = b->requests - 1; r >= 0; r--)
    for (int kv_head = 0; kv_head < h->kv_heads; kv_head += together) add_tasks(plan, h, b, r, kv_head, together, split);
  size_t partial = 0;
  for (int i = 0; i < plan->splits; i++) {
    plan->split[i].at = partial;
    partial += plan->split[i].parts * partial_size(plan->split[i].rows, padded(h->head_dim));
  }
  if (partial > plan->partial_room) {
    free(plan->partial);
    plan->partial = (float*)aligned_alloc(64, (partial * sizeof(float) + 63) / 64 * 64);
    if (!plan->partial) abort();
    plan->partial_room = partial;
  }
}

void tb_attention_plan_reset(tb_attention_plan* plan) {
  for (int i = 0; i < plan->splits; i++) plan->split[i].left = plan->split[i].parts;
}

void tb_attention_plan_free(tb_attention_plan* plan) {
  free(plan->task);
  free(plan->split);
  free(plan->partial);
}

void tb_attention_task_run(tb_attention_plan* plan, int index, const tb_heads* h, const tb_batch* b, const void* q, size_t q_step,
                           const void* k_cache, const void* v_cache, void* out) {
  const tb_attention_kernel* kernel = tb_attention_of_level();
  const tb_attention_task& t = plan->task[index];
  const int group = h->heads / h->kv_heads, rows = t.tokens * group, width = padded(h->head_dim);
  const int row = b->query_start[t.request] + t.token, position = position_of(b, t.request, t.token);
  const size_t own = partial_size(rows, width) * sizeof(float), kernels = (kernel->scratch(h, rows) + 63) / 64 * 64;
  char* scratch = (char*)tb_scratch(SLOT, kernels + own);
  const bool paired = tb_kv_paired(h, b->block_size);
  const size_t head = (paired ? b->block_size : 1) * tb_kv_head_bytes(h);
  const char** soon = (const char**)tb_scratch(SOON_SLOT, 2 * MOST_SOON * sizeof(char*));
  const char *k = (const char*)k_cache, *v = (const char*)v_cache;
  int soon_bytes = 0, later = index + tb_threads();
  const int rows_soon = paired ? 0 : rows_of_later(plan, later, h, b, k, v, soon, &soon_bytes);
  for (int i = 0; i < t.kv_heads; i++) {
    const int kv_head = t.kv_head + i, first_soon = i * rows_soon / t.kv_heads;
    const bool same = i + 1 < t.kv_heads;
    const int groups = paired ? groups_of_later(plan, same ? index : later, same ? i + 1 : 0, h, b, k, v, soon) : 0;
    Partial found((float*)(scratch + kernels), rows, width);
    if (t.split >= 0) {
      const tb_attention_split& split = plan->split[t.split];
      const int part = t.part_begin - first_seen(h, position) / TB_PART;
      found = Partial(plan->partial + split.at + part * partial_size(split.rows, width), split.rows, width, i * rows);
    }
    const tb_attention_rows task = {
        h,
        (const char*)q + (row * q_step + (size_t)kv_head * group * h->head_dim) * width_of(h->dtype),
        q_step,
        k + kv_head * head,
        v + kv_head * head,
        paired,
        b->blocks + b->table_start[t.request],
        b->block_size,
        position,
        t.tokens,
        t.part_begin,
        t.part_end,
        soon + first_soon,
        paired ? groups : (i + 1) * rows_soon / t.kv_heads - first_soon,
        soon_bytes,
        found.sums,
        found.most,
        found.total,
    };
    kernel->run(&task, scratch);
    for (int r = 0; t.split < 0 && r < rows; r++)
      kernel->finish(found.sums + (size_t)r * width, found.total[r], target(t, h, b, kv_head, r, out), h->dtype, h->head_dim);
  }
  if (t.split >= 0 && __atomic_sub_fetch(&plan->split[t.split].left, 1, __ATOMIC_ACQ_REL) == 0) merge(plan, t, h, b, out);
}

void tb_clear_rest(const tb_heads* h, const tb_batch* b, int request, void* k_cache, void* v_cache) {
  const int end = b->context_len[request], count = b->query_start[request + 1] - b->query_start[request];
  const int offset = end % b->block_size;
  if (!offset || offset > count || tb_kv_paired(h, b->block_size)) return;  // full, or begun earlier
  const size_t row = h->kv_heads * tb_kv_head_bytes(h);
  const size_t at = ((size_t)b->blocks[b->table_start[request] + end / b->block_size] * b->block_size + offset) * row;
  memset((char*)k_cache + at, 0, (b->block_size - offset) * row);
  memset((char*)v_cache + at, 0, (b->block_size - offset) * row);
}

// Where the block of a slot begins in a paired cache.
static size_t block_at(const tb_heads* h, int block_size, int64_t slot) {
  return (size_t)(slot / block_size) * block_size * h->kv_heads * tb_kv_head_bytes(h);
}

static void store_paired(const tb_heads* h, const tb_batch* b, int token, const uint16_t* k, const uint16_t* v, char* k_cache, char* v_cache) {
  const tb_attention_kernel* kernel = tb_attention_of_level();
  const int64_t slot = b->slots[token];
  const size_t head = b->block_size * tb_kv_head_bytes(h), at = block_at(h, b->block_size, slot);
  const bool last = token + 1 == b->tokens || b->slots[token + 1] != slot + 1;  // of its request, or of its block: then at an odd place
  for (int i = 0; i < h->kv_heads; i++)
    kernel->store_pairs(k + i * h->head_dim, v + i * h->head_dim, h->head_dim, slot % b->block_size, last, k_cache + at + i * head,
                        v_cache + at + i * head);
}

void tb_bring_slot(const tb_heads* h, const tb_batch* b, int token, const void* k_cache, const void* v_cache) {
  if (!tb_kv_paired(h, b->block_size)) return;
  const size_t bytes = tb_kv_head_bytes(h), head = b->block_size * bytes;
  const int offset = b->slots[token] % b->block_size;
  const size_t at = block_at(h, b->block_size, b->slots[token]);
  for (int i = 0; i < h->kv_heads; i++) {
    const char* k = (const char*)k_cache + at + i * head + offset / TB_PAIRED_GROUP * TB_PAIRED_GROUP * bytes;
    const char* v = (const char*)v_cache + at + i * head + offset / 2 * 2 * bytes;
    for (int d = 0; d < h->head_dim / 2; d++) __builtin_prefetch(k + d * 4 * TB_PAIRED_GROUP, 1);
    for (size_t d = 0; d < 2 * bytes; d += 64) __builtin_prefetch(v + d, 1);
  }
}

void tb_store_kv(const tb_heads* h, const tb_batch* b, int token, const void* k, const void* v, void* k_cache, void* v_cache) {
  if (tb_kv_paired(h, b->block_size))
    return store_paired(h, b, token, (const uint16_t*)k, (const uint16_t*)v, (char*)k_cache, (char*)v_cache);
  const int64_t slot = b->slots[token];
  const size_t bytes = tb_kv_head_bytes(h), row = h->kv_heads * bytes;
  char *to_k = (char*)k_cache + slot * row, *to_v = (char*)v_cache + slot * row;
  if (h->kv_dtype == TB_KV_INT8) {
    const tb_attention_kernel* kernel = tb_attention_of_level();
    const size_t step = h->head_dim * width_of(h->dtype);
    for (int i = 0; i < h->kv_heads; i++) {
      kernel->quantize(h->dtype, (const char*)k + i * step, to_k + i * bytes, h->head_dim);
      kernel->quantize(h->dtype, (const char*)v + i * step, to_v + i * bytes, h->head_dim);
    }
  } else {
    tb_rows()->cast(h->dtype, k, h->kv_dtype, to_k, h->kv_heads * h->head_dim);
    tb_rows()->cast(h->dtype, v, h->kv_dtype, to_v, h->kv_heads * h->head_dim);
  }
}

void tb_write_kv(const tb_heads* h, const tb_batch* b, const void* k, size_t k_step, const void* v, size_t v_step, void* k_cache,
                 void* v_cache) {
  const size_t item = width_of(h->dtype);
  for (int t = 0; t < b->tokens; t++)
    tb_store_kv(h, b, t, (const char*)k + t * k_step * item, (const char*)v + t * v_step * item, k_cache, v_cache);
  for (int r = 0; r < b->requests; r++) tb_clear_rest(h, b, r, k_cache, v_cache);
}

void tb_attention(const tb_heads* heads, const tb_batch* batch, const void* q, size_t q_step, const void* k_cache,
                  const void* v_cache, void* out) {
  tb_attention_plan plan = {};
  tb_attention_plan_make(&plan, heads, batch, tb_threads());
  struct Job {
    tb_attention_plan* plan;
    const tb_heads* heads;
    const tb_batch* batch;
    const void* q;
    size_t q_step;
    const void *k, *v;
    void* out;
  } job = {&plan, heads, batch, q, q_step, k_cache, v_cache, out};
  tb_run(plan.tasks, [](void* context, int index, int) {
    const Job& j = *(const Job*)context;
    tb_attention_task_run(j.plan, index, j.heads, j.batch, j.q, j.q_step, j.k, j.v, j.out);
  }, &job);
  tb_attention_plan_free(&plan);
}
