// Quantised products for any vector unit. Included by the per-instruction-set files inside an anonymous namespace, after V and
// linear_vector.h, and a struct I:
//   Vec                       as many 32-bit integers as V's vectors have floats
//   kRows                     rows of the largest register tile
//   kSigned                   dot<8> takes weights less 128, so no start value has to
//   zero() set1(int32) load(p) broadcast(p)   the last: 4 bytes to every lane
//   low(Vec, mask)  or_low(Vec a, Vec b, mask)   bytes & mask; a | (b & mask)
//   left<n>(Vec)              by n bits (right by -n), in lanes of 16 or more; bits that cross a byte are masked off afterwards
//   times<shift>(Vec)         32-bit lanes times 2^shift
//   dot<bits>(Vec sum, Vec w, Vec x)   sum + products of 4 unsigned bytes below 2^bits and 4 signed ones, exact
//   to_float(Vec), half(p), unsigned_bytes(p), signed_bytes(p)   V::Vec
//   mul, fma, number(f*)      the last: one float to every lane

constexpr int kVecs = V::kVecs, kWidth = TB_TILE_N / V::kVecs, kVecBytes = kWidth * 4, kStepBytes = TB_TILE_N * 4;

// Vector v of step S of the 32 k at w.
template <int F, int S>
__attribute__((always_inline)) inline I::Vec weights(const char* w, int v) {
  constexpr tb_layout L = tb_layouts[F];
  if constexpr (L.bits == 8) return I::load(w + S * kStepBytes + v * kVecBytes);
  const I::Vec pair = I::load(w + S / 2 * kStepBytes + v * kVecBytes);
  const I::Vec q = I::low(S % 2 ? I::template left<-4>(pair) : pair, 15);
  if constexpr (L.bits == 5) return I::or_low(q, I::template left<4 - S>(I::load(w + tb_high_offset + v * kVecBytes)), 16);
  if constexpr (L.bits == 6) {
    const char* high = w + tb_high_offset + S / 4 * kStepBytes + v * kVecBytes;
    return I::or_low(q, I::template left<4 - 2 * (S % 4)>(I::load(high)), 48);
  }
  return q;
}

template <int M, int Bits>
__attribute__((always_inline)) inline void add_step(I::Vec (&sum)[M][kVecs], const I::Vec (&w)[kVecs], const char* x, size_t ldx) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    const I::Vec value = I::broadcast(x + i * ldx);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[i][v] = I::template dot<Bits>(sum[i][v], w[v], value);
  }
}

// Memory that will be needed next: with one group of rows what lies ahead in the stream, else `lines` lines of the next tile a turn.
struct Ahead {
  const char *at, *end;
  int lines;

  // Step S's share of a turn over Bytes in Steps steps, w at the turn's start: requests spread evenly don't fill the queue for misses.
  template <int Bytes, int Steps, int S>
  __attribute__((always_inline)) inline void fetch(const char* w) {
    if (lines < 0) {
      constexpr int kAll = Bytes / kLine;
#pragma GCC unroll 32
      for (int i = kAll * S / Steps; i < kAll * (S + 1) / Steps; ++i) __builtin_prefetch(w + kAhead + i * kLine, 0, 3);
    } else if (S == 0 && at < end) {
      for (int i = 0; i < lines; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
    }
  }
};

// Steps S ... End of a turn's Steps steps and Bytes bytes: x at its first one.
template <int M, int F, int Bytes, int Steps, int S, int End>
__attribute__((always_inline)) inline void add_steps(I::Vec (&sum)[M][kVecs], const char* w, const char* x, size_t ldx, Ahead& ahead) {
  if constexpr (S < End) {
    ahead.fetch<Bytes, Steps, S>(w);
    I::Vec q[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) q[v] = weights<F, S>(w, v);
    add_step<M, tb_layouts[F].bits>(sum, q, x + 4 * S, ldx);
    add_steps<M, F, Bytes, Steps, S + 1, End>(sum, w, x, ldx, ahead);
  }
}

template <int F>
__attribute__((always_inline)) inline V::Vec scale_of_part(const char* header, const char* w, int part, int v) {
  constexpr tb_layout L = tb_layouts[F];
  const char* scales = w + tb_weight_bytes(L);
  if constexpr (L.blocks == 1) return I::half(scales + v * kWidth * 2);
  const V::Vec all = I::half(header + v * kWidth * 2);
  if constexpr (L.minimum) return I::mul(all, I::unsigned_bytes(scales + v * kWidth));
  return I::mul(all, I::signed_bytes(scales + part * TB_TILE_N + v * kWidth));
}

template <int F>
__attribute__((always_inline)) inline V::Vec minimum(const char* header, const char* w, int v) {
  constexpr tb_layout L = tb_layouts[F];
  const char* scales = w + tb_weight_bytes(L);
  if constexpr (L.blocks == 1) return I::half(scales + TB_TILE_N * 2 + v * kWidth * 2);
  return I::negative(I::mul(I::half(header + TB_TILE_N * 2 + v * kWidth * 2), I::unsigned_bytes(scales + TB_TILE_N + v * kWidth)));
}

// total [M][32] += one part (16 or 32 k) of a block, M rows of x.
template <int M, int F, int Part>
__attribute__((always_inline)) inline void add_part(float* total, const char* header, const char* w, const char* x, size_t ldx,
                                                    Ahead& ahead) {
  constexpr tb_layout L = tb_layouts[F];
  constexpr size_t kStart = L.part == 32 ? offsetof(tb_x_block, negative) : offsetof(tb_x_block, half) + 4 * Part;
  I::Vec sum[M][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    I::Vec start = I::zero();
    if constexpr (L.shift >= 0 && !(I::kSigned && L.bits == 8)) start = I::template times<L.shift>(I::broadcast(x + i * ldx + kStart));
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[i][v] = start;
  }
  add_steps<M, F, tb_block_bytes(L), 8, Part * L.part / 4, (Part + 1) * L.part / 4>(sum, w, x, ldx, ahead);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    const V::Vec scale = scale_of_part<F>(header, w, Part, v);
    V::Vec least = V::zero();
    if constexpr (L.minimum) least = minimum<F>(header, w, v);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      float* to = total + i * TB_TILE_N + v * kWidth;
      const char* row = x + i * ldx;
      const V::Vec dot = I::mul(I::to_float(sum[i][v]), I::number(row + offsetof(tb_x_block, scale)));
      V::Vec value = I::fma(dot, scale, V::load(to));
      if constexpr (L.minimum) value = I::fma(least, I::number(row + offsetof(tb_x_block, sum)), value);
      V::store(to, value);
    }
  }
}

template <int M>
__attribute__((always_inline)) inline void finish_total(const Place& at, const float* total) {
  V::Vec sum[M][kVecs];
  for (int i = 0; i < M; ++i) {
    for (int v = 0; v < kVecs; ++v) sum[i][v] = V::load(total + i * TB_TILE_N + v * kWidth);
  }
  finish<M>(at, sum);
}

template <int M, int F>
struct Tile {
  static void run(const Place& place, Ahead ahead) {
    constexpr tb_layout L = tb_layouts[F];
    const tb_block& b = *place.b;
    const char* w = b.w + place.tile * b.tile_bytes;
    const char* x = static_cast<const char*>(b.x) + place.row * b.ldx;
    alignas(64) float total[M * TB_TILE_N] = {};
    float* kept = total;
    for (int block = 0; block < b.steps; block += L.blocks) {
      const char* header = w;
      w += tb_header_bytes(L);
      for (int i = 0; i < L.blocks; ++i) {
        asm volatile("" : "+r"(kept) : : "memory");  // kept in memory: registers are for the integers
        add_part<M, F, 0>(kept, header, w, x, b.ldx, ahead);
        if constexpr (L.part == 16) add_part<M, F, 1>(kept, header, w, x, b.ldx, ahead);
        w += tb_block_bytes(L);
        x += sizeof(tb_x_block);
      }
    }
    finish_total<M>(place, kept);
  }
};

template <int M>
struct Tile<M, TB_I8> {
  static void run(const Place& place, Ahead ahead) {
    constexpr int kTurn = 4, kFold = TB_FOLD_INT8 / 4;
    const tb_block& b = *place.b;
    const char* w = b.w + place.tile * b.tile_bytes;
    const char* scales = w + size_t(b.steps) * kStepBytes;
    const char* head = static_cast<const char*>(b.x) + place.row * b.ldx;
    const char* x = head + tb_round_up(4 + 4 * ((size_t(b.steps) + kFold - 1) / kFold), 64);
    alignas(64) float total[M * TB_TILE_N];
    for (int begin = 0, fold = 0; begin < b.steps; begin += kFold, ++fold) {
      const int end = begin + kFold < b.steps ? begin + kFold : b.steps;
      I::Vec sum[M][kVecs];
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const I::Vec start = I::kSigned ? I::zero() : I::broadcast(head + i * b.ldx + 4 + 4 * fold);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[i][v] = start;
      }
      int s = begin;
      for (; s + kTurn <= end; s += kTurn, w += kTurn * kStepBytes, x += 4 * kTurn) {
        add_steps<M, TB_I8, kTurn * kStepBytes, kTurn, 0, kTurn>(sum, w, x, b.ldx, ahead);
      }
      for (; s < end; ++s, w += kStepBytes, x += 4) add_steps<M, TB_I8, 0, 1, 0, 1>(sum, w, x, b.ldx, ahead);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          float* to = total + i * TB_TILE_N + v * kWidth;
          const V::Vec part = I::to_float(sum[i][v]);
          V::store(to, fold ? V::add(V::load(to), part) : part);
        }
      }
    }
    for (int i = 0; i < M; ++i) {
      for (int v = 0; v < kVecs; ++v) {
        float* to = total + i * TB_TILE_N + v * kWidth;
        const V::Vec scale = V::load(reinterpret_cast<const float*>(scales) + v * kWidth);
        V::store(to, I::mul(I::mul(V::load(to), scale), I::number(head + i * b.ldx)));
      }
    }
    finish_total<M>(place, total);
  }
};

template <int M, int F>
struct QuantRows {
  static void run(int m, const Place& place, const Ahead& ahead) {
    if (m == M) return Tile<M, F>::run(place, ahead);
    QuantRows<M - 1, F>::run(m, place, ahead);
  }
};
template <int F>
struct QuantRows<0, F> {
  static void run(int, const Place&, const Ahead&) {}
};

// As block() in linear_vector.h.
template <int F>
void product(const tb_block* b) {
  const int groups = (b->m + I::kRows - 1) / I::kRows;
  const int tile_lines = int(b->tile_bytes / kLine), group_lines = (tile_lines + groups - 1) / groups;
  const int turns = F == TB_I8 ? (b->steps >= 4 ? b->steps / 4 : 1) : b->steps;
  const int lines = groups == 1 ? -1 : (group_lines + turns - 1) / turns;
  for (int t = 0; t < b->tiles; ++t) {
    const char* next = b->w + (t + 1) * b->tile_bytes;
    const char* end = t + 1 < b->tiles ? next + b->tile_bytes : next;
    for (int g = 0; g < groups; ++g) {
      const int row = int(int64_t(b->m) * g / groups), rows = int(int64_t(b->m) * (g + 1) / groups) - row;
      const char* at = next + size_t(g) * group_lines * kLine;
      const char* stop = at + size_t(group_lines) * kLine;
      QuantRows<I::kRows, F>::run(rows, Place{b, t, row}, Ahead{at, stop < end ? stop : end, lines});
    }
  }
}

#define TB_QUANT_PRODUCTS                                                                                               \
  {nullptr, product<TB_I8>, product<TB_Q4_0>, product<TB_Q4_1>, product<TB_Q5_0>, product<TB_Q5_1>, product<TB_Q8_0>, \
   product<TB_Q4_K>, product<TB_Q5_K>, product<TB_Q6_K>}
