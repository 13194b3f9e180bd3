// One job of the pool a step: every worker runs through the same phases, takes tasks of a phase as long as there are some, and goes on
// when all of them are done. A worker that the system held up finds the phases over that the others did without it. With few tokens, what lies between two matrix products (norms, rotation, K/V write) is too little to share:
// the worker that finishes a phase's last task does it while the others wait.
#include "decoder.h"

#include <initializer_list>
#include <math.h>
#include <new>
#include <string.h>

#include "elementwise.h"
#include "memory.h"
#include "pool.h"
#include "quant.h"

struct alignas(64) Counter {
  int taken, done;
};

struct tb_decoder {
  tb_decoder_config config;
  tb_decoder_layer* layer;
  tb_attention_plan* plan;  // by layer; layers of one window use the first one's
  int* plan_of;             // by layer
  tb_heads* heads;          // by layer
  Counter* counters;        // by phase of a step
  char* memory;             // activations
  size_t room;
};

namespace {

enum { FEW_TOKENS = 4, STREAMING_TOKENS = 16, BROUGHT = 16 << 10, ROW_PIECE = 128, GLU_SLOT = 3, PHASES_OF_A_LAYER = 10 };

size_t width_of(int dtype) { return dtype == TB_BF16 ? 2 : 4; }
size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of int8 for the products that take them, beside the rows of dtype that they were made of.
struct Quantised {
  char* at;
  size_t row;  // bytes from one to the next: most that any layer's product takes
};

struct Step {
  tb_decoder* decoder;
  const tb_decoder_step_args* args;
  const tb_row_functions* rows;
  char *x, *normal, *qkv, *attended, *activated, *branch;  // [tokens, ...] of dtype; branch: before a norm behind attention or MLP
  Quantised normal_q, attended_q, activated_q;
  char* hidden;
  int threads;
  Counter* counters;
};

struct Worker {
  Step& s;
  const tb_decoder_config& c;
  const int tokens, index;
  const size_t item;
  int phases = 0;
  const tb_packed* soon = nullptr;  // weights that the next phases read

  Worker(Step& step, int worker)
      : s(step), c(step.decoder->config), tokens(step.args->batch.tokens), index(worker), item(width_of(c.dtype)) {}

  bool few() const { return tokens <= FEW_TOKENS; }

  // f(task) for each task, then `last()` on one worker, then all go on.
  template <class F, class L>
  void phase(int tasks, F f, L last) {
    Counter& counter = s.counters[phases];
    const unsigned stage = ++phases;
    if (tb_stage_over(stage)) return;
    for (int i; (i = __atomic_fetch_add(&counter.taken, 1, __ATOMIC_RELAXED)) < tasks;) {
      f(i);
      if (__atomic_add_fetch(&counter.done, 1, __ATOMIC_ACQ_REL) < tasks) continue;
      last();
      tb_stage_done(stage);
    }
    if (tb_stage_over(stage)) return;
    bring();
    tb_stage_wait(stage);
  }

  // While the others finish: the beginning of what this worker will probably read next, so that the memory works all the time.
  void bring() {
    if (!soon || tokens > STREAMING_TOKENS) return;
    const tb_segment& of = soon->segment[0];
    const int piece = soon->tiles / (4 * s.threads), tile = index * (piece < 1 ? 1 : piece);
    if (tile >= of.tiles) return;
    const char* from = of.data + tile * of.tile_bytes;
    const size_t left = (of.tiles - tile) * of.tile_bytes, bytes = left < BROUGHT ? left : (size_t)BROUGHT;
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  // f(first, end) over all tokens
  template <class F>
  void over_tokens(F f) {
    const int piece = (tokens + 8 * s.threads - 1) / (8 * s.threads);
    phase((tokens + piece - 1) / piece, [&](int i) { f(i * piece, i * piece + piece < tokens ? i * piece + piece : tokens); }, [] {});
  }

  // phase(tasks, f), and then whole rows of x for the product with w: at once by the last worker where they are few.
  template <class F>
  void phase_then_quantise(int tasks, F f, const tb_packed* w, bool wanted, const char* x, const Quantised& q) {
    auto rows = [&](int first, int end) {
      for (int t = first; t < end; t++) quantise(w, x, q, t);
    };
    if (wanted && few()) return phase(tasks, f, [&] { rows(0, tokens); });
    phase(tasks, f, [] {});
    if (wanted) over_tokens(rows);
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

  // Row t of x for the products with w.
  void quantise(const tb_packed* w, const char* x, const Quantised& q, int t) {
    if (w->input != TB_VALUES) tb_quantise(w->input, c.dtype, x + (size_t)t * w->k * item, w->k, q.at + t * q.row);
  }

  // made_for: the product that q's rows were quantised for; another one's input may differ.
  void linear(const tb_packed* w, const char* x, const Quantised& q, const tb_packed* made_for, void* y, int ldy, int dtype, int store,
              int first, int count, int tile, int end) {
    if (w->input != TB_VALUES && w->input == made_for->input)
      tb_quantised_part(w, q.at + first * q.row, q.row, y, ldy, count, dtype, store, tile, end);
    else tb_linear_part(w, x + (size_t)first * w->k * item, w->k, y, ldy, count, dtype, store, tile, end);
  }

  void norm(const char* x, const float* weight, char* y, int t) {
    s.rows->rms_norm(c.dtype, x + (size_t)t * c.hidden * item, weight, y + (size_t)t * c.hidden * item, c.hidden, c.norm_eps);
  }

  void embed(int first, int end) {
    const size_t row = c.hidden * item;
    for (int t = first; t < end; t++) {
      const char* from = (const char*)c.embedding + s.args->token_ids[t] * row;
      if (!c.embedding) tb_packed_row(c.head, s.args->token_ids[t], c.dtype, s.x + t * row);
      else if (c.embed_scale == 1.0f) memcpy(s.x + t * row, from, row);
      if (c.embed_scale != 1.0f) s.rows->scale(c.dtype, c.embedding ? from : s.x + t * row, c.embed_scale, s.x + t * row, c.hidden);
    }
  }

  // Norm and rotation of q and k, K and V into the cache.
  void place(int l, int first, int end) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const int all = c.heads + c.kv_heads;
    auto bring = [&](int t) { tb_bring_slot(&s.decoder->heads[l], &s.args->batch, t, s.args->k[l], s.args->v[l]); };
    bring(first);
    for (int t = first; t < end; t++) {
      if (t + 1 < end) bring(t + 1);
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
      tb_store_kv(&s.decoder->heads[l], &s.args->batch, t, k, v, s.args->k[l], s.args->v[l]);
    }
    if (first == 0) {
      tb_attention_plan_reset(&s.decoder->plan[s.decoder->plan_of[l]]);
      for (int r = 0; r < s.args->batch.requests; r++) tb_clear_rest(&s.decoder->heads[l], &s.args->batch, r, s.args->k[l], s.args->v[l]);
    }
  }

  // What attention or MLP found is in x already, or, if a norm stands behind it, in `branch`. reader: of the next norm's rows, or NULL.
  void join(const float* after, const float* next, const tb_packed* reader, char* to, int first, int end) {
    const size_t row = c.hidden * item;
    for (int t = first; t < end; t++) {
      if (after) s.rows->rms_norm_add(c.dtype, s.branch + t * row, after, s.x + t * row, c.hidden, c.norm_eps);
      norm(s.x, next, to, t);
      if (reader) quantise(reader, to, s.normal_q, t);
    }
  }

  void attention(int l) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const int qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
    soon = layer.out;
    product(
        layer.qkv->tiles, 4,
        [&](int first, int count, int tile, int end) {
          char* y = s.qkv + (size_t)first * qkv * item;
          linear(layer.qkv, s.normal, s.normal_q, layer.qkv, y, qkv, c.dtype, TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { place(l, first, end); });
    tb_attention_plan* plan = &s.decoder->plan[s.decoder->plan_of[l]];
    phase_then_quantise(
        plan->tasks,
        [&](int i) {
          tb_attention_task_run(plan, i, &s.decoder->heads[l], &s.args->batch, s.qkv, qkv, s.args->k[l], s.args->v[l], s.attended);
        },
        layer.out, layer.out->input != TB_VALUES, s.attended, s.attended_q);
    const bool add = !layer.after_attention;
    soon = layer.gate;
    product(
        layer.out->tiles, 4,
        [&](int first, int count, int tile, int end) {
          char* y = (add ? s.x : s.branch) + (size_t)first * c.hidden * item;
          linear(layer.out, s.attended, s.attended_q, layer.out, y, c.hidden, c.dtype, add ? TB_ADD : TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { join(layer.after_attention, layer.before_mlp, layer.gate, s.normal, first, end); });
  }

  void gate_up(const tb_decoder_layer& layer, int first, int count, int tile, int end) {
    const int columns = (end - tile) * TB_TILE_N, from = tile * TB_TILE_N;
    float* gate = (float*)tb_scratch(GLU_SLOT, (size_t)2 * count * columns * sizeof(float));
    float* up = gate + (size_t)count * columns;
    linear(layer.gate, s.normal, s.normal_q, layer.gate, gate - from, columns, TB_F32, TB_SET, first, count, tile, end);
    linear(layer.up, s.normal, s.normal_q, layer.gate, up - from, columns, TB_F32, TB_SET, first, count, tile, end);
    const int n = c.intermediate - from < columns ? c.intermediate - from : columns;
    for (int t = 0; t < count; t++) {
      char* y = s.activated + ((size_t)(first + t) * c.intermediate + from) * item;
      s.rows->glu(c.activation, c.dtype, gate + (size_t)t * columns, up + (size_t)t * columns, y, n);
      if (layer.down->input == TB_INT8_BLOCKS)
        tb_quantise_blocks(c.dtype, y, from, n, s.activated_q.at + (first + t) * s.activated_q.row);
    }
  }

  void mlp(int l) {
    const tb_decoder_layer& layer = s.decoder->layer[l];
    const bool add = !layer.after_mlp, final = l + 1 == c.layers;
    const int pieces = (tokens + ROW_PIECE - 1) / ROW_PIECE, rows = (tokens + pieces - 1) / pieces;
    int piece = layer.gate->tiles / (4 * s.threads);
    piece = piece < 1 ? 1 : tokens > 16 && piece > 4 ? 4 : piece;
    const int columns = (layer.gate->tiles + piece - 1) / piece;
    soon = layer.down;
    phase_then_quantise(
        columns * pieces,
        [&](int i) {
          const int first = i % pieces * rows, tile = i / pieces * piece, count = tokens - first < rows ? tokens - first : rows;
          if (count > 0) gate_up(layer, first, count, tile, tile + piece < layer.gate->tiles ? tile + piece : layer.gate->tiles);
        },
        layer.down, layer.down->input == TB_INT8_ROWS, s.activated, s.activated_q);
    const float* next = final ? c.norm : s.decoder->layer[l + 1].before_attention;
    const tb_packed* reader = final ? nullptr : s.decoder->layer[l + 1].qkv;
    soon = final ? c.head : reader;
    product(
        layer.down->tiles, 4,
        [&](int first, int count, int tile, int end) {
          char* y = (add ? s.x : s.branch) + (size_t)first * c.hidden * item;
          linear(layer.down, s.activated, s.activated_q, layer.down, y, c.hidden, c.dtype, add ? TB_ADD : TB_SET, first, count, tile, end);
        },
        [&](int first, int end) { join(layer.after_mlp, next, reader, final ? s.hidden : s.normal, first, end); });
  }

  void run() {
    over_tokens([&](int first, int end) {
      embed(first, end);
      for (int t = first; t < end; t++) {
        norm(s.x, s.decoder->layer[0].before_attention, s.normal, t);
        quantise(s.decoder->layer[0].qkv, s.normal, s.normal_q, t);
      }
    });
    for (int l = 0; l < c.layers; l++) {
      attention(l);
      mlp(l);
    }
  }
};

size_t most(size_t a, const tb_packed* w) {
  const size_t b = w->input == TB_VALUES ? 0 : tb_input_bytes(w->input, w->k);
  return a > b ? a : b;
}

// Bytes of the rows that the layers' products take quantised.
void find_quantised(Step& s) {
  const tb_decoder& d = *s.decoder;
  s.normal_q = s.attended_q = s.activated_q = {nullptr, 0};
  for (int l = 0; l < d.config.layers; l++) {
    const tb_decoder_layer& layer = d.layer[l];
    s.normal_q.row = most(most(s.normal_q.row, layer.qkv), layer.gate);
    s.attended_q.row = most(s.attended_q.row, layer.out);
    s.activated_q.row = most(s.activated_q.row, layer.down);
  }
}

// Lays the activations of a step out in one piece of memory, which is kept.
bool lay_out(Step& s) {
  tb_decoder* d = s.decoder;
  const tb_decoder_config& c = d->config;
  const size_t row = s.args->batch.tokens * width_of(c.dtype);
  const size_t hidden = lines(row * c.hidden), heads = lines(row * c.heads * c.head_dim);
  const size_t qkv = lines(row * (c.heads + 2 * c.kv_heads) * c.head_dim), activated = lines(row * c.intermediate);
  find_quantised(s);
  const size_t int8 = s.args->batch.tokens * (s.normal_q.row + s.attended_q.row + s.activated_q.row);
  const size_t size = 3 * hidden + heads + qkv + activated + int8;
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
  s.activated = at, at += activated;
  for (Quantised* q : {&s.normal_q, &s.attended_q, &s.activated_q}) {
    q->at = at;
    at += s.args->batch.tokens * q->row;
  }
  return true;
}

}  // namespace

static size_t phases_of(int layers) { return (size_t)PHASES_OF_A_LAYER * layers + 1; }

tb_decoder* tb_decoder_create(const tb_decoder_config* config) {
  const int n = config->layers;
  tb_decoder* d = new (std::nothrow) tb_decoder();
  if (!d) return nullptr;
  d->config = *config;
  d->layer = (tb_decoder_layer*)calloc(n, sizeof *d->layer);
  d->plan = (tb_attention_plan*)calloc(n, sizeof *d->plan);
  d->plan_of = (int*)calloc(n, sizeof *d->plan_of);
  d->heads = (tb_heads*)calloc(n, sizeof *d->heads);
  d->counters = (Counter*)aligned_alloc(alignof(Counter), phases_of(n) * sizeof(Counter));
  if (!d->counters || !d->layer || !d->plan || !d->plan_of || !d->heads) {
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
  free(d->counters);
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
  s.counters = d->counters;
  memset(s.counters, 0, phases_of(d->config.layers) * sizeof(Counter));
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
