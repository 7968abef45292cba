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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedseg.compiler

from .networks import MORE, NETWORKS, Network

MODELS = {**NETWORKS, **MORE}
BUDGET = 0.3
# The columns, and the options of the backend.
WAYS: dict[str, dict[str, Any]] = {"exact": {}, "budget": {"budget": BUDGET}, "8": {"bits": 8}, "4": {"bits": 4}}
HEADS = {"exact": "exact", "budget": f"budget {BUDGET}", "8": "8 bits", "4": "4 bits"}
# The most that the exact backend should keep, as a share of eager mode's bytes.
GOAL = 0.5
# Steps of training whose losses are compared with eager mode's.
STEPS = 20
GOALS = {"diffusion U-Net": 0.35, "VAE decoder": 0.35}
# Above this share little is gained.
LITTLE = 0.85
FILE = Path(__file__).with_name("supported.json")
PAGE = Path(__file__).parents[1] / "docs" / "supported.md"
START, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def step(net: nn.Module, x: Tensor) -> Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss


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
            with warnings.catch_warnings():
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


def losses(name: str, compiled: bool) -> list[float]:
    """The losses of ``STEPS`` steps of SGD in fp32, exact, with the same weights and input in each step."""
    network = MODELS[name]
    torch.manual_seed(0)
    net, x = network.make().train(), torch.randn(network.shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.compiler.reset()
    run = torch.compile(net, backend=fusedseg.compiler.backend, options={"codegen": "aten"}) if compiled else net
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found.append(step(run, x).item())
        optimizer.step()
    torch.compiler.reset()
    return found


def difference(name: str) -> float:
    """The largest difference of a loss from eager mode's, relative to it; 0 if all losses are the same bits."""
    pairs = zip(losses(name, compiled=False), losses(name, compiled=True), strict=True)
    return max(abs(ours - eager) / abs(eager) for eager, ours in pairs)


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


def table() -> str:
    """The table of the page, and the sentences that say what misses its goal."""
    rows = json.loads(FILE.read_text())
    heads = ["model, input", "package", *HEADS.values(), "graphs", "exports", f"losses of {STEPS} steps"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, found in rows.items():
        cells = [", ".join(f"{share:.2f}" for share in found[way][:2]) + again(found[way][2]) for way in WAYS]
        title = f"{name}, {'×'.join(map(str, found['input']))}"
        rest = [str(found["graphs"]), "yes" if found["exports"] else "no"]
        rest.append(f"differ by `{found['losses']:.0e}`" if found["losses"] else "same bits")
        lines.append("| " + " | ".join([title, found["package"] or "this repository", *cells, *rest]) + " |")
    parts = ["\n".join(lines)]
    for title, lines in remarks(rows).items():
        parts.append(title + "\n\n" + ("\n".join(f"* {line}" for line in lines) or "* none"))
    absent = [name for name in MODELS if name not in rows]
    if absent:
        parts.append(f"Not measured yet: {', '.join(absent)}.")
    return "\n\n".join(parts) + "\n"


def remarks(rows: dict[str, Any]) -> dict[str, list[str]]:
    """What the rows say plainly: titles, and the models below them."""
    kept = {name: {way: found[way][0] for way in WAYS} for name, found in rows.items()}
    return {
        "Models that miss the goal for what the exact backend keeps:": [
            f"{name} keeps {share['exact']:.3f}; the goal is {GOALS.get(name, GOAL)}."
            for name, share in kept.items()
            if share["exact"] > GOALS.get(name, GOAL)
        ],
        "Models that keep more than the budget:": [
            f"{name} keeps {share['budget']:.3f}." for name, share in kept.items() if share["budget"] > BUDGET
        ],
        "Models in which 4 bits keep hardly less than the exact backend:": [
            f"{name} keeps {share['4']:.3f} with 4 bits, and {share['exact']:.3f} without."
            for name, share in kept.items()
            if share["4"] > LITTLE * share["exact"]
        ],
        f"Models whose exact peak is above {LITTLE} of eager mode's, so that little is gained:": [
            f"{name} peaks at {found['exact'][1]:.3f}." for name, found in rows.items() if found["exact"][1] > LITTLE
        ],
    }


def again(share: float) -> str:
    # no-break spaces, so that a narrow cell does not part a number and its sign
    return f", {share:.1%}".replace("%", "\u00a0%") if share else ""


def page() -> str:
    """The page with the table that the figures give."""
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    return before + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the compiler's backend keeps of known models.")
    parser.add_argument("names", nargs="*", help=f"models to measure: {', '.join(MODELS)}")
    parser.add_argument("--page", action="store_true", help="write the table of docs/supported.md and measure nothing")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in MODELS]:
        parser.error(f"unknown models {', '.join(unknown)}; choose among {', '.join(MODELS)}")
    if not args.page:
        for name in args.names or [name for name, network in MODELS.items() if network.is_here()]:
            found = {**row(name), "losses": difference(name)}
            print(name, found, flush=True)
            have = json.loads(FILE.read_text()) if FILE.exists() else {}
            rows = {**have, name: found}
            ordered = {model: rows[model] for model in MODELS if model in rows}
            lines = ",\n".join(f"{json.dumps(model)}: {json.dumps(ordered[model])}" for model in ordered)
            FILE.write_text("{\n" + lines + "\n}\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
