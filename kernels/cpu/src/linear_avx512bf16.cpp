// Linear kernels for AVX512-BF16: products of bfloat16 pairs, summed in float32 (VDPBF16PS; subnormals count as zero).
#include <immintrin.h>

#include "linear_kernels.h"

#define TB_PREFETCH_BYTES 4096

namespace {
#include "linear_avx512.h"
#include "linear_vector.h"

struct Bf16 {
  static constexpr int kXBytes = 4, kXCount = 2, kFold = TB_FOLD_BF16, kParts = 1;
  using Weights = __m512bh;
  using X = __m512bh;
  static Weights weights(const char* w, int v, int) { return (__m512bh)_mm512_load_si512(w + v * 64); }
  static X x(const char* p, int) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static __m512 apply(__m512 sum, Weights w, X x) { return _mm512_dpbf16_ps(sum, w, x); }
};

}  // namespace

extern "C" const tb_linear_kernels tb_linear_avx512bf16 = {block<F32>, block<Bf16>, 1, 12, size_t(256) << 10};
