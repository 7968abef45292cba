"""Checks of kernels that are compiled before their launch, for ``test_ahead.py``.

    python -m tests.kernels.ahead_checks NAME...

They run in a process of their own without the interpreter.  No GPU is needed: launches compile for an H100, or only
note what they would compile.
"""

import ast
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from fusedseg.kernels.triton_names import JITFunction
from torch import nn
from triton.runtime._async_compile import active_mode

from bench.contenders import relu
from bench.networks import plain_unet
from fusedseg import _backend, _torch
from fusedseg.kernels import ahead, concat, dry_run, launcher
from fusedseg.losses import CrossEntropyLoss
from fusedseg.ops.registry import FAMILIES
from fusedseg.ops.self_test import first_use
from fusedseg.unet import UNet
from tests.resnet import ResNet18
from tests.tools.checks import print_results

# The kernels that were compiled, by name and specialisation.
Kinds = set[tuple[str, str]]
CPU = torch.device("cpu")


@contextlib.contextmanager
def served() -> Iterator[None]:
    """A context in which Triton serves all tensors, and launches compile for an H100."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    reasons = {(family, dtype, CPU): "" for family in FAMILIES for dtype in dtypes}
    with (
        dry_run.dry_run("sm_90"),
        mock.patch.dict(_backend._reasons, reasons),
        mock.patch.object(_backend, "explain", return_value=("triton", "")),
    ):
        _forget_kernels()
        yield
        _forget_kernels()


def _forget_kernels() -> None:
    for name, module in list(sys.modules.items()):
        # Triton's own functions are launched by none of these checks.
        for found in vars(module).values() if name.startswith("fusedseg.kernels.") else ():
            if type(found) is JITFunction:
                found.device_caches.clear()


@contextlib.contextmanager
def compiling_nothing() -> Iterator[Kinds]:
    """Notes what Triton would compile."""
    kinds: Kinds = set()

    def note(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        kinds.add((self.__name__, str(key)))
        self.device_caches[device][0][key] = SimpleNamespace()
        return self.device_caches[device][0][key]

    with mock.patch.object(JITFunction, "_do_compile", note):
        yield kinds


def step(run: Any, x: torch.Tensor, training: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    if training:
        y.float().sum().backward()


def kinds_of_steps(make: Any, x: torch.Tensor, training: bool, options: dict[str, Any]) -> tuple[Kinds, Kinds, Kinds]:
    """What is compiled ahead, what launches compile after it, and what they compile by themselves in a later step."""
    torch._dynamo.reset()
    run = torch.compile(make().train(training), backend="fusedseg", options={"codegen": "aten", **options})
    found: Kinds = set()
    with served(), compiling_nothing() as kinds:
        compile_ahead = ahead.compile_ahead

        def compiling(wanted: Any) -> None:
            before = set(kinds)
            compile_ahead(wanted)
            found.update(kinds - before)

        # On one core nothing is compiled ahead.
        threads = mock.patch.object(ahead, "threads", return_value=2)
        with mock.patch.object(ahead, "compile_ahead", compiling), threads:
            step(run, x, training)
        at_launch = kinds - found
    with served(), compiling_nothing() as alone, mock.patch.object(ahead, "threads", return_value=1):
        step(run, x, training)
    return found, at_launch, alone


def unet() -> nn.Module:
    return UNet(3, 4, widths=(8, 16), norm_act=relu(2), plain=True)


class WithLoss(nn.Module):
    """A network with its loss in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = unet().to(memory_format=torch.channels_last), CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = (x[:, 0] > 0).long()
        return self.loss(self.net(x), target)


NETWORKS = {
    "U-Net with its loss": (WithLoss, torch.randn(2, 3, 128, 128).to(memory_format=torch.channels_last)),
    "PlainConvUNet": (lambda: plain_unet((8, 16)).to(memory_format=torch.channels_last_3d),
                      torch.randn(2, 1, 32, 32, 32).to(memory_format=torch.channels_last_3d)),
    "U-Net": (lambda: unet().to(memory_format=torch.channels_last),
              torch.randn(2, 3, 128, 128).to(memory_format=torch.channels_last)),
    "U-Net in planes": (unet, torch.randn(2, 3, 64, 64)),
    "ResNet": (lambda: ResNet18(10, width=8, stages=1).to(memory_format=torch.channels_last),
               torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)),
}  # fmt: skip


def _compiles_what_a_step_launches(name: str, training: bool = True, **options: Any) -> None:
    make, x = NETWORKS[name]
    found, at_launch, alone = kinds_of_steps(make, x, training, options)
    assert alone, "nothing is compiled"
    assert found == alone, (name, training, len(found), len(alone), found ^ alone)
    assert not at_launch, (name, training, at_launch)


def networks_in_channels_last() -> None:
    """``a_loss_in_the_graph_and_bits_in_rows`` trains the U-Net, and ``bits_in_planes`` has norms in planes."""
    _compiles_what_a_step_launches("U-Net", training=False)
    _compiles_what_a_step_launches("ResNet")


def nnunets_network() -> None:
    _compiles_what_a_step_launches("PlainConvUNet")


def a_loss_in_the_graph_and_bits_in_rows() -> None:
    _compiles_what_a_step_launches("U-Net with its loss", bits=4)


def bits_in_planes() -> None:
    _compiles_what_a_step_launches("U-Net in planes", bits=8)


def self_tests() -> None:
    for name, family in FAMILIES.items():
        with served(), compiling_nothing() as kinds, mock.patch.object(ahead, "threads", return_value=2):
            first_use.compile_first(name, torch.bfloat16, CPU)
            found = set(kinds)
        with served(), compiling_nothing() as alone:
            list(family.self_test(torch.bfloat16, CPU))
        assert found == alone, (name, len(found), len(alone))
        # Casts are PyTorch's own kernels.
        assert bool(found) == (name != "casts"), name


def sources(count: int) -> list[torch.Tensor]:
    images = [torch.randn(1, 16 + 16 * k, 8, 8, dtype=torch.bfloat16) for k in range(count)]
    return [x.to(memory_format=torch.channels_last) for x in images]


def join(images: list[torch.Tensor]) -> None:
    channels = [x.shape[1] for x in images]
    y = torch.empty(1, sum(channels), 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    concat.concat(images, channels, y, sum(channels))


def listed(count: int) -> list[Any]:
    with launcher.noting(only_lists=True) as notes, _torch.ListingMode(allow_non_fake_inputs=True) as mode:
        join([mode.from_tensor(x) for x in sources(count)])
    return notes.wanted


def threads_compile_the_same_code() -> None:
    """The code of a kernel that a thread compiles is that of a launch, and the launch compiles nothing."""
    with dry_run.dry_run("sm_90") as launches:
        _forget_kernels()
        join(sources(2))
        (alone,) = launches
    with dry_run.dry_run("sm_90") as launches, mock.patch.object(ahead, "threads", return_value=2):
        _forget_kernels()
        ahead.compile_ahead(listed(2))
        launches.clear()
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled at the launch")):
            join(sources(2))
        (after,) = launches
    assert alone.compiled.asm["ptx"] == after.compiled.asm["ptx"]
    _forget_kernels()


def an_error_is_that_of_the_launch() -> None:
    """A kernel that cannot be compiled raises nothing ahead, and the launch raises Triton's error."""
    messages = []
    for early in (False, True):
        with dry_run.dry_run("sm_90") as launches, mock.patch.object(ahead, "threads", return_value=2):
            _forget_kernels()
            with mock.patch("triton.compiler.compile", side_effect=ValueError("no such instruction")):
                if early:
                    ahead.compile_ahead(listed(3))
                try:
                    join(sources(3))
                    # Triton 3.8 raises the error of a thread where a launch first reads the kernel.
                    _ = launches[-1].compiled.asm
                except ValueError as error:
                    messages.append(str(error))
    _forget_kernels()
    assert messages == ["no such instruction"] * 2, messages


def threads_parse_one_after_the_other() -> None:
    """Two threads parsed at the same time, and Python 3.11 raised SystemError in one of them.

    Python itself raises it by chance, so the test counts the threads inside of the parser.
    """
    tree = ast.parse("def f(): pass")
    inside = most = 0

    def parse(source: str) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return tree

    with mock.patch("triton.runtime.jit.ast.parse", parse), ahead.parsing_in_turn():
        calls = [threading.Thread(target=concat.concat_kernel.parse) for _ in range(4)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert most == 1, most


class Waiting:
    """Stands for a launcher that tells that its thread compiles, and waits a moment for another thread."""

    def __init__(self, here: threading.Event, other: threading.Event) -> None:
        self.here, self.other = here, other

    def compile(self, tensors: Any, floats: Any) -> None:
        self.here.set()
        self.other.wait(0.5)


def two_threads_put_the_parser_back() -> None:
    """Both replaced it.  The second one to leave put back what it had found, which was that of the first one."""
    original = JITFunction.parse
    first_in, first_out, second_in = (threading.Event() for _ in range(3))

    def compile_first() -> None:
        ahead.compile_ahead([(Waiting(first_in, second_in), (), ())])
        first_out.set()

    first = threading.Thread(target=compile_first)
    first.start()
    assert first_in.wait(5)
    ahead.compile_ahead([(Waiting(second_in, first_out), (), ())])
    first.join()
    assert JITFunction.parse is original


def an_interrupt_leaves_no_mode() -> None:
    """Triton 3.6 leaves its mode after it has waited for its threads.  Interrupted, it could compile nothing more."""

    class Interrupted(triton.AsyncCompileMode):
        def __exit__(self, *exception: Any) -> None:
            raise KeyboardInterrupt

    with mock.patch.object(ahead, "AsyncCompileMode", Interrupted), contextlib.suppress(KeyboardInterrupt):
        ahead.compile_ahead([])
    assert active_mode.get() is None


def a_function_that_fails_on_fake_tensors_is_called_as_before() -> None:
    from fusedseg.ops.ahead import compile_kernels

    def function(arguments: list[torch.Tensor]) -> None:
        raise RuntimeError("no meta kernel")

    with mock.patch.object(ahead, "threads", return_value=2):
        assert compile_kernels(function, [torch.ones(1)], CPU) == 0


def the_random_numbers_of_a_step_stay() -> None:
    """The call on fake tensors draws no random numbers and changes no buffer."""
    from fusedseg.ops.ahead import compile_kernels

    buffer = torch.zeros(3)

    def function(arguments: list[torch.Tensor]) -> torch.Tensor:
        arguments[0].add_(1)
        return torch.nn.functional.dropout(arguments[0], 0.5)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with mock.patch.object(ahead, "threads", return_value=2):
        compile_kernels(function, [buffer], CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(buffer, torch.zeros(3))


if __name__ == "__main__":
    print_results(globals())
