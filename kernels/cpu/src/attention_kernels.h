// The attention kernel, for the instruction set of the including file.
//
// One microkernel does both products: C[r][columns] += A[r][k] * B[k][columns], A's elements broadcast, columns in vectors.
//   scores   A = q [rows][head_dim]     B = K of a tile, turned: [head_dim][64 positions]
//   sums     A = weights [rows][64]     B = V of a tile: [64 positions][head_dim]
// With bfloat16 q and cache on AVX512-BF16 an "element" is a pair of bfloat16 of neighbouring k, 32 bits like a float, and weights are
// rounded to bfloat16. Otherwise K and V are widened when they are packed. Of an int8 cache the integers are packed as they are, which is
// exact; K's scales then multiply the scores, and V's the weights that enter the second product (not those that are summed).
// A paired cache (attention.h) is B as it is. With AMX both products of bfloat16 are of tiles of 16 rows (attention_tiles.h).
#pragma once
#include "attention_pack.h"

namespace {

// What is added to a product: nothing, c, or c * factor[r]
enum Start { ZERO, KEEP, SCALE };

// c[R][C * W] = start + a b; distances between rows in elements. b(k, j): where vector j of row k is.
template <class Element, int R, int C, class B>
inline void product(const float* a, int lda, B b, int count, float* c, int ldc, Start start, const float* factor) {
  vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) sum[r][j] = start == ZERO ? zero() : load(c + r * ldc + j * W);
  if (start == SCALE) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sum[r][j] = mul(sum[r][j], set1(factor[r]));
  }
  for (int k = 0; k < count; k++) {
    vec column[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) column[j] = load(b(k, j));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sum[r][j] = Element::product(column[j], a + r * lda + k, sum[r][j]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) store(c + r * ldc + j * W, sum[r][j]);
}

// The same for any number of columns, a multiple of W.
template <class Element, int R, class B>
void product_columns(const float* a, int lda, B b, int count, float* c, int ldc, Start start, const float* factor, int columns) {
  int j = 0;
  for (; j + COLUMNS * W <= columns; j += COLUMNS * W)
    product<Element, R, COLUMNS>(a, lda, b.from(j), count, c + j, ldc, start, factor);
  for (; j < columns; j += W) product<Element, R, 1>(a, lda, b.from(j), count, c + j, ldc, start, factor);
}

template <class Element, class B>
void product_rows(int rows, const float* a, int lda, B b, int count, float* c, int ldc, Start start, const float* factor,
                  int columns) {
  switch (rows) {
#define TB_CASE(n) case n: return product_columns<Element, n>(a, lda, b, count, c, ldc, start, factor, columns);
    TB_CASE(1)
    TB_CASE(2)
    TB_CASE(3)
#if defined(__AVX2__)
    TB_CASE(4)
#endif
#if defined(__AVX512F__)
    TB_CASE(5)
    TB_CASE(6)
#endif
#undef TB_CASE
  }
}

}  // namespace

#include "attention_tiles.h"

namespace {

struct Scratch {
  float *q, *k, *v, *scores, *weights, *sums, *most, *lanes;
  int* token;  // by row
  Scratch(void* at, const Shape& s, int rows) {
    float* p = (float*)at;
    q = p, p += (size_t)rows * s.steps;
    k = p, p += (size_t)s.steps * TB_TILE;
    v = p, p += (size_t)TB_TILE * s.width;
    scores = p, p += MOST_ROWS * TB_TILE;
    weights = p, p += MOST_ROWS * TB_TILE;
    sums = p, p += (size_t)rows * s.width;
    most = p, p += round_up(rows, 16);
    lanes = p, p += round_up(rows, 16) * W;
    token = (int*)p;
  }
};

size_t scratch_bytes(const tb_heads* h, int rows) {
  const size_t steps = round_up(h->head_dim, 16), width = steps;
  return 4 * (rows * (steps + width + 1) + TB_TILE * (steps + width) + 2 * MOST_ROWS * TB_TILE + round_up(rows, 16) * (1 + W));
}

// x of the columns lo <= column < hi, from `column` on; `other` elsewhere
inline vec visible(vec x, int column, int lo, int hi, float other) {
  vec at = add(iota(), set1((float)column));
  return less_then(at, set1((float)lo), set1(other), less_then(at, set1((float)hi), x, set1(other)));
}

// What a tile's scores are multiplied with: all alike, or (int8) each column; and what weights are.
struct Scales {
  float all;
  alignas(64) float k[TB_TILE], v[TB_TILE];

  void read(const int8_t* const* k_rows, const int8_t* const* v_rows, int count, int dim) {
    for (int i = 0; i < TB_TILE; i++) k[i] = v[i] = 0;
    for (int i = 0; i < count; i++) {
      memcpy(&k[i], k_rows[i] + dim, sizeof k[i]);
      memcpy(&v[i], v_rows[i] + dim, sizeof v[i]);
    }
    for (int i = 0; i < TB_TILE; i += W) store(k + i, mul(load(k + i), set1(all)));
  }
  template <class T>
  void read(const T* const*, const T* const*, int, int) {}
};

// Scores of one row's visible columns lo <= i < hi as they are compared and weighed: times scale, if `plain` later on. Returns the
// largest by lanes. scale and softcap carry log2 e.
template <class Pack>
inline vec survey(float* scores, int lo, int hi, const Scales& by, float softcap, bool plain) {
  vec top = set1(-INFINITY);
#pragma GCC unroll 4
  for (int i = 0; i < TB_TILE / W; i++) {
    vec s = load(scores + i * W);
    if (!plain) {
      s = mul(s, Pack::SCALED ? load(by.k + i * W) : set1(by.all));
      if (softcap != 0) s = mul(tanh(div(s, set1(softcap))), set1(softcap));
      store(scores + i * W, s);
    }
    if (lo > 0 || hi < TB_TILE) s = visible(s, i * W, lo, hi, -INFINITY);
    top = max(top, s);
  }
  return plain ? mul(top, set1(by.all)) : top;
}

// A row's reference, from which its weights are powers of 2, moves to its maximum when that is higher by more than SLACK: weights are at
// most 2^SLACK. Returns what the row's sums so far are to be multiplied with.
enum { SLACK = 8 };
inline float raise(vec top, float* most) {
  const float before = *most;
  if (!any_greater(top, set1(before + SLACK))) return 1;
  *most = max_lanes(top);
  if (before == -INFINITY) return 1;  // sums are zeros yet
  float t[W];
  store(t, exp2<false>(set1(before - *most)));
  return t[0];
}

// One row of a tile: 2^(score * scale - most) of the visible columns, 0 elsewhere; `lanes` gets their sum.
template <class Pack>
inline void weigh(const float* scores, float* weights, int lo, int hi, const Scales& by, float scale, float most, float factor,
                  float* lanes) {
  vec sum = zero();
#pragma GCC unroll 4
  for (int i = 0; i < TB_TILE / W; i++) {
    vec weight = exp2<Pack::GROUP == 2>(fma(load(scores + i * W), set1(scale), set1(-most)));
    if (lo > 0 || hi < TB_TILE) weight = visible(weight, i * W, lo, hi, 0);
    sum = add(sum, weight);
    if (Pack::SCALED) {
      weight = mul(weight, load(by.v + i * W));
      if (lo > 0 || hi < TB_TILE) weight = visible(weight, i * W, lo, hi, 0);  // the scale may be NaN
    }
    Pack::store_weights(Pack::weight_at(weights, i * W), weight);
  }
  store(lanes, fma(load(lanes), set1(factor), sum));
}

inline vec weighted(vec part, float part_by, vec sum, float by) { return fma(part, set1(part_by), mul(sum, set1(by))); }

void fold(float* sums, float* most, float* total, const float* part_sums, float part_most, float part_total, int width) {
  const float after = *most > part_most ? *most : part_most;
  float a[W], b[W];
  store(a, exp2<false>(set1(*most - after)));
  store(b, exp2<false>(set1(part_most - after)));
  *most = after;
  *total = *total * a[0] + part_total * b[0];
  for (int d = 0; d < width; d += W) store(sums + d, weighted(load(part_sums + d), b[0], load(sums + d), a[0]));
}

// sum_lanes of each of n <= W rows
inline vec sums_of_lanes(const float* rows, int n) {
  vec lanes[W];
  if (n <= 4) {
    float t[W] = {};
    for (int j = 0; j < n; j++) t[j] = sum_lanes(load(rows + j * W));
    return load(t);
  }
  for (int j = 0; j < W; j++) lanes[j] = load(rows + j * W);
  transpose(lanes);
  for (int half = W / 2; half; half /= 2)
    for (int j = 0; j < half; j++) lanes[j] = add(lanes[j], lanes[j + half]);
  return lanes[0];
}

// Folds what the rows found in a part into what they found in earlier ones.
void close_part(const tb_attention_rows* a, const Scratch& s, int width, int rows, int part) {
  const int from = part * TB_PART, window = a->heads->window;
  for (int block = 0; block < rows; block += W) {
    const int n = rows - block < W ? rows - block : (int)W;
    const vec part_total = sums_of_lanes(s.lanes + (size_t)block * W, n);
    const vec most = load_up_to(a->most + block, n), part_most = load_up_to(s.most + block, n), after = max(most, part_most);
    const vec by = exp2<false>(sub(most, after)), part_by = exp2<false>(sub(part_most, after));
    const vec total = add(mul(load_up_to(a->total + block, n), by), mul(part_total, part_by));
    float own[W], of_part[W], mosts[W], totals[W], part_totals[W];
    store(own, by), store(of_part, part_by), store(mosts, after), store(totals, total), store(part_totals, part_total);
    for (int j = 0; j < n; j++) {
      const int r = block + j, position = a->position + s.token[r];
      const int low = window && position >= window ? position - window + 1 : 0;
      if (position < from || low >= from + TB_PART) continue;
      const float* sums = s.sums + (size_t)r * width;
      float* into = a->sums + (size_t)r * width;
      if (part == (a->part_begin > low / TB_PART ? a->part_begin : low / TB_PART)) {  // the row's first part here
        for (int d = 0; d < width; d += W) store(into + d, load(sums + d));
        a->most[r] = s.most[r];
        a->total[r] = part_totals[j];
      } else {
        for (int d = 0; d < width; d += W) store(into + d, weighted(load(sums + d), of_part[j], load(into + d), own[j]));
        a->most[r] = mosts[j];
        a->total[r] = totals[j];
      }
    }
  }
}

// The two products. fetch: what of the next tile is where in this one is fetched too, if the cache is read as it is.
template <class Pack, class B>
void scores_of(int rows, const float* q, const Shape& shape, B keys, [[maybe_unused]] B next, [[maybe_unused]] bool fetch,
               float* scores) {
  typedef typename Pack::Element Element;
  if constexpr (Pack::STORED)
    if (fetch)
      return product_rows<Element>(rows, q, shape.steps, Fetching<B>{keys, next}, shape.depth, scores, TB_TILE, ZERO, nullptr, TB_TILE);
  product_rows<Element>(rows, q, shape.steps, keys, shape.depth, scores, TB_TILE, ZERO, nullptr, TB_TILE);
}

template <class Pack, class B>
void sums_of(int rows, const float* weights, const Shape& shape, B values, [[maybe_unused]] B next, [[maybe_unused]] bool fetch,
             int count, float* sums, Start start, const float* factor) {
  typedef typename Pack::Element Element;
  const int lda = TB_TILE / Pack::GROUP, width = shape.width;
  if constexpr (Pack::STORED)
    if (fetch) {
      product_rows<Element>(rows, weights, lda, Fetching<B>{values, next}, count, sums, width, start, factor, width);
      for (; count < lda; count++)
        for (int d = 0; d < width; d += W) __builtin_prefetch(next.from(d)(count, 0), 0, 2);
      return;
    }
  product_rows<Element>(rows, weights, lda, values, count, sums, width, start, factor, width);
}

#if defined(TB_TILES)
template <class Pack>
void scores_of(int, const float* q, const Shape& shape, TiledKeys keys, TiledKeys next, bool fetch, float* scores) {
  tile_scores(q, shape, keys, Pack::STORED && fetch ? &next : nullptr, scores);
}

template <class Pack>
void sums_of(int rows, const float* weights, const Shape& shape, Packed values, const Groups* next, bool fetch, int, float* sums,
             Start start, const float* factor) {
  tile_sums(rows, weights, shape.width, values, fetch ? next : nullptr, sums, start, factor);
}
#endif

template <class Pack, class Q>
void attend(const tb_attention_rows* a, void* memory) {
  const tb_heads* h = a->heads;
  const int group = h->heads / h->kv_heads, rows = a->tokens * group, dim = h->head_dim, window = h->window;
  const int end = a->position + a->tokens;  // one past the last position that any row sees
  const int first = window && a->position >= window ? a->position - window + 1 : 0;
  const float softcap = h->softcap * 1.44269504f;
  Scales by;
  by.all = h->scale * 1.44269504f;
  const bool plain = !Pack::SCALED && softcap == 0 && by.all > 0;
  const Shape shape(h, Pack::GROUP);
  Scratch s(memory, shape, rows);
  pack_queries<Pack, Q>(a, shape, group, s.q);
  for (int r = 0; r < rows; r++) s.token[r] = r / group;
  const int head_bytes = (int)tb_kv_head_bytes(h);
  const int last = a->part_end * TB_PART < end ? a->part_end * TB_PART : end;
  const int tiles = (last - (first > a->part_begin * TB_PART ? first : a->part_begin * TB_PART) + TB_TILE - 1) / TB_TILE;
  const int later_share = a->later_rows / (tiles < 1 ? 1 : tiles) + 1;
  int later = Pack::STORED ? a->later_rows : 0;
  [[maybe_unused]] int shaped = 0;
  constexpr int ROWS = Pack::ROWS;

  for (int part = a->part_begin; part < a->part_end; part++) {
    const int from = part * TB_PART, to = from + TB_PART < end ? from + TB_PART : end;
    if (to <= first) continue;
    for (int r = 0; r < rows; r++) s.most[r] = -INFINITY;
    memset(s.lanes, 0, (size_t)round_up(rows, W) * W * 4);
    for (int tile = from; tile < to; tile += TB_TILE) {
      if (tile + TB_TILE <= first) continue;
      const int count = end - tile < TB_TILE ? end - tile : (int)TB_TILE;
      const typename Pack::Place here(a, tile, count);
      // The next tile's K and V are fetched in the course of the first rows; to be packed, of all, where they are many.
      const int after = end - tile - TB_TILE < TB_TILE ? end - tile - TB_TILE : (int)TB_TILE;
      const int next = (Pack::STORED || rows >= 2 * TB_TILE) && tile + TB_TILE < last ? after : 0;
      const auto there = Pack::Place::behind(here, a, tile + TB_TILE, next);
      for (const int stop = later + later_share < a->later_rows ? later + later_share : a->later_rows; later < stop; later++)
        fetch(a->later[later], a->later_bytes);
      const auto keys = Pack::keys(here, count, dim, shape, s.k);
      const auto values = Pack::values(here, count, dim, shape, s.v);
      by.read(here.k, here.v, count, dim);
      // rows that see something of the tile: from the first token that is not too early to the last that is not too late
      const int early = tile > a->position ? tile - a->position : 0, gone = tile + TB_TILE + window - 1 - a->position;
      const int late = window && gone < a->tokens ? gone : a->tokens;
      int fetched = 0;
      for (int r = early * group; r < late * group; r += ROWS) {
        for (const int stop = next * (r + ROWS) / (late * group); fetched < stop && fetched < next; fetched++)
          there.fetch_row(fetched, head_bytes);
        const int some = late * group - r < ROWS ? late * group - r : (int)ROWS;
#if defined(TB_TILES)
        if (Pack::TILES && some != shaped) use_tiles(some, some), shaped = some;
#endif
        // columns from here on are seen by none of the rows
        const int seen = a->position + s.token[r + some - 1] + 1 - tile, needed = seen < TB_TILE ? seen : (int)TB_TILE;
        scores_of<Pack>(some, s.q + (size_t)r * shape.steps, shape, keys, Pack::keys_of_next(there), r == early * group, s.scores);
        float factor[ROWS];
        int lo[ROWS], hi[ROWS], fresh = 0, moved = 0;
        for (int i = 0; i < some; i++) fresh += s.most[r + i] == -INFINITY;
        for (int i = 0; i < some; i++) {
          const int position = a->position + s.token[r + i];
          lo[i] = window ? position - window + 1 - tile : 0;
          hi[i] = position + 1 - tile;
          if (fresh < some && s.most[r + i] == -INFINITY) memset(s.sums + (size_t)(r + i) * shape.width, 0, shape.width * 4);
          factor[i] = raise(survey<Pack>(s.scores + i * TB_TILE, lo[i], hi[i], by, softcap, plain), s.most + r + i);
          moved += factor[i] != 1;
        }
        const Start start = fresh == some ? ZERO : moved ? SCALE : KEEP;
        for (int i = 0; i < some; i++)
          weigh<Pack>(s.scores + i * TB_TILE, s.weights + i * TB_TILE / Pack::GROUP, lo[i], hi[i], by, plain ? by.all : 1.0f,
                      s.most[r + i], factor[i], s.lanes + (size_t)(r + i) * W);
        sums_of<Pack>(some, s.weights, shape, values, Pack::values_of_next(there, shape), r == early * group,
                      (needed + Pack::GROUP - 1) / Pack::GROUP, s.sums + (size_t)r * shape.width, start, factor);
      }
    }
    close_part(a, s, shape.width, rows, part);
  }
#if defined(TB_TILES)
  if (Pack::TILES) _tile_release();
#endif
}

template <class Q, class T>
void run_as(const tb_attention_rows* a, void* scratch) {
#if defined(TB_TILES)
  if constexpr (sizeof(Q) == 2 && sizeof(T) <= 2)
    if (a->heads->head_dim % 32 == 0) {
      if constexpr (sizeof(T) == 2)
        if (a->paired) return attend<Tiled, Q>(a, scratch);
      return attend<TiledRows<T>, Q>(a, scratch);
    }
#endif
#if defined(__AVX512BF16__)
  if constexpr (sizeof(Q) == 2 && sizeof(T) == 2)
    if (a->paired) return attend<Stored, Q>(a, scratch);
  if constexpr (sizeof(Q) == 2 && sizeof(T) <= 2) return attend<Paired<T>, Q>(a, scratch);
#endif
  return attend<Widened<T>, Q>(a, scratch);
}

template <class Q>
void run_with(const tb_attention_rows* a, void* scratch) {
  switch (a->heads->kv_dtype) {
    case TB_BF16: return run_as<Q, bf16>(a, scratch);
    case TB_KV_INT8: return run_as<Q, int8_t>(a, scratch);
    default: return run_as<Q, float>(a, scratch);
  }
}

void run(const tb_attention_rows* a, void* scratch) {
  if (a->heads->dtype == TB_BF16) run_with<bf16>(a, scratch);
  else run_with<float>(a, scratch);
}

void finish(const float* sums, float total, void* y, int dtype, int n) {
  vec by = set1(total);
  for_vectors(n, [&](int i, int m) {
    vec found = div(load(sums + i), by);
    if (dtype == TB_BF16) store_up_to((bf16*)y + i, found, m);
    else store_up_to((float*)y + i, found, m);
  });
}

}  // namespace

#define TB_ATTENTION_KERNEL(name)          \
  extern const tb_attention_kernel name;   \
  const tb_attention_kernel name = {W, scratch_bytes, run, fold, finish, quantize, STORE_PAIRS};
