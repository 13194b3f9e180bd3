// Linear kernels for AVX512 without BF16: bfloat16 weights are widened, activations come as float32.
#include <immintrin.h>

#include "linear_kernels.h"

#define TB_PREFETCH_BYTES 4096

namespace {
#include "linear_avx512.h"
#include "linear_vector.h"

struct Widened {
  static constexpr int kXBytes = 8, kXCount = 2, kFold = TB_FOLD_BF16, kParts = 2;
  using Weights = __m512;
  using X = __m512;
  static Weights weights(const char* w, int v, int part) {
    __m512i pairs = _mm512_load_si512(w + v * 64);
    return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(pairs, 16)
                                         : _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
  }
  static X x(const char* p, int part) { return F32::x(p + 4 * part, 0); }
  static __m512 apply(__m512 sum, Weights w, X x) { return _mm512_fmadd_ps(w, x, sum); }
};

}  // namespace

extern "C" const tb_linear_kernels tb_linear_avx512 = {block<F32>, block<Widened>, 0, 12, size_t(256) << 10};
