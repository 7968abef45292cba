"""Checks that the fused modules of a converted model are still where they were at the conversion.

A fused norm applies the activation of another module, and writes over the output of the convolution before it.  If the
activation, the norm or the convolution is replaced or removed later, the model would silently compute another function.
The check raises an error at the next forward instead.

All fused norms step aside in a forward in which a hook, or a forward that was replaced, would see another tensor than
in the stock model.  The output of a fused norm is activated already, and a norm in place writes over the output of the
convolution.  So if a module that gets or returns one of these tensors has a hook, norms and activations run as the
stock modules do.
"""

import weakref
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from .._module_hooks import has_global_hooks, has_hooks
from ..nn.stock_norm import Aside
from .applied import Applied
from .flow import CONVS
from .formats import inputs_in
from .twins import STOCK


class Fused(NamedTuple):
    """A fused norm, the activation modules whose work it does, and the convolutions whose output it writes over.

    seen_by: the modules whose hooks would see another tensor than in the stock model.
    """

    norm: nn.Module
    acts: tuple[nn.Module, ...]
    convs: tuple[nn.Module, ...]
    seen_by: tuple[nn.Module, ...]


class Wiring:
    """The places of all modules that take part in a fused norm of ``root``.

    Norms and activations ask ``aside`` whether they run as stock modules.
    """

    def __init__(self, root: nn.Module, fused: list[Fused], paths: dict[nn.Module, str], aside: Aside) -> None:
        self.root, self._fused, self._paths, self._aside = root, fused, paths, aside
        # For each module in `fused`: (parent, name) of every place where it is registered.
        self._places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._find_places()
        # The modules that were in the model at the conversion, and those that had another forward than their class.
        self._known = weakref.WeakSet(root.modules())
        self._forwards = {m: m.__dict__["forward"] for f in fused for m in f.seen_by if "forward" in m.__dict__}
        # The modules whose hooks are looked for before every forward, each with its own forward or None.
        self._watched: dict[nn.Module, Any] = {}
        # The children of every module at the last examination.
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] | None = None
        # The format of inputs that are images; None leaves them as they are.
        self.memory_format: torch.memory_format | None = None

    def laid_out(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """The arguments of a call of the model, with images in the memory format."""
        return (args, kwargs) if self.memory_format is None else inputs_in(self.memory_format, (args, kwargs))

    def _find_places(self) -> None:
        """Records where the modules are now.  Modules without a part in a fused norm are not kept alive."""
        self._places = {module: [] for norm, acts, convs, *_ in self._fused for module in (norm, *acts, *convs)}
        self._paths = {module: self._paths[module] for module in self._places}
        for parent in self.root.modules():
            for name, child in parent._modules.items():
                if child in self._places:
                    self._places[child].append((parent, name))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has other dictionaries of children, and a set of weak references cannot be pickled.
        return self.__dict__ | {"_children": None, "_known": list(self._known)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _known=weakref.WeakSet(state["_known"]))

    def check(self) -> None:
        """Raises RuntimeError if a module of a fused norm was moved, replaced or removed since the conversion.

        It runs before every forward.  It also decides whether the fused norms step aside in the whole forward, because
        a hook may remove itself between a norm and its activation.
        """
        self._check_places()
        self._aside.now = has_global_hooks() or any(
            has_hooks(module) or module.__dict__.get("forward") != forward for module, forward in self._watched.items()
        )

    def _check_places(self) -> None:
        """Compares the children of each module with the last examination; examines fused norms only if one differs."""
        if self._children is not None:
            for modules, children in self._children:
                if tuple(modules.values()) != children:
                    break
            else:
                return
        self._examine()
        self._children = [
            (module._modules, tuple(module._modules.values()))
            for module in self.root.modules()
            if module._modules and not isinstance(module, torch.jit.ScriptModule)
        ]

    def _examine(self) -> None:
        present = set(self.root.modules())
        left = []
        for fused in self._fused:
            # A norm that was reverted was reverted together with its activations.
            if STOCK in fused.norm.__dict__ and self._is_whole(fused, present):
                now = tuple(self._now(conv, present) for conv in fused.convs)
                left.append(fused._replace(convs=now, seen_by=tuple(m for m in fused.seen_by if m in present)))
        self._fused = left
        self._find_places()
        self._find_watched(present)

    def _is_whole(self, fused: Fused, present: set[nn.Module]) -> bool:
        """Whether a fused norm is still in the model.  Raises RuntimeError if only a part of the fusion is."""
        norm, acts, convs, _ = fused
        name = self._path(norm)
        if norm not in present:
            for act in acts:
                if act in present and isinstance(act, Applied):
                    _refuse(f"{name} was replaced or removed, but {self._path(act)} still leaves its work to it")
            return False
        if not self._in_place(norm, present):
            _refuse(f"{name} was moved or replaced, but still does the work of {self._path(acts[0])} as well")
        for act in acts:
            if act not in present or not self._in_place(act, present):
                _refuse(f"{self._path(act)} was moved, replaced or removed, but {name} still does its work")
        for conv in convs:
            if not self._in_place(conv, present, CONVS):
                _refuse(f"{self._path(conv)} was moved, replaced or removed, but {name} still writes over its input")
        return True

    def _find_watched(self, present: set[nn.Module]) -> None:
        """Finds the modules to look at.

        At the conversion the observed flow names these modules.  A module that was added later is looked at if it holds
        some of the modules of a fusion (norm, activations, convolutions), but not all of them: the tensors that go from
        one module of the fusion to another pass through it.
        """
        parents: dict[nn.Module, list[nn.Module]] = {}
        for parent in self.root.modules():
            for child in parent.children():
                parents.setdefault(child, []).append(parent)
        new = present.difference(self._known)
        self._forwards = {module: forward for module, forward in self._forwards.items() if module in present}
        self._watched = {}
        for norm, acts, convs, seen_by in self._fused:
            above = [_above(module, parents) for module in (norm, *acts, *convs)]
            later = [m for m in new if len({m in modules for modules in above}) == 2]
            self._watched.update((module, self._forwards.get(module)) for module in (*seen_by, *convs, *later))

    def _in_place(self, module: nn.Module, present: set[nn.Module], or_one_of: tuple[type, ...] = ()) -> bool:
        """Whether the module is still at all its places, or inside a wrapper there."""
        places = [(parent, name) for parent, name in self._places[module] if parent in present]
        for parent, name in places:
            child = parent._modules.get(name)
            if child is None or not (module in child.modules() or isinstance(child, or_one_of)):
                return False
        return bool(places) or module in present

    def _now(self, conv: nn.Module, present: set[nn.Module]) -> nn.Module:
        """The convolution itself, or the convolution that was put in its place."""
        if conv in present:
            return conv
        found = next(parent._modules[name] for parent, name in self._places[conv] if parent in present)
        assert found is not None
        self._paths[found] = self._paths[conv]
        return found

    def _path(self, module: nn.Module) -> str:
        return self._paths[module] or "(the model)"


def _above(module: nn.Module, parents: dict[nn.Module, list[nn.Module]]) -> set[nn.Module]:
    """The module, and all modules that hold it."""
    found: set[nn.Module] = set()
    left = [module]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += parents.get(one, [])
    return found


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"fusedseg.convert: {what}; call fusedseg.convert on the model again, or fusedseg.revert before its modules "
        "are changed"
    )
