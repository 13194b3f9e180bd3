// Row functions of a decoder. Storage is enum tb_dtype, arithmetic float32, rounded once (nearest even) when stored. Every row is
// computed by one thread, in vectors from its first element on and the rest in a padded vector: its bits depend on nothing else.
#pragma once
#include <stdint.h>

#include "linear.h"

enum tb_activation { TB_SILU = 0, TB_GELU_TANH = 1 };

typedef struct tb_row_functions {
  // y = x / sqrt(mean(x^2) + eps) * weight. y may be x.
  void (*rms_norm)(int dtype, const void* x, const float* weight, void* y, int n, float eps);
  // y += x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm_add)(int dtype, const void* x, const float* weight, void* y, int n, float eps);
  // x[i], x[i + half] turned by the angle whose cos[i], sin[i] are given; x[2 * half ...] stays
  void (*rope)(int dtype, void* x, const float* cos, const float* sin, int half);
  // y = activation(gate) * up, from float32
  void (*glu)(int activation, int dtype, const float* gate, const float* up, void* y, int n);
  // y = x * scale
  void (*scale)(int dtype, const void* x, float scale, void* y, int n);
  // y = cap * tanh(x / cap), float32; y may be x
  void (*softcap)(const float* x, float cap, float* y, int n);
  // y of to_dtype from x of dtype
  void (*cast)(int dtype, const void* x, int to_dtype, void* y, int n);
  // The largest element (NaN: ignored; -infinity if there is none)
  float (*max)(const float* x, int n);
  // The first i >= from with x[i] > threshold; n if there is none
  int (*next_above)(const float* x, int n, int from, float threshold);
} tb_row_functions;

#ifdef __cplusplus
extern "C" {
#endif

const tb_row_functions* tb_rows(void);  // of the level in use

// The same over rows, on the pool (ctypes calls these). Rows follow each other without gaps.
void tb_rms_norm(int dtype, const void* x, const float* weight, void* y, int rows, int n, float eps);
void tb_rms_norm_add(int dtype, const void* x, const float* weight, void* y, int rows, int n, float eps);
void tb_rope(int dtype, void* x, const float* cos, const float* sin, int tokens, int heads, int head_dim, int half);
void tb_glu(int activation, int dtype, const float* gate, const float* up, void* y, int rows, int n);
void tb_softcap(const float* x, float cap, float* y, int rows, int n);
// y[i] = table[ids[i]] * scale (no product if scale is 1)
void tb_embed(int dtype, const void* table, const int64_t* ids, float scale, void* y, int rows, int n);
// Of each row of float32 logits: the k largest in descending order, the lower index first among equals. NaN counts as -infinity.
// 1 <= k <= n. values, indices: [rows, k]
void tb_top_k(const float* x, int rows, int n, int k, float* values, int32_t* indices);

#ifdef __cplusplus
}
#endif
