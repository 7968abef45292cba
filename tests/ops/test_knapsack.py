"""The choice of the calls that run twice, against all sets of calls on random graphs, and its price against a step."""

import random
from itertools import combinations

import pytest

from fusedseg.ops.recompute.choice import Budget, Call
from fusedseg.ops.recompute.graph import Graph
from fusedseg.ops.recompute.guide import choose
from fusedseg.ops.recompute.knapsack import CLOSE, SAME, Knapsack, Limits
from fusedseg.ops.recompute.replay import Node, Others


def random_graph(seed: int, calls: int) -> Graph:
    """A network of calls with cheap functions between them and skips to earlier tensors, as a scope writes it."""
    rng, graph = random.Random(seed), Graph()
    values = [graph.add(Node(rng.randint(1, 50)))]
    for index in range(calls):
        x = rng.choice(values[-3:])
        graph.save(x, 2 * index)
        nbytes = rng.randint(1, 60)
        graph.calls.append(Call("conv2d", index, (), nbytes, rng.randint(1, 100)))
        y = graph.add(Node(nbytes, (x,), index))
        graph.of_call.append(y)
        graph.save(y, 2 * index + 1)
        inputs = (y,) if rng.random() < 0.6 else (y, rng.choice(values))
        values.append(graph.add(Node(nbytes, inputs, overwrites=rng.random() < 0.5)))
    graph.save(values[-1], 2 * calls)
    return graph


def sets(graph: Graph):
    calls = graph.choosable
    return (frozenset(chosen) for n in range(len(calls) + 1) for chosen in combinations(calls, n))


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_of_all_sets(seed):
    graph = random_graph(seed, 6)
    knapsack = Knapsack(graph)
    costs = [cost for again in sets(graph) if (cost := graph.cost(again)) is not None]
    for share in (0.8, 0.6, 0.4, 0.2):
        for peak in (float("inf"), knapsack.nothing.peak):
            limits = Limits(knapsack.nothing.kept * share, peak=peak)
            allowed = [cost.flops for cost in costs if limits.allow(cost)]
            found = knapsack.solve(limits)
            assert (found is None) == (not allowed)
            if found is not None:
                assert found.cost.flops <= min(allowed) + CLOSE * sum(call.flops for call in graph.calls)
                assert graph.cost(found.again) == found.cost


@pytest.mark.parametrize("seed", range(12))
def test_the_bounds_are_bounds(seed):
    """No set saves more than its calls by themselves, nor repeats less; otherwise the search could miss a set."""
    graph = random_graph(seed, 6)
    nothing = graph.cost(())
    alone = {i: graph.cost((i,)) for i in graph.choosable}
    for again in sets(graph):
        cost = graph.cost(again)
        assert nothing.kept - cost.kept <= sum(nothing.kept - alone[i].kept for i in again)
        assert cost.flops >= sum(graph.calls[i].flops for i in again)
        for moment in graph.moments():
            assert cost.peak >= moment.nbytes - sum(moment.outputs.get(i, 0) for i in again)


def test_a_value_that_is_needed_again_is_held():
    """A skip is rebuilt in the decoder, and held until the encoder needs it, as long as the peak stays."""
    graph = Graph()
    image = graph.add(Node(10))
    graph.save(image, 0)
    graph.calls.append(Call("conv2d", 0, (), 20, 100))
    skip = graph.add(Node(20, (image,), 0))
    graph.of_call.append(skip)
    graph.save(skip, 1)
    for group in range(2, 14):
        graph.save(graph.add(Node(4, (graph.add(Node(4)),))), group)
    graph.save(skip, 14)
    count = len(graph.packs)
    graph.others = [Others(0, 40 if number == count - 1 else 0) for number in range(count)]
    assert graph.cost({0}) == (10 + 12 * 4, 100, 10 + 12 * 4 + 20 + 40, {0})
    # Beside large gradients in between, the call runs twice more, and the peak stays.
    graph.others = [Others(0, 40 if number > 6 else 0) for number in range(count)]
    assert graph.cost({0}) == (10 + 12 * 4, 200, 10 + 12 * 4 + 20 + 40, frozenset())
    held = graph.cost({0}, hold_all=True)
    assert held[:2] == (10 + 12 * 4, 100)
    assert held.peak > graph.cost({0}).peak


def test_what_a_call_forms_lies_beside_the_tensors_that_its_reader_has_asked_for_before():
    graph = Graph()
    image = graph.add(Node(10))
    graph.save(image, 0)
    for index, (nbytes, workspace) in enumerate([(20, 0), (30, 100)]):
        graph.calls.append(Call("conv2d", index, (), nbytes, 1, workspace=workspace))
        graph.of_call.append(graph.add(Node(nbytes, (image,), index)))
    for node in graph.of_call:
        graph.save(node, 1)
    assert graph.cost({0, 1}).peak == 10 + 20 + 30 + 100
    assert graph.cost({1}).peak == 10 + 20 + 30 + 100
    assert graph.cost({0}).peak == 10 + 20 + 30


@pytest.mark.parametrize("seed", range(8))
def test_bytes_and_arithmetic_as_limits(seed):
    """If any set is within both limits, a set within both is chosen, even if its peak is higher than before."""
    graph = random_graph(seed, 6)
    nothing, total = graph.cost(()), sum(call.flops for call in graph.calls)
    prices = (graph.cost(again, hold_all=hold_all) for again in sets(graph) for hold_all in (False, True))
    costs = [cost for cost in prices if cost is not None]
    reached = 0
    for kept in (0.8, 0.6, 0.4):
        for flops in (0.2, 0.5, 0.8):
            most = int(kept * nothing.kept)
            choice = choose(graph, Budget(nbytes=most, extra_flops=flops), nothing.kept)
            if any(Limits(most, flops * total).allow(cost) for cost in costs):
                assert choice.kept <= most
                assert choice.repeated <= flops
                reached += 1
            # A choice that follows itself costs what it says.
            assert choice.flops in [graph.cost(choice.again, hold_all=hold_all).flops for hold_all in (False, True)]
    assert reached


@pytest.mark.parametrize("seed", range(6))
def test_a_smaller_budget_has_no_higher_peak(seed):
    graph = random_graph(seed, 14)
    knapsack = Knapsack(graph)
    kept = knapsack.nothing.kept
    found = [knapsack.descend(kept, kept * share / 20, float("inf")) for share in range(20, 0, -1)]
    peak = found[0].cost.peak
    for one in found:
        assert one.cost.peak <= peak * (1 + SAME)
        peak = min(peak, one.cost.peak)
    assert [one.cost.kept for one in found] == sorted((one.cost.kept for one in found), reverse=True)
    assert found[-1].cost.kept < kept


def test_arithmetic_as_the_limit():
    graph = random_graph(3, 10)
    knapsack = Knapsack(graph)
    total = sum(call.flops for call in graph.calls)
    kept = []
    for share in (0.0, 0.2, 0.5, 1.0):
        found = knapsack.descend(knapsack.nothing.kept, float("-inf"), share * total)
        assert found.cost.flops <= share * total
        kept.append(found.cost.kept)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]


def test_too_long_a_chain_has_no_price():
    graph = Graph()
    value = graph.add(Node(1))
    for index in range(250):
        graph.calls.append(Call("conv2d", index, (), 1, 1))
        value = graph.add(Node(1, (value,), index))
        graph.of_call.append(value)
        graph.save(value, index)
    assert graph.cost(range(250)) is None
    assert graph.cost(range(0, 250, 2)) is not None
