"""A budget: which convolutions and matrix products run twice, so that forward keeps fewer bytes.

A product that runs twice is one more value that backward may compute again; what is kept then follows from the rules of
``keep.py``.  So a choice is a set of products.  Its price is what the graphs will do: the bytes that are kept, the
arithmetic that is repeated, and the peak of the step in the order in which its nodes run (``Prices``).  The search is
that of the recompute scope (``knapsack.py``): a smaller budget never has a higher peak.
"""

import math
import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from .._sizes import text_of
from ..ops.recompute import cheap
from ..ops.recompute.graph import Moment
from ..ops.recompute.knapsack import Knapsack
from ..ops.recompute.replay import Cost
from . import keep, reinplace
from .joint import Joint, is_random, value_of
from .live import Live, nbytes_of
from .settings import OP
from .wanted import Wanted


class Product(NamedTuple):
    """A convolution or a matrix product that may run twice."""

    node: fx.Node
    flops: int


def eager_bytes(joint: Joint) -> int:
    """The bytes that autograd keeps in eager mode: results of forward that backward reads, each memory once."""
    roots = reinplace.roots_of(joint.graph)
    # A part of what a call of forward has made is a value of forward, even if backward alone reads that part.
    made = {node for node in joint.graph.nodes if keep.call_node(node) in joint.forward}
    kept = {roots[node] for node in joint.gradients if node in made}
    for node in joint.graph.nodes:
        if node not in made and node is not joint.end:
            kept |= {roots[source] for source in node.all_input_nodes if source in made}
    return sum(nbytes_of(root) for root in kept if root.op == "call_function")


def _flops_of(node: fx.Node) -> int:
    """The arithmetic of a product; sizes that are symbols have those of the example."""
    from torch.utils.flop_counter import flop_registry

    def numbers(value: Any) -> Any:
        return torch.Size(map(cheap.hint_of, value.shape)) if isinstance(value, Tensor) else value

    args, kwargs, out = tree_map(numbers, fx.map_arg((node.args, node.kwargs, node), value_of))
    return int(flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=out))  # type: ignore[union-attr]


class Prices:
    """The price of each set of products; ``Knapsack`` asks for it.

    Args:
        joint: the graph.
        fused: whether Inductor generates the code, which computes elementwise neighbours in one kernel.
    """

    def __init__(self, joint: Joint, fused: bool) -> None:
        self._joint = joint
        self.live = Live(joint, fused)
        self.calls: list[Any] = [
            Product(node, _flops_of(node))
            for node in joint.graph.nodes
            if node in joint.forward and cheap.has_flops(node) and not is_random(node)
        ]
        self.total = sum(product.flops for product in self.calls)

    @property
    def choosable(self) -> list[int]:
        return list(range(len(self.calls)))

    def plan(self, again: Collection[int]) -> keep.Plan:
        return keep.plan_of(self._joint, {self.calls[i].node for i in again})

    def cost(self, again: Collection[int], *, hold_all: bool = False) -> Cost:
        """The price; ``hold_all`` has no effect, because backward always holds what it has computed again."""
        plan = self.plan(again)
        flops = sum(product.flops for product in self.calls if product.node in plan.again)
        return Cost(self.live.kept(plan), flops, self.live.peak(plan))

    def moments(self) -> list[Moment]:
        """Nothing is known about the peak but the price."""
        return []


def choose(joint: Joint, wanted: Wanted, eager: int, fused: bool) -> keep.Plan:
    """The plan for a budget, or the nearest one, with a warning.

    Args:
        joint: the graph.
        wanted: the budget.
        eager: the bytes that eager mode keeps.
        fused: as in ``Prices``.
    """
    prices = Prices(joint, fused)
    budget, arguments = wanted.budget, prices.live.arguments
    most = budget.bytes_of(eager)
    for found in Knapsack(prices).steps(eager, budget.most_flops * prices.total):
        kept_enough = most is not None and found.cost.kept <= most
        if kept_enough or (wanted.peak is not None and found.cost.peak + arguments <= wanted.peak):
            break
    else:
        _warn_of(found.cost, wanted, eager, prices)
    return prices.plan(found.again)


def _warn_of(cost: Cost, wanted: Wanted, eager: int, prices: Prices) -> None:
    """Says which budget can be met; one without a number of bytes always is."""
    most, peak = wanted.budget.bytes_of(eager), cost.peak + prices.live.arguments
    if wanted.peak is not None:
        asked, nearest = f"a peak of {text_of(wanted.peak)}", f"a peak of {text_of(peak)}"
    elif most is not None:
        asked, nearest = (
            f"budget {text_of(most)}",
            f"{text_of(cost.kept)}, which is a share of {_up(cost.kept / eager)}",
        )
    else:
        return
    warnings.warn(
        f"{OP}: {asked} cannot be met without a higher peak or more arithmetic.  The nearest that can is {nearest}; "
        f"{cost.flops / max(prices.total, 1):.1%} of the forward's arithmetic runs again, and extra_flops, which is "
        f"{wanted.budget.most_flops:g}, limits it",
        stacklevel=2,
    )


def _up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 1000:g}"
