#include "dispatch.h"

#include <atomic>

#if defined(TB_X86)
#include <cpuid.h>
#endif
#if defined(TB_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(TB_X86)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Tiles of bfloat16 and int8. Linux hands their registers to a process that asks; it refuses where a thread's stack for signals is too small
// to save them.
bool has_amx() {
#if defined(TB_X86) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!tb_amx_compiled || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

int detect() {
#if defined(TB_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return TB_SCALAR;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return TB_AVX2;
  if (!__builtin_cpu_supports("avx512vnni")) return TB_AVX512;
  if (!__builtin_cpu_supports("avx512bf16")) return TB_AVX512VNNI;
  return has_amx() ? TB_AMX : TB_AVX512BF16;
#else
  return TB_SCALAR;
#endif
}

std::atomic<int> in_use{-1};

}  // namespace

#if !defined(TB_X86)
extern "C" const int tb_amx_compiled = 0;
#endif

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
