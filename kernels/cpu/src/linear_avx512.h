// 16 floats a vector: what linear_avx512.cpp, linear_avx512bf16.cpp and quant_avx512vnni.cpp share. Included inside an anonymous namespace.

struct V {
  using Vec = __m512;
  static constexpr int kVecs = 2, kRows = 12;
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static __mmask16 first(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1); }
  static Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_n(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
  static Vec load_bf16_n(const uint16_t* p, int n) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store_bf16_n(uint16_t* p, Vec v, int n) {
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(rounded));
  }
};

struct F32 {
  static constexpr int kXBytes = 4, kXCount = 1, kFold = TB_FOLD_F32, kParts = 1;
  using Weights = __m512;
  using X = __m512;
  static Weights weights(const char* w, int v, int) { return _mm512_load_ps(w + v * 64); }
  static X x(const char* p, int) {
    float value;
    __builtin_memcpy(&value, p, 4);
    return _mm512_set1_ps(value);
  }
  static __m512 apply(__m512 sum, Weights w, X x) { return _mm512_fmadd_ps(w, x, sum); }
};
