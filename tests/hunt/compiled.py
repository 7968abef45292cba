"""Programs and networks that are compiled, for the backend of ``fusedseg.compiler``.

A program's steps become one function, which is compiled.  Its leaves and modules are made outside of it, and the
backward passes run outside.  A network is compiled as a module.
"""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.hunt import prelude
from tests.hunt.grow import grown
from tests.hunt.networks import grown_network
from tests.hunt.prelude import Log, network_logs, outcome
from tests.hunt.program import Block, Network, Node, Step, Steps, defined, names_in, nodes, script, without

SETUP = ("leaf", "module", "memory")
# The end of a function, and steps that raise in eager mode.
NO_STEPS = ("return", "attempt")
# So many of the last tensors are returned, beside the loss.  A tensor that is returned is not computed again.
RETURNED = 3


class Compiled(NamedTuple):
    """A program whose function is compiled, or a network that is.

    Attributes:
        parts: the steps that make leaves and modules, and the steps of the function.
        shape: the shape of a network's input; None for a program.
        dynamic: whether it is compiled for all sizes.
        options: the backend's, beside the codegen.
        judge: what says how a network with bits is wrong; None without bits.
        returned: how many of the last tensors are returned.
    """

    seed: int
    parts: tuple[Steps, ...]
    shape: tuple[int, ...] | None = None
    dynamic: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    judge: Callable[..., str | None] | None = None
    returned: int = RETURNED

    def functions(self) -> str:
        if self.shape is not None:
            return self.network().functions()
        setup, body = ([f"    {line}" for node in part for line in node.lines()] for part in self.parts)
        loss = ["loss"] if any("loss = " in line for line in body) else []
        found = ", ".join(f"{name!r}: {name}" for name in [*self._tensors()[-self.returned :], *loss])
        lines = ["def program(run, log):", *setup, "    def forward():", *(f"    {line}" for line in body),
                 f"        return {{{found}}}", "    finish(run(forward)(), log)"]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _tensors(self) -> list[str]:
        names = [name for node in self.parts[1] if _is_run(node) for name in defined(node) if name[0] == "t"]
        return list(dict.fromkeys(names))

    def network(self) -> Network:
        last = Step("return", f"return joined({', '.join(self._tensors()[-self.returned :] or ['t0'])})")
        return Network(self.seed, ((*self.parts[0], *self.parts[1], last),), self.shape or (), {})

    def run(self, how: Callable) -> Log:
        """What it gives if ``how`` compiles it."""
        if self.shape is not None:
            return network_logs(self.network().make(), self.shape, how)
        namespace = dict(vars(prelude))
        exec(compile(self.functions(), f"<compiled program {self.seed}>", "exec"), namespace)
        return outcome(namespace["program"], how)

    def __str__(self) -> str:
        run = "outcome(program, how)"
        if self.shape is not None:
            run = f"network_logs(lambda: seeded(Network(), {self.seed}), {self.shape}, how)"
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        call = f"compiled_failure(lambda how: {run}, {self.dynamic}{options})"
        if self.judge is not None:
            call = f"{self.judge.__name__}(lambda: seeded(Network(), {self.seed}), {self.shape}{options})"
        name = f"compiled {'program' if self.shape is None else 'network'} {self.seed}"
        return script(name, self.functions(), call)


def _is_run(node: Node) -> bool:
    """Whether a node's steps are steps of the function itself."""
    return not (isinstance(node, Block) and node.header.startswith("def"))


def _steps(steps: Steps) -> Steps:
    """The steps without those that raise, which stand in blocks of their own."""
    out: list[Node] = []
    for node in steps:
        if isinstance(node, Block) and node.kind != "attempt":
            # A function keeps its return.
            last = [inner for inner in node.body if inner.kind == "return"]
            out.append(replace(node, body=(*_steps(node.body), *last)))
        elif node.kind not in NO_STEPS:
            out.append(node)
    return tuple(out)


def program(seed: int) -> Compiled:
    """The program of a seed."""
    steps = grown(seed)
    setup = tuple(node for node in steps if node.kind in SETUP and re.match(r"[pmb]\d+ = ", node.lines()[0]))
    rest = [node for node in steps if node not in setup]
    return Compiled(seed, (setup, _known(setup, _steps(tuple(rest)))), dynamic=seed % 8 == 7)


def network(seed: int) -> Compiled:
    made = grown_network(seed)
    setup = tuple(node for node in made.parts[0] if node.kind in SETUP)
    rest = tuple(node for node in made.parts[0] if node not in setup)
    return Compiled(seed, (setup, _known(setup, _steps(rest))), made.shape, dynamic=seed % 8 == 7)


def with_budget(seed: int) -> Compiled:
    """A network for which products run twice."""
    return network(seed)._replace(options={"budget": random.Random(seed).choice((0.5, 0.4, 0.3, 0.2, 0.1, 0.02))})


def with_bits(seed: int) -> Compiled:
    """A network whose kept values are rounded; tensors of symbolic sizes would stay as they are."""
    options = {"bits": random.Random(seed).choice((8, 4))}
    return network(seed)._replace(dynamic=False, options=options, judge=prelude.rounded_difference)


def _known(setup: Steps, body: Steps) -> Steps:
    """The steps without those that need the result of a step that is gone."""
    every = [node for steps in (setup, body) for _, node in nodes(steps)]
    # The arguments of a function are names too.
    heads = {name for node in every if isinstance(node, Block) for name in names_in(node)}
    made = {name for node in every for name in defined(node)} | heads | {"t0"}
    named = {name for node in every for name in names_in(node) if name[0] in "tf"}
    return without(body, named - made)
