"""Triton kernels. They know no engine, take torch tensors, and run in Triton's interpreter where there is no GPU (TRITON_INTERPRET=1)."""
