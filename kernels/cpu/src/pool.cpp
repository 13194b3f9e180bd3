#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kMaxThreads = 256;

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4, "a futex is 4 bytes");

// Sleeps while *word == value (or less: callers check again).
void sleep_on(Word* word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word->load() == value) {
    timespec nap{0, 50000};
    nanosleep(&nap, nullptr);
  }
#endif
}

void wake_all(Word* word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
#endif
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

std::atomic<int> spin_us{50};

// A word that threads wait on: who changes it wakes the sleepers, if there are any.
struct alignas(64) Signal {
  Word word{0};
  Word sleepers{0};

  // Returns once the word differs from `value`; gives what it is then.
  uint32_t wait_change(uint32_t value) {
    uint32_t seen;
    int64_t end = 0;
    for (int i = 0;; ++i) {
      if ((seen = word.load(std::memory_order_acquire)) != value) return seen;
      relax();
      if (i % 16 == 15) {
        int64_t now = now_ns();
        if (end == 0) end = now + int64_t(spin_us.load(std::memory_order_relaxed)) * 1000;
        if (now >= end) break;
      }
    }
    sleepers.fetch_add(1);
    while ((seen = word.load()) == value) sleep_on(&word, value);
    sleepers.fetch_sub(1);
    return seen;
  }

  void set(uint32_t value) {
    word.store(value);  // sequentially consistent, as is `sleepers`: either the waiter sees the value or we see the waiter
    if (sleepers.load() != 0) wake_all(&word);
  }
};

struct Job {
  tb_task fn;
  void* ctx;
  int tasks;
  int workers;
};

struct Pool {
  pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
  int threads = 1;  // in use
  int started = 1;  // existing, the caller counted
  Job job{};
  Signal go[kMaxThreads];       // one a worker: counts its jobs
  uint32_t sent[kMaxThreads]{};  // what the caller last put there
  Signal done;                  // counts finished jobs (all workers of one)
  alignas(64) std::atomic<int> running{0};
  alignas(64) std::atomic<int> next{0};
  Signal phase;  // the barrier's
  alignas(64) std::atomic<int> arrived{0};
  Signal stage;  // the last one that is over
};

std::atomic<Pool*> pool_in_use{nullptr};
thread_local bool inside = false;

// A forked child has none of the threads, and locks in any state: it starts afresh, and the old pool's memory is left alone.
void after_fork() {
  Pool* old = pool_in_use.load();
  Pool* fresh = new Pool;
  fresh->threads = old->threads;
  pool_in_use.store(fresh);
  inside = false;
}

Pool* make_pool() {
  Pool* fresh = new Pool;
  Pool* none = nullptr;
  if (!pool_in_use.compare_exchange_strong(none, fresh)) {
    delete fresh;
    return none;
  }
  pthread_atfork(nullptr, nullptr, after_fork);
  return fresh;
}

Pool* the_pool() {
  Pool* pool = pool_in_use.load(std::memory_order_acquire);
  return pool ? pool : make_pool();
}

void work(Pool* pool, const Job& job, int worker) {
  inside = true;
  if (job.tasks <= job.workers) {
    job.fn(job.ctx, worker, worker);
  } else {
    for (int i; (i = pool->next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;) job.fn(job.ctx, i, worker);
  }
  inside = false;
}

struct Start {
  Pool* pool;
  int worker;
  uint32_t seen;
};

void* worker_main(void* arg) {
  Start start = *static_cast<Start*>(arg);
  delete static_cast<Start*>(arg);
  Pool* pool = start.pool;
  uint32_t seen = start.seen;
  for (;;) {
    seen = pool->go[start.worker].wait_change(seen);
    work(pool, pool->job, start.worker);
    if (pool->running.fetch_sub(1) == 1) pool->done.set(pool->done.word.load() + 1);
  }
  return nullptr;
}

// Starts what is missing of pool->threads, and lowers that where the system refuses. The new threads take no signals.
void start_threads(Pool* pool) {
  while (pool->started < pool->threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    auto* start = new Start{pool, pool->started, pool->sent[pool->started]};
    int failed = pthread_create(&thread, nullptr, worker_main, start);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed) {
      delete start;
      pool->threads = pool->started;
      break;
    }
    pthread_detach(thread);
    pool->started++;
  }
}

void run_here(int tasks, tb_task fn, void* ctx) {
  for (int i = 0; i < tasks; ++i) fn(ctx, i, 0);
}

}  // namespace

extern "C" {

void tb_run(int tasks, tb_task fn, void* ctx) {
  if (tasks <= 0) return;
  if (inside) return run_here(tasks, fn, ctx);
  Pool* pool = the_pool();
  pthread_mutex_lock(&pool->turn);
  start_threads(pool);
  int workers = tasks < pool->threads ? tasks : pool->threads;
  pool->job = Job{fn, ctx, tasks, workers};
  pool->next.store(0, std::memory_order_relaxed);
  pool->stage.word.store(0);
  pool->running.store(workers - 1);
  uint32_t finished = pool->done.word.load();
  for (int w = 1; w < workers; ++w) pool->go[w].set(++pool->sent[w]);
  work(pool, pool->job, 0);
  if (workers > 1) pool->done.wait_change(finished);
  pthread_mutex_unlock(&pool->turn);
}

void tb_barrier(void) {
  Pool* pool = the_pool();
  int count = pool->job.workers;
  if (count <= 1) return;
  uint32_t phase = pool->phase.word.load(std::memory_order_acquire);
  if (pool->arrived.fetch_add(1) + 1 == count) {
    pool->arrived.store(0);
    pool->phase.set(phase + 1);
  } else {
    pool->phase.wait_change(phase);
  }
}

void tb_stage_done(unsigned stage) { the_pool()->stage.set(stage); }

int tb_stage_over(unsigned stage) { return the_pool()->stage.word.load(std::memory_order_acquire) >= stage; }

void tb_stage_wait(unsigned stage) {
  Pool* pool = the_pool();
  for (uint32_t seen = pool->stage.word.load(std::memory_order_acquire); seen < stage;) seen = pool->stage.wait_change(seen);
}

int tb_threads(void) {
  Pool* pool = the_pool();
  if (inside) return pool->threads;
  pthread_mutex_lock(&pool->turn);
  start_threads(pool);
  int threads = pool->threads;
  pthread_mutex_unlock(&pool->turn);
  return threads;
}

void tb_set_threads(int threads) {
  Pool* pool = the_pool();
  pthread_mutex_lock(&pool->turn);
  pool->threads = threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads;
  start_threads(pool);
  pthread_mutex_unlock(&pool->turn);
}

void tb_set_spin(int microseconds) { spin_us.store(microseconds < 0 ? 0 : microseconds); }

}  // extern "C"
