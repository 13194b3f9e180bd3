// How tiles of K and V, and queries, are laid out for the microkernel of attention_kernels.h; and int8 rows of the cache.
#pragma once
#include <math.h>

#include "attention.h"
#include "vec.h"

namespace {

#if defined(__AVX512F__)
enum { MICRO_ROWS = 6, COLUMNS = 4 };  // of the microkernel, columns in vectors
#elif defined(__AVX2__)
enum { MICRO_ROWS = 4, COLUMNS = 2 };
#else
enum { MICRO_ROWS = 3, COLUMNS = 2 };
#endif
enum { MOST_ROWS = 16 };  // at a time, of any product

#if defined(__AVX512F__)
inline vec load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline vec load_n(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p)));
}
#else
#if defined(__AVX2__)
inline vec load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
#else
inline vec load(const int8_t* p) { return vec{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
#endif
inline vec load_n(const int8_t* p, int n) {
  int8_t full[W] = {};
  for (int i = 0; i < n; i++) full[i] = p[i];
  return load(full);
}
#endif

// n integers in -127 ... 127 to the nearest, even if in the middle
inline void store_integers(int8_t* p, vec x, int n) {
#if defined(__AVX512F__)
  _mm_mask_storeu_epi8(p, (__mmask16)((1u << n) - 1), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
#else
  float t[W];
  store(t, rint(x));
  for (int i = 0; i < n; i++) p[i] = (int8_t)t[i];
#endif
}

// A head of K or V as an int8 row: n integers, then the float32 that they are to be multiplied with, max |x| / 127. Zeros where that is
// below the smallest normal number; a scale of NaN (and zeros) where x holds a NaN or an infinity, so that who sees the row gets NaN.
template <class T>
void quantize_head(const T* x, int8_t* to, int n) {
  vec most = zero(), poison = zero();
  for_vectors(n, [&](int i, int m) {
    vec v = load_up_to(x + i, m);
    most = max(most, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  });
  float scale = max_lanes(most) / 127.0f, inverse = 0;
  if (sum_lanes(poison) != 0) scale = NAN;  // it is NaN
  else if (scale >= 1.17549435e-38f) inverse = 1.0f / scale;
  else scale = 0;
  if (inverse == 0) memset(to, 0, n);
  else for_vectors(n, [&](int i, int m) { store_integers(to + i, mul(load_up_to(x + i, m), set1(inverse)), m); });
  memcpy(to + n, &scale, sizeof scale);
}

void quantize(int dtype, const void* x, void* to, int n) {
  if (dtype == TB_BF16) quantize_head((const bf16*)x, (int8_t*)to, n);
  else quantize_head((const float*)x, (int8_t*)to, n);
}

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Shape {
  int depth;  // elements that the first product runs over
  int steps;  // elements of a row of q: depth, to a multiple of W
  int width;  // columns of V, a multiple of 16
  Shape(const tb_heads* h, int group)
      : depth((h->head_dim + group - 1) / group), steps(round_up(depth, W)), width(round_up(h->head_dim, 16)) {}
};

inline void fetch(const char* from, int bytes) {
  for (int b = 0; b < bytes; b += 64) __builtin_prefetch(from + b, 0, 2);
}

// Where K and V of `count` positions from `first` on are, a row each.
template <class T>
struct Rows {
  const T *k[TB_TILE], *v[TB_TILE];
  Rows(const tb_attention_rows* a, int first, int count) {
    const size_t step = a->heads->kv_heads * tb_kv_head_bytes(a->heads) / sizeof(T);
    for (int i = 0, block = first / a->block_size, offset = first % a->block_size; i < count; i++) {
      const size_t at = ((size_t)a->blocks[block] * a->block_size + offset) * step;
      k[i] = (const T*)a->k + at;
      v[i] = (const T*)a->v + at;
      if (++offset == a->block_size) offset = 0, block++;
    }
  }
  static Rows behind(const Rows&, const tb_attention_rows* a, int first, int count) { return Rows(a, first, count); }
  void fetch_row(int i, int bytes) const {
    fetch((const char*)k[i], bytes);
    fetch((const char*)v[i], bytes);
  }
};

// B of a product in a tile that was packed. b(k, j): vector j of row k; b.from(n): without the first n columns.
struct Packed {
  const float* at;
  int step;
  const float* operator()(int k, int j) const { return at + k * step + j * W; }
  Packed from(int column) const { return {at + column, step}; }
};

// What is read of one tile is fetched of the next.
template <class B>
struct Fetching {
  B now, next;
  const float* operator()(int k, int j) const {
    __builtin_prefetch(next(k, j), 0, 2);
    return now(k, j);
  }
  Fetching from(int column) const { return {now.from(column), next.from(column)}; }
};

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
      if (n >= W * Pack::GROUP && i + W <= count) {
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) r[j] = Pack::read(rows[i + j] + d * Pack::GROUP, W * Pack::GROUP);
      } else {
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) r[j] = i + j < count && n > 0 ? Pack::read(rows[i + j] + d * Pack::GROUP, n) : zero();
      }
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) store(to + (size_t)(d + j) * TB_TILE + i, r[j]);
    }
}

// How the tiles are packed: 32-bit elements from storage T.
template <class T>
struct Widened {
  typedef Single Element;
  typedef Rows<T> Place;
  // values of an element; elements are in memory as they are needed; rows end with a scale
  enum { GROUP = 1, RAW = sizeof(T) == 4, SCALED = sizeof(T) == 1, STORED = 0, TILES = 0, ROWS = MICRO_ROWS };
  static vec read(const T* x, int n) { return n >= W ? load(x) : load_n(x, n); }
  static void store_weights(float* p, vec w) { store(p, w); }
  static float* weight_at(float* p, int i) { return p + i; }
  static Packed keys(const Place& place, int count, int dim, const Shape& s, float* to) {
    pack_keys<Widened>(place.k, count, dim, s, to);
    return {to, TB_TILE};
  }
  static Packed keys_of_next(const Place&) { return {}; }
  static Packed values_of_next(const Place&, const Shape&) { return {}; }
  static Packed values(const Place& place, int count, int dim, const Shape& s, float* to) {
    const T* const* rows = place.v;
    const int width = s.width;
    for (int i = 0; i < count; i++)
      for (int d = 0; d < width; d += W) {
        vec x = zero();
        if (d + W <= dim) x = load(rows[i] + d);
        else if (d < dim) x = load_n(rows[i] + d, dim - d);
        store(to + i * width + d, x);
      }
    for (int i = count * width; i < TB_TILE * width; i += W) store(to + i, zero());
    return {to, width};
  }
};

#if defined(__AVX512BF16__)
inline __m512i pairs(const bf16* x, int n) {
  return n >= 32 ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), x);
}
inline __m512i pairs(const int8_t* x, int n) {
  const __m256i bytes = n >= 32 ? _mm256_loadu_si256((const __m256i*)x) : _mm256_maskz_loadu_epi8((__mmask32)((1u << n) - 1), x);
  const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes));
  const __m512i high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));  // 8 bits: exact
}

template <class T>
struct Paired {
  typedef Pair Element;
  typedef Rows<T> Place;
  enum { GROUP = 2, RAW = sizeof(T) == 2, SCALED = sizeof(T) == 1, STORED = 0, TILES = 0, ROWS = MICRO_ROWS };
  static vec read(const T* x, int n) { return _mm512_castsi512_ps(pairs(x, n)); }
  static void store_weights(float* p, vec w) { _mm256_storeu_si256((__m256i*)p, narrow(w)); }
  static float* weight_at(float* p, int i) { return p + i / 2; }
  static __m512i lanes() { return _mm512_cvtps_epi32(iota()); }
  static Packed keys(const Place& place, int count, int dim, const Shape& s, float* to) {
    pack_keys<Paired>(place.k, count, dim, s, to);
    return {to, TB_TILE};
  }
  static Packed keys_of_next(const Place&) { return {}; }
  static Packed values_of_next(const Place&, const Shape&) { return {}; }
  static Packed values(const Place& place, int count, int dim, const Shape& s, float* to) {
    const T* const* rows = place.v;
    const int width = s.width;
    const __m512i low = _mm512_add_epi32(_mm512_set1_epi32(0x00200000), _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001), lanes()));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    for (int i = 0; i < count; i += 2)
      for (int d = 0; d < width; d += 32) {
        if (d + 32 <= dim && i + 1 < count) {
          const __m512i even = pairs(rows[i] + d, 32), odd = pairs(rows[i + 1] + d, 32);
          _mm512_storeu_si512(to + i / 2 * width + d, _mm512_permutex2var_epi16(even, low, odd));
          _mm512_storeu_si512(to + i / 2 * width + d + 16, _mm512_permutex2var_epi16(even, high, odd));
          continue;
        }
        const __m512i even = pairs(rows[i] + d, dim - d), odd = i + 1 < count ? pairs(rows[i + 1] + d, dim - d) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + i / 2 * width + d, _mm512_permutex2var_epi16(even, low, odd));
        if (d + 16 < width) _mm512_storeu_si512(to + i / 2 * width + d + 16, _mm512_permutex2var_epi16(even, high, odd));
      }
    for (int i = (count + 1) / 2 * width; i < TB_TILE / 2 * width; i += 16) store(to + i, zero());
    return {to, width};
  }
};

// The groups of 16 positions of a paired cache that a tile lies in; for those behind the request's end, the first again, so that there is
// something to read.
struct Groups {
  enum { COUNT = TB_TILE / TB_PAIRED_GROUP };
  const float *k[COUNT], *v[COUNT];

  Groups(const tb_attention_rows* a, int first, int count) {
    const size_t position = a->heads->head_dim / 2, block = position * a->heads->kv_heads * a->block_size;
    for (int i = 0; i < COUNT; i++) {
      const int p = i * TB_PAIRED_GROUP < count ? first + i * TB_PAIRED_GROUP : first;
      const size_t at = a->blocks[p / a->block_size] * block + p % a->block_size * position;
      k[i] = (const float*)a->k + at;
      v[i] = (const float*)a->v + at;
    }
  }
  // The next tile; count 0: that behind the task's last, or this one if there is none.
  static Groups behind(const Groups& here, const tb_attention_rows* a, int first, int count) {
    if (count) return Groups(a, first, count);
    Groups found = here;
    for (int i = 0; i < COUNT && a->later_rows; i++) {
      found.k[i] = (const float*)a->later[i];
      found.v[i] = (const float*)a->later[COUNT + i];
    }
    return found;
  }
  void fetch_row(int, int) const {}
};

struct StoredKeys {
  const float* const* group;
  const float* operator()(int k, int j) const { return group[j] + k * W; }
  StoredKeys from(int column) const { return {group + column / W}; }
};

struct StoredValues {
  const float* const* group;
  int width, first;
  const float* operator()(int k, int j) const {
    const int of_group = TB_PAIRED_GROUP / 2;
    return group[k / of_group] + k % of_group * width + first + j * W;
  }
  StoredValues from(int column) const { return {group, width, first + column}; }
};

// Of a paired cache: nothing to pack.
struct Stored : Paired<bf16> {
  typedef Groups Place;
  enum { STORED = 1 };
  static StoredKeys keys(const Place& place, int, int, const Shape&, float*) { return {place.k}; }
  static StoredValues values(const Place& place, int, int, const Shape& s, float*) { return {place.v, s.width, 0}; }
  static StoredKeys keys_of_next(const Place& place) { return {place.k}; }
  static StoredValues values_of_next(const Place& place, const Shape& s) { return {place.v, s.width, 0}; }
};

// A token's head of k and v to position `offset` of a block's, in a paired cache.
void store_pairs(const void* k, const void* v, int dim, int offset, int last, void* to_k, void* to_v) {
  char* key = (char*)to_k + (offset / TB_PAIRED_GROUP * TB_PAIRED_GROUP * (dim / 2) + offset % TB_PAIRED_GROUP) * 4;
  for (int d = 0; d < dim; d += 2) memcpy(key + d / 2 * TB_PAIRED_GROUP * 4, (const bf16*)k + d, 4);
  char* value = (char*)to_v + offset / 2 * dim * 4;
  for (int d = 0; d < dim; d += 16) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)((const bf16*)v + d)));
    if (offset % 2) _mm512_mask_storeu_epi16(value + d * 4, 0xaaaaaaaa, _mm512_slli_epi32(x, 16));
    else _mm512_mask_storeu_epi16(value + d * 4, last ? 0xffffffff : 0x55555555, x);
  }
}
#define STORE_PAIRS store_pairs
#else
#define STORE_PAIRS nullptr
#endif

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

}  // namespace
