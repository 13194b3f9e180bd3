// Which instruction sets the kernels use. Every level includes those below it; a kernel that has no version for the level in
// use takes the next lower one. Results may differ in their last bits between levels, never within one.
//
// A source file whose name ends in _avx2, _avx512, _avx512vnni, _avx512bf16 or _amx is compiled for that level (see ../build.py), and
// only on x86-64; everything in it but its table of functions must be static or in an anonymous namespace, and it must not use
// inline functions of the C++ library: the linker would keep one copy of those for all levels. A compiler that knows no AMX compiles
// _amx files as those of _avx512bf16; tb_amx_compiled says so.
#pragma once

enum tb_isa_level { TB_SCALAR = 0, TB_AVX2 = 1, TB_AVX512 = 2, TB_AVX512VNNI = 3, TB_AVX512BF16 = 4, TB_AMX = 5, TB_ISA_LEVELS = 6 };

#if defined(__x86_64__)
#define TB_X86 1
#endif

#ifdef __cplusplus
extern "C" {
#endif

int tb_isa_best(void);         // the highest level of this CPU and operating system (which is asked for AMX's registers at the first call)
int tb_isa(void);              // the level in use; tb_isa_best() until it is set
int tb_use_isa(int level);     // 0, or -1 (and no change) for a level that this machine lacks. Not while kernels run.

extern const int tb_amx_compiled;

#ifdef __cplusplus
}
#endif
