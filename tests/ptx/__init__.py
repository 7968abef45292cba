"""A machine that executes the PTX of compiled kernels in numpy, on the memory of CPU tensors; see docs/methods.md."""
