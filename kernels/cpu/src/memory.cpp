#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kMapping = size_t(32) << 20;
constexpr size_t kHeader = 64;

// One mapping. Pieces are cut off its front one after the other; it is unmapped when the last one is freed.
struct Mapping {
  char* base;
  size_t size, used;
  long pieces;
};

struct alignas(64) PieceHeader {
  Mapping* mapping;
};
static_assert(sizeof(PieceHeader) == kHeader, "pieces are 64-byte aligned");

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
Mapping* current = nullptr;

void unmap(Mapping* mapping) {
  munmap(mapping->base, mapping->size);
  delete mapping;
}

Mapping* map(size_t size) {
  size = (size + kHuge - 1) / kHuge * kHuge;
  void* raw = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  uintptr_t start = reinterpret_cast<uintptr_t>(raw), base = (start + kHuge - 1) / kHuge * kHuge;
  if (base != start) munmap(raw, base - start);
  munmap(reinterpret_cast<void*>(base + size), start + kHuge - base);
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(base), size, MADV_HUGEPAGE);
#endif
  return new Mapping{reinterpret_cast<char*>(base), size, 0, 0};
}

void* cut(Mapping* mapping, size_t bytes) {
  auto* header = reinterpret_cast<PieceHeader*>(mapping->base + mapping->used);
  mapping->used += bytes;
  mapping->pieces++;
  header->mapping = mapping;
  return header + 1;
}

void* alloc_locked(size_t bytes) {
  if (current && current->used + bytes <= current->size) return cut(current, bytes);
  Mapping* fresh = map(bytes > kMapping / 2 ? bytes : kMapping);
  if (!fresh) return nullptr;
  if (bytes <= kMapping / 2) current = fresh;
  return cut(fresh, bytes);
}

struct Scratch {
  void* at[8]{};
  size_t size[8]{};
  ~Scratch() {
    for (void* piece : at) free(piece);
  }
};
thread_local Scratch scratch;

}  // namespace

extern "C" {

void* tb_alloc(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  bytes = (bytes + 63) / 64 * 64 + kHeader;
  pthread_mutex_lock(&lock);
  void* piece = alloc_locked(bytes);
  pthread_mutex_unlock(&lock);
  return piece;
}

void tb_free(void* piece) {
  if (!piece) return;
  Mapping* mapping = (static_cast<PieceHeader*>(piece) - 1)->mapping;
  pthread_mutex_lock(&lock);
  if (--mapping->pieces == 0) {
    if (mapping == current) current = nullptr;
    unmap(mapping);
  }
  pthread_mutex_unlock(&lock);
}

void* tb_scratch(int slot, size_t bytes) {
  if (scratch.size[slot] < bytes) {
    free(scratch.at[slot]);
    size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratch.at[slot] = aligned_alloc(64, size);
    if (!scratch.at[slot]) {
      fprintf(stderr, "tokenbus kernels: no memory for %zu bytes of working space\n", size);
      abort();
    }
    scratch.size[slot] = size;
  }
  return scratch.at[slot];
}

}  // extern "C"
