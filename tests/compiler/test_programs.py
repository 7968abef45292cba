"""The passes keep the values of a program: it is compiled in ways drawn at random, beside eager mode in float64.

``tests/gpu/test_ways.py`` finds a pass that changes no graph.
"""

import contextlib
import copy
import random
from typing import Any, NamedTuple

import pytest
import torch

import fusedseg
from fusedseg.compiler.codegen import concatenation
from fusedseg.compiler.rewrite import split_convolutions
from fusedseg.ops.layout import FORMATS
from tests.compiler.networks import INDUCTOR, NETWORKS, compiled
from tests.compiler.programs import CONTIGUOUS, OF_A_GPU, OF_ITS_SIZE, PROGRAMS, made, outputs_of, step

pytestmark = [
    pytest.mark.usefixtures("strides_of_a_gpu", "needs_interpreter"),
    pytest.mark.filterwarnings("ignore:.*cannot be met:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the model has a graph break:UserWarning"),
    # Dynamo looks at an autograd.Function through an object of it.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Way(NamedTuple):
    """How a program runs.

    Attributes:
        options: those of the backend.
        kernels: whether Triton's kernels serve its tensors, in the interpreter.
        rows: whether the program and its input are in channels_last.
        training, grad: the mode of its modules, and whether a backward follows.
        frozen: the parameters that get no gradient.
        steps: so many run, and the last one is compared.
        dynamic: whether it is compiled for all sizes.
    """

    options: dict[str, Any]
    dtype: torch.dtype = torch.float64
    kernels: bool = False
    rows: bool = False
    autocast: bool = False
    training: bool = True
    grad: bool = True
    frozen: str = ""
    steps: int = 2
    dynamic: bool | None = None


def of_a_gpu(name: str) -> Way:
    fmt = FORMATS.get(len(PROGRAMS[name].shape), "keep")
    return Way({"memory_format": fmt}, kernels=True, rows=fmt != "keep" and name not in CONTIGUOUS)


def drawn(name: str, number: int) -> Way:
    pick = random.Random(f"{name} {number}")
    options: dict[str, Any] = {}
    kind = pick.choice(("", "", "budget", "bits", "bits and a budget"))
    if "budget" in kind:
        options["budget"] = pick.choice((0.6, 0.3, "peak 1MiB"))
    if "bits" in kind:
        options["bits"] = pick.choice((8, 8, 4))
    way = of_a_gpu(name)
    if pick.random() < 0.6:
        options["memory_format"] = pick.choice(("keep", way.options["memory_format"]))
    kernels, autocast = pick.random() < 0.5, pick.random() < 0.15
    # The interpreter takes seconds for tensors large enough to be packed, so one number alone has both.
    kernels = kernels and ("bits" not in kind or number == 1)
    if kernels and not autocast and not options:
        options["fused_convolutions"] = pick.random() < 0.5
    single, rows = pick.random() < 0.3, way.rows and pick.random() < 0.3
    if rows or options.get("memory_format", "keep") != "keep":
        # oneDNN, which computes no float64, writes beside its memory for narrow images in channels_last (docs/faq.md).
        single = autocast = False
    return Way(
        options, torch.float32 if single or autocast else torch.float64, kernels, rows, autocast,
        training=pick.random() < 0.75,
        grad=pick.random() < 0.85,
        frozen=pick.choice(("", "", "", "first half", "every third")),
        steps=pick.choice((1, 2)),
        dynamic=pick.random() < 0.15 or None,
    )  # fmt: skip


# What was wrong once.
SEEDS = {
    "a mask among the sources": ("clicked", Way({"budget": 0.2})),  # it has no convolution of its own
    "a mask, bits": ("clicked", Way({"bits": 8})),
    "an empty vector among the sources": ("collected", Way({"budget": 0.2})),  # it has no channels
    "an empty vector, bits": ("collected", Way({"bits": 8})),
    # The kernel read biases with gaps as if they were dense, and took a sum's one channel for all.  The first steps
    # call the op, and later ones launch without it.
    "biases with gaps": ("biased", Way({}, kernels=True, rows=True, steps=3)),
    # The norm became its own residual, and the graph a circle.
    "its own residual": ("its own residual", Way({"bits": 8}, torch.float32, kernels=True, steps=1)),
}


def is_close(found: torch.Tensor, wanted: torch.Tensor, share: float, least: float) -> bool:
    """Whether the difference is at most a share of a tensor, and what may come on top of each value."""
    most = share * wanted.norm() + least * wanted.numel() ** 0.5
    return found.shape == wanted.shape and bool((found - wanted).norm() <= most)


# The error of gradients of values in so many bits; those of autocast have 16.
MOST = {16: 0.05, 8: 0.03, 4: 0.1}


def results(net, run, x, way: Way):
    """What the last step leaves: outputs, gradients, parameters and buffers."""
    for _ in range(way.steps):
        with torch.autocast("cpu", torch.bfloat16) if way.autocast and run is not net else contextlib.nullcontext():
            if way.grad:
                found = step(net, run, x)
                continue
            with torch.no_grad():
                found = {f"output {n}": t for n, t in enumerate(outputs_of(net, run, x.clone()))}
    return {name: t.detach().double() for name, t in (found | dict(net.named_buffers())).items()}


def strides(t):
    """The strides of dimensions with several positions; the others have no meaning."""
    return [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]


def check(name: str, way: Way, monkeypatch, codegen: str = "aten") -> None:
    monkeypatch.setattr(fusedseg, "backend", "triton" if way.kernels else "aten")
    for module in (concatenation, split_convolutions):
        # Small maps are those of large images.
        monkeypatch.setattr(module, "SLAB_BYTES", 2**12)
    # Tensors of 4096 values and more are packed.
    net, x = made(name, 3 if "bits" in way.options and name not in OF_ITS_SIZE else 1)
    net, x = net.to(way.dtype).train(way.training), x.to(way.dtype)
    if way.rows:
        net, x = (of.to(memory_format=FORMATS[x.dim()]) for of in (net, x))
    parameters = [*net.parameters()]
    for p in {"": [], "first half": parameters[: len(parameters) // 2], "every third": parameters[::3]}[way.frozen]:
        p.requires_grad_(False)
    twin = copy.deepcopy(net)
    # The mask of a dropout is another one in float64.
    twin = twin if name in ("dropout", "mixed") else twin.double()
    wanted = results(twin, twin, x.to(next(twin.parameters()).dtype), way)
    found = results(net, compiled(net, codegen, way.dynamic, **way.options), x, way)
    assert found.keys() == wanted.keys()
    exact = (1e-7, 1e-9) if way.dtype == torch.float64 else (1e-4, 1e-5)
    # Bits round nothing in forward.
    forward = (0.03, 0.01) if way.autocast else exact
    of_gradients = {key for key in wanted if key.startswith(("input", "gradient"))}
    for key in wanted.keys() - of_gradients:
        assert is_close(found[key], wanted[key], *forward), (key, way)
        # A caller sees eager mode's strides.
        # As on a GPU, norms keep channels_last, where PyTorch's on a CPU may return contiguous memory.
        if codegen == "aten" and "output" in key and not (way.autocast or (way.kernels and way.rows)):
            assert strides(found[key]) == strides(wanted[key]), (key, way)
    if of_gradients and (way.autocast or "bits" in way.options):
        # All gradients together, because the bias of a convolution before a norm has none but for rounding.
        mine, theirs = (torch.cat([of[key].flatten() for key in sorted(of_gradients)]) for of in (found, wanted))
        assert is_close(mine, theirs, MOST[way.options.get("bits", 16)], 0.0), way
        return
    for key in of_gradients:
        assert is_close(found[key], wanted[key], *exact), (key, way)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", OF_A_GPU)
def test_values_as_on_a_gpu(name, monkeypatch):
    check(name, of_a_gpu(name), monkeypatch)


# The test above has values and gradients of most programs without options; every eighth one has options too.
@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NETWORKS][::8])
def test_drawn_values(name, monkeypatch):
    check(name, drawn(name, 0), monkeypatch)


# A program has a part inside of a checkpoint.
in_a_checkpoint = pytest.mark.filterwarnings("ignore:.*inside of a checkpoint")


@pytest.mark.slow
@in_a_checkpoint
@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("number", range(3))
def test_values_in_other_ways(number, monkeypatch):
    for name in PROGRAMS:
        check(name, drawn(name, number), monkeypatch)
        torch._dynamo.reset()


BY_INDUCTOR = "called twice", "a buffer that moves", "checkpoint", "U-Net 3D", "batch", "skip", "up, bilinear"


@in_a_checkpoint
@pytest.mark.parametrize(
    ("place", "name"), [pytest.param(*of, marks=INDUCTOR, id=of[1]) for of in enumerate(BY_INDUCTOR)]
)
def test_values_with_inductor(place, name, monkeypatch):
    """Each program as it is, and in two of six other ways in turn."""
    others = [
        *(Way(options) for options in ({"bits": 8}, {"budget": 0.5}, of_a_gpu(name).options)),
        *(Way({}, training=False), Way({}, frozen="first half"), Way({}, training=False, grad=False)),
    ]
    for way in (Way({}), *others[place % 3 :: 3]):
        check(name, way, monkeypatch, "inductor")
        torch._dynamo.reset()


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("defect", SEEDS)
def test_named_defects(defect, monkeypatch):
    check(*SEEDS[defect], monkeypatch)
