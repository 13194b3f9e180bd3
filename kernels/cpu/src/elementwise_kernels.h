// The row functions, for the instruction set of the including file.
#pragma once
#include <math.h>

#include "elementwise.h"
#include "vec.h"

namespace {

template <class T>
float inverse_rms(const T* x, int n, float eps) {
  vec sum = zero();
  for_vectors(n, [&](int i, int m) {
    vec v = load_up_to(x + i, m);
    sum = fma(v, v, sum);
  });
  return 1.0f / sqrtf(sum_lanes(sum) / (float)n + eps);
}

template <class T>
void norm(const T* x, const float* weight, T* y, int n, float eps) {
  vec scale = set1(inverse_rms(x, n, eps));
  for_vectors(n, [&](int i, int m) {
    store_up_to(y + i, mul(mul(load_up_to(x + i, m), scale), load_up_to(weight + i, m)), m);
  });
}

template <class T>
void norm_add(const T* x, const float* weight, T* y, int n, float eps) {
  vec scale = set1(inverse_rms(x, n, eps));
  for_vectors(n, [&](int i, int m) {
    vec normal = mul(mul(load_up_to(x + i, m), scale), load_up_to(weight + i, m));
    store_up_to(y + i, add(load_up_to(y + i, m), normal), m);
  });
}

template <class T>
void turn(T* x, const float* cos, const float* sin, int half) {
  for_vectors(half, [&](int i, int m) {
    vec a = load_up_to(x + i, m), b = load_up_to(x + half + i, m), c = load_up_to(cos + i, m), s = load_up_to(sin + i, m);
    store_up_to(x + i, sub(mul(a, c), mul(b, s)), m);
    store_up_to(x + half + i, add(mul(b, c), mul(a, s)), m);
  });
}

inline vec silu(vec x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
inline vec gelu_tanh(vec x) {
  vec cube = mul(mul(x, x), x);
  vec inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

template <class T>
void gated(int activation, const float* gate, const float* up, T* y, int n) {
  if (activation == TB_SILU)
    for_vectors(n, [&](int i, int m) { store_up_to(y + i, mul(silu(load_up_to(gate + i, m)), load_up_to(up + i, m)), m); });
  else
    for_vectors(n, [&](int i, int m) { store_up_to(y + i, mul(gelu_tanh(load_up_to(gate + i, m)), load_up_to(up + i, m)), m); });
}

template <class T, class U>
void convert(const T* x, U* y, int n) {
  for_vectors(n, [&](int i, int m) { store_up_to(y + i, load_up_to(x + i, m), m); });
}

#define TB_BY_DTYPE(call)        \
  if (dtype == TB_BF16) {        \
    typedef bf16 T;              \
    call;                        \
  } else {                       \
    typedef float T;             \
    call;                        \
  }

void rms_norm_row(int dtype, const void* x, const float* weight, void* y, int n, float eps) {
  TB_BY_DTYPE(norm((const T*)x, weight, (T*)y, n, eps))
}
void rms_norm_add_row(int dtype, const void* x, const float* weight, void* y, int n, float eps) {
  TB_BY_DTYPE(norm_add((const T*)x, weight, (T*)y, n, eps))
}
void rope_row(int dtype, void* x, const float* cos, const float* sin, int half) { TB_BY_DTYPE(turn((T*)x, cos, sin, half)) }
void glu_row(int activation, int dtype, const float* gate, const float* up, void* y, int n) {
  TB_BY_DTYPE(gated(activation, gate, up, (T*)y, n))
}
void scale_row(int dtype, const void* x, float scale, void* y, int n) {
  vec by = set1(scale);
  TB_BY_DTYPE(for_vectors(n, [&](int i, int m) { store_up_to((T*)y + i, mul(load_up_to((const T*)x + i, m), by), m); }))
}
void softcap_row(const float* x, float cap, float* y, int n) {
  vec c = set1(cap);
  for_vectors(n, [&](int i, int m) { store_up_to(y + i, mul(tanh(div(load_up_to(x + i, m), c)), c), m); });
}
void cast_row(int dtype, const void* x, int to_dtype, void* y, int n) {
  if (dtype == to_dtype) memcpy(y, x, (size_t)n * (dtype == TB_BF16 ? 2 : 4));
  else if (dtype == TB_BF16) convert((const bf16*)x, (float*)y, n);
  else convert((const float*)x, (bf16*)y, n);
}
float max_row(const float* x, int n) {
  vec most = set1(-INFINITY);
  int i = 0;
  for (; i + W <= n; i += W) most = max(load(x + i), most);
  float found = max_lanes(most);
  for (; i < n; i++) found = x[i] > found ? x[i] : found;
  return found;
}
int next_above_row(const float* x, int n, int from, float threshold) {
  vec limit = set1(threshold);
  int i = from;
  for (; i + W <= n; i += W)
    if (int found = any_greater(load(x + i), limit)) return i + __builtin_ctz((unsigned)found);
  for (; i < n; i++)
    if (x[i] > threshold) return i;
  return n;
}

}  // namespace

#define TB_ROW_FUNCTIONS(name)                                                                                             \
  extern const tb_row_functions name;                                                                                      \
  const tb_row_functions name = {rms_norm_row, rms_norm_add_row, rope_row, glu_row, scale_row, softcap_row, cast_row,      \
                                 max_row,      next_above_row};
