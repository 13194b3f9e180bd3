// What the packing of plain and quantised weights shares. Internal.
#pragma once
#include "linear.h"

struct PackJob {
  int dtype, source, bias_dtype;  // of activations, of src where those are numbers, of bias
  int blocks;
  const void* const* src;
  const int64_t* rows;
  const int64_t* ld;
  int64_t k;
  const void* const* bias;  // NULL, or by block
  const int* formats;       // by block; NULL: all are `format`
  int format, input;
  size_t (*tile_bytes)(const PackJob&, int format);
  void (*pack_tile)(const PackJob&, const tb_segment&, int tile, char* to);
  tb_packed* w = nullptr;

  // Source of output j of a segment's tile, size bytes an element of ld; NULL where the tile is padded.
  const char* row(const tb_segment& segment, int tile, int j, size_t size) const;
};

// Lays out segments, and packs their tiles and the bias on the pool. NULL when there is no memory or a size is not in 1 ... 2^31 - 64.
tb_packed* tb_pack_job(PackJob* job);
