// A whole step of a dense decoder in one call: embedding, layers, final norm. The shape is core/models/config.py's DecoderConfig.
#pragma once
#include <stdint.h>

#include "attention.h"
#include "linear.h"

typedef struct tb_decoder_layer {
  const tb_packed *qkv, *out, *gate, *up, *down;  // gate and up: one segment each, or segments of whole tiles
  // Weights of norms, float32, 1 added where the family says so; NULL where there is none
  const float *before_attention, *after_attention, *before_mlp, *after_mlp, *q_norm, *k_norm;
  int window;  // 0: none
  int rope;    // which of the step's angle tables; -1: none
} tb_decoder_layer;

typedef struct tb_decoder_config {
  int dtype, layers, hidden, intermediate, heads, kv_heads, head_dim;
  int activation;  // enum tb_activation
  float norm_eps, attention_scale;
  float attention_softcap, logit_softcap;  // 0: none
  float embed_scale;                       // 1: none
  const void* embedding;                   // [vocabulary, hidden] of dtype; NULL: rows of head, as tb_packed_row gives them
  const float* norm;
  const tb_packed* head;
  const tb_decoder_layer* layer;
} tb_decoder_config;

typedef struct tb_decoder_step_args {
  tb_batch batch;
  const int64_t *token_ids, *positions;  // [tokens]
  void* const* k;                        // by layer: caches as tb_heads has them, of dtype or as tb_decoder_set_kv says
  void* const* v;
  const float* const* cos;  // by table: [positions, half]
  const float* const* sin;
  const int32_t* half;      // by table: half of the dimensions that are turned
} tb_decoder_step_args;

typedef struct tb_decoder tb_decoder;

#ifdef __cplusplus
extern "C" {
#endif

// Copies the config and the array of layers, not what they point to. NULL when there is no memory.
tb_decoder* tb_decoder_create(const tb_decoder_config* config);
void tb_decoder_free(tb_decoder* decoder);

// The caches of the next steps: enum tb_dtype (the config's) or TB_KV_INT8.
void tb_decoder_set_kv(tb_decoder* decoder, int kv_dtype);

// Writes the tokens' K/V and `hidden` [tokens, hidden] of dtype, normalised. 0, or -1 when there is no memory for the activations.
// One call at a time for a decoder.
int tb_decoder_step(tb_decoder* decoder, const tb_decoder_step_args* step, void* hidden);

// out: float32 [rows, vocabulary]
void tb_decoder_logits(const tb_decoder* decoder, const void* hidden, int rows, float* out);

#ifdef __cplusplus
}
#endif
