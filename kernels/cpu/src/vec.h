// float32 vectors for the instruction set that the including file is compiled for: AVX-512, AVX2 with FMA, or the compiler's own
// vectors of 4. Everything is local to the including file. Needs -ffp-contract=off: products and sums are fused where fma() says so.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)  // its own header starts some vectors from themselves
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#include "linear.h"

namespace {

typedef uint16_t bf16;

inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float widen(float x) { return x; }

#if defined(__AVX512F__)

enum { W = 16 };
typedef __m512 vec;

inline vec set1(float x) { return _mm512_set1_ps(x); }
inline vec zero() { return _mm512_setzero_ps(); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
inline vec load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vec load_n(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)), 16));
}
inline void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
inline void store_n(float* p, vec x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
#if defined(__AVX512BF16__)
inline __m256i narrow(vec x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
inline __m256i narrow(vec x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
}
#endif
inline void store(bf16* p, vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store_n(bf16* p, vec x, int n) { _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), narrow(x)); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline vec min(vec a, vec b) { return _mm512_min_ps(a, b); }  // b where either is NaN
inline vec less_then(vec a, vec b, vec yes, vec no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline int any_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }  // bit i: a[i] > b[i]
inline vec rint(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec scale_by_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }
inline vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Rows and columns of 16 x 16 elements change places. From memory: row i at rows[i], its first 16 * 4 bytes.
inline void transpose_from(const void* const* rows, vec* r) {
  __m512 t[16];
  for (int c = 0; c < 4; c++)
    for (int i = 0; i < 4; i++) {  // rows i, i + 4, i + 8, i + 12 in the four lanes
      __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float*)rows[i] + 4 * c));
      x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps((const float*)rows[i + 4] + 4 * c));
      x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps((const float*)rows[i + 8] + 4 * c));
      t[4 * c + i] = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps((const float*)rows[i + 12] + 4 * c));
    }
  for (int c = 0; c < 16; c += 4) {
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(t[c], t[c + 1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(t[c + 2], t[c + 3]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(t[c], t[c + 1])), e = _mm512_castps_pd(_mm512_unpackhi_ps(t[c + 2], t[c + 3]));
    r[c] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    r[c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(d, e));
    r[c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(d, e));
  }
}

inline void transpose(vec* r) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + 2 + j])));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + 2 + j])));
    }
  }
  for (int i = 0; i < 4; i++) {
    __m512 a = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88);
    __m512 c = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd), d = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[8 + i] = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[4 + i] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

#elif defined(__AVX2__)

enum { W = 8 };
typedef __m256 vec;

inline vec set1(float x) { return _mm256_set1_ps(x); }
inline vec zero() { return _mm256_setzero_ps(); }
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline vec load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
inline void store(bf16* p, vec x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
inline vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
inline vec less_then(vec a, vec b, vec yes, vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline int any_greater(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline vec rint(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec scale_by_power(vec x, vec n) {  // n within -126 ... 127
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
inline vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

inline void transpose(vec* r) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}

#else

enum { W = 4 };
typedef float vec __attribute__((vector_size(16), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(16), aligned(4)));

inline vec set1(float x) { return vec{x, x, x, x}; }
inline vec zero() { return set1(0); }
inline vec load(const float* p) {
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline vec load(const bf16* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vec x) {
  for (int i = 0; i < W; i++) {
    float f = x[i];
    uint32_t bits;
    memcpy(&bits, &f, 4);
    p[i] = f != f ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
inline vec add(vec a, vec b) { return a + b; }
inline vec sub(vec a, vec b) { return a - b; }
inline vec mul(vec a, vec b) { return a * b; }
inline vec div(vec a, vec b) { return a / b; }
inline vec fma(vec a, vec b, vec c) { return a * b + c; }
inline vec max(vec a, vec b) { return a > b ? a : b; }
inline vec min(vec a, vec b) { return a < b ? a : b; }
inline vec less_then(vec a, vec b, vec yes, vec no) { return a < b ? yes : no; }
inline int any_greater(vec a, vec b) {
  ivec m = a > b;
  return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8);
}
inline vec rint(vec x) {  // |x| below 2^22
  const vec magic = set1(12582912.0f);
  return (x + magic) - magic;
}
inline vec scale_by_power(vec x, vec n) {  // n within -126 ... 127
  ivec e = __builtin_convertvector(n, ivec);
  e = (e + 127) << 23;
  vec power;
  memcpy(&power, &e, sizeof power);
  return x * power;
}
inline vec iota() { return vec{0, 1, 2, 3}; }

inline void transpose(vec* r) {
  float t[4][4];
  for (int i = 0; i < 4; i++) store(t[i], r[i]);
  for (int i = 0; i < 4; i++) r[i] = vec{t[0][i], t[1][i], t[2][i], t[3][i]};
}

#endif

#if !defined(__AVX512F__)
template <class T>
inline vec load_n(const T* p, int n) {  // zeros from n on; n < W
  T full[W] = {};
  for (int i = 0; i < n; i++) full[i] = p[i];
  return load(full);
}
template <class T>
inline void store_n(T* p, vec x, int n) {
  T full[W];
  store(full, x);
  for (int i = 0; i < n; i++) p[i] = full[i];
}
#endif

// Sums and maxima over lanes: halves against each other, always in this order.
inline float sum_lanes(vec x) {
  float t[W];
  store(t, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] += t[i + half];
  return t[0];
}
inline float max_lanes(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float t[W];
  store(t, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
#endif
}

// exp within 2 units in the last place; 0 below -110 (AVX-512) or -87.3, NaN stays. Coefficients: Cephes expf (Moshier).
inline vec exp(vec x) {
#if defined(__AVX512F__)
  vec c = max(set1(-110.0f), min(set1(89.0f), x));
#else
  vec c = max(set1(-87.3f), min(set1(88.0f), x));
#endif
  vec n = rint(mul(c, set1(1.44269504f)));
  vec r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  vec y = scale_by_power(add(fma(p, mul(r, r), r), set1(1.0f)), n);
#if defined(__AVX512F__)
  return y;
#else
  return less_then(x, set1(-87.3f), zero(), y);
#endif
}

// 2^x for x <= 8 or so (0 far below), a NaN stays, exp2(0) is 1. Relative error of FAST below 2^-18, else that of float32. Polynomials: least
// maximum relative error of 2^f = 1 + f q(f), fitted by ourselves on the interval that f is in.
template <bool FAST>
inline vec exp2(vec x) {
#if defined(__AVX512F__)
  vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 of infinity
  vec p;
  if (FAST) {
    p = fma(f, set1(1.3426684774e-2f), set1(5.2242472767e-2f));
    p = fma(p, f, set1(2.4128019809e-1f));
    p = fma(p, f, set1(6.9304484128e-1f));
  } else {
    p = fma(f, set1(2.1612914861e-4f), set1(1.2467845808e-3f));
    p = fma(p, f, set1(9.6754515543e-3f));
    p = fma(p, f, set1(5.5485282093e-2f));
    p = fma(p, f, set1(2.4022930860e-1f));
    p = fma(p, f, set1(6.9314706325e-1f));
  }
  return scale_by_power(fma(p, f, set1(1.0f)), x);  // the power is floor(x)
#else
  vec c = max(set1(-126.0f), x);
  vec n = rint(c), f = sub(c, n);
  vec p = fma(f, set1(1.5353361957e-4f), set1(1.3398875016e-3f));
  p = fma(p, f, set1(9.6184369176e-3f));
  p = fma(p, f, set1(5.5503323705e-2f));
  p = fma(p, f, set1(2.4022647738e-1f));
  p = fma(p, f, set1(6.9314718246e-1f));
  return less_then(x, set1(-126.0f), zero(), scale_by_power(fma(p, f, set1(1.0f)), n));
#endif
}

// tanh within 3 units in the last place. Coefficients: Cephes tanhf (Moshier).
inline vec tanh(vec x) {
  vec z = mul(x, x);
  vec p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  vec small = fma(mul(p, z), x, x);
  vec a = max(x, sub(zero(), x));
  vec e = exp(add(a, a));
  vec large = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  large = less_then(x, zero(), sub(zero(), large), large);
  return less_then(a, set1(0.625f), small, large);
}

// f(i, n) for each vector of n <= W elements at i.
template <class F>
inline void for_vectors(int count, F f) {
  int i = 0;
  for (; i + W <= count; i += W) f(i, (int)W);
  if (i < count) f(i, count - i);
}
template <class T>
inline vec load_up_to(const T* p, int n) { return n == W ? load(p) : load_n(p, n); }
template <class T>
inline void store_up_to(T* p, vec x, int n) {
  if (n == W) store(p, x);
  else store_n(p, x, n);
}

}  // namespace
