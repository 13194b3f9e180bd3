// Linear kernels for AVX2 with FMA: bfloat16 weights are widened, activations come as float32.
#include <immintrin.h>

#include "linear_kernels.h"

#define TB_PREFETCH_BYTES 4096

namespace {
#include "linear_avx2.h"
#include "linear_vector.h"

struct F32 {
  static constexpr int kXBytes = 4, kXCount = 1, kFold = TB_FOLD_F32, kParts = 1;
  using Weights = __m256;
  using X = __m256;
  static Weights weights(const char* w, int v, int) { return _mm256_load_ps(reinterpret_cast<const float*>(w) + v * 8); }
  static X x(const char* p, int) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  static __m256 apply(__m256 sum, Weights w, X x) { return _mm256_fmadd_ps(w, x, sum); }
};

struct Widened {
  static constexpr int kXBytes = 8, kXCount = 2, kFold = TB_FOLD_BF16, kParts = 2;
  using Weights = __m256;
  using X = __m256;
  static Weights weights(const char* w, int v, int part) {
    __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + v);
    return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(pairs, 16)
                                         : _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
  }
  static X x(const char* p, int part) { return F32::x(p + 4 * part, 0); }
  static __m256 apply(__m256 sum, Weights w, X x) { return _mm256_fmadd_ps(w, x, sum); }
};

}  // namespace

extern "C" const tb_linear_kernels tb_linear_avx2 = {block<F32>, block<Widened>, 0, 12, size_t(256) << 10};
