"""Small kernels, written by hand, for the machine's own tests."""

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
