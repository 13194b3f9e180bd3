// One job of the pool a step: every worker runs through the same phases, takes tasks of a phase as long as there are some, and meets
// the others at its end. With few tokens, what lies between two matrix products (norms, rotation, K/V write) is too little to share:
// the worker that finishes a phase's last task does it while the others wait.
#include "decoder.h"

#include <math.h>
#include <new>
#include <string.h>

#include "elementwise.h"
#include "memory.h"
#include "pool.h"

struct tb_decoder {
  tb_decoder_config config;
  tb_decoder_layer* layer;
  tb_attention_plan* plan;  // by layer; layers of one window use the first one's
  int* plan_of;             // by layer
  tb_heads* heads;          // by layer
  char* memory;             // activations
  size_t room;
};

namespace {

enum { FEW_TOKENS = 4, ROW_PIECE = 128, GLU_SLOT = 3 };

size_t width_of(int dtype) { return dtype == TB_BF16 ? 2 : 4; }
size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

struct alignas(64) Counter {
  int taken, done;
};

struct Step {
  tb_decoder* decoder;
  const tb_decoder_step_args* args;
  const tb_row_functions* rows;
  char *x, *normal, *qkv, *attended, *activated, *branch;  // [tokens, ...] of dtype; branch: before a norm behind attention or MLP
  char* hidden;
  int threads;
  Counter counters[4] = {};
};

struct Worker {
  Step& s;
  const tb_decoder_config& c;
  const int tokens, index;
  const size_t item;
  int phases = 0;

  Worker(Step& step, int worker)
      : s(step), c(step.decoder->config), tokens(step.args->batch.tokens), index(worker), item(width_of(c.dtype)) {}

  bool few() const { return tokens <= FEW_TOKENS; }

  // f(task) for each task, then `last()` on one worker, then all go on. A counter is cleared two phases before its next use.
  template <class F, class L>
  void phase(int tasks, F f, L last) {
    Counter& counter = s.counters[phases & 3];
    if (index == 0) s.counters[(phases + 2) & 3] = Counter();
    phases++;
    for (int i; (i = __atomic_fetch_add(&counter.taken, 1, __ATOMIC_RELAXED)) < tasks;) {
      f(i);
      if (__atomic_add_fetch(&counter.done, 1, __ATOMIC_ACQ_REL) == tasks) last();
    }
    tb_barrier();
  }

  // f(first, end) over all tokens
  template <class F>
  void over_tokens(F f) {
    const int piece = (tokens + 8 * s.threads - 1) / (8 * s.threads);
    phase((tokens + piece - 1) / piece, [&](int i) { f(i * piece, i * piece + piece < tokens ? i * piece + piece : tokens); }, [] {});
  }

  // f(first row, rows, first tile, end tile) over a matrix product, then between(first row, end row) over its rows
  template <class F, class B>
  void product(int tiles, int piece_of_many, F f, B between) {
    const int pieces = (tokens + ROW_PIECE - 1) / ROW_PIECE, rows = (tokens + pieces - 1) / pieces;
    int piece = tiles / (4 * s.threads);
    piece = piece < 1 ? 1 : piece;
    if (tokens > 16 && piece > piece_of_many) piece = piece_of_many;
    const int columns = (tiles + piece - 1) / piece;
    auto task = [&](int i) {
      const int first = i % pieces * rows, tile = i / pieces * piece;
      const int count = tokens - first < rows ? tokens - first : rows;
      if (count > 0) f(first, count, tile, tile + piece < tiles ? tile + piece : tiles);
    };
    if (few()) {
      phase(columns * pieces, task, [&] { between(0, tokens); });
    } else {
      phase(columns * pieces, task, [] {});
      over_tokens(between);
    }
  }

  void linear(const tb_packed* w, const char* x, int ldx, char* y, int ldy, int store, int first, int count, int tile, int end) {
    tb_linear_part(w, x + (size_t)first * ldx * item, ldx, y + (size_t)first * ldy * item, ldy, count, c.dtype, store, tile, end);
  }

  void norm(const char* x, const float* weight, char* y, int t) {
    s.rows->rms_norm(c.dtype, x + (size_t)t * c.hidden * item, weight, y + (size_t)t * c.hidden * item, c.hidden, c.norm_eps);
  }

  void embed(int first, int end) {
    const size_t row = c.hidden * item;
    for (int t = first; t < end; t++) {
      const char* from = (const char*)c.embedding + s.args->token_ids[t] * row;
      if (c.embed_scale == 1.0f) memcpy(s.x + t * row, from, row);
      else s.rows->scale(c.dtype, from, c.embed_scale, s.x + t * row, c.hidden);
    }
  }

  // Norm and rotation of q and k, K and V into the cache.
  void place(int l, int first, int end) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const int all = c.heads + c.kv_heads;
    for (int t = first; t < end; t++) {
      char* row = s.qkv + (size_t)t * (all + c.kv_heads) * c.head_dim * item;
      for (int h = 0; h < all; h++) {
        char* head = row + h * c.head_dim * item;
        const float* weight = h < c.heads ? layer.q_norm : layer.k_norm;
        if (weight) s.rows->rms_norm(c.dtype, head, weight, head, c.head_dim, c.norm_eps);
        if (layer.rope >= 0) {
          const int half = s.args->half[layer.rope];
          const size_t at = (size_t)s.args->positions[t] * half;
          s.rows->rope(c.dtype, head, s.args->cos[layer.rope] + at, s.args->sin[layer.rope] + at, half);
        }
      }
      const char* k = row + c.heads * c.head_dim * item;
      const char* v = k + c.kv_heads * c.head_dim * item;
      tb_store_kv(&s.decoder->heads[l], s.args->batch.slots[t], k, v, s.args->k[l], s.args->v[l]);
    }
    if (first == 0) {
      tb_attention_plan_reset(&s.decoder->plan[s.decoder->plan_of[l]]);
      for (int r = 0; r < s.args->batch.requests; r++) tb_clear_rest(&s.decoder->heads[l], &s.args->batch, r, s.args->k[l], s.args->v[l]);
    }
  }

  // What attention or MLP found is in x already, or, if a norm stands behind it, in `branch`.
  void join(const float* after, const float* next, char* to, int first, int end) {
    const size_t row = c.hidden * item;
    for (int t = first; t < end; t++) {
      if (after) s.rows->rms_norm_add(c.dtype, s.branch + t * row, after, s.x + t * row, c.hidden, c.norm_eps);
      norm(s.x, next, to, t);
    }
  }

  void attention(int l) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const int qkv = (c.heads + 2 * c.kv_heads) * c.head_dim, heads = c.heads * c.head_dim;
    product(
        layer.qkv->tiles, 4,
        [&](int first, int count, int tile, int end) {
          linear(layer.qkv, s.normal, c.hidden, s.qkv, qkv, TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { place(l, first, end); });
    tb_attention_plan* plan = &s.decoder->plan[s.decoder->plan_of[l]];
    phase(
        plan->tasks,
        [&](int i) {
          tb_attention_task_run(plan, i, &s.decoder->heads[l], &s.args->batch, s.qkv, qkv, s.args->k[l], s.args->v[l], s.attended);
        },
        [] {});
    const bool add = !layer.after_attention;
    product(
        layer.out->tiles, 4,
        [&](int first, int count, int tile, int end) {
          linear(layer.out, s.attended, heads, add ? s.x : s.branch, c.hidden, add ? TB_ADD : TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { join(layer.after_attention, layer.before_mlp, s.normal, first, end); });
  }

  void gate_up(const tb_decoder_layer& layer, int first, int count, int tile, int end) {
    const int columns = (end - tile) * TB_TILE_N, from = tile * TB_TILE_N;
    float* gate = (float*)tb_scratch(GLU_SLOT, (size_t)2 * count * columns * sizeof(float));
    float* up = gate + (size_t)count * columns;
    const char* x = s.normal + (size_t)first * c.hidden * item;
    tb_linear_part(layer.gate, x, c.hidden, gate - from, columns, count, TB_F32, TB_SET, tile, end);
    tb_linear_part(layer.up, x, c.hidden, up - from, columns, count, TB_F32, TB_SET, tile, end);
    const int n = c.intermediate - from < columns ? c.intermediate - from : columns;
    for (int t = 0; t < count; t++) {
      char* y = s.activated + ((size_t)(first + t) * c.intermediate + from) * item;
      s.rows->glu(c.activation, c.dtype, gate + (size_t)t * columns, up + (size_t)t * columns, y, n);
    }
  }

  void mlp(int l) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const bool add = !layer.after_mlp, final = l + 1 == c.layers;
    const int pieces = (tokens + ROW_PIECE - 1) / ROW_PIECE, rows = (tokens + pieces - 1) / pieces;
    int piece = layer.gate->tiles / (4 * s.threads);
    piece = piece < 1 ? 1 : tokens > 16 && piece > 2 ? 2 : piece;
    const int columns = (layer.gate->tiles + piece - 1) / piece;
    phase(
        columns * pieces,
        [&](int i) {
          const int first = i % pieces * rows, tile = i / pieces * piece, count = tokens - first < rows ? tokens - first : rows;
          if (count > 0) gate_up(layer, first, count, tile, tile + piece < layer.gate->tiles ? tile + piece : layer.gate->tiles);
        },
        [] {});
    const float* next = final ? c.norm : s.decoder->layer[l + 1].before_attention;
    product(
        layer.down->tiles, 2,
        [&](int first, int count, int tile, int end) {
          linear(layer.down, s.activated, c.intermediate, add ? s.x : s.branch, c.hidden, add ? TB_ADD : TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { join(layer.after_mlp, next, final ? s.hidden : s.normal, first, end); });
  }

  void run() {
    over_tokens([&](int first, int end) {
      embed(first, end);
      for (int t = first; t < end; t++) norm(s.x, s.decoder->layer[0].before_attention, s.normal, t);
    });
    for (int l = 0; l < c.layers; l++) {
      attention(l);
      mlp(l);
    }
  }
};

// Lays the activations of a step out in one piece of memory, which is kept.
bool lay_out(Step& s) {
  tb_decoder* d = s.decoder;
  const tb_decoder_config& c = d->config;
  const size_t row = s.args->batch.tokens * width_of(c.dtype);
  const size_t hidden = lines(row * c.hidden), heads = lines(row * c.heads * c.head_dim);
  const size_t qkv = lines(row * (c.heads + 2 * c.kv_heads) * c.head_dim), activated = lines(row * c.intermediate);
  const size_t size = 3 * hidden + heads + qkv + activated;
  if (size > d->room) {
    tb_free(d->memory);
    d->memory = (char*)tb_alloc(size);
    d->room = d->memory ? size : 0;
    if (!d->memory) return false;
  }
  char* at = d->memory;
  s.x = at, at += hidden;
  s.normal = at, at += hidden;
  s.branch = at, at += hidden;
  s.attended = at, at += heads;
  s.qkv = at, at += qkv;
  s.activated = at;
  return true;
}

}  // namespace

tb_decoder* tb_decoder_create(const tb_decoder_config* config) {
  const int n = config->layers;
  tb_decoder* d = new (std::nothrow) tb_decoder();
  if (!d) return nullptr;
  d->config = *config;
  d->layer = (tb_decoder_layer*)calloc(n, sizeof *d->layer);
  d->plan = (tb_attention_plan*)calloc(n, sizeof *d->plan);
  d->plan_of = (int*)calloc(n, sizeof *d->plan_of);
  d->heads = (tb_heads*)calloc(n, sizeof *d->heads);
  if (!d->layer || !d->plan || !d->plan_of || !d->heads) {
    tb_decoder_free(d);
    return nullptr;
  }
  memcpy(d->layer, config->layer, n * sizeof *d->layer);
  d->config.layer = d->layer;
  for (int l = 0; l < n; l++) {
    d->heads[l] = {config->heads,    config->kv_heads,        config->head_dim,         config->dtype, config->dtype,
                   d->layer[l].window, config->attention_scale, config->attention_softcap};
    while (d->layer[d->plan_of[l]].window != d->layer[l].window) d->plan_of[l]++;
  }
  return d;
}

void tb_decoder_set_kv(tb_decoder* d, int kv_dtype) {
  for (int l = 0; l < d->config.layers; l++) d->heads[l].kv_dtype = kv_dtype;
}

void tb_decoder_free(tb_decoder* d) {
  if (!d) return;
  for (int l = 0; d->plan && l < d->config.layers; l++) tb_attention_plan_free(&d->plan[l]);
  free(d->plan);
  free(d->plan_of);
  free(d->heads);
  free(d->layer);
  tb_free(d->memory);
  delete d;
}

int tb_decoder_step(tb_decoder* d, const tb_decoder_step_args* args, void* hidden) {
  Step s;
  s.decoder = d;
  s.args = args;
  s.rows = tb_rows();
  s.hidden = (char*)hidden;
  tb_run(1, [](void*, int, int) {}, nullptr);  // threads that the system refuses are known after this
  s.threads = tb_threads();
  if (!lay_out(s)) return -1;
  for (int l = 0; l < d->config.layers; l++)
    if (d->plan_of[l] == l) tb_attention_plan_make(&d->plan[l], &d->heads[l], &args->batch, s.threads);
  tb_run(s.threads, [](void* context, int index, int) { Worker(*(Step*)context, index).run(); }, &s);
  return 0;
}

void tb_decoder_logits(const tb_decoder* d, const void* hidden, int rows, float* out) {
  const tb_decoder_config& c = d->config;
  tb_linear(c.head, hidden, c.hidden, out, c.head->n, rows, TB_F32, TB_SET);
  if (c.logit_softcap != 0) tb_softcap(out, c.logit_softcap, out, rows, c.head->n);
}
