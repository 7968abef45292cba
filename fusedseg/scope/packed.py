"""What a scope with ``bits`` keeps: tensors in 8 or 4 bits a value, rounded at random (``ops/low_bit``).

``PackedData`` is a recipe without inputs: it holds the codes of a tensor, and a rebuild decompresses them.  So the
rules for rebuilt tensors hold for it as well: saved tensors that are asked for soon after each other share one value,
and nothing else keeps a value alive.

Rounded values may go only where they do not bias the gradient.  ``PackingRegistry.reading`` says what the present call
may read and how it may save a tensor; ``packing.py`` sets it for each call.  Outside of known calls all is exact.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from .. import _torch
from .._module_hooks import looking_on
from ..ops.low_bit.op import pack, unpack
from ..ops.low_bit.spec import DTYPES, FEWEST_VALUES, Bits, Packed, mixed, rank
from ..ops.norm.coded import FromCodes
from ..ops.observer import OpCall
from .memory import Memory
from .offers import Offer
from .plain import Place, plain
from .registry import Registry
from .saved import EXACT, AsItIs, Data, Handle, Hooks, Recipe, modified

CHOICES = get_args(Bits)
HELD_BYTES = 2**24  # unpacked tensors of up to this many bytes are held for the next reader

_unseeded = itertools.count()  # steps of all scopes without a seed


class Rounding:
    """What a user has asked for, and the number of steps so far.

    Args:
        bits: 8 or 4.
        seed: an integer.  Its steps are counted here, so that equal programs get equal bits.  None shares one count
            of steps with all other scopes without a seed.
        unrounded: modules that keep everything as it is.
    """

    def __init__(self, bits: int, seed: int | None = None, unrounded: Sequence[torch.nn.Module] = ()) -> None:
        self.bits, self.seed, self.unrounded, self.steps = bits, seed, tuple(unrounded), 0

    @classmethod
    def parse(cls, op: str, bits: Any, seed: Any, unrounded: Sequence[torch.nn.Module] = ()) -> "Rounding | None":
        """Raises TypeError or ValueError if an argument does not fit.  None if ``bits`` is None."""
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"{op}: seed must be an integer or None, got {type(seed).__name__}")
        if bits is None:
            for name, given in (("seed", seed is not None), ("unrounded", len(unrounded) > 0)):
                if given:
                    raise ValueError(f"{op}: {name} is given without bits")
            return None
        if isinstance(bits, bool) or not isinstance(bits, int):
            raise TypeError(f"{op}: bits must be 8, 4 or None, got {type(bits).__name__}")
        if bits not in CHOICES:
            raise ValueError(f"{op}: bits must be 8, 4 or None, got {bits}")
        return cls(bits, seed, unrounded)

    def key(self) -> tuple[int, int, int]:
        """What the rounding of the next step depends on, beside the place in the step."""
        if self.seed is None:
            return 0, rank(), next(_unseeded)
        self.steps += 1
        return self.seed, rank(), self.steps - 1


class Reading(NamedTuple):
    """What a call may read in backward, and how it may save a tensor.

    needs: the fewest bits of a source of the recipes that it may save.
    bits: the bits in which other tensors are packed; None keeps them as they are.
    sides: whether the sign of each saved tensor must be exact, which a recipe of rounded values does not give.
    own: whether the call may pack what does not require a gradient, because it has computed it.
    defers: whether its tensors are packed later (``PackingRegistry.pending``).
    spared: a tensor that stays as it is, such as a computed weight.
    """

    needs: int = EXACT
    bits: int | None = None
    sides: bool = False
    own: bool = False
    defers: bool = False
    spared: Tensor | None = None


UNKNOWN = Reading()


class PackedData(Recipe):
    """A tensor that is kept in fewer bits.  It shares no memory with the tensor, once it is packed.

    ``version`` is that of the tensor when it was saved.  The registry treats it like ``Data``: a writer of the tensor's
    memory need not care for it, except that it must be packed before.
    """

    copied = exposed = False
    in_recipe = in_graph = unpacks = True
    # Counted as data, not as a call; but its values are rebuilt.
    steps, needs = 0, 1
    # Set while the tensor is not packed yet: what the norm that reads it has returned, and the kink of that norm.
    output: "weakref.ref[torch.UntypedStorage] | None" = None
    kink_of_norm: Callable[[], Tensor | None] | None = None

    def __init__(self, t: Tensor, at: Place, outer: Hooks | None, bits: int, key: int) -> None:
        self.at, self.device, self.outer, self.version = at, t.device, outer, t._version
        self.orders: list[int] = []
        self.inputs = ()
        self.bits, self._key = bits, key
        self._dense: Tensor | None = t.detach()
        # The fields of ``Packed``: the tensors, as data if hooks around the scope hold them, and the others.
        self._parts: Sequence[Tensor | Data | None] = ()
        self._form: Sequence[Any] = ()
        self.has_kink, self.nbytes = False, t.untyped_storage().nbytes()
        # A list of one number, which all packed tensors of a scope share: the bytes of the largest one when unpacked.
        self.largest = [0]

    def settle(self, bits: int, kink: Tensor | None = None) -> None:
        """Packs the tensor, unless it is packed or was changed unnoticed, which ``load`` tells."""
        t = self._dense
        if t is None or t._version != self.version:
            return
        with _torch.DisableTorchFunction():
            self.take(pack(t, bits, self._key, kink))

    def take(self, packed: Packed) -> None:
        """Keeps ``packed`` in place of the tensor."""
        self._parts, self._form, self.nbytes = packed[:4], packed[4:], packed.nbytes
        if self.outer is not None:
            self._parts = [None if part is None else self._given_away(part) for part in packed[:4]]
        self._dense, self.bits, self.has_kink = None, packed.bits, packed.kink is not None
        self.output = self.kink_of_norm = None

    def packed(self) -> Packed:
        self.settle(self.bits)
        if self._dense is not None:
            raise modified(self._dense, self.version)
        parts = [part.load() if isinstance(part, Data) else part for part in self._parts]
        return Packed._make([*parts, *self._form])

    def _given_away(self, part: Tensor) -> Data:
        data = Data(part, self.outer, Place.of(part))
        # The hooks may return it only once.
        data.in_recipe = True
        return data

    def near(self, order: float) -> bool:
        # The peak is where the largest tensors would be held, so each reader unpacks them for itself.
        return self.at.nbytes <= max(HELD_BYTES, self.largest[0] // 2) and super().near(order)

    def changed(self) -> bool:
        return False

    def copy_before_change(self, storage: torch.UntypedStorage) -> None:
        self.settle(self.bits)

    copy_for_recipes = copy_before_change

    def _rebuilt(self, order: int, for_call: bool) -> Tensor:
        with _torch.DisableTorchFunction():
            return unpack(self.packed())


class RecipeOfCodes(Recipe):
    """A recipe whose function may be a ``FromCodes``."""

    def _rebuilt(self, order: int, for_call: bool) -> Tensor:
        source, at = self.inputs[0]
        if isinstance(self.rebuild, FromCodes) and type(source) is PackedData and source.at == at:
            with _torch.DisableTorchFunction(), torch.no_grad():
                again = self.rebuild.from_codes(source.packed())
                if again is not None:
                    return again(*(self._input(i, order, for_call)[0] for i in range(1, len(self.inputs))))
        return super()._rebuilt(order, for_call)


# A function that makes the call of an op under a registry.
OpRule = Callable[["PackingRegistry", Any], Tensor]


class PackingRegistry(Registry):
    """The registry of a scope with ``bits``."""

    rounds, chains, recipe = True, False, RecipeOfCodes

    def __init__(self, outer: Hooks | None, rounding: Rounding, ops: Mapping[type[OpCall], OpRule]) -> None:
        super().__init__(outer)
        # The rules of this package's ops (``packed_ops.py``).
        self.ops = ops
        self.rounding, self._step, self._places = rounding, rounding.key(), itertools.count()
        self.reading = UNKNOWN
        # The number of modules of ``Rounding.unrounded`` that run now.
        self._inside = 0
        self.largest = [0]
        # The tensors that are packed before the next call, when it is known what reads the output of their norm.
        self.pending: list[PackedData] = []

    def observe(self, call: OpCall) -> Tensor:
        rule = self.ops.get(type(call))
        return super().observe(call) if rule is None else rule(self, call)

    @property
    def needs(self) -> int:  # type: ignore[override]
        return self.reading.needs

    @property
    def spares(self) -> bool:
        """Whether a module of ``Rounding.unrounded`` runs now."""
        return self._inside > 0

    def pack(self, t: Tensor) -> AsItIs | Data | Handle:
        saved = super().pack(t)
        return Handle(saved, Place.of(t)) if isinstance(saved, PackedData) else saved

    def keep(self, t: Tensor, computed: bool | None = None) -> Any:
        """Keeps ``t``: as the present call may; if ``computed``, as a result of a call; if it is False, as it is."""
        if computed is None:
            return super().keep(t)
        # What a norm rebuilds its input from has another shape than the kinks of the norm.
        with self.allowing(self.reading._replace(own=True, defers=False, sides=False) if computed else UNKNOWN):
            return super().keep(t)

    def _keep(self, t: Tensor, at: Place, memory: Memory) -> Any:
        reading = self.reading
        if reading.bits is None or memory.exposed or not self._takes(t):
            return super()._keep(t, at, memory)
        known: Any = memory.kept_at(at, t._version)
        if isinstance(known, PackedData):
            # A norm with an activation (``defers``) needs its own kink.  Its recipes find the newest copy.
            if not (known.has_kink or reading.defers) if reading.sides else known.bits >= reading.needs:
                return known
        elif known is not None:
            # The tensor is kept as it is for another reason.
            return super()._keep(t, at, memory)
        made = self._note(PackedData(t, at, self.outer, reading.bits, self.next_key()), memory)
        if reading.defers:
            self.pending.append(made)
        else:
            made.settle(reading.bits)
        return made

    def _note(self, made: PackedData, memory: Memory) -> PackedData:
        made.largest, self.largest[0] = self.largest, max(self.largest[0], made.at.nbytes)
        newest: Any = weakref.ref(made)  # the newest copy is found first
        memory.kept = (newest, *(ref for ref in memory.kept if ref() is not None))
        return made

    def next_key(self) -> int:
        """The seed of the tensor that is packed next."""
        return mixed(*self._step, next(self._places))

    def packs_anew(self, t: Tensor, overwritten: bool) -> bool:
        """Whether ``pack`` will pack ``t``, which no recipe and no packed tensor stands for, so that an op may do it.

        overwritten: whether ``t`` gets other values before.
        """
        if not plain(t) or not self.packs(t):
            return False
        memory = self._find(t.untyped_storage())
        if memory is None or memory.exposed:
            return memory is None
        at, version = Place.of(t), t._version
        return overwritten or (memory.offer_of(at, version) is None and memory.kept_at(at, version) is None)

    def keep_packed(self, t: Tensor, packed: Packed) -> PackedData:
        """Keeps ``packed`` for ``t``, and for calls that save ``t`` later."""
        made = PackedData(t, Place.of(t), self.outer, packed.bits, 0)
        made.take(packed)
        return self._note(made, self._memory(t.untyped_storage()))

    def known(self, x: Tensor) -> Any:
        """What is kept of ``x``, or else the ``Offer`` to rebuild it, or None."""
        memory, place = (self._find(x.untyped_storage()) if plain(x) else None), (Place.of(x), x._version)
        return None if memory is None else memory.kept_at(*place) or memory.offer_of(*place)

    def rounded_steps(self, x: Tensor) -> int | None:
        """The calls that would rebuild ``x`` from rounded values; None if its sign is certain."""
        known = self.known(x)
        if isinstance(known, Offer):
            return None if known.bits >= EXACT else known.steps
        return 0 if isinstance(known, PackedData) and known.has_kink else None

    def packs(self, t: Tensor) -> bool:
        return self.reading.bits is not None and self._takes(t)

    def _takes(self, t: Tensor) -> bool:
        """Whether ``t`` may be packed.  What is left out are vectors, small tensors, masks and the caller's data."""
        reading = self.reading
        # The second forward of a checkpoint lives shortly, and the first one keeps nothing.
        if self._in_checkpoint or t.dim() < 2 or t.numel() < FEWEST_VALUES or t.dtype not in DTYPES:
            return False
        if not (t.requires_grad or reading.own):
            return False
        storage = t.untyped_storage()
        if reading.spared is not None and reading.spared.untyped_storage() is storage:
            return False
        # A tensor that was expanded has less memory than values.
        return storage.nbytes() >= t.nbytes

    @contextmanager
    def allowing(self, reading: Reading) -> Any:
        """A context for a known call, which is exact inside of ``Rounding.unrounded``."""
        before, self.reading = self.reading, UNKNOWN if self.spares else reading
        try:
            yield
        finally:
            self.reading = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the modules of ``Rounding.unrounded`` are noticed when this thread calls them."""
        modules, thread = set(self.rounding.unrounded), threading.get_ident()

        def count(step: int, module: torch.nn.Module) -> None:
            if module in modules and threading.get_ident() == thread:
                self._inside += step

        with looking_on(lambda module, args: count(1, module), lambda module, *call: count(-1, module)):
            yield

    def linear(self, spared: Tensor | None = None) -> Any:
        """A context for a call whose saved tensors enter the gradient linearly."""
        self.settle()
        return self.allowing(Reading(0, self.rounding.bits, spared=spared))

    def close(self) -> None:
        self.settle()
        super().close()

    def settle(self) -> None:
        """Packs what is pending, without knowing what reads the outputs of the norms."""
        pending, self.pending = self.pending, []
        for data in pending:
            data.settle(data.bits)
