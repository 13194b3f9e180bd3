// Linear kernels for any vector unit. Included by the per-instruction-set files inside an anonymous namespace, after a struct V:
//   Vec                        a vector of floats; kVecs of them hold one step of a tile's 32 outputs
//   kVecs, kRows               kRows x kVecs accumulators fit the registers
//   zero() load(f*) store(f*, Vec) add(Vec, Vec)
//   store_n(f*, Vec, n)        the first n values; n may be anything: <= 0 is none
//   load_n(f*, n) load_bf16_n(u16*, n) store_bf16_n(u16*, Vec, n)
// and structs Op, what one step does: kXBytes bytes of x for kXCount values of k, kFold steps between sums, kParts parts of
//   Weights weights(w, vector, part), X x(p, part), Vec apply(Vec sum, Weights, X)

constexpr int kLine = 64;
constexpr int kUnroll = 4;  // steps between two looks at the loop's end
constexpr int kAhead = TB_PREFETCH_BYTES;

struct Place {
  const tb_block* b;
  int tile, row;
};

template <int M>
__attribute__((always_inline)) inline void finish(const Place& at, const typename V::Vec (&sum)[M][V::kVecs]) {
  const tb_block& b = *at.b;
  constexpr int kWidth = TB_TILE_N / V::kVecs;
  for (int v = 0; v < V::kVecs; ++v) {
    const int base = at.tile * TB_TILE_N + v * kWidth, count = b.n - base;
    for (int i = 0; i < M; ++i) {
      const size_t to = (at.row + i) * b.ldy + base;
      typename V::Vec value = b.bias ? V::add(sum[i][v], V::load(b.bias + base)) : sum[i][v];
      if (b.out_dtype == TB_F32) {
        float* y = static_cast<float*>(b.y) + to;
        if (b.store == TB_ADD) value = V::add(V::load_n(y, count), value);
        V::store_n(y, value, count);
      } else {
        uint16_t* y = static_cast<uint16_t*>(b.y) + to;
        if (b.store == TB_ADD) value = V::add(V::load_bf16_n(y, count), value);
        V::store_bf16_n(y, value, count);
      }
    }
  }
}

template <int M>
__attribute__((always_inline)) inline void fold(typename V::Vec (&sum)[M][V::kVecs], const float* total) {
  for (int i = 0; i < M; ++i) {
    for (int v = 0; v < V::kVecs; ++v) {
      sum[i][v] = V::add(V::load(total + i * TB_TILE_N + v * (TB_TILE_N / V::kVecs)), sum[i][v]);
    }
  }
}

template <int M>
__attribute__((always_inline)) inline void keep(const typename V::Vec (&sum)[M][V::kVecs], float* total) {
  for (int i = 0; i < M; ++i) {
    for (int v = 0; v < V::kVecs; ++v) V::store(total + i * TB_TILE_N + v * (TB_TILE_N / V::kVecs), sum[i][v]);
  }
}

// One step of M rows: each accumulator takes its products, in the order of k (a widened bf16 pair is two parts). Values that are used
// again stay in registers, those of the shorter side; the others are used as they come.
template <int M, class Op>
__attribute__((always_inline)) inline void step(typename V::Vec (&sum)[M][V::kVecs], const char* w, const char* x, size_t ldx) {
#pragma GCC unroll 2
  for (int part = 0; part < Op::kParts; ++part) {
    if (V::kVecs <= V::kRows) {
      typename Op::Weights weights[V::kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < V::kVecs; ++v) weights[v] = Op::weights(w, v, part);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const typename Op::X value = Op::x(x + i * ldx, part);
#pragma GCC unroll 8
        for (int v = 0; v < V::kVecs; ++v) sum[i][v] = Op::apply(sum[i][v], weights[v], value);
      }
    } else {
      typename Op::X values[M];
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) values[i] = Op::x(x + i * ldx, part);
#pragma GCC unroll 8
      for (int v = 0; v < V::kVecs; ++v) {
        const typename Op::Weights weights = Op::weights(w, v, part);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) sum[i][v] = Op::apply(sum[i][v], weights, values[i]);
      }
    }
  }
}

// M rows times one tile. `ahead` ... `ahead_end` is memory that will be needed next: `lines` lines of it are fetched every kUnroll steps.
template <int M, class Op>
void tile(const Place& at, const char* ahead, const char* ahead_end, int lines) {
  const tb_block& b = *at.b;
  const size_t ldx = b.ldx * (Op::kXBytes / Op::kXCount);
  const char* w = b.w + at.tile * b.tile_bytes;
  const char* x = static_cast<const char*>(b.x) + at.row * ldx;
  constexpr size_t kStep = TB_TILE_N * 4;
  alignas(64) float own[M * TB_TILE_N];
  float* total = b.partial ? b.partial + (size_t(at.tile) * b.m + at.row) * TB_TILE_N : own;
  bool have_total = !b.first;
  for (int begin = 0; begin < b.steps; begin += Op::kFold) {
    const int end = begin + Op::kFold < b.steps ? begin + Op::kFold : b.steps;
    typename V::Vec sum[M][V::kVecs];
    for (int i = 0; i < M; ++i) {
      for (int v = 0; v < V::kVecs; ++v) sum[i][v] = V::zero();
    }
    int s = begin;
    for (; s + kUnroll <= end; s += kUnroll) {
      if (lines < 0) {
#pragma GCC unroll 16
        for (size_t i = 0; i < kUnroll * kStep / kLine; ++i) __builtin_prefetch(w + kAhead + i * kLine, 0, 3);
      } else if (ahead < ahead_end) {
        for (int i = 0; i < lines; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
      }
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) step<M, Op>(sum, w + u * kStep, x + u * Op::kXBytes, ldx);
      w += kUnroll * kStep;
      x += kUnroll * Op::kXBytes;
    }
    for (; s < end; ++s, w += kStep, x += Op::kXBytes) step<M, Op>(sum, w, x, ldx);
    if (have_total) fold<M>(sum, total);
    have_total = true;
    if (end == b.steps && b.last) return finish<M>(at, sum);
    keep<M>(sum, total);
  }
}

template <int M, class Op>
struct Rows {
  static void run(int m, const Place& at, const char* ahead, const char* ahead_end, int lines) {
    if (m == M) return tile<M, Op>(at, ahead, ahead_end, lines);
    Rows<M - 1, Op>::run(m, at, ahead, ahead_end, lines);
  }
};
template <class Op>
struct Rows<0, Op> {
  static void run(int, const Place&, const char*, const char*, int) {}
};

// All rows and tiles of a block. Rows are cut into groups of nearly equal size, at most kRows. With one group the weights stream
// through once; with more, each group's pass fetches its part of the next tile, so that the memory works all the time.
template <class Op>
void block(const tb_block* b) {
  const int groups = (b->m + V::kRows - 1) / V::kRows;
  const int tile_lines = int(size_t(b->steps) * TB_TILE_N * 4 / kLine);
  const int passes_lines = (tile_lines + groups - 1) / groups;
  const int turns = b->steps / kUnroll > 0 ? b->steps / kUnroll : 1;
  const int lines = groups == 1 ? -1 : (passes_lines + turns - 1) / turns;
  for (int t = 0; t < b->tiles; ++t) {
    const char* next = b->w + (t + 1) * b->tile_bytes;
    const char* end = t + 1 < b->tiles ? next + size_t(tile_lines) * kLine : next;
    for (int g = 0; g < groups; ++g) {
      const int row = int(int64_t(b->m) * g / groups), rows = int(int64_t(b->m) * (g + 1) / groups) - row;
      const char* ahead = next + size_t(g) * passes_lines * kLine;
      const char* stop = ahead + size_t(passes_lines) * kLine;
      Rows<V::kRows, Op>::run(rows, Place{b, t, row}, ahead, stop < end ? stop : end, lines);
    }
  }
}
