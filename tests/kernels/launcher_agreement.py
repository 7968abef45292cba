"""Checks that direct launches find out whether they agree with Triton's, and that compiled kernels stay loaded.

``launcher_checks.py`` runs them, in a process without the interpreter.
"""

import contextlib
import gc
import inspect
import textwrap
import threading
import types
from unittest import mock

import torch
from fusedseg.kernels.dry_run import dry_run
from fusedseg.kernels.launch import multiprocessors
from triton.runtime import jit
from triton.runtime.jit import JITFunction

from fusedseg.kernels import launcher
from tests.kernels.launcher_checks import add, add_kernel, no_public_launch, recorder, tensor


def another_launch() -> types.FunctionType:
    """``JITFunction.run`` of a Triton that passes one more argument to its launchers."""
    source = textwrap.dedent(inspect.getsource(JITFunction.run))
    changed = source.replace(
        "kernel.run(grid_0, grid_1, grid_2, stream,", "kernel.run(grid_0, grid_1, grid_2, stream, 7,"
    )
    assert changed != source
    scope = dict(vars(jit))
    exec(changed, scope)
    return scope["run"]


def other_arguments_take_the_public_way() -> None:
    """A direct launch compares itself with one public launch; if they differ, all launches are public."""
    run = another_launch()
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.multiple(launcher, RUN=run, _agrees=None),
        recorder() as of,
    ):
        arrived: list[tuple] = []
        of.launcher_cls = lambda src, metadata: lambda *arguments: arrived.append(arguments)
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        for _ in range(3):
            launch(tensors, 1.0)
        assert launcher._agrees is False
        # Every launch had the arguments of this Triton: no direct launch was tried.
        assert [arguments[4] for arguments in arrived] == [7, 7, 7]
        assert not launch._compiled


def one_launch_proves_the_arguments() -> None:
    """The second launch of a kind shows what Triton passes on, and runs once; all later launches are direct."""
    with mock.patch.object(launcher, "_agrees", None), recorder() as record:
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        for count, agrees in enumerate((None, True, True), 1):
            launch(tensors, 1.0)
            assert launcher._agrees is agrees
            assert len(record.launched) == count
        with no_public_launch():
            launch(tensors, 1.0)
        # Other kernels are direct from their second launch on.
        other = add(99)
        other(tensors, 1.0)
        with no_public_launch():
            other(tensors, 1.0)


def a_failed_launch_leaves_no_spy() -> None:
    """Triton's function is back in its place after an error."""
    with mock.patch.object(launcher, "_agrees", None), recorder() as record:
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        launch(tensors, 1.0)
        (found,) = launch._once.values()
        record.fails = True
        with contextlib.suppress(RuntimeError):
            launch(tensors, 1.0)
        assert found.compiled._run is found.call


def a_spy_ignores_other_threads() -> None:
    """Another thread's launch of the same kernel counted as this thread's, and switched direct launches off."""
    with mock.patch.object(launcher, "_agrees", None), recorder():
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        launch(tensors, 1.0)
        (found,) = launch._once.values()
        with launcher.Spy(found) as spy:
            thread = threading.Thread(target=launch._launch, args=(tensors, (2.0,)))
            thread.start()
            thread.join()
            assert spy.arguments is None
            launch._launch(tensors, (1.0,))
        assert spy.arguments is not None
        assert 1.0 in spy.arguments


def spies_wait_for_each_other() -> None:
    """A spy that left took away that of another thread, which then saw no launch and switched direct launches off."""
    with mock.patch.object(launcher, "_agrees", None), recorder():
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        launch(tensors, 1.0)
        (found,) = launch._once.values()
        entered, left = threading.Event(), threading.Event()
        seen = []

        def second() -> None:
            with launcher.Spy(found) as spy:
                entered.set()
                left.wait()
                launch._launch(tensors, (2.0,))
            seen.append(spy.arguments)

        thread = threading.Thread(target=second)
        with launcher.Spy(found):
            thread.start()
            entered.wait(0.1)
        left.set()
        thread.join()
        assert seen[0] is not None


def a_dry_run_plans_for_its_gpu() -> None:
    """A cached number made dry runs of an A100 plan for an H100."""
    before = multiprocessors(torch.device("cpu"))
    for target, expected in (("sm_80", 108), ("sm_90", 132)):
        with dry_run(target):
            assert multiprocessors(torch.device("cpu")) == expected
    assert multiprocessors(torch.device("cpu")) == before


def kernels_stay_loaded() -> None:
    """A captured graph goes on launching its kernels after their launchers and tensors are gone."""
    with recorder() as record:
        launch, tensors = add(), (tensor(torch.float32), None, tensor(torch.float32))
        for _ in range(2):
            launch(tensors, 1.0)
        # Kernels of earlier checks have been unloaded.
        record.unloaded = 0
        del launch, tensors
        launcher.forget_plans()
        gc.collect()
        assert record.loaded
        assert not record.unloaded
        # The record works: a kernel that nobody holds is unloaded.
        add_kernel.device_caches.clear()
        gc.collect()
        assert record.unloaded
