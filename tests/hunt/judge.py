"""Runs a program in eager mode and compiled, or a network and its converted form, and says how they differ."""

import contextlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.hunt.compiled import Compiled
from tests.hunt.prelude import (
    aot_eager,
    compiled_difference,
    eager_call,
    network_difference,
    network_results,
)
from tests.hunt.program import Network, Steps, defined, edited, names_in, nodes, renamed, without


class Verdict(NamedTuple):
    """``kind`` is one of

    same: every result has the same bits;
    raises: eager mode raises, and so do we;
    unstable: eager mode gives other results the second time;
    as aot_eager: compiled code has the bits of PyTorch's own compiled code, which are not those of eager mode;
    nothing captured: PyTorch's compiler finds no graph in the program;
    impossible: PyTorch's own compiled code raises;
    failure: anything else.
    """

    kind: str
    how: str = ""

    @property
    def cause(self) -> str:
        """The cause that failures share: the text without numbers and names."""
        text = re.sub(r"\b[tpm]\d+(\.\w+)*", "x", self.how)
        return re.sub(r"[-+]?\d[\d.e+-]*", "#", text.splitlines()[0] if text else "")[:140]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings, because PyTorch warns about many random programs."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The compiler logs breaks of graphs.
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def judged(program: Network | Compiled, tell: Callable[[str], None] = lambda phase: None) -> Verdict:
    """Judges a program; calls ``tell`` with each phase that starts, because a crash in eager mode is PyTorch's own."""
    if isinstance(program, Network):
        with quiet():
            tell("eager")
            stock = network_results(program.make()(), program.shape, training=True)
            if "error" in stock:
                return Verdict("raises", stock["error"])
            tell("ours")
            how = network_difference(program.make(), program.shape, **program.options)
        return Verdict("same") if how is None else Verdict("failure", how)
    tell("eager")
    with quiet():
        if program.judge is None:
            return Verdict(*compiled_difference(program.run, program.dynamic, tell, **program.options))
        if (error := program.run(eager_call).error) is not None:
            return Verdict("raises", str(error))
        tell("ours")
        found = program.judge(program.network().make(), program.shape, **program.options)
        if found is None:
            return Verdict("same")
        error = program.run(aot_eager(program.dynamic)).error
    return Verdict("failure", found) if error is None else Verdict("impossible", str(error))


def shrunk(program: Network | Compiled, tries: int = 1000) -> Network | Compiled:
    """The program without the steps that the failure does not need.

    A dropped step takes with it what needs its result; or the result's readers get one of the step's own inputs.
    """
    wanted = _sort(judged(program))

    def fails(candidate: Network | Compiled) -> bool:
        try:
            return _sort(judged(candidate)) == wanted
        except (SyntaxError, MemoryError, RuntimeError):
            # Too little is left of the program, or it asks for more memory than the limit.
            return False

    again = True
    while again and tries > 0:
        again = False
        tidy = program._replace(parts=_without_unused(program.parts))
        if fails(tidy):
            program = tidy
        for part in range(len(program.parts)):
            for path, _ in list(nodes(program.parts[part])):
                if tries <= 0:
                    break
                for steps in _smaller(program.parts[part], path):
                    tries -= 1
                    candidate = program._replace(parts=(*program.parts[:part], steps, *program.parts[part + 1 :]))
                    if fails(candidate):
                        program, again = candidate, True
                        break
    return program


def _without_unused(parts: tuple[Steps, ...]) -> tuple[Steps, ...]:
    """The steps without the leaves and modules that no other step names."""
    named = Counter(name for steps in parts for _, node in nodes(steps) for name in dict.fromkeys(names_in(node)))
    kinds = ("leaf", "module", "memory")
    unused = {n for steps in parts for node in steps if node.kind in kinds for n in defined(node) if named[n] == 1}
    return tuple(without(steps, set(unused)) for steps in parts)


def _sort(verdict: Verdict) -> tuple[str, str]:
    """Values that differ may differ elsewhere in a smaller program; an error stays what it is."""
    if "differs" in verdict.how:
        return verdict.kind, "differs"
    return verdict.kind, verdict.cause[:60]


def _smaller(steps, path):
    """The ways to leave out the node at a path; the ways that drop most come first."""
    try:
        node = _at(steps, path)
    except (IndexError, AttributeError):
        # The node was dropped together with another node.
        return
    results = defined(node)
    body = getattr(node, "body", None)
    gone = edited(steps, path, ())
    yield without(gone, set(results)) if results else gone
    if body is not None:
        if not node.header.startswith("def"):
            yield edited(steps, path, body)
        return
    for result in results[:1]:
        for name in dict.fromkeys(n for n in names_in(node) if n not in results and n[0] in "tp"):
            yield renamed(gone, result, name)


def _at(steps, path):
    node = steps[path[0]]
    for i in path[1:]:
        node = node.body[i]
    return node
