"""Small kernels, written by hand, for the machine's own tests."""

import numpy as np
import torch

from tests.ptx.driver import segment_of
from tests.ptx.machine import Launch, Options, Program

HEAD = """.version 8.8
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{parameters}
)
.reqntid {threads}
{{
	.reg .pred %p<20>;
	.reg .b16 %rs<40>;
	.reg .b32 %r<60>;
	.reg .b64 %rd<40>;
{body}
	ret;
}}
"""
REGISTERS = {"b16": "rs", "b32": "r", "b64": "rd"}


def run(body, *tensors, threads=32, grid=(1, 1, 1), **options):
    """Runs a kernel and returns its findings; %rd0, %rd1, ... are addresses of tensors, and %r0 is the thread."""
    parameters = ",\n".join(f"	.param .u64 .ptr .global .align 1 k_param_{i}" for i in range(len(tensors)))
    loads = "".join(f"	ld.param.b64 %rd{i}, [k_param_{i}];\n" for i in range(len(tensors)))
    ptx = HEAD.format(parameters=parameters, threads=threads, body=loads + "	mov.u32 %r0, %tid.x;\n" + body)
    segments = {i: segment_of(f"a{i}", t, i) for i, t in enumerate(tensors)}
    found = []
    values = [segments[i].virtual for i in range(len(tensors))]
    Launch(Program(ptx, shared=1024), grid, values, segments, Options(**options), found.append).run()
    return found


def each(code, *inputs, kind="b32", out="b32"):
    """Runs code on inputs in registers 10, 11 and 12; returns each thread's value of register 19."""
    arrays = [torch.from_numpy(np.ascontiguousarray(v).view(np.uint8)) for v in inputs]
    size, out_size = int(kind[1:]) // 8, int(out[1:]) // 8
    n = len(arrays[0]) // size
    result, body = torch.zeros(n * out_size, dtype=torch.uint8), ""
    for i in range(len(arrays)):
        body += f"	mad.wide.u32 %rd30, %r0, {size}, %rd{i};\n"
        body += f"	ld.global.{kind} %{REGISTERS[kind]}{10 + i}, [%rd30];\n"
    body += f"{code}\n	mad.wide.u32 %rd31, %r0, {out_size}, %rd{len(arrays)};\n"
    body += f"	st.global.{out} [%rd31], %{REGISTERS[out]}19;\n"
    run(body, *arrays, result, threads=n)
    return result.numpy().view(f"u{out_size}")
