// What this machine can do at most: read bandwidth, and the rate of the instructions that matrix products are made of.
#include <pthread.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

constexpr int kMost = 256;

struct Job {
  const char* data;
  size_t bytes;
  int64_t rounds;
  double sum;
};

void* read_all(void* arg) {
  Job* job = static_cast<Job*>(arg);
#if defined(__AVX512F__)
  __m512i sum[8];
  for (auto& s : sum) s = _mm512_setzero_si512();
  for (size_t i = 0; i + 512 <= job->bytes; i += 512) {
    const char* p = job->data + i;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(p + 4096 + 64 * j);  // faster than without, where one core reads
      sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(p + 64 * j));
    }
  }
  job->sum = 0;
  for (auto& s : sum) job->sum += double(_mm512_reduce_add_epi64(s));
#else
  uint64_t sum[16] = {};
  for (size_t i = 0; i + 128 <= job->bytes; i += 128) {
    const uint64_t* p = reinterpret_cast<const uint64_t*>(job->data + i);
    for (int j = 0; j < 16; ++j) sum[j] += p[j];
  }
  job->sum = 0;
  for (uint64_t s : sum) job->sum += double(s);
#endif
  return nullptr;
}

#if defined(__AMX_BF16__)
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Linux hands the tiles to a process that asks.
bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
  return allowed;
}

void* multiply_tiles(void* arg) {
  Job* job = static_cast<Job*>(arg);
  const TileShapes shapes;
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  for (int64_t r = 0; r < job->rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return nullptr;
}
#endif

void* multiply(void* arg) {
  Job* job = static_cast<Job*>(arg);
#if defined(__AVX512BF16__)
  __m512 sum[24];
  for (auto& s : sum) s = _mm512_setzero_ps();
  __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80), w = x;
  for (int64_t r = 0; r < job->rounds; ++r) {
    asm volatile("" : "+v"(x), "+v"(w));
#pragma GCC unroll 24
    for (auto& s : sum) s = _mm512_dpbf16_ps(s, w, x);
  }
  __m512 all = sum[0];
  for (auto& s : sum) all = _mm512_add_ps(all, s);
  job->sum = _mm512_reduce_add_ps(all);
#elif defined(__AVX512F__)
  __m512 sum[24];
  for (auto& s : sum) s = _mm512_setzero_ps();
  __m512 x = _mm512_set1_ps(1.0f), w = x;
  for (int64_t r = 0; r < job->rounds; ++r) {
    asm volatile("" : "+v"(x), "+v"(w));
#pragma GCC unroll 24
    for (auto& s : sum) s = _mm512_fmadd_ps(w, x, s);
  }
  __m512 all = sum[0];
  for (auto& s : sum) all = _mm512_add_ps(all, s);
  job->sum = _mm512_reduce_add_ps(all);
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 sum[12];
  for (auto& s : sum) s = _mm256_setzero_ps();
  __m256 x = _mm256_set1_ps(1.0f), w = x;
  for (int64_t r = 0; r < 2 * job->rounds; ++r) {
    asm volatile("" : "+x"(x), "+x"(w));
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm256_fmadd_ps(w, x, s);
  }
  __m256 all = sum[0];
  for (auto& s : sum) all = _mm256_add_ps(all, s);
  job->sum = all[0];
#else
  float sum[24] = {};
  for (int64_t r = 0; r < job->rounds; ++r) {
    asm volatile("" ::: "memory");
    for (auto& s : sum) s += 1.0f;
  }
  job->sum = sum[0];
#endif
  return nullptr;
}

// One thread is measured in its own processor time: what else runs on the machine costs it little.
double seconds(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

double timed(int threads, void* (*work)(void*), Job* jobs) {
  pthread_t started[kMost];
  const double begin = seconds(threads);
  for (int i = 1; i < threads; ++i) pthread_create(&started[i], nullptr, work, &jobs[i]);
  work(&jobs[0]);
  for (int i = 1; i < threads; ++i) pthread_join(started[i], nullptr);
  return seconds(threads) - begin;
}

}  // namespace

extern "C" {

// Seconds to read `bytes` from `data`, each of `threads` threads its own part.
double limit_read(const char* data, size_t bytes, int threads) {
  Job jobs[kMost];
  for (int i = 0; i < threads; ++i) {
    const size_t begin = bytes / 4096 * i / threads * 4096, end = bytes / 4096 * (i + 1) / threads * 4096;
    jobs[i] = {data + begin, end - begin, 0, 0};
  }
  return timed(threads, read_all, jobs);
}

// Floating-point operations per second of multiply-adds on registers: bf16 tiles (AMX) or pairs where the processor has them, else float32.
double limit_multiply(int64_t rounds, int threads) {
#if defined(__AMX_BF16__)
  if (tiles_allowed()) {
    Job jobs[kMost];
    for (int i = 0; i < threads; ++i) jobs[i] = {nullptr, 0, rounds, 0};
    return 4 * 2 * 16 * 16 * 32 * double(rounds) * threads / timed(threads, multiply_tiles, jobs);
  }
#endif
#if defined(__AVX512BF16__)
  const double each = 24 * 64;
#elif defined(__AVX512F__)
  const double each = 24 * 32;
#elif defined(__AVX2__) && defined(__FMA__)
  const double each = 2 * 12 * 16;
#else
  const double each = 24;
#endif
  Job jobs[kMost];
  for (int i = 0; i < threads; ++i) jobs[i] = {nullptr, 0, rounds, 0};
  return each * double(rounds) * threads / timed(threads, multiply, jobs);
}

}  // extern "C"
