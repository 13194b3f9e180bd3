// The largest logits of a row without a sort: one pass that stops only where something beats the worst of the best so far.
#include <math.h>

#include "elementwise.h"
#include "pool.h"

namespace {

struct Entry {
  float value;
  int32_t index;
};

bool beats(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.index < b.index); }

// heap[0] is the worst of `size`.
void sift_down(Entry* heap, int size, int at) {
  for (;;) {
    int worst = at;
    for (int child = 2 * at + 1; child <= 2 * at + 2; child++)
      if (child < size && beats(heap[worst], heap[child])) worst = child;
    if (worst == at) return;
    Entry t = heap[at];
    heap[at] = heap[worst];
    heap[worst] = t;
    at = worst;
  }
}

void best_one(const float* x, int n, float* value, int32_t* index) {
  const tb_row_functions* f = tb_rows();
  const float most = f->max(x, n);
  *value = most;
  *index = most == -INFINITY ? 0 : f->next_above(x, n, 0, nextafterf(most, -INFINITY));
}

void best(const float* x, int n, int k, float* values, int32_t* indices) {
  const tb_row_functions* f = tb_rows();
  Entry* heap = new Entry[k];
  for (int i = 0; i < k; i++) heap[i] = {x[i] == x[i] ? x[i] : -INFINITY, i};
  for (int i = k / 2 - 1; i >= 0; i--) sift_down(heap, k, i);
  for (int i = k; (i = f->next_above(x, n, i, heap[0].value)) < n; i++) {
    heap[0] = {x[i], i};
    sift_down(heap, k, 0);
  }
  for (int left = k; left; left--) {
    values[left - 1] = heap[0].value;
    indices[left - 1] = heap[0].index;
    heap[0] = heap[left - 1];
    sift_down(heap, left - 1, 0);
  }
  delete[] heap;
}

struct Job {
  const float* x;
  int n, k;
  float* values;
  int32_t* indices;
};

}  // namespace

void tb_top_k(const float* x, int rows, int n, int k, float* values, int32_t* indices) {
  Job job = {x, n, k, values, indices};
  tb_run(rows, [](void* context, int r, int) {
    const Job& j = *(const Job*)context;
    const float* row = j.x + (size_t)r * j.n;
    if (j.k == 1) best_one(row, j.n, j.values + r, j.indices + r);
    else best(row, j.n, j.k, j.values + (size_t)r * j.k, j.indices + (size_t)r * j.k);
  }, &job);
}
