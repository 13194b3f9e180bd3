"""CPU kernels in C++ (src/), compiled at installation or at first use, called through ctypes. `lib.load()` says whether they are there."""
