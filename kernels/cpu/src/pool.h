// A pool of threads that share one job at a time.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// index: 0 <= index < tasks. worker: 0 <= worker < tb_threads(); 0 is the thread that called tb_run.
typedef void (*tb_task)(void* ctx, int index, int worker);

// Calls fn(ctx, index, worker) for every index and returns when all have returned. The caller is worker 0.
//   tasks <= tb_threads()   index i always runs on worker i, all at the same time: tb_barrier may be used inside
//   tasks >  tb_threads()   whoever is free takes the next index
// Called within a task, it runs everything on the calling worker (no tb_barrier and no stages there). Calls from several threads take turns.
// After fork(), the child starts threads of its own at its first tb_run. fn must not throw.
void tb_run(int tasks, tb_task fn, void* ctx);

// Within tb_run(tasks <= tb_threads()): returns when all its tasks have called it as often; what they wrote is visible.
void tb_barrier(void);

// Stages of tb_run(tasks <= tb_threads()) that not every task need take part in, numbered from 1 in each run, ended in order. After
// tb_stage_wait(n), or when tb_stage_over(n) is not 0, all that was written before tb_stage_done(n) is visible.
void tb_stage_done(unsigned stage);
void tb_stage_wait(unsigned stage);
int tb_stage_over(unsigned stage);

// Threads that the next tb_run uses, the caller included. 1 until it is set; clamped to 1 ... 256. Waits for a running tb_run.
int tb_threads(void);
void tb_set_threads(int threads);

// Microseconds for which a waiting thread spins before it sleeps (50 until it is set). Any value gives the same results.
void tb_set_spin(int microseconds);

#ifdef __cplusplus
}
#endif
