"""The scope in which saved tensors are replaced by recipes: ``fusedseg.recompute``."""

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator, ExitStack
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from ... import _torch
from .. import unfused
from ..low_bit.spec import Bits
from . import compiled
from .budgeted import BUDGET_RULES, BudgetRegistry
from .choice import Budget
from .compiled import warn_of_torch
from .guide import Guide, Learn
from .packed import PackingRegistry, Rounding
from .packed_budget import PACKED_BUDGET_RULES, PackedBudgetRegistry
from .packing import PACKING_RULES
from .recipes import BUDGETED, PACKING, REGISTRIES, innermost
from .registry import Registry
from .saved import unpack
from .stock import RULES
from .watch import Watch

REGISTRIES.add(PackingRegistry)


class recompute(ContextDecorator):
    """A context manager or decorator in which autograd saves recipes in place of tensors that are cheap to rebuild.

    Use::

        with fusedseg.recompute():
            loss = criterion(model(x), y)
        loss.backward()

    The model need not change.  Norms, activations (in place or not), ``cat``, ``interpolate``, ``pad``, pools, dropout,
    sums and products of tensors, and the modules of this package have recipes.  ``stock.py`` lists these functions and
    what each of them saves.  Without a budget, no convolution is computed twice.  Values, gradients, running
    statistics and random numbers are the same as without the scope, on a CPU to the last bit.  A scope inside a scope
    changes nothing, so that the outermost scope decides about a budget.  The scope holds for the thread that enters it.

    Kept for backward: about one tensor for each convolution, one byte per element for the mask of dropout and for the
    positions of max-pooling, and in a long residual stream the sum after about every fifth block.

    With ``budget`` or ``extra_flops``, calls of convolutions, linear layers, ``matmul``, ``bmm`` and
    ``scaled_dot_product_attention`` run a second time in backward, where their outputs are large for their arithmetic
    (``docs/recompute.md``).  The first step with new shapes keeps as much as without a budget, and chooses these calls
    at the end of its scope; later scopes with the same calls in the same order follow the choice.  ``fusedseg.convert``
    chooses before the first step.  A scope inside of a checkpoint follows choices, but makes none.  The first time that
    a signature runs twice, it runs once more at once; if it gives other bits, a warning says so, and the output stays.

    Args:
        budget: a share of the bytes that autograd is about to save (0.3), or bytes as an int or a text ("6GiB"); None
            lets no call run twice unless ``extra_flops`` is given.
        extra_flops: the arithmetic that may run twice, as a share of the forward arithmetic of these calls (0.02).
            Without ``budget``, it buys as few bytes as it can.  The default with ``budget`` is 0.35.
        bits: 8 or 4 keeps activations in so many bits a value.  The forward pass stays exact; the gradient gets noise,
            but stays right on average (``docs/low_bits.md``).  None keeps them as they are.  With a budget too, only
            calls that read exact values run twice, such as the first convolution.
        seed: the seed of the rounding with ``bits``.  The scope object counts its steps, so that each time that it is
            entered rounds anew, and equal seeds give equal bits.  None shares one count with all scopes without a seed.
        unrounded: with ``bits``, modules whose calls keep everything as it is.

    Falls back to saving the data if it is not certain that a rebuild gives the same bits.  This concerns results of
    functions that the scope does not know, tensors that were modified in place afterwards, tensor subclasses, nested
    and inference tensors, and tensors that could be rebuilt only from the caller's own memory.  All data is saved
    inside ``torch.vmap``, and while other saved-tensor hooks, such as a checkpoint's, lie inside the scope.  Hooks
    around the scope receive the tensors that are kept.

    Under ``torch.compile`` the compiler keeps and rebuilds what the scope would keep and rebuild, whether the scope is
    inside the compiled function or around its call.  A backend that does not use AOTAutograd cannot follow a scope
    inside the compiled function, and the scope warns.

    Warns:
        UserWarning: the first step with new shapes cannot reach the budget; the warning names the bytes that later
            steps keep, and the nearest budget that can be met.

    Raises:
        TypeError, ValueError: ``budget`` or ``extra_flops`` cannot be read or is out of range.
        RuntimeError: in backward, if a tensor from which other tensors are rebuilt was modified in place after the
            scope had ended (inside the scope, a copy is made first); or when a transform of ``torch.func`` that
            differentiates is entered, because saved-tensor hooks cannot surround it.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; here only what is cheap runs again.
    """

    # The products that run again in compiled code (``compiled.begin``); None if they are not known there.
    _again: tuple[int, ...] | None = None

    # What is kept in fewer bits; None if nothing is.
    _rounding: Rounding | None = None

    # Whether the scope is that of a converted model, whose convolutions look for notes (``joins.py``).
    _joins = False

    def __init__(
        self,
        budget: float | str | None = None,
        *,
        extra_flops: float | None = None,
        bits: Bits | None = None,
        seed: int | None = None,
        unrounded: Sequence[torch.nn.Module] = (),
    ) -> None:
        for module in unrounded:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    f"fusedseg.recompute: unrounded must be a sequence of modules, got {type(module).__name__}"
                )
        self._rounding = Rounding.parse("fusedseg.recompute", bits, seed, unrounded)
        self._make_guide: Callable[[], Guide] | None = None
        if budget is not None or extra_flops is not None:
            parsed = Budget.parse("fusedseg.recompute", budget, extra_flops)
            assert parsed is not None
            self._make_guide = partial(Learn, parsed, bits)
        self._entered: list[tuple[ExitStack, BudgetRegistry | None]] = []

    @classmethod
    def guided(
        cls,
        make_guide: Callable[[], Guide] | None,
        again: tuple[int, ...] | None = None,
        rounding: Rounding | None = None,
    ) -> "recompute":
        """A scope whose registry asks a new guide, the result of ``make_guide()``, each time that it is entered.

        ``again`` has the calls that run twice, for compiled code, which asks no guide.
        """
        made = cls()
        made._make_guide, made._again, made._rounding = make_guide, again, rounding
        made._joins = True
        return made

    def _recreate_cm(self) -> "recompute":
        # A decorated function makes a new scope for each call, so that any thread may call it.
        scope = type(self)()
        scope._make_guide, scope._again, scope._rounding = self._make_guide, self._again, self._rounding
        return scope

    @compiled.as_python
    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            if not unfused.wanted() and compiled.prepare():
                if self._make_guide is not None:
                    if self._again is None:
                        compiled.warn_of_budget()
                    elif torch.is_grad_enabled():
                        compiled.warn_of_uncounted()
                if self._rounding is not None:
                    compiled.warn_of_bits()
                compiled.begin(self._again or ())
            return
        stack, guided = ExitStack(), None
        if _torch.MISSING_FOR_SCOPE:
            warn_of_torch(_torch.scope_problem())
        # Inside another scope there is nothing left to do.
        elif (around := innermost()) is not None:
            around.joins |= self._joins
        else:
            outer, rules, back = _torch.top_saved_tensors_default_hooks(True), RULES, unpack
            registry: Registry
            guide, rounding = None if self._make_guide is None else self._make_guide(), self._rounding
            if guide is not None and rounding is not None:
                registry, rules = PackedBudgetRegistry(outer, guide, rounding), PACKED_BUDGET_RULES
            elif guide is not None:
                registry, rules = BudgetRegistry(outer, guide), BUDGET_RULES
            elif rounding is not None:
                registry, rules = PackingRegistry(outer, rounding), PACKING_RULES
            else:
                registry = Registry(outer)
            if isinstance(registry, BudgetRegistry):
                guided, back = registry, registry.guide.unpack
                BUDGETED.append(registry)
                stack.callback(BUDGETED.remove, registry)
            if isinstance(registry, PackingRegistry):
                PACKING.append(registry)
                stack.callback(PACKING.remove, registry)
                if registry.rounding.unrounded:
                    stack.enter_context(registry.watching())
            registry.joins = self._joins
            stack.callback(registry.close)
            pack = registry.pack
            stack.enter_context(saved_tensors_hooks(pack, back))
            stack.enter_context(Watch(registry, pack, rules))
        self._entered.append((stack, guided))

    @compiled.as_python
    def __exit__(self, *exception: object) -> None:
        if torch.compiler.is_compiling():
            if not unfused.wanted() and compiled.prepare():
                compiled.end()
            return
        stack, guided = self._entered.pop()
        stack.close()
        if guided is not None and exception[0] is None:
            guided.finish()
