// Quantised products for AVX2. VPMADDUBSW's 16-bit sums of two products never saturate here: weights below 64 give at most
// 2 * 63 * 127, and for 8 bits |w| <= 128 is multiplied by x with w's sign: at most 2 * 128 * 127 = 32512.
#include <immintrin.h>

#include "quant_kernels.h"

#define TB_PREFETCH_BYTES 4096

namespace {
#include "linear_avx2.h"
#include "linear_vector.h"
#include "quant_rows.h"

struct I {
  using Vec = __m256i;
  static constexpr int kRows = 2;
  static constexpr bool kSigned = true;
  static Vec zero() { return _mm256_setzero_si256(); }
  static Vec load(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static Vec broadcast(const char* p) {
    int32_t value;
    __builtin_memcpy(&value, p, 4);
    return _mm256_set1_epi32(value);
  }
  static Vec low(Vec a, char mask) { return _mm256_and_si256(a, _mm256_set1_epi8(mask)); }
  static Vec or_low(Vec a, Vec b, char mask) { return _mm256_or_si256(a, low(b, mask)); }
  template <int N>
  static Vec left(Vec a) {
    return N >= 0 ? _mm256_slli_epi16(a, N < 0 ? 0 : N) : _mm256_srli_epi16(a, N < 0 ? -N : 0);
  }
  template <int N>
  static Vec times(Vec a) { return _mm256_slli_epi32(a, N); }
  template <int Bits>
  static Vec dot(Vec sum, Vec w, Vec x) {
    if (Bits == 8) {
      w = _mm256_xor_si256(w, _mm256_set1_epi8(char(-128)));
      x = _mm256_sign_epi8(x, w);
      w = _mm256_abs_epi8(w);
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  }
  static __m256 to_float(Vec a) { return _mm256_cvtepi32_ps(a); }
  static __m256 half(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m128i bytes(const char* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m256 unsigned_bytes(const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(p))); }
  static __m256 signed_bytes(const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p))); }
  static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 negative(__m256 a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static __m256 number(const char* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
};

#include "quant_vector.h"
}  // namespace

extern "C" const tb_quant_kernels tb_quant_avx2 = {TB_QUANT_PRODUCTS, rows, blocks};
