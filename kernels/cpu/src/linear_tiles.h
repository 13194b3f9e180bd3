// What the linears in AMX's tiles share (amx.h). Included inside an anonymous namespace, after linear_vector.h.

enum { SUMS_SLOT = 5 };  // of tb_scratch
constexpr int kTileRows = 16, kTileSteps = 16;  // of the registers; a step is what 4 bytes of a row hold of k
constexpr size_t kStep = TB_TILE_N * 4;

// 16 steps of up to 32 rows (two: more than 16) and 32 outputs.
#define TB_MULTIPLY(dot, two, x, x_step, w)                 \
  do {                                                      \
    _tile_loadd(4, (x), (x_step));                          \
    _tile_loadd(6, (w), kStep);                             \
    dot(0, 4, 6);                                           \
    _tile_loadd(7, (w) + 64, kStep);                        \
    dot(1, 4, 7);                                           \
    if (two) {                                              \
      _tile_loadd(5, (x) + kTileRows * (x_step), (x_step)); \
      dot(2, 5, 6);                                         \
      dot(3, 5, 7);                                         \
    }                                                       \
  } while (0)

// 16 steps of up to 16 rows and 64 outputs, those of two tiles.
#define TB_MULTIPLY_PAIR(dot, x, x_step, w, v) \
  do {                                         \
    _tile_loadd(4, (x), (x_step));             \
    _tile_loadd(6, (w), kStep);                \
    dot(0, 4, 6);                              \
    _tile_loadd(7, (w) + 64, kStep);           \
    dot(1, 4, 7);                              \
    _tile_loadd(6, (v), kStep);                \
    dot(2, 4, 6);                              \
    _tile_loadd(7, (v) + 64, kStep);           \
    dot(3, 4, 7);                              \
  } while (0)

// call(number, address, bytes from row to row) for the sums of 32 outputs, `ld` elements from row to row.
#define TB_EACH_SUM(two, call, at, ld)                        \
  do {                                                        \
    auto* const sums_at = (at);                               \
    const size_t sums_ld = (ld);                              \
    call(0, sums_at, sums_ld * 4);                            \
    call(1, sums_at + 16, sums_ld * 4);                       \
    if (two) {                                                \
      call(2, sums_at + 16 * sums_ld, sums_ld * 4);           \
      call(3, sums_at + 16 * sums_ld + 16, sums_ld * 4);      \
    }                                                         \
  } while (0)

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void ask_for(const char* w) {
#pragma GCC unroll 32
  for (size_t i = 0; i < kTileSteps * kStep / kLine; ++i) __builtin_prefetch(w + kAhead + i * kLine, 0, 3);
}

// What is left of k behind whole tiles, with zeros: rows of x, row_bytes apart, and a tile's weights.
struct Rest {
  alignas(64) char x[2 * kTileRows][64], w[kTileSteps * kStep];
  Rest(const char* x_rest, size_t row_bytes, int rows, const char* w_rest, int steps) {
    memset(w, 0, sizeof w);
    memcpy(w, w_rest, steps * kStep);
    for (int i = 0; i < rows; ++i) {
      memset(x[i], 0, 64);
      memcpy(x[i], x_rest + i * row_bytes, steps * 4);
    }
  }
};

inline bool whole_tile(const Place& at) { return at.b->n - at.tile * TB_TILE_N >= TB_TILE_N; }

// A row's 32 sums become outputs. A whole tile's bfloat16 are rounded by the processor: to nearest even, subnormals to zero.
inline void store_outputs(const Place& at, __m512 low, __m512 high) {
  const tb_block& b = *at.b;
  if (b.out_dtype != TB_BF16 || !whole_tile(at)) {
    const V::Vec sum[1][V::kVecs] = {{low, high}};
    return finish<1>(at, sum);
  }
  uint16_t* y = static_cast<uint16_t*>(b.y) + at.row * b.ldy + at.tile * TB_TILE_N;
  if (b.bias) {
    low = V::add(low, V::load(b.bias + at.tile * TB_TILE_N));
    high = V::add(high, V::load(b.bias + at.tile * TB_TILE_N + 16));
  }
  if (b.store == TB_ADD) low = V::add(V::load_bf16_n(y, 16), low), high = V::add(V::load_bf16_n(y + 16, 16), high);
  _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
