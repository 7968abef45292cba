"""A machine that executes the compiled kernels: PTX, in numpy, on the memory of CPU tensors; see docs/compiled.md."""
