#include "elementwise.h"

#include <string.h>

#include "dispatch.h"
#include "pool.h"

extern const tb_row_functions tb_rows_scalar;
#if defined(TB_X86)
extern const tb_row_functions tb_rows_avx2, tb_rows_avx512, tb_rows_avx512bf16;
#endif

const tb_row_functions* tb_rows(void) {
#if defined(TB_X86)
  switch (tb_isa()) {
    case TB_AVX2: return &tb_rows_avx2;
    case TB_AVX512:
    case TB_AVX512VNNI: return &tb_rows_avx512;
    case TB_AMX:
    case TB_AVX512BF16: return &tb_rows_avx512bf16;
  }
#endif
  return &tb_rows_scalar;
}

namespace {

size_t width(int dtype) { return dtype == TB_BF16 ? 2 : 4; }

template <class F>
void over_rows(int rows, int n, F f) {
  const int piece = n >= 4096 ? 1 : 4096 / n;  // rows of one task: about 4096 elements
  struct Job {
    F* f;
    int rows, piece;
  } job = {&f, rows, piece};
  tb_run((rows + piece - 1) / piece, [](void* context, int index, int) {
    Job& j = *(Job*)context;
    for (int r = index * j.piece; r < j.rows && r < (index + 1) * j.piece; r++) (*j.f)(r);
  }, &job);
}

}  // namespace

void tb_rms_norm(int dtype, const void* x, const float* weight, void* y, int rows, int n, float eps) {
  const size_t step = n * width(dtype);
  over_rows(rows, n, [&](int r) { tb_rows()->rms_norm(dtype, (const char*)x + r * step, weight, (char*)y + r * step, n, eps); });
}

void tb_rms_norm_add(int dtype, const void* x, const float* weight, void* y, int rows, int n, float eps) {
  const size_t step = n * width(dtype);
  over_rows(rows, n, [&](int r) { tb_rows()->rms_norm_add(dtype, (const char*)x + r * step, weight, (char*)y + r * step, n, eps); });
}

void tb_rope(int dtype, void* x, const float* cos, const float* sin, int tokens, int heads, int head_dim, int half) {
  const size_t step = head_dim * width(dtype);
  over_rows(tokens * heads, head_dim, [&](int r) {
    const size_t angle = (size_t)(r / heads) * half;
    tb_rows()->rope(dtype, (char*)x + r * step, cos + angle, sin + angle, half);
  });
}

void tb_glu(int activation, int dtype, const float* gate, const float* up, void* y, int rows, int n) {
  over_rows(rows, n, [&](int r) {
    const size_t at = (size_t)r * n;
    tb_rows()->glu(activation, dtype, gate + at, up + at, (char*)y + at * width(dtype), n);
  });
}

void tb_softcap(const float* x, float cap, float* y, int rows, int n) {
  over_rows(rows, n, [&](int r) { tb_rows()->softcap(x + (size_t)r * n, cap, y + (size_t)r * n, n); });
}

void tb_embed(int dtype, const void* table, const int64_t* ids, float scale, void* y, int rows, int n) {
  const size_t step = n * width(dtype);
  over_rows(rows, n, [&](int r) {
    const char* row = (const char*)table + ids[r] * step;
    char* to = (char*)y + r * step;
    if (scale == 1.0f) memcpy(to, row, step);
    else tb_rows()->scale(dtype, row, scale, to, n);
  });
}
