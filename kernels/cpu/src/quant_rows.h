// Quantises activations; plain loops that compilers turn into vectors. Included inside an anonymous namespace.

inline float wide(float x) { return x; }
inline float wide(uint16_t x) { return tb_bf16_to_f32(x); }

inline int32_t magnitude_bits(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

struct Scale {
  float scale, inverse;
};

// bits: the largest |x|'s; as integers they are in the same order, infinity and NaN above all others.
inline Scale scale_of(int32_t bits) {
  float most;
  __builtin_memcpy(&most, &bits, 4);
  if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
  if (most < 1.2621774e-29f) return {0.0f, 0.0f};  // 2^-96
  return {most / 127.0f, 127.0f / most};
}

template <class T>
__attribute__((always_inline)) inline int32_t largest(const T* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = magnitude_bits(wide(x[i]));
    most = bits > most ? bits : most;
  }
  return most;
}

// To nearest even by a sum with 1.5 * 2^23, whose last bit counts ones. Nothing is read where the inverse is 0: x may be NaN.
template <class T>
__attribute__((always_inline)) inline void round_all(const T* x, int64_t n, float inverse, int8_t* q) {
  if (inverse == 0.0f) {
    __builtin_memset(q, 0, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]) * inverse + 12582912.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    q[i] = (int8_t)(bits - 0x4b400000);
  }
}

__attribute__((always_inline)) inline int32_t sum_of(const int8_t* q, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += q[i];
  return sum;
}

template <class T>
void quantise_row(const T* x, int64_t k, char* out) {
  const Scale s = scale_of(largest(x, k));
  int8_t* q = reinterpret_cast<int8_t*>(out + tb_x_header(k));
  round_all(x, k, s.inverse, q);
  __builtin_memset(q + k, 0, tb_round_up(k, 64) - k);
  __builtin_memcpy(out, &s.scale, 4);
  int32_t* negative = reinterpret_cast<int32_t*>(out + 4);
  for (int64_t begin = 0; begin < k; begin += TB_FOLD_INT8) {
    const int64_t left = k - begin;
    *negative++ = -128 * sum_of(q + begin, left < TB_FOLD_INT8 ? left : int64_t(TB_FOLD_INT8));
  }
}

template <class T>
void quantise_blocks(const T* x, int64_t blocks, tb_x_block* out) {
  for (int64_t b = 0; b < blocks; ++b, x += 32, ++out) {
    const Scale s = scale_of(largest(x, 32));
    round_all(x, 32, s.inverse, out->q);
    const int32_t first = sum_of(out->q, 16), second = sum_of(out->q + 16, 16);
    out->scale = s.scale;
    out->sum = s.scale * float(first + second);
    out->negative = -(first + second);
    out->half[0] = -first;
    out->half[1] = -second;
  }
}

inline void rows(int dtype, const void* x, int64_t k, void* q) {
  if (dtype == TB_F32) return quantise_row(static_cast<const float*>(x), k, static_cast<char*>(q));
  quantise_row(static_cast<const uint16_t*>(x), k, static_cast<char*>(q));
}

inline void blocks(int dtype, const void* x, int64_t count, tb_x_block* q) {
  if (dtype == TB_F32) return quantise_blocks(static_cast<const float*>(x), count, q);
  quantise_blocks(static_cast<const uint16_t*>(x), count, q);
}
