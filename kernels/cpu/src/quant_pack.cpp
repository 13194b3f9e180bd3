// Packs int8 weights, and GGUF's blocks. The files' layouts: ggml's block_q4_0 ... block_q6_K.
#include <cstring>

#include "pack.h"
#include "quant.h"
#include "quant_kernels.h"

namespace {
#include "quant_rows.h"

// ---- int8 ----

size_t int8_tile_bytes(const PackJob& job, int) { return size_t((job.k + 3) / 4 + 1) * 4 * TB_TILE_N; }

template <class T>
float pack_int8_row(const T* row, int64_t k, char* out) {
  const Scale s = scale_of(largest(row, k));
  for (int64_t begin = 0; begin < k; begin += 64) {
    const int64_t n = 64 < k - begin ? 64 : k - begin;
    int8_t q[64] = {};
    round_all(row + begin, n, s.inverse, q);
    for (int64_t i = 0; i < n; i += 4) {
      for (int e = 0; e < 4; ++e) out[(begin + i) * TB_TILE_N + e] = char(uint8_t(q[i + e] + 128));
    }
  }
  return s.scale;
}

float pack_stored_row(const int8_t* row, int64_t k, char* out) {
  for (int64_t i = 0; i < k; i += 4) {
    for (int e = 0; e < 4; ++e) out[i * TB_TILE_N + e] = char(uint8_t((i + e < k ? row[i + e] : 0) + 128));
  }
  float scale;
  memcpy(&scale, row + (k + 3) / 4 * 4, 4);
  return scale;
}

void pack_int8_tile(const PackJob& job, const tb_segment& segment, int tile, char* to) {
  float* scales = reinterpret_cast<float*>(to + segment.tile_bytes - 4 * TB_TILE_N);
  for (int j = 0; j < TB_TILE_N; ++j) {
    const char* row = job.row(segment, tile, j, job.source == TB_F32 ? 4 : job.source == TB_BF16 ? 2 : 1);
    if (!row) scales[j] = 0.0f;
    else if (job.source == TB_STORED_INT8) scales[j] = pack_stored_row(reinterpret_cast<const int8_t*>(row), job.k, to + 4 * j);
    else if (job.source == TB_F32) scales[j] = pack_int8_row(reinterpret_cast<const float*>(row), job.k, to + 4 * j);
    else scales[j] = pack_int8_row(reinterpret_cast<const uint16_t*>(row), job.k, to + 4 * j);
  }
}

// ---- GGUF ----

constexpr int file_bytes[TB_FORMATS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210};  // of a block of 32, K types: 256

// 32 weights as unsigned numbers, and what lies beside them: scale and minimum fp16, or K types' integers.
struct Piece {
  uint8_t q[32];
  uint16_t scale, minimum;
};

uint16_t number(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

void low_bits(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[16 + i] = p[i] >> 4;
  }
}

void fifth_bits(const uint8_t* p, uint8_t* q) {
  uint32_t bits;
  memcpy(&bits, p, 4);
  for (int i = 0; i < 32; ++i) q[i] |= (bits >> i & 1) << 4;
}

void read_small(int format, const uint8_t* p, Piece* out) {
  out->scale = number(p);
  p += 2;
  if (tb_layouts[format].minimum) {
    out->minimum = number(p);
    p += 2;
  }
  if (format == TB_Q8_0) {
    for (int i = 0; i < 32; ++i) out->q[i] = p[i] ^ 0x80;
    return;
  }
  const bool five = tb_layouts[format].bits == 5;
  low_bits(five ? p + 4 : p, out->q);
  if (five) fifth_bits(p, out->q);
}

// Sub-block s of 8, of Q4_K: d, dmin, 12 bytes of 6-bit scales and minima, low bits; Q5_K: fifth bits before the low ones.
void read_k45(int format, const uint8_t* p, int s, Piece* out) {
  const uint8_t* packed = p + 4;
  out->scale = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4;
  out->minimum = s < 4 ? packed[s + 4] & 63 : packed[s + 4] >> 4 | (packed[s] >> 6) << 4;
  const uint8_t* high = p + 16;
  const uint8_t* low = high + (format == TB_Q5_K ? 32 : 0) + s / 2 * 32;
  for (int i = 0; i < 32; ++i) {
    out->q[i] = low[i] >> s % 2 * 4 & 15;
    if (format == TB_Q5_K) out->q[i] |= (high[i] >> s & 1) << 4;
  }
}

// Q6_K: low bits of 4 groups of 32 in 64 bytes, upper bits of the same in 32; then the other half's. Scales of 16, d.
void read_k6(const uint8_t* p, int s, Piece* out) {
  const uint8_t *low = p + s / 4 * 64 + s % 2 * 32, *high = p + 128 + s / 4 * 32, *scales = p + 192 + 2 * s;
  for (int i = 0; i < 32; ++i) out->q[i] = (low[i] >> (s % 4 / 2 * 4) & 15) | (high[i] >> s % 4 * 2 & 3) << 4;
  out->scale = scales[0];
  out->minimum = scales[1];
}

void write_weights(int bits, const uint8_t* q, int j, char* block) {
  for (int k = 0; k < 32; ++k) {
    const int step = k / 4, at = 4 * j + k % 4;
    if (bits == 8) {
      block[step * 4 * TB_TILE_N + at] = char(q[k]);
      continue;
    }
    block[step / 2 * 4 * TB_TILE_N + at] |= char((q[k] & 15) << (step % 2 * 4));
    char* high = block + tb_high_offset + at;
    if (bits == 5) *high |= char((q[k] >> 4) << step);
    if (bits == 6) high[step / 4 * 4 * TB_TILE_N] |= char((q[k] >> 4) << (step % 4 * 2));
  }
}

void write_small(const tb_layout& l, const Piece& piece, int j, char* block) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(block + tb_weight_bytes(l));
  scales[j] = piece.scale;
  if (l.minimum) scales[TB_TILE_N + j] = piece.minimum;
  write_weights(l.bits, piece.q, j, block);
}

void pack_super(int format, const uint8_t* source, int j, char* to) {
  const tb_layout& l = tb_layouts[format];
  uint16_t* header = reinterpret_cast<uint16_t*>(to);
  header[j] = number(format == TB_Q6_K ? source + 208 : source);
  if (l.minimum) header[TB_TILE_N + j] = number(source + 2);
  char* block = to + tb_header_bytes(l);
  for (int s = 0; s < 8; ++s, block += tb_block_bytes(l)) {
    Piece piece;
    if (format == TB_Q6_K) read_k6(source, s, &piece);
    else read_k45(format, source, s, &piece);
    char* scales = block + tb_weight_bytes(l);
    scales[j] = char(piece.scale);
    scales[TB_TILE_N + j] = char(piece.minimum);
    write_weights(l.bits, piece.q, j, block);
  }
}

size_t gguf_tile_bytes(const PackJob& job, int format) {
  const tb_layout& l = tb_layouts[format];
  return size_t(job.k / 32 / l.blocks) * (tb_header_bytes(l) + l.blocks * tb_block_bytes(l));
}

void pack_gguf_tile(const PackJob& job, const tb_segment& segment, int tile, char* to) {
  const tb_layout& l = tb_layouts[segment.format];
  const size_t group = tb_header_bytes(l) + l.blocks * tb_block_bytes(l);
  memset(to, 0, segment.tile_bytes);
  const uint8_t* rows[TB_TILE_N];
  for (int j = 0; j < TB_TILE_N; ++j) rows[j] = reinterpret_cast<const uint8_t*>(job.row(segment, tile, j, 1));
  for (size_t g = 0; g < segment.tile_bytes / group; ++g) {
    for (int j = 0; j < TB_TILE_N; ++j) {
      if (!rows[j]) continue;
      const uint8_t* source = rows[j] + g * file_bytes[segment.format];
      if (l.blocks == 8) {
        pack_super(segment.format, source, j, to + g * group);
        continue;
      }
      Piece piece;
      read_small(segment.format, source, &piece);
      write_small(l, piece, j, to + g * group);
    }
  }
}

}  // namespace

extern "C" {

tb_packed* tb_pack_int8(int dtype, int source, int blocks, const void* const* src, const int64_t* rows, const int64_t* ld,
                        int64_t k, const void* const* bias) {
  PackJob job{dtype, source, TB_F32, blocks, src, rows, ld, k, bias, nullptr, TB_I8, TB_INT8_ROWS, int8_tile_bytes, pack_int8_tile};
  return tb_pack_job(&job);
}

tb_packed* tb_pack_gguf(int dtype, int blocks, const int* formats, const void* const* src, const int64_t* rows, const int64_t* ld,
                        int64_t k, const void* const* bias) {
  for (int b = 0; b < blocks; ++b) {
    if (!tb_gguf_row_bytes(formats[b], k)) return nullptr;
  }
  PackJob job{dtype, TB_F32, TB_F32, blocks, src, rows, ld, k, bias, formats, 0, TB_INT8_BLOCKS, gguf_tile_bytes, pack_gguf_tile};
  return tb_pack_job(&job);
}

size_t tb_gguf_row_bytes(int format, int64_t k) {
  if (format <= TB_I8 || format >= TB_FORMATS || k < 1) return 0;
  const int values = 32 * tb_layouts[format].blocks;
  return k % values ? 0 : size_t(k / values) * file_bytes[format];
}

}  // extern "C"
