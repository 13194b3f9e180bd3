// Which instruction sets the kernels use. Every level includes those below it; a kernel that has no version for the level in
// use takes the next lower one. Results may differ in their last bits between levels, never within one.
//
// A source file whose name ends in _avx2, _avx512, _avx512vnni or _avx512bf16 is compiled for that level (see ../build.py), and
// only on x86-64; everything in it but its table of functions must be static or in an anonymous namespace, and it must not use
// inline functions of the C++ library: the linker would keep one copy of those for all levels.
#pragma once

enum tb_isa_level { TB_SCALAR = 0, TB_AVX2 = 1, TB_AVX512 = 2, TB_AVX512VNNI = 3, TB_AVX512BF16 = 4, TB_ISA_LEVELS = 5 };

#if defined(__x86_64__)
#define TB_X86 1
#endif

#ifdef __cplusplus
extern "C" {
#endif

int tb_isa_best(void);         // the highest level of this CPU and operating system
int tb_isa(void);              // the level in use; tb_isa_best() until it is set
int tb_use_isa(int level);     // 0, or -1 (and no change) for a level that this machine lacks. Not while kernels run.

#ifdef __cplusplus
}
#endif
