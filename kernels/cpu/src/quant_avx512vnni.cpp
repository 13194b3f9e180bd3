// Quantised products for AVX512-VNNI: VPDPBUSD adds 4 products of unsigned and signed bytes without saturation.
#include <immintrin.h>

#include "quant_kernels.h"

#define TB_PREFETCH_BYTES 4096

namespace {
#include "linear_avx512.h"
#include "linear_vector.h"
#include "quant_rows.h"

struct I {
  using Vec = __m512i;
  static constexpr int kRows = 8;
  static constexpr bool kSigned = false;
  static Vec zero() { return _mm512_setzero_si512(); }
  static Vec load(const char* p) { return _mm512_load_si512(p); }
  static Vec broadcast(const char* p) {
    int32_t value;
    __builtin_memcpy(&value, p, 4);
    return _mm512_set1_epi32(value);
  }
  static Vec low(Vec a, char mask) { return _mm512_and_si512(a, _mm512_set1_epi8(mask)); }
  static Vec or_low(Vec a, Vec b, char mask) { return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(mask), 0xf8); }
  template <int N>
  static Vec left(Vec a) {
    return N >= 0 ? _mm512_slli_epi16(a, N < 0 ? 0 : N) : _mm512_srli_epi16(a, N < 0 ? -N : 0);
  }
  template <int N>
  static Vec times(Vec a) { return _mm512_slli_epi32(a, N); }
  template <int Bits>
  static Vec dot(Vec sum, Vec w, Vec x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static __m512 to_float(Vec a) { return _mm512_cvtepi32_ps(a); }
  static __m512 half(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m128i bytes(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512 unsigned_bytes(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(p))); }
  static __m512 signed_bytes(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p))); }
  static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 negative(__m512 a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static __m512 number(const char* p) {
    float value;
    __builtin_memcpy(&value, p, 4);
    return _mm512_set1_ps(value);
  }
};

#include "quant_vector.h"
}  // namespace

extern "C" const tb_quant_kernels tb_quant_avx512vnni = {TB_QUANT_PRODUCTS, rows, blocks};
