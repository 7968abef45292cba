"""Checks of ``kernels/launcher.py`` with a driver that records launches, in a process without the interpreter.

    python -m tests.kernels.launcher_checks CHECK ...   ->  {"name of a check": "" or what failed}

Kernels are compiled for sm_90; a GPU is not needed.
"""

import contextlib
import os
import random
import warnings
import weakref
from typing import NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from fusedseg.kernels.dry_run import AbsentDevice, dry_run, parse_target
from fusedseg.kernels.launcher import Launcher, addresses_and_kind
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fusedseg
from fusedseg import _backend
from fusedseg.activation import Activation
from fusedseg.kernels import launcher
from fusedseg.ops.norm import kept
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import Backward, Forward
from fusedseg.ops.norm.stock import KINDS
from tests.tools.called import Called
from tests.tools.checks import print_results

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, factor: tl.float64, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    v = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) * factor.to(tl.float32)
    if y_ptr is not None:
        v += tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, v.to(out_ptr.dtype.element_ty), mask=mask)


class Launched(NamedTuple):
    """The arguments that a driver receives; each compiled kernel has a ``function`` of its own."""

    grid: tuple[int, ...]
    stream: int
    function: int
    args: tuple


class Recorder(AbsentDevice):
    """A driver that lists its launches."""

    def __init__(self) -> None:
        super().__init__(parse_target("sm_90"))
        self.launched: list[Launched] = []
        self.device, self.stream, self.loaded, self.unloaded, self.fails = 0, 7, 0, 0, False
        self.utils = self
        recorder = self

        class Record:
            def __init__(self, src, metadata) -> None:
                pass

            def __call__(self, x, y, z, stream, function, packed_metadata, metadata, enter, leave, *args) -> None:
                for hook in (enter, leave):
                    if hook is not None:
                        hook(metadata)
                if recorder.fails:
                    raise RuntimeError("Triton Error [CUDA]: invalid argument")
                recorder.launched.append(Launched((x, y, z), stream, function, args))

        self.launcher_cls = Record

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, name, kernel, shared, device) -> tuple[int, ...]:
        self.loaded += 1
        return 1, self.loaded, 32, 0, 1024

    def unload_module(self, module) -> None:
        self.unloaded += 1


@contextlib.contextmanager
def recorder():
    """Activates a recorder and forgets kernels that other drivers have loaded.

    The recorder stays active, because the active driver unloads kernels that are freed later.
    """
    made = Recorder()
    driver.set_active(made)
    add_kernel.device_caches.clear()
    yield made


def tensor(dtype: torch.dtype, aligned: bool = True) -> torch.Tensor:
    size = 100
    return torch.zeros(size + 16, dtype=dtype)[0 if aligned else 1 :][:size]


def add(n: int = 100) -> Launcher:
    return Launcher(add_kernel, (triton.cdiv(n, 64),), (n,), {"EVEN": n % 2 == 0, "BLOCK": 64, "num_warps": 1})


def public(tensors, factor, n=100) -> None:
    constants = {"EVEN": n % 2 == 0, "BLOCK": 64, "num_warps": 1, "enable_fp_fusion": False}
    add_kernel[(triton.cdiv(n, 64),)](*tensors, factor, n, **constants)


def as_addresses(launched: Launched) -> Launched:
    return launched._replace(args=tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launched.args))


@contextlib.contextmanager
def no_public_launch():
    """Inside, Triton's public launch of a launcher's kernel fails: launches must go directly to the compiled kernel."""
    with mock.patch.object(JITFunction, "__getitem__", side_effect=AssertionError("launched the public way")):
        yield


def launches_what_triton_would() -> None:
    """A direct launch runs the same compiled kernel with the same arguments as Triton, whatever was launched before."""
    pick = random.Random(0)
    with recorder() as record:
        launch = add()
        direct, kinds = 0, set()
        for _ in range(64):
            dtypes = [pick.choice((torch.float16, torch.float32)) for _ in range(3)]
            tensors = [tensor(dtype, pick.random() < 0.7) for dtype in dtypes]
            tensors[1] = pick.choice((None, tensors[1]))
            factor = pick.choice((0.0, 1.0, 0.1))
            with mock.patch.object(
                JITFunction, "__getitem__", autospec=True, side_effect=JITFunction.__getitem__
            ) as way:
                launch(tensors, factor)
            direct += not way.called
            kinds.add(tuple(None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors))
            public(tensors, factor)
            ours, theirs = record.launched[-2:]
            assert as_addresses(ours) == as_addresses(theirs), f"{ours} is not {theirs}"
    # Only the first launch of each kind goes the public way, and once in a process a launch that is compared.
    assert 64 - len(kinds) - direct in (0, 1), f"{direct} direct launches, of {len(kinds)} kinds"


def tells_apart_what_triton_does() -> None:
    pick = random.Random(1)
    seen: dict[tuple, list] = {}
    with recorder():
        binder = add_kernel.device_caches[0][-1]
        for _ in range(2000):
            tensors = [
                None if pick.random() < 0.2 else tensor(pick.choice(DTYPES), pick.random() < 0.6) for _ in range(3)
            ]
            factor = pick.choice((0.0, 1.0, 16.0, 0.1))
            _, specialization, _ = binder(*tensors, factor, 100, EVEN=True, BLOCK=64)
            _, kind = addresses_and_kind(tensors, 0)
            assert seen.setdefault(kind, specialization) == specialization, f"{seen[kind]} is not {specialization}"
    assert len({str(s) for s in seen.values()}) > 100


def sizes_and_constants_are_a_launchers_own() -> None:
    with recorder() as record:
        x, out = tensor(torch.float32), tensor(torch.float32)
        for n in (1, 16, 99, 100):
            launch = add(n)
            for _ in range(2):
                launch((x, None, out), 1.0)
            public((x, None, out), 1.0, n)
            assert len({as_addresses(launched) for launched in record.launched[-3:]}) == 1


def takes_the_current_device_and_stream() -> None:
    with recorder() as record:
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        for record.device in (0, 0, 1, 1, 0):
            record.stream += 10
            launch(tensors, 1.0)
        streams = [launched.stream for launched in record.launched]
        functions = [launched.function for launched in record.launched]
        assert streams == [17, 27, 38, 48, 57]
        assert functions == [1, 1, 2, 2, 1]


def hooks_see_launches() -> None:
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    with recorder() as record:
        launch, tensors, seen = add(), (tensor(torch.float32), None, tensor(torch.float32)), []
        launch(tensors, 1.0)
        for hook in hooks:
            hook.add(seen.append)
        launch(tensors, 1.0)
        for hook in hooks:
            hook.remove(seen.append)
        with no_public_launch():
            launch(tensors, 1.0)
        assert [of.get()["name"] for of in seen] == ["add_kernel"] * 2
        assert len(record.launched) == 3


def options_take_the_public_way() -> None:
    for knobs, name, value in (
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "something"),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *args: ("", "")),
    ):
        with mock.patch.object(knobs, name, value):
            assert launcher.is_watched(), name
    assert not launcher.is_watched()


def no_launch_fuses() -> None:
    """No launch fuses floating-point operations, because z must be rebuilt to the bit.

    Triton's default, which 3.10 changes, and an environment variable must not matter.
    """
    tensors = (tensor(torch.float32), None, tensor(torch.float32))
    for choice in (None, "1", "0"):
        chosen = {} if choice is None else {"TRITON_DEFAULT_FP_FUSION": choice}
        with recorder(), mock.patch.dict(os.environ, chosen), warnings.catch_warnings():
            warnings.simplefilter("error")
            launch = add()
            launch(tensors, 1.0)
            (*_, compiled) = next(iter(launch._compiled.values()))
            assert compiled.metadata.enable_fp_fusion is False, choice


def dry_run_lists_every_launch() -> None:
    with recorder() as record:
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        launch(tensors, 1.0)
        with dry_run("sm_90") as launches:
            launch(tensors, 1.0)
            launch(tensors, 1.0)
        assert len(launches) == 2
        assert len(record.launched) == 1
        with no_public_launch():
            launch(tensors, 1.0)


def a_dry_run_makes_its_own_plans() -> None:
    """The plans of one GPU may not fit another, so none of them is used in a dry run, and none is left behind by it."""
    with recorder(), mock.patch.object(launcher, "_clear", []):
        planned_for = launcher.plan(lambda: driver.active.get_current_target().arch)
        assert planned_for() == 90
        with dry_run("sm_80"):
            assert planned_for() == 80
        assert planned_for() == 90


def the_function_in_c_gets_what_triton_gives_it() -> None:
    """A direct launch calls the C function that the launcher of Triton 3.8 and 3.9, a Python function, would call.

    The first comparison of a process finds that out too.
    """
    stubs = {name: name for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")}
    with (
        recorder() as record,
        mock.patch.multiple(nvidia, create=True, PyKernelArg=lambda **kind: kind, **stubs),
        mock.patch.object(launcher, "_agrees", None),
    ):
        record.launcher_cls = nvidia.CudaLauncher
        given: list[tuple] = []
        record.launch = lambda *args: given.append(args)
        record.build_signature_metadata = tuple
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float16, aligned=False))
        for _ in range(3):
            launch(tensors, 0.5)
        assert launcher._agrees
        found = next(iter(launch._compiled.values()))
        assert found.packed == hasattr(found.compiled.run, "kernel_signature")
    _, public, direct = given
    # Triton's public launch passes tensors, and metadata that only hooks read.
    *public, arguments = public
    *direct, addresses = direct
    hooks = slice(8, 11)
    assert direct[hooks] == [None] * 3
    public[hooks] = [None] * 3
    assert public == direct, f"{public} is not {direct}"
    assert tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments) == addresses


class Arriving(kept.Arriving):
    """A copy to the host, and its event."""

    made = waits = 0

    def __init__(self, mask: torch.Tensor) -> None:
        Arriving.made += 1
        self.mask = mask.clone()

    def here(self) -> bool:
        return True

    def wait(self) -> None:
        Arriving.waits += 1


def a_step_of_18_norms_makes_few_device_ops() -> None:
    """The rule for GPUs.  Each norm asked for its kept channels in 11 ops, and summed over samples in two to four."""
    chosen = {("norm", torch.float32, torch.device("cpu")): ""}
    lags = staticmethod(lambda weight, bias: bias is not None)
    with (
        recorder() as record,
        mock.patch.dict(_backend._reasons, chosen),
        mock.patch.multiple(kept, Arriving=Arriving, _trackers=weakref.WeakSet()),
        mock.patch.object(kept.KeptChannels, "_may_lag", lags),
    ):
        kept._watch_optimizers()
        norms = torch.nn.ModuleList(fusedseg.InPlaceInstanceNormAct(4, affine=True) for _ in range(18))
        # No kernel runs, so gradients are whatever memory held.
        optimizer = torch.optim.SGD(norms.parameters(), 0.0)
        dz = torch.ones(2, 4, 3, 3)
        for _ in range(3):
            inputs = [torch.randn(2, 4, 3, 3, requires_grad=True).clone() for _ in norms]
            record.launched.clear()
            Arriving.made = Arriving.waits = 0
            with Called() as called:
                outputs = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
                torch.autograd.backward(outputs, [dz] * 18)
            optimizer.step()
            optimizer.zero_grad()
    # Forward, backward, and the sums of the parameters' gradients over the samples.
    assert len(record.launched) == 3 * 18, len(record.launched)
    # One copy and one event for all.  The clone stands for the copy; the last two look at the list on the host.
    assert (Arriving.made, Arriving.waits) == (1, 0)
    asked = ["cat", "abs", "clamp_", "abs", "mul_", "gt", "clone", "any", "_local_scalar_dense"]
    assert called.names == asked, called.names


# Channels and size of the norms of nnU-Net's PlainConvUNet, of a 2D U-Net and of ResNet-50.
VOLUMES = ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (320, 4))
IMAGES = ((64, 512), (128, 256), (256, 128), (512, 64), (1024, 32))
RESNET = ((64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 28), (256, 14), (1024, 14), (512, 14),
          (512, 7), (2048, 7))  # fmt: skip


def kernels_of_norms(kind: str, shapes: list[tuple[int, ...]], memory_format: torch.memory_format) -> int:
    """The number of kernels that Triton compiles for forward and backward of norms in compiled graphs."""
    found = set()

    def noted(self, tensors, floats):
        binder = self._kernel.device_caches[0][-1]
        _, specialization, options = binder(*tensors, *floats, *self._sizes, **self._constants)
        found.add((self._kernel.__name__, str(specialization), str(sorted(options.items()))))

    norm = Norm("input", Activation("leaky_relu", 0.01), momentum=0.1, over=KINDS[kind].over())
    forward, again, backward = Forward(norm, moving=True), Forward(norm), Backward(norm, True, False)
    chosen = {("norm", torch.float16, torch.device("cpu")): ""}
    launcher.forget_plans()
    with recorder(), mock.patch.dict(_backend._reasons, chosen), mock.patch.object(Launcher, "_launch", noted):
        for shape in shapes:
            # The system does not commit memory that is never written.
            x = torch.empty(shape, dtype=torch.float16, memory_format=memory_format)
            weight, bias = torch.ones(2, shape[1])
            running = torch.ones(2, shape[1]) if kind == "batch" else (None, None)
            _, mean, rstd, *_ = forward(x, weight, bias, None, *running, None, None)
            again(x, weight, bias, None, None, None, mean, rstd)
            backward(torch.empty_like(x), x, weight, bias, None, mean, rstd)
    launcher.forget_plans()
    return len(found)


def norms_of_a_network_share_kernels() -> None:
    """They were 28, 25, 19 and 22 kernels: Triton compiled anew for the numbers of programs and parts of each shape."""
    volumes = [(2, C, n, n, n) for C, n in VOLUMES]
    assert kernels_of_norms("instance", volumes, torch.channels_last_3d) <= 22
    assert kernels_of_norms("instance", volumes, torch.contiguous_format) <= 17
    assert kernels_of_norms("batch", [(8, C, n, n) for C, n in IMAGES], torch.channels_last) <= 9
    assert kernels_of_norms("batch", [(128, C, n, n) for C, n in RESNET], torch.channels_last) <= 9


def unknown_versions_take_the_public_way() -> None:
    with recorder() as record, mock.patch.object(launcher, "KNOWN", False):
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        for _ in range(3):
            launch(tensors, 1.0)
        assert all(isinstance(launched.args[0], torch.Tensor) for launched in record.launched)


if __name__ == "__main__":
    # The checks are imported, because this module has another name here.
    from tests.kernels import launcher_agreement, launcher_checks

    print_results(vars(launcher_checks) | vars(launcher_agreement))
