"""A machine that executes the compiled kernels: PTX, in numpy, on the memory of CPU tensors.

    parse.py        the text of a kernel -> basic blocks of instructions
    translate.py    a block -> a Python function on arrays with one element for each thread
    arithmetic.py   the instructions that compute, one thread at a time
    values.py       what they compute, in numpy
    wave.py         CTAs that run in lock step: divergence, barriers, shuffles
    memory.py       global memory, and who touched it
    shared.py       shared memory and asynchronous copies
    matrices.py     ldmatrix, stmatrix, mma and wgmma
    driver.py       the driver through which Triton launches kernels here
    option.py       pytest --ptx sm_80|sm_90

docs/compiled.md says what is checked, and what cannot be seen here.
"""
