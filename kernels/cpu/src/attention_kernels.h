// The attention kernel, for the instruction set of the including file.
//
// One microkernel does both products: C[r][columns] += A[r][k] * B[k][columns], A's elements broadcast, columns in vectors.
//   scores   A = q [rows][head_dim]     B = K of a tile, turned: [head_dim][64 positions]
//   sums     A = weights [rows][64]     B = V of a tile: [64 positions][head_dim]
// With bfloat16 q and cache on AVX512-BF16 an "element" is a pair of bfloat16 of neighbouring k, 32 bits like a float, and weights are
// rounded to bfloat16. Otherwise K and V are widened when they are packed.
#pragma once
#include <math.h>

#include "attention.h"
#include "vec.h"

namespace {

#if defined(__AVX512F__)
enum { ROWS = 6, COLUMNS = 4 };  // of the microkernel, columns in vectors
#elif defined(__AVX2__)
enum { ROWS = 4, COLUMNS = 2 };
#else
enum { ROWS = 3, COLUMNS = 2 };
#endif

struct Single {  // elements are float32
  static vec product(vec b, const float* a, vec c) { return fma(b, set1(*a), c); }
};
#if defined(__AVX512BF16__)
struct Pair {
  static vec product(vec b, const float* a, vec c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(b), (__m512bh)_mm512_castps_si512(set1(*a)));
  }
};
#endif

// c[R][C * W] = c * factor[r] (or zeros without factor) + a b; distances between rows in elements
template <class Element, int R, int C>
inline void product(const float* a, int lda, const float* b, int ldb, int count, float* c, int ldc, const float* factor) {
  vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) sum[r][j] = factor ? mul(load(c + r * ldc + j * W), set1(factor[r])) : zero();
  for (int k = 0; k < count; k++) {
    vec column[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) column[j] = load(b + k * ldb + j * W);
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
template <class Element, int R>
void product_columns(const float* a, int lda, const float* b, int ldb, int count, float* c, int ldc, const float* factor, int columns) {
  int j = 0;
  for (; j + COLUMNS * W <= columns; j += COLUMNS * W) product<Element, R, COLUMNS>(a, lda, b + j, ldb, count, c + j, ldc, factor);
  for (; j < columns; j += W) product<Element, R, 1>(a, lda, b + j, ldb, count, c + j, ldc, factor);
}

template <class Element>
void product_rows(int rows, const float* a, int lda, const float* b, int ldb, int count, float* c, int ldc, const float* factor,
                  int columns) {
  switch (rows) {
#define TB_CASE(n) case n: return product_columns<Element, n>(a, lda, b, ldb, count, c, ldc, factor, columns);
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

// How the tiles are packed: 32-bit elements from storage T.
template <class T>
struct Widened {
  typedef Single Element;
  enum { GROUP = 1, RAW = sizeof(T) == 4 };  // values of an element; elements are in memory as they are needed
  static vec read(const T* x, int n) { return n >= W ? load(x) : load_n(x, n); }
  static void store_weights(float* p, vec w) { store(p, w); }
  static float* weight_at(float* p, int i) { return p + i; }
  static void values(const T* const* rows, int count, int dim, int width, float* to) {
    for (int i = 0; i < count; i++)
      for (int d = 0; d < width; d += W) store(to + i * width + d, d + W <= dim ? load(rows[i] + d) : d < dim ? load_n(rows[i] + d, dim - d) : zero());
    for (int i = count * width; i < TB_TILE * width; i += W) store(to + i, zero());
  }
};

#if defined(__AVX512BF16__)
struct Paired {
  typedef Pair Element;
  enum { GROUP = 2, RAW = 1 };
  static vec read(const bf16* x, int n) {
    if (n >= 32) return _mm512_castsi512_ps(_mm512_loadu_si512(x));
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), x));
  }
  static void store_weights(float* p, vec w) { _mm256_storeu_si256((__m256i*)p, narrow(w)); }
  static float* weight_at(float* p, int i) { return p + i / 2; }
  static __m512i lanes() { return _mm512_cvtps_epi32(iota()); }
  static __m512i wide(const bf16* x, int n) {
    return _mm512_cvtepu16_epi32(n >= 16 ? _mm256_loadu_si256((const __m256i*)x) : _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), x));
  }
  static void values(const bf16* const* rows, int count, int dim, int width, float* to) {
    const __m512i low = _mm512_add_epi32(_mm512_set1_epi32(0x00200000), _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001), lanes()));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    for (int i = 0; i < count; i += 2) {
      int d = 0;
      for (; d + 32 <= dim && i + 1 < count; d += 32) {
        __m512i even = _mm512_loadu_si512(rows[i] + d), odd = _mm512_loadu_si512(rows[i + 1] + d);
        _mm512_storeu_si512(to + i / 2 * width + d, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_storeu_si512(to + i / 2 * width + d + 16, _mm512_permutex2var_epi16(even, high, odd));
      }
      for (; d < width; d += 16) {
        const int n = dim - d;
        __m512i even = n > 0 ? wide(rows[i] + d, n) : _mm512_setzero_si512();
        __m512i odd = n > 0 && i + 1 < count ? wide(rows[i + 1] + d, n) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + i / 2 * width + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
    }
    for (int i = (count + 1) / 2 * width; i < TB_TILE / 2 * width; i += 16) store(to + i, zero());
  }
};
#endif

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Shape {
  int steps;  // elements of a row of q, a multiple of W
  int width;  // columns of V, a multiple of 16
  Shape(const tb_heads* h, int group) : steps(round_up((h->head_dim + group - 1) / group, W)), width(round_up(h->head_dim, 16)) {}
};

struct Scratch {
  float *q, *k, *v, *scores, *weights, *sums, *most, *total, *lanes;
  Scratch(void* at, const Shape& s, int rows) {
    float* p = (float*)at;
    q = p, p += (size_t)rows * s.steps;
    k = p, p += (size_t)s.steps * TB_TILE;
    v = p, p += (size_t)TB_TILE * s.width;
    scores = p, p += ROWS * TB_TILE;
    weights = p, p += ROWS * TB_TILE;
    sums = p, p += (size_t)rows * s.width;
    most = p, p += round_up(rows, 16);
    total = p, p += round_up(rows, 16);
    lanes = p;
  }
};

size_t scratch_bytes(const tb_heads* h, int rows) {
  const size_t steps = round_up(h->head_dim, 16), width = steps;
  return 4 * (rows * (steps + width + 16) + TB_TILE * (steps + width) + 2 * ROWS * TB_TILE + 2 * round_up(rows, 16));
}

template <class Pack, class Q>
void pack_queries(const tb_attention_rows* a, const Shape& s, int group, float* to) {
  const int dim = a->heads->head_dim;
  for (int t = 0; t < a->tokens; t++)
    for (int g = 0; g < group; g++, to += s.steps) {
      const Q* from = (const Q*)a->q + t * a->q_step + (size_t)g * dim;
      if (Pack::GROUP == 2) {
        memcpy(to, from, dim * sizeof(Q));
        memset((char*)to + dim * sizeof(Q), 0, s.steps * 4 - dim * sizeof(Q));
      } else {
        for (int d = 0; d < s.steps; d += W) store(to + d, d + W <= dim ? load(from + d) : d < dim ? load_n(from + d, dim - d) : zero());
      }
    }
}

// K of up to 64 positions, turned; zeros beyond `count`.
template <class Pack, class T>
void pack_keys(const T* const* rows, int count, int dim, const Shape& s, float* to) {
  for (int i = 0; i < TB_TILE; i += W)
    for (int d = 0; d < s.steps; d += W) {
      vec r[W];
      const int n = dim - d * Pack::GROUP;
#if defined(__AVX512F__)
      if (Pack::RAW && n >= W * Pack::GROUP && i + W <= count) {
        const void* from[W];
        for (int j = 0; j < W; j++) from[j] = rows[i + j] + d * Pack::GROUP;
        transpose_from(from, r);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) store(to + (size_t)(d + j) * TB_TILE + i, r[j]);
        continue;
      }
#endif
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) r[j] = i + j < count && n > 0 ? Pack::read(rows[i + j] + d * Pack::GROUP, n) : zero();
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) store(to + (size_t)(d + j) * TB_TILE + i, r[j]);
    }
}

// One row of a tile: scores become weights of the visible columns lo <= i < hi; the row's maximum (of scores times log2 e) and sum
// move on. scale and softcap carry that log2 e. Returns what the row's sums so far are to be multiplied with.
template <class Pack>
float weigh(const float* scores, float* weights, int lo, int hi, float scale, float softcap, float* most, float* lanes) {
  vec s[TB_TILE / W];
  vec top = set1(-INFINITY);
  const bool whole = lo <= 0 && hi >= TB_TILE;
#pragma GCC unroll 4
  for (int i = 0; i < TB_TILE / W; i++) {
    s[i] = mul(load(scores + i * W), set1(scale));
    if (softcap != 0) s[i] = mul(tanh(div(s[i], set1(softcap))), set1(softcap));
    if (!whole) {
      vec at = add(iota(), set1((float)(i * W)));
      s[i] = less_then(at, set1((float)lo), set1(-INFINITY), less_then(at, set1((float)hi), s[i], set1(-INFINITY)));
    }
    top = max(top, s[i]);
  }
  const float before = *most;
  float after = before;
  if (any_greater(top, set1(before))) after = max_lanes(top);
  *most = after;
  vec sum = zero();
#pragma GCC unroll 4
  for (int i = 0; i < TB_TILE / W; i++) {
    vec weight = exp2<Pack::GROUP == 2>(sub(s[i], set1(after)));
    Pack::store_weights(Pack::weight_at(weights, i * W), weight);
    sum = add(sum, weight);
  }
  float factor = 1;
  if (before != after) {
    float t[W];
    store(t, exp2<false>(set1(before - after)));
    factor = t[0];
  }
  store(lanes, fma(load(lanes), set1(factor), sum));
  return factor;
}

void fold(float* sums, float* most, float* total, const float* part_sums, float part_most, float part_total, int width) {
  const float after = *most > part_most ? *most : part_most;
  float a[W], b[W];
  store(a, exp2<false>(set1(*most - after)));
  store(b, exp2<false>(set1(part_most - after)));
  *most = after;
  *total = *total * a[0] + part_total * b[0];
  for (int d = 0; d < width; d += W) store(sums + d, fma(load(part_sums + d), set1(b[0]), mul(load(sums + d), set1(a[0]))));
}

template <class Pack, class Q, class T>
void attend(const tb_attention_rows* a, void* memory) {
  const tb_heads* h = a->heads;
  const int group = h->heads / h->kv_heads, rows = a->tokens * group, dim = h->head_dim, window = h->window;
  const int end = a->position + a->tokens;  // one past the last position that any row sees
  const int first = window && a->position >= window ? a->position - window + 1 : 0;
  const float scale = h->scale * 1.44269504f, softcap = h->softcap * 1.44269504f;
  const Shape shape(h, Pack::GROUP);
  Scratch s(memory, shape, rows);
  pack_queries<Pack, Q>(a, shape, group, s.q);
  const size_t position_step = (size_t)h->kv_heads * dim, block_step = position_step * a->block_size;
  const int last = a->part_end * TB_PART < end ? a->part_end * TB_PART : end;
  const int tiles = (last - (first > a->part_begin * TB_PART ? first : a->part_begin * TB_PART) + TB_TILE - 1) / TB_TILE;
  const int later_share = a->later_rows / (tiles < 1 ? 1 : tiles) + 1;
  int later = 0;

  for (int part = a->part_begin; part < a->part_end; part++) {
    const int from = part * TB_PART, to = from + TB_PART < end ? from + TB_PART : end;
    if (to <= first) continue;
    for (int r = 0; r < rows; r++) s.most[r] = -INFINITY;
    memset(s.lanes, 0, (size_t)rows * W * 4);
    memset(s.sums, 0, (size_t)rows * shape.width * 4);
    for (int tile = from; tile < to; tile += TB_TILE) {
      if (tile + TB_TILE <= first) continue;
      const int count = end - tile < TB_TILE ? end - tile : (int)TB_TILE;
      const T *k[TB_TILE], *v[TB_TILE];
      for (int i = 0, block = tile / a->block_size, offset = tile % a->block_size; i < count; i++) {
        const size_t at = a->blocks[block] * block_step + offset * position_step;
        k[i] = (const T*)a->k + at;
        v[i] = (const T*)a->v + at;
        if (++offset == a->block_size) offset = 0, block++;
      }
      for (const int stop = later + later_share < a->later_rows ? later + later_share : a->later_rows; later < stop; later++)
        for (int b = 0; b < a->later_bytes; b += 64) __builtin_prefetch(a->later[later] + b, 0, 2);
      pack_keys<Pack, T>(k, count, dim, shape, s.k);
      Pack::values(v, count, dim, shape.width, s.v);
      // rows that see something of the tile: from the first token that is not too early to the last that is not too late
      const int early = tile > a->position ? tile - a->position : 0;
      const int late = window && tile + TB_TILE + window - 1 - a->position < a->tokens ? tile + TB_TILE + window - 1 - a->position : a->tokens;
      for (int r = early * group; r < late * group; r += ROWS) {
        const int some = late * group - r < ROWS ? late * group - r : (int)ROWS;
        product_rows<typename Pack::Element>(some, s.q + (size_t)r * shape.steps, shape.steps, s.k, TB_TILE, shape.steps, s.scores,
                                             TB_TILE, nullptr, TB_TILE);
        float factor[ROWS];
        for (int i = 0; i < some; i++) {
          const int position = a->position + (r + i) / group;
          const int lo = window ? position - window + 1 - tile : 0;
          factor[i] = weigh<Pack>(s.scores + i * TB_TILE, s.weights + i * TB_TILE / Pack::GROUP, lo, position + 1 - tile, scale,
                                  softcap, s.most + r + i, s.lanes + (size_t)(r + i) * W);
        }
        product_rows<typename Pack::Element>(some, s.weights, TB_TILE / Pack::GROUP, s.v, shape.width, TB_TILE / Pack::GROUP,
                                             s.sums + (size_t)r * shape.width, shape.width, factor, shape.width);
      }
    }
    for (int r = 0; r < rows; r++) {
      const int position = a->position + r / group;
      const int low = window && position >= window ? position - window + 1 : 0;
      if (position < from || low >= from + TB_PART) continue;
      const float total = sum_lanes(load(s.lanes + (size_t)r * W));
      const float* sums = s.sums + (size_t)r * shape.width;
      float* into = a->sums + (size_t)r * shape.width;
      const int begin = a->part_begin > low / TB_PART ? a->part_begin : low / TB_PART;  // the row's first part here
      if (part == begin) {
        memcpy(into, sums, (size_t)shape.width * 4);
        a->most[r] = s.most[r];
        a->total[r] = total;
      } else {
        fold(into, a->most + r, a->total + r, sums, s.most[r], total, shape.width);
      }
    }
  }
}

void run(const tb_attention_rows* a, void* scratch) {
  const bool q16 = a->heads->dtype == TB_BF16, kv16 = a->heads->kv_dtype == TB_BF16;
#if defined(__AVX512BF16__)
  if (q16 && kv16) return attend<Paired, bf16, bf16>(a, scratch);
#else
  if (q16 && kv16) return attend<Widened<bf16>, bf16, bf16>(a, scratch);
#endif
  if (q16) return attend<Widened<float>, bf16, float>(a, scratch);
  if (kv16) return attend<Widened<bf16>, float, bf16>(a, scratch);
  return attend<Widened<float>, float, float>(a, scratch);
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
  const tb_attention_kernel name = {W, scratch_bytes, run, fold, finish};
