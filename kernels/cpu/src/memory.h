// Memory for weights: 64-byte aligned pieces of large mappings that ask for huge pages.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void* tb_alloc(size_t bytes);  // zeroed where it was never used before; NULL when there is no memory
void tb_free(void* piece);     // NULL is ignored. A mapping goes back to the system with its last piece

// Worker-local working memory: at least `bytes`, 64-byte aligned, valid until the same thread asks for the same slot again.
// Slots 0 and 1 are the linears'; 2 ... 7 are free for other kernels. Aborts the process when there is no memory.
void* tb_scratch(int slot, size_t bytes);

#ifdef __cplusplus
}
#endif
