"""The table of the page docs/supported.md: what ``torch.compile(model, backend="fusedseg")`` keeps of known models.

``supported.json`` beside this file has the figures, counted on the graphs of one real training step.  The first command
measures all models whose package is installed, or those that are named, and writes them there; the second writes the
page's table from the file::

    python -m bench.supported [NAME ...]
    python -m bench.supported --page
"""

import argparse
import importlib.metadata
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fusedseg.compiler
from fusedseg.compiler import NotCompiled
from fusedseg.compiler.capture import stock_norms as norms

from .networks import MORE, NETWORKS, Network
from .report import Marks, write_into
from .results import markdown

MODELS = {**NETWORKS, **MORE}
BUDGET = 0.3
# The columns, and the options of the backend.
WAYS: dict[str, dict[str, Any]] = {"exact": {}, "budget": {"budget": BUDGET}, "8": {"bits": 8}, "4": {"bits": 4}}
# Steps of training whose losses are compared with those of a run in float64.
STEPS = 20
FILE = Path(__file__).with_name("supported.json")
PAGE = Path(__file__).parents[1] / "docs" / "supported.md"
CHOICE = """## Which codegen is chosen

The bytes that kernels of a step read and write, counted on tensors without values. A graph takes Inductor's code where
that moves at least 10 % fewer ([how](compiler.md#which-codegen)):"""
MARKS = Marks("<!-- table -->", "<!-- end of the table -->")


def step(net: nn.Module, x: Tensor) -> Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss


@contextmanager
def norms_of_a_gpu() -> Iterator[None]:
    """Norms of captured graphs become the op, as on a GPU; on a CPU they would stay PyTorch's."""
    wanted = norms.wanted_by
    with mock.patch.object(norms, "wanted_by", lambda settings, for_gpu: wanted(settings, True)):
        yield


def row(name: str, ways: Iterable[str] = tuple(WAYS)) -> dict[str, Any]:
    """The figures of one model: shares of eager mode's kept bytes and peak, and repeated arithmetic."""
    network = MODELS[name]
    found: dict[str, Any] = {"package": package(network), "input": list(network.shape)}
    for way in ways:
        torch.manual_seed(0)
        net, x = network.make().train(), torch.randn(network.shape)
        torch.compiler.reset()
        compiled = torch.compile(net, backend=fusedseg.compiler.backend, options={"codegen": "aten", **WAYS[way]})
        try:
            with warnings.catch_warnings(), norms_of_a_gpu():
                # A budget that is not met shows in the table.
                warnings.simplefilter("ignore")
                step(compiled, x)
            report = fusedseg.compiler.report(compiled)
        finally:
            torch.compiler.reset()
        graphs = [graph for graph in report.graphs if graph.eager is not None and graph.ours is not None]
        eager, ours = report.kept
        peaks = [max(getattr(graph, which).peak for graph in graphs) for which in ("eager", "ours")]
        found[way] = [round(ours / eager, 3), round(peaks[1] / peaks[0], 3), round(max(g.repeated for g in graphs), 3)]
        found["graphs"] = len(report.graphs)
    found["exports"] = exports(network)
    return found


def moved(network: Network) -> list[Any] | None:
    """The codegen that the largest graph chooses, and the bytes that the kernels of both would move.

    None: the compiler refuses the model on tensors without values.
    """
    try:
        graphs = fusedseg.compiler.estimate(network.make, network.shape).graphs
    except NotCompiled:
        return None
    largest = max((graph for graph in graphs if graph.moved is not None), key=lambda graph: graph.moved.aten)
    return [largest.codegen, *largest.moved]


def losses(name: str, way: str, steps: int) -> list[float]:
    """The losses of so many steps of SGD, exact, with the same weights and input in each step.

    way: "float64" in eager mode; or in fp32 "eager" and "ours".
    """
    network = MODELS[name]
    torch.manual_seed(0)
    net, x = network.make().train(), torch.randn(network.shape)
    if way == "float64":
        net, x = net.double(), x.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.compiler.reset()
    options = {"codegen": "aten"}
    run = torch.compile(net, backend=fusedseg.compiler.backend, options=options) if way == "ours" else net
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(step(run, x).item())
        optimizer.step()
    torch.compiler.reset()
    return found


def loss_errors(name: str, steps: int = STEPS) -> dict[str, float]:
    """The largest relative distance of a loss from that of the run in float64, for eager mode and for the backend."""
    exact = losses(name, "float64", steps)
    pairs = {way: zip(losses(name, way, steps), exact, strict=True) for way in ("eager", "ours")}
    return {way: max(abs(loss - truth) / abs(truth) for loss, truth in both) for way, both in pairs.items()}


def package(network: Network) -> str:
    """The package of a model and its version; "" for models of this repository."""
    if not network.package:
        return ""
    return f"{network.package.replace('_', '-')} {importlib.metadata.version(network.package)}"


def exports(network: Network) -> bool:
    """Whether ``torch.export`` takes the stock model, which the backend does not change."""
    try:
        torch.export.export(network.make().eval(), (torch.randn(network.shape),))
    except (RuntimeError, TypeError, ValueError, torch._dynamo.exc.TorchDynamoException):
        return False
    return True


def table() -> list[str]:
    """The lines of the page's tables, one figure a cell, and of the sentences that name the exceptions."""
    rows = json.loads(FILE.read_text())
    exact = [[title(name, found), *shares(found["exact"]), again(found["exact"])] for name, found in rows.items()]
    lines = [*markdown(["model, input", "kept", "peak", "repeated"], exact), ""]
    options = [
        [name, *shares(found["budget"]), again(found["budget"]), *shares(found["8"]), *shares(found["4"])]
        for name, found in rows.items()
    ]
    heads = [f"budget {BUDGET}: kept", "its peak", "repeated", "8 bits: kept", "its peak", "4 bits: kept", "its peak"]
    lines += [*markdown(["model", *heads], options), "", *CHOICE.splitlines(), ""]
    counted = {name: found["moved"] for name, found in rows.items() if found["moved"] is not None}
    chosen = [[name, *megabytes(figures), figures[0]] for name, figures in counted.items()]
    lines += [*markdown(["model", "MB with `aten`", "MB with Inductor", "share", "chosen"], chosen), ""]
    lines += [*(f"* {line}" for line in remarks(rows)), ""]
    absent = [name for name in MODELS if name not in rows]
    if absent:
        lines += [f"Not measured yet: {', '.join(absent)}.", ""]
    return lines


def title(name: str, found: dict[str, Any]) -> str:
    origin = f" ({found['package']})" if found["package"] else ""
    return f"{name}{origin}, {'×'.join(map(str, found['input']))}"


def shares(figures: list[float]) -> list[str]:
    """The kept bytes and the peak, as shares of eager mode's."""
    return [f"{share:.2f}" for share in figures[:2]]


def megabytes(figures: list[Any]) -> list[str]:
    """The bytes that kernels move, and the share of Inductor's."""
    _, aten, inductor = figures
    return [f"{aten / 1e6:.1f}", f"{inductor / 1e6:.1f}", f"{inductor / aten:.2f}"]


def again(figures: list[float]) -> str:
    """The repeated share of forward's arithmetic; no-break spaces, so that no line parts a number and its sign."""
    return f"{figures[2]:.1%}".replace("%", "\u00a0%") if figures[2] else "0"


def remarks(rows: dict[str, Any]) -> Iterable[str]:
    """A sentence for each model that is no single graph, or is not exported."""
    for name, found in rows.items():
        if found["graphs"] != 1:
            yield f"{name} is {found['graphs']} graphs; the others are one."
        if not found["exports"]:
            yield f"`torch.export` does not take the stock {name}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the compiler's backend keeps of known models.")
    parser.add_argument("names", nargs="*", help=f"models to measure: {', '.join(MODELS)}")
    parser.add_argument("--page", action="store_true", help="write the table of docs/supported.md and measure nothing")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in MODELS]:
        parser.error(f"unknown models {', '.join(unknown)}; choose among {', '.join(MODELS)}")
    if not args.page:
        for name in args.names or [name for name, network in MODELS.items() if network.is_here()]:
            found = {**row(name), "moved": moved(MODELS[name]), "losses": loss_errors(name)}
            print(name, found, flush=True)
            have = json.loads(FILE.read_text()) if FILE.exists() else {}
            rows = {**have, name: found}
            ordered = {model: rows[model] for model in MODELS if model in rows}
            lines = ",\n".join(f"{json.dumps(model)}: {json.dumps(ordered[model])}" for model in ordered)
            FILE.write_text("{\n" + lines + "\n}\n")
    write_into(PAGE, table(), MARKS)


if __name__ == "__main__":
    main()
