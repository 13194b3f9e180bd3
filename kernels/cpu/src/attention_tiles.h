// Both products of attention_kernels.h in AMX's tiles (amx.h): 16 rows at a time x 64 positions x head_dim, a multiple of 32. Columns that
// no row sees are multiplied too, with weights of 0. attend() shapes the tiles.
#pragma once

#if defined(__AMX_BF16__)
#define TB_TILES 1
#include "amx.h"

namespace {

enum { TILE_PAIRS = 16, TILE_COLUMNS = 16 };

// K of a tile: 16 positions a group, each `step` from pair of dimensions to pair.
struct TiledKeys {
  const float* group[TB_TILE / TB_PAIRED_GROUP];
  int step;
};

// Of a paired cache. V is copied: 32 positions of a product lie in two groups, and what stands behind the request's end may be anything.
struct Tiled : Stored {
  enum { TILES = 1, ROWS = 16 };
  static TiledKeys keys_of_next(const Place& place) { return {{place.k[0], place.k[1], place.k[2], place.k[3]}, W}; }
  static TiledKeys keys(const Place& place, int, int, const Shape&, float*) { return keys_of_next(place); }
  static Packed values(const Place& place, int count, int, const Shape& s, float* to) {
    const int group = TB_PAIRED_GROUP / 2, pairs = (count + 1) / 2;
    for (int i = 0; i < TB_TILE / 2; i++) {
      const float* from = place.v[i / group] + i % group * s.width;
      for (int d = 0; d < s.width; d += W) store(to + i * s.width + d, i < pairs ? load(from + d) : zero());
    }
    return {to, s.width};
  }
  static const Place* values_of_next(const Place& place, const Shape&) { return &place; }
};

// Of others: both are packed.
template <class T>
struct TiledRows : Paired<T> {
  enum { TILES = 1, ROWS = 16 };
  typedef Rows<T> Place;
  static TiledKeys keys(const Place& place, int count, int dim, const Shape& s, float* to) {
    Paired<T>::keys(place, count, dim, s, to);
    return {{to, to + W, to + 2 * W, to + 3 * W}, TB_TILE};
  }
  static TiledKeys keys_of_next(const Place&) { return {}; }
  static const Groups* values_of_next(const Place&, const Shape&) { return nullptr; }
};

inline void bring(const float* from, int count) {
  for (int i = 0; i < count; i += W) __builtin_prefetch(from + i, 0, 2);
}

// scores[rows][64] = q K. next: fetched, if not NULL.
inline void tile_scores(const float* q, const Shape& shape, const TiledKeys& keys, const TiledKeys* next, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const size_t step = keys.step * sizeof(float);
  for (int k = 0; k < shape.depth; k += TILE_PAIRS) {
    const size_t at = (size_t)k * keys.step;
    _tile_loadd(4, q + k, shape.steps * 4);
    _tile_loadd(6, keys.group[0] + at, step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys.group[1] + at, step);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, keys.group[2] + at, step);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, keys.group[3] + at, step);
    _tile_dpbf16ps(3, 4, 7);
    for (int j = 0; next && j < TB_TILE / TB_PAIRED_GROUP; j++) bring(next->group[j] + (size_t)k * next->step, TILE_PAIRS * W);
  }
  _tile_stored(0, scores, TB_TILE * 4);
  _tile_stored(1, scores + TILE_COLUMNS, TB_TILE * 4);
  _tile_stored(2, scores + 2 * TILE_COLUMNS, TB_TILE * 4);
  _tile_stored(3, scores + 3 * TILE_COLUMNS, TB_TILE * 4);
}

// sums[rows][32 columns] = start + weights V
inline void tile_columns(const float* weights, const float* v, int width, bool keep, float* sums) {
  if (keep) {
    _tile_loadd(0, sums, width * 4);
    _tile_loadd(1, sums + TILE_COLUMNS, width * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int i = 0; i < TB_TILE / 2; i += TILE_PAIRS) {
    _tile_loadd(4, weights + i, TB_TILE * 2);
    _tile_loadd(6, v + i * width, width * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + i * width + TILE_COLUMNS, width * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, width * 4);
  _tile_stored(1, sums + TILE_COLUMNS, width * 4);
}

inline void tile_sums(int rows, const float* weights, int width, Packed values, const Groups* next, float* sums, Start start,
                      const float* factor) {
  for (int r = 0; start == SCALE && r < rows; r++)
    for (int d = 0; factor[r] != 1 && d < width; d += W) store(sums + r * width + d, mul(load(sums + r * width + d), set1(factor[r])));
  for (int d = 0; d < width; d += 2 * TILE_COLUMNS) tile_columns(weights, values(0, d / W), width, start != ZERO, sums + d);
  for (int i = 0; next && i < Groups::COUNT; i++) bring(next->v[i], width * TB_PAIRED_GROUP / 2);
}

}  // namespace
#endif
