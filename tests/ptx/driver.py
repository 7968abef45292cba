"""A driver for Triton whose launches run on the machine, on the memory of CPU tensors.

    with driven(Driver("sm_80")) as driver:
        ...    # kernel[grid](...), or ops of fusedseg with the backend "triton"
    driver.findings, driver.launches

Replaced are also

    CUDABackend.make_cubin, .hash    ptxas is not asked for machine code; the cache keeps such results apart
    CompiledKernel._init_handles     ``load_binary`` is given machine code, and the machine wants the PTX beside it
    Launcher.__call__                direct launches pass addresses: the tensors that they belong to are noted
    fusedseg._backend._interpreted   allows the backend "triton" on CPU tensors
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from fusedseg.kernels.dry_run import AbsentDevice, parse_target
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver as triton_driver

from tests.tools.codegen import SHARED
from tests.tools.traffic import Moved, extent

from .machine import Grid, Launch, Options, Program
from .memory import Segment
from .parse import Unsupported
from .wave import Finding

POINTERS = {"*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp64": torch.float64,
            "*i32": torch.int32, "*u8": torch.uint8, "*i64": torch.int64}  # fmt: skip
FLOATS = {"fp32": (np.float32, np.uint32), "fp64": (np.float64, np.uint64)}
_devices = itertools.count(1000)


def segment_of(name: str, tensor: torch.Tensor, number: int) -> Segment:
    first, end = extent(tensor)
    return Segment(name, first, end - first, number, tensor.element_size())


class Driver(AbsentDevice):
    """Has the interface that Triton expects of a driver, and of the driver's ``utils`` and ``launcher_cls``."""

    def __init__(self, arch: str) -> None:
        super().__init__(parse_target(arch))
        self.arch = arch
        # Triton stores compiled kernels by device.
        self.device = next(_devices)
        self.utils, self.options = self, Options()
        # Launches of each kernel.
        self.launches: Counter[str] = Counter()
        self.findings: Counter[Finding] = Counter()
        self.programs: dict[str, Program] = {}
        self.moved: Moved | None = None
        self.tensors: list[torch.Tensor | None] = []
        self._compiling: list[CompiledKernel] = []
        self._functions: list[tuple[str, int]] = []

    def get_current_device(self) -> int:
        return self.device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.arch], "multiprocessor_count": 108}

    def load_binary(self, name, kernel, shared, device) -> tuple[int, ...]:
        self._functions.append((self._compiling[-1].asm["ptx"], shared))
        # Module, function, registers, spilled bytes and threads.
        return 1, len(self._functions) - 1, 32, 0, 1024

    def unload_module(self, module) -> None:
        pass

    def launcher_cls(self, src, metadata):
        parameters = [item for item in src.signature.items() if item[1] != "constexpr"]
        places = [k for k, kind in enumerate(src.signature.values()) if kind != "constexpr"]
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise Unsupported(f"{metadata.name}: scratch memory or clusters")

        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *args) -> None:
            for hook in (enter, leave):
                if hook is not None:
                    hook(launch_metadata)
            if len(args) != len(src.signature):
                raise TypeError(f"{metadata.name}: {len(args)} arguments for {len(src.signature)} parameters")
            if max(y, z) > 65535:
                raise ValueError(f"{metadata.name}: no GPU launches the grid {x, y, z}")
            if x * y * z > 0:
                self.launch(function, (x, y, z), parameters, [args[k] for k in places])

        return launch

    def program(self, function: int) -> Program:
        ptx, shared = self._functions[function]
        if ptx not in self.programs:
            self.programs[ptx] = Program(ptx, shared)
        return self.programs[ptx]

    def launch(self, function: int, grid: Grid, parameters: list[tuple[str, str]], args: list) -> None:
        program, segments, values = self.program(function), {}, []
        known = {t.data_ptr(): t for t in self.tensors if t is not None}
        for number, ((name, kind), arg) in enumerate(zip(parameters, args, strict=True)):
            if kind[0] != "*":
                values.append(bits_of(name, kind, arg))
                continue
            # A direct launch passes addresses.
            tensor = known[arg] if isinstance(arg, int) else arg
            if tensor is None:
                values.append(0)
                continue
            if tensor.dtype is not POINTERS[kind]:
                raise TypeError(f"{program.kernel.name}: {name} is {tensor.dtype}, not {kind}")
            segments[number] = segment_of(name, tensor, number)
            values.append(segments[number].virtual)
        # Two kinds of scratch memory, which no kernel here uses.
        values += [0, 0]
        if len(values) != len(program.kernel.parameters):
            raise TypeError(f"{program.kernel.name}: {len(values)} values for {program.kernel.parameters}")
        launch = Launch(program, grid, values, segments, self.options, lambda finding: self.findings.update([finding]))
        self.launches[program.kernel.name] += 1
        launch.run()
        if self.moved is not None:
            add_up(self.moved, launch)


def bits_of(name: str, kind: str, value) -> int:
    if kind in FLOATS:
        floating, bits = FLOATS[kind]
        return int(floating(value).view(bits))
    count = int(kind[1:])
    low = -(1 << count - 1) if kind[0] == "i" and count > 1 else 0
    if not low <= value < low + (1 << count):
        raise OverflowError(f"{name} = {value} is no {kind}")
    return int(value) & ((1 << max(8, count)) - 1)


def add_up(moved: Moved, launch: Launch) -> None:
    """Arguments that lie at the same address count under the name of the first one."""
    names: dict[int, str] = {}
    first = {s.name: names.setdefault(s.address, s.name) for s in launch.segments.values()}
    for total, counter in ((moved.loads, launch.moved.loads), (moved.stores, launch.moved.stores)):
        for (kernel, name), nbytes in counter.items():
            total[kernel, first[name]] += nbytes
    moved.launches += launch.moved.launches


@contextlib.contextmanager
def driven(driver: Driver) -> Iterator[Driver]:
    """Inside, launches run on the machine.  Kernels must have been defined without TRITON_INTERPRET."""
    from fusedseg import _backend
    from fusedseg.kernels import launcher

    active, init = triton_driver._active, CompiledKernel._init_handles
    call = launcher.Launcher.__call__

    def init_handles(self):
        driver._compiling.append(self)
        try:
            return init(self)
        finally:
            driver._compiling.pop()

    def noted(self, tensors, *floats):
        with mock.patch.object(driver, "tensors", list(tensors)):
            return call(self, tensors, *floats)

    with (
        mock.patch.object(CompiledKernel, "_init_handles", init_handles),
        mock.patch.object(CUDABackend, "make_cubin", return_value=b"none"),
        mock.patch.object(CUDABackend, "hash", lambda self: f"PTX without machine code for {self.target}"),
        mock.patch.object(launcher.Launcher, "__call__", noted),
        mock.patch.object(_backend, "_interpreted", return_value=True),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(setattr, triton_driver, "_active", active)
        stack.callback(launcher.forget_plans)
        triton_driver.set_active(driver)
        launcher.forget_plans()
        yield driver
