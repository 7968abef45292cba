"""Finds branches in a model's forward code that may change its flow after the conversion.

``convert`` sees the calls of one forward.  Code such as ``if self.flag:`` may call other modules, or read other
tensors, once the attribute has another value.  This module reads the source of the forward and runs nothing of it.
"""

import ast
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

# Values of attributes that are often set again, such as a flag, an epoch or the name of a phase.
SETTINGS = (bool, int, float, str, Enum, property)
FIXED = object()
# In modules of these packages, no setting that a program sets later changes the flow.
KNOWN = ("torch.", "fusedseg.")
# The fields of a Branch without the sites.
Place = tuple[str, str, str, int]


class Branch(NamedTuple):
    """A branch on an attribute in forward code around fused norms, or forward code that cannot be read.

    Attributes:
        function: the method that has the branch, such as "Net.forward".
        attribute: the attribute that the branch reads, such as "self.flag"; "" if the source cannot be read.
        file, line: the place of the branch; "" and 0 if the source cannot be read.
        sites: the first path of each fused norm, as in its row of the report, that lies in such a module.
    """

    function: str
    attribute: str
    file: str
    line: int
    sites: tuple[str, ...]


class _Source(NamedTuple):
    """The parts of a method's source that matter here; ``self.a.b`` is written as ("a", "b").

    tests: attributes in the conditions of branches, with their lines in the file.
    calls: attributes that are called.
    inherited: names of methods that are called by ``super()``.
    """

    tests: list[tuple[tuple[str, ...], int]]
    calls: set[tuple[str, ...]]
    inherited: set[str]


class Branches:
    """Collects the branches around fused norms.

    Args:
        both_modes: whether the flow is known in training and in eval mode, so that ``self.training`` may change.
    """

    def __init__(self, both_modes: bool) -> None:
        self._both_modes = both_modes
        self._sources: dict[Callable[..., Any], _Source | None] = {}
        self._looked: dict[nn.Module, list[Place]] = {}
        self._sites: dict[Place, dict[str, None]] = {}

    def look(self, site: str, owners: Iterable[nn.Module]) -> None:
        """Reads the forward code of the modules that call a fused norm, and of the modules around them."""
        for owner in owners:
            if owner not in self._looked:
                self._looked[owner] = list(self._branches_of(owner))
            for found in self._looked[owner]:
                # A dict keeps the order.
                self._sites.setdefault(found, {})[site] = None

    def found(self) -> list[Branch]:
        return [Branch(*found, tuple(sites)) for found, sites in self._sites.items()]

    def _branches_of(self, module: nn.Module) -> Iterator[Place]:
        sources = {method: self._source(method) for method in self._methods(module)}
        calls = {called for source in sources.values() if source for called in source.calls}
        for method, source in sources.items():
            name = getattr(method, "__qualname__", type(module).__name__).rpartition("<locals>.")[2]
            if source is None:
                yield name, "", "", 0
                continue
            file = inspect.getsourcefile(method) or ""
            for names, line in source.tests:
                if setting := self._setting(module, names, calls):
                    yield name, setting, file, line

    def _methods(self, module: nn.Module) -> list[Callable[..., Any]]:
        """The forward of a module, and methods of the same object that it calls, except methods of KNOWN packages."""
        found: list[Callable[..., Any]] = []
        if isinstance(module, fx.GraphModule):
            # A graph has no branches.
            return found
        waiting: list[Any] = [getattr(module.forward, "__func__", module.forward)]
        while waiting:
            method = inspect.unwrap(waiting.pop())
            if method in found or (getattr(method, "__module__", None) or "").startswith(KNOWN):
                continue
            found.append(method)
            source = self._source(method)
            if source is not None:
                after = _classes_after(module, method)
                called = [_method(type(module).__mro__, names[0]) for names in sorted(source.calls) if len(names) == 1]
                called += [_method(after, name) for name in sorted(source.inherited)]
                waiting += [method for method in called if method is not None]
        return found

    def _source(self, method: Callable[..., Any]) -> _Source | None:
        if method not in self._sources:
            self._sources[method] = _read(method)
        return self._sources[method]

    def _setting(self, module: nn.Module, names: tuple[str, ...], calls: set[tuple[str, ...]]) -> str:
        """The attribute as it is written, if it is a setting that code may set again; otherwise "".

        Submodules, parameters and containers are fixed when a model is built.  An attribute that is None is an absent
        submodule if the code calls it, as in ``x if self.downsample is None else self.downsample(x)``.
        """
        written = ".".join(("self", *names))
        value: Any = module
        for name in names:
            value = _attribute(value, name)
        if names[-1] == "training" and self._both_modes:
            return ""
        if value is None:
            return "" if names in calls else written
        if isinstance(value, types.FunctionType):
            # A method may read any setting; a function among the attributes is called like a submodule.
            return written + "()" if value is _method(type(module).__mro__, names[-1]) else ""
        return written if isinstance(value, SETTINGS) or (isinstance(value, Tensor) and value.numel() == 1) else ""


def _attribute(holder: Any, name: str) -> Any:
    """The attribute, found without running a property; FIXED for a parameter, an absent submodule, or no attribute."""
    if isinstance(holder, nn.Module) and name not in holder.__dict__:
        for held in (holder._modules, holder._buffers, holder._parameters):
            if name in held:
                return FIXED if held[name] is None or held is holder._parameters else held[name]
    return inspect.getattr_static(holder, name, FIXED)


def _classes_after(module: nn.Module, method: Callable[..., Any]) -> tuple[type, ...]:
    """The classes in which ``super()`` looks for a name when ``method`` calls it."""
    classes = type(module).__mro__
    for i, cls in enumerate(classes):
        if any(inspect.unwrap(f) is method for f in cls.__dict__.values() if isinstance(f, types.FunctionType)):
            return classes[i + 1 :]
    return ()


def _method(classes: Iterable[type], name: str) -> Callable[..., Any] | None:
    found = next((cls.__dict__[name] for cls in classes if name in cls.__dict__), None)
    return found if isinstance(found, types.FunctionType) else None


def _read(method: Callable[..., Any]) -> _Source | None:
    """The tests and calls in the source of a method; None if it has no source in Python, or no ``self``."""
    try:
        lines, first = inspect.getsourcelines(method)
        # The line in front allows for the indentation of a method.
        node: Any = ast.parse("if True:\n" + "".join(lines) if lines[0][:1].isspace() else "\n" + "".join(lines)).body[
            0
        ]
    # Any object may be the forward of a module, and a report must not fail for it.
    except Exception:
        return None
    node = node.body[0] if isinstance(node, ast.If) else node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not (node.args.posonlyargs + node.args.args):
        return None
    me = (node.args.posonlyargs + node.args.args)[0].arg
    source = _Source([], set(), set())
    for test in _tests(node):
        for part in ast.walk(test):
            if isinstance(part, ast.Attribute) and (names := _names(part, me)):
                source.tests.append((names, part.lineno + first - 2))
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if names := _names(part.func, me):
                source.calls.add(names)
            elif isinstance(part.func, ast.Attribute) and ast.unparse(part.func.value).startswith("super("):
                source.inherited.add(part.func.attr)
    return source


def _tests(function: ast.AST) -> Iterator[ast.expr]:
    """The conditions of a function's branches, without those that only lead to an error."""
    checks: set[ast.AST] = set()
    # A parent comes before its parts.
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)):
            checks.update(ast.walk(node.test))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test
        elif isinstance(node, ast.BoolOp) and node not in checks:
            yield from node.values[:-1]
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
            yield from (case.guard for case in node.cases if case.guard)


def _only_raises(node: ast.If) -> bool:
    return not node.orelse and all(isinstance(statement, ast.Raise) for statement in node.body)


def _names(node: ast.AST, me: str) -> tuple[str, ...]:
    """The names of an attribute of ``self``; () for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return tuple(names) if isinstance(node, ast.Name) and node.id == me else ()
