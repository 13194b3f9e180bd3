// Quantised products in plain C++, and the unpacking of blocks that other kernels use too.
#include "quant_kernels.h"

namespace {
#include "quant_rows.h"

constexpr int kRows = 16;  // that share an unpacked block

const uint16_t* halves(const char* p) { return reinterpret_cast<const uint16_t*>(p); }
uint8_t byte_of(const char* p) { return static_cast<uint8_t>(*p); }

// Weight of (k, output) within a block, as stored.
uint8_t weight(int bits, const char* block, int k, int j) {
  const int step = k / 4, at = 4 * j + k % 4;
  if (bits == 8) return byte_of(block + step * 4 * TB_TILE_N + at);
  const int low = byte_of(block + step / 2 * 4 * TB_TILE_N + at) >> (step % 2 * 4) & 15;
  const char* high = block + tb_high_offset + at;
  if (bits == 5) return uint8_t(low | (byte_of(high) >> step & 1) << 4);
  if (bits == 6) return uint8_t(low | (byte_of(high + step / 4 * 4 * TB_TILE_N) >> step % 4 * 2 & 3) << 4);
  return uint8_t(low);
}

void add_block(const tb_layout& l, const tb_unpacked& w, const tb_x_block& x, float* total) {
  for (int part = 0; part < 32 / l.part; ++part) {
    int32_t dot[TB_TILE_N];
    const int32_t start = l.shift < 0 ? 0 : (l.part == 32 ? x.negative : x.half[part]) * (1 << l.shift);
    for (int j = 0; j < TB_TILE_N; ++j) dot[j] = start;
    for (int k = part * l.part; k < (part + 1) * l.part; ++k) {
      for (int j = 0; j < TB_TILE_N; ++j) dot[j] += w.q[k][j] * x.q[k];
    }
    for (int j = 0; j < TB_TILE_N; ++j) total[j] = float(dot[j]) * x.scale * w.scale[part][j] + total[j];
  }
  if (l.minimum) {
    for (int j = 0; j < TB_TILE_N; ++j) total[j] = w.minimum[j] * x.sum + total[j];
  }
}

void finish_rows(const tb_block* b, int row, int rows, int tile, const float (*total)[TB_TILE_N]) {
  const int base = tile * TB_TILE_N, count = b->n - base < TB_TILE_N ? b->n - base : TB_TILE_N;
  for (int i = 0; i < rows; ++i) {
    float* yf = static_cast<float*>(b->y) + (row + i) * b->ldy + base;
    uint16_t* yh = static_cast<uint16_t*>(b->y) + (row + i) * b->ldy + base;
    for (int j = 0; j < count; ++j) {
      const float v = b->bias ? total[i][j] + b->bias[base + j] : total[i][j];
      if (b->out_dtype == TB_F32) yf[j] = b->store == TB_ADD ? yf[j] + v : v;
      else yh[j] = tb_f32_to_bf16(b->store == TB_ADD ? tb_bf16_to_f32(yh[j]) + v : v);
    }
  }
}

template <class F>
void over_tiles(const tb_block* b, F f) {
  for (int t = 0; t < b->tiles; ++t) {
    for (int row = 0; row < b->m; row += kRows) {
      const int rows = kRows < b->m - row ? kRows : b->m - row;
      float total[kRows][TB_TILE_N] = {};
      f(b->w + t * b->tile_bytes, static_cast<const char*>(b->x) + row * b->ldx, rows, total);
      finish_rows(b, row, rows, t, total);
    }
  }
}

template <int F>
void product(const tb_block* b) {
  over_tiles(b, [b](const char* w, const char* x, int rows, float (*total)[TB_TILE_N]) {
    constexpr tb_layout L = tb_layouts[F];
    for (int block = 0; block < b->steps; block += L.blocks) {
      const char* header = w;
      w += tb_header_bytes(L);
      for (int s = 0; s < L.blocks; ++s, w += tb_block_bytes(L)) {
        tb_unpacked unpacked;
        tb_unpack(F, header, w, &unpacked);
        for (int i = 0; i < rows; ++i) {
          add_block(L, unpacked, reinterpret_cast<const tb_x_block*>(x + i * b->ldx)[block + s], total[i]);
        }
      }
    }
  });
}

template <>
void product<TB_I8>(const tb_block* b) {
  constexpr int kFold = TB_FOLD_INT8 / 4;
  over_tiles(b, [b](const char* w, const char* x, int rows, float (*total)[TB_TILE_N]) {
    const float* scale = reinterpret_cast<const float*>(w + size_t(b->steps) * 4 * TB_TILE_N);
    for (int i = 0; i < rows; ++i, x += b->ldx) {
      const int8_t* q = reinterpret_cast<const int8_t*>(x) + tb_x_header(int64_t(b->steps) * 4);
      for (int begin = 0; begin < b->steps; begin += kFold) {
        const int end = begin + kFold < b->steps ? begin + kFold : b->steps;
        int32_t dot[TB_TILE_N] = {};
        for (int s = begin; s < end; ++s) {
          const uint8_t* bytes = reinterpret_cast<const uint8_t*>(w) + size_t(s) * 4 * TB_TILE_N;
          for (int j = 0; j < TB_TILE_N; ++j) {
            for (int k = 0; k < 4; ++k) dot[j] += (bytes[4 * j + k] - 128) * q[size_t(s) * 4 + k];
          }
        }
        for (int j = 0; j < TB_TILE_N; ++j) total[i][j] = begin ? total[i][j] + float(dot[j]) : float(dot[j]);
      }
      const float own = *reinterpret_cast<const float*>(x);
      for (int j = 0; j < TB_TILE_N; ++j) total[i][j] = total[i][j] * scale[j] * own;
    }
  });
}

}  // namespace

extern "C" {

void tb_unpack_row(int format, const char* header, const char* block, int j, uint8_t* q, float* scale, float* minimum) {
  const tb_layout& l = tb_layouts[format];
  for (int k = 0; k < 32; ++k) q[k] = weight(l.bits, block, k, j);
  const char* scales = block + tb_weight_bytes(l);
  const uint16_t* numbers = halves(l.blocks == 1 ? scales : header) + j;
  scale[0] = scale[1] = tb_f16_to_f32(numbers[0]);
  *minimum = l.minimum ? tb_f16_to_f32(numbers[TB_TILE_N]) : 0.0f;
  if (l.blocks == 1) return;
  if (l.minimum) *minimum = -(*minimum * float(byte_of(scales + TB_TILE_N + j)));
  for (int part = 0; part < 2; ++part) {
    scale[part] *= l.part == 16 ? float(static_cast<int8_t>(scales[part * TB_TILE_N + j])) : float(byte_of(scales + j));
  }
}

void tb_unpack(int format, const char* header, const char* block, tb_unpacked* out) {
  for (int j = 0; j < TB_TILE_N; ++j) {
    uint8_t q[32];
    float scale[2];
    tb_unpack_row(format, header, block, j, q, scale, &out->minimum[j]);
    for (int k = 0; k < 32; ++k) out->q[k][j] = q[k];
    for (int part = 0; part < 2; ++part) out->scale[part][j] = scale[part];
  }
}

const tb_quant_kernels tb_quant_scalar = {
    {nullptr, product<TB_I8>, product<TB_Q4_0>, product<TB_Q4_1>, product<TB_Q5_0>, product<TB_Q5_1>, product<TB_Q8_0>,
     product<TB_Q4_K>, product<TB_Q5_K>, product<TB_Q6_K>},
    rows,
    blocks,
};

}  // extern "C"
