// 8 floats a vector: what linear_avx2.cpp and quant_avx2.cpp share. Included inside an anonymous namespace.

struct V {
  using Vec = __m256;
  static constexpr int kVecs = 4, kRows = 3;
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_n(float* p, Vec v, int n) { _mm256_maskstore_ps(p, first(n), v); }
  static Vec load_bf16_n(const uint16_t* p, int n) {
    alignas(16) uint16_t kept[8] = {};
    if (n >= 8) {
      __builtin_memcpy(kept, p, 16);
    } else {
      for (int j = 0; j < n; ++j) kept[j] = p[j];
    }
    __m256i wide = _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(kept)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static void store_bf16_n(uint16_t* p, Vec v, int n) {
    __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, nan, is_nan);
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    if (n >= 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
      return;
    }
    alignas(16) uint16_t values[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(values), half);
    for (int j = 0; j < n; ++j) p[j] = values[j];
  }
};
