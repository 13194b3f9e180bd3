#include "dispatch.h"

#include <atomic>

#if defined(TB_X86)
#include <cpuid.h>
#endif

namespace {

#if defined(TB_X86)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int detect() {
#if defined(TB_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return TB_SCALAR;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return TB_AVX2;
  if (!__builtin_cpu_supports("avx512vnni")) return TB_AVX512;
  return __builtin_cpu_supports("avx512bf16") ? TB_AVX512BF16 : TB_AVX512VNNI;
#else
  return TB_SCALAR;
#endif
}

std::atomic<int> in_use{-1};

}  // namespace

extern "C" {

int tb_isa_best(void) {
  static const int best = detect();
  return best;
}

int tb_isa(void) {
  int level = in_use.load(std::memory_order_relaxed);
  return level >= 0 ? level : tb_isa_best();
}

int tb_use_isa(int level) {
  if (level < TB_SCALAR || level > tb_isa_best()) return -1;
  in_use.store(level);
  return 0;
}

}  // extern "C"
