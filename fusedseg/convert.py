"""``convert``: blocks of a stock model run their norms, activations and pools as lean ops, in eager mode.

A *block* is a module whose class says which child reads what, so that nothing has to be observed (``_steps_of``).  The
children stay the same stock modules.  Only the call of a block does their work: ``BlockPlan`` finds the pairs of norm
and activation once, and a call looks at a few attributes of each module before it does that module's work.  Whatever
else calls a child, or looks at its calls, meets the stock module.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from . import _torch
from ._module_hooks import has_global_hooks, has_hooks
from ._torch import FakeTensor, FakeTensorMode
from .activation import OF_MODULE as ACTIVATIONS
from .activation import TABLE, Activation, is_invertible, parse_activation
from .memory.meter import LiveBytes
from .ops.max_pool import pool as pools
from .ops.norm.checks import check
from .ops.norm.eager import normalise_eagerly
from .ops.norm.kept import KeptChannels
from .ops.norm.stock import KINDS, OF_MODULE

OP = "fusedseg.convert"
Model = TypeVar("Model", bound=nn.Module)

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
POOLS: dict[type[nn.Module], int] = {nn.MaxPool2d: 2, nn.MaxPool3d: 3}


# The library blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Add:
    """The place in a block's steps where the block's own input is added to the tensor, in place.

    projection: modules that the input goes through first.
    """

    projection: tuple[nn.Module, ...] = ()

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        for module in self.projection:
            given = module(given)
        x += given
        return x


Step = nn.Module | Add


# Block -> the modules that its forward calls one after the other; None if this block does something else.
Steps = Callable[[Any], Sequence[Step] | None]


def _residual(block: Any, before: Sequence[nn.Module], act: nn.Module) -> Sequence[Step] | None:
    """The steps of nnU-Net's residual blocks, if the skip is the identity and nothing lies between norm and sum."""
    # The constructor makes the identity itself; a module projects.
    own = getattr(block.skip, "__qualname__", "") == f"{_stock_class(block).__qualname__}.__init__.<locals>.<lambda>"
    if not own or block.apply_se or block.apply_stochastic_depth:
        return None
    return (*before, Add(), act) if isinstance(act, nn.Module) else None


def _unet_res_block(block: Any) -> Sequence[Step] | None:
    """MONAI's: its skip is the identity unless the block has a third convolution or norm."""
    projection = tuple(getattr(block, name) for name in ("conv3", "norm3") if name in block._modules)
    return block.conv1, block.norm1, block.lrelu, block.conv2, block.norm2, Add(projection), block.lrelu


_DNA = "dynamic_network_architectures.building_blocks"
_DYNUNET = "monai.networks.blocks.dynunet_block"
# The module and the name of a class, so that no library is imported -> the digest of its source that was read
# (``digest_of``), and its steps.
LIBRARY: dict[tuple[str, str], tuple[str, Steps]] = {
    (f"{_DNA}.simple_conv_blocks", "ConvDropoutNormReLU"): ("f35871bdc10c906f", lambda b: (b.all_modules,)),
    (f"{_DNA}.residual", "BasicBlockD"): ("1e095a395dea0d83", lambda b: _residual(b, (b.conv1, b.conv2), b.nonlin2)),
    (f"{_DNA}.residual", "BottleneckD"): (
        "cbff1eccf9e39eb8",
        lambda b: _residual(b, (b.conv1, b.conv2, b.conv3), b.nonlin3),
    ),
    (_DYNUNET, "UnetBasicBlock"): (
        "bbd7da61637874c5",
        lambda b: (b.conv1, b.norm1, b.lrelu, b.conv2, b.norm2, b.lrelu),
    ),
    (_DYNUNET, "UnetResBlock"): ("b68da2459286bea6", _unet_res_block),
    ("monai.networks.nets.vnet", "LUConv"): ("f250e5d356e5f8c5", lambda b: (b.conv_block, b.act_function)),
}


def digest_of(cls: type[nn.Module]) -> str:
    """The digest of the source of a class's constructor and forward; "" if there is no source."""
    try:
        source = inspect.getsource(cls.__init__) + inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@functools.cache
def _library_steps(cls: type[nn.Module]) -> Steps | None:
    """The steps of a known class; None for other classes, and for other versions of a known one."""
    known = LIBRARY.get((cls.__module__, cls.__qualname__))
    return known[1] if known is not None and known[0] == digest_of(cls) else None


def _stock_class(module: nn.Module) -> type[nn.Module]:
    return module._stock if isinstance(module, FusedStock) else type(module)


def _steps_of(module: nn.Module) -> Sequence[Step] | None:
    """The modules that a call of the module calls one after the other; None if its class does not say that."""
    # mypy sees no hash of a class of modules.
    cls: Any = _stock_class(module)
    if cls.__call__ is not nn.Module.__call__:
        return None
    if issubclass(cls, nn.Sequential):
        plain = cls.forward is nn.Sequential.forward and cls.__iter__ is nn.Sequential.__iter__
        children = tuple(module._modules.values())
        return children if plain and None not in children else None  # type: ignore[return-value]
    steps = _library_steps(cls)
    return None if steps is None else steps(module)


# The plan of a block -------------------------------------------------------------------------------------------------


@functools.lru_cache
def _parsed(name: str, parameter: object) -> Activation | None:
    try:
        return parse_activation(OP, name, parameter)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _activation(act: Any) -> Activation | None:
    """The activation of a stock module, as its attributes are now; None if no op has it."""
    row = ACTIVATIONS[type(act)]
    for name, value in row.fixed:
        if getattr(act, name) != value:
            return None
    return _parsed(row.name, None if row.parameter is None or row.learned else getattr(act, row.parameter.attribute))


def _is_untouched(module: nn.Module, cls: type) -> bool:
    """Whether a module is still of its class, and nobody looks at its calls, so that other code may do its work."""
    own = module.__dict__
    if module.__class__ is not cls or has_hooks(module) or "forward" in own or "_conv_forward" in own:
        return False
    return own.get("_compiled_call_impl") is None


def _takes(norm: Any, x: Tensor) -> bool:
    """Whether a stock norm takes the input, as one batch with the channels that it was made for."""
    kind = OF_MODULE[type(norm)]
    least, most = kind.modules[type(norm)]
    if x.layout is not torch.strided or not least <= x.dim() <= most:
        return False
    return x.numel() > 0 and x.shape[1] == getattr(norm, kind.channels)


@dataclass(eq=False, slots=True)
class NormAndAct:
    """A norm and the activation after it.

    conv: the convolution directly before the norm, or None.  adds: whether the block's input is added between norm and
    activation.  after: the convolution directly after the activation, or None.
    """

    conv: nn.Module | None
    norm: nn.Module
    act: Any
    adds: bool
    after: nn.Module | None
    classes: tuple[type, ...] = ()
    kept: KeptChannels = field(default_factory=KeptChannels)

    def __post_init__(self) -> None:
        self.classes = tuple(type(module) for module in (self.norm, self.act, self.conv, self.after))

    def way(self, how: Activation | None, fresh: bool) -> str:
        """What the op keeps, "output" or "input"; "" if it would save nothing, or must not run.

        ``fresh`` says that this call has just made the norm's input, and that nobody else has it.
        """
        if how is None:
            return ""
        # Who writes over the output later: nobody before the next convolution, which keeps it; else eager mode must
        # keep the output too, as it does for an activation in place.
        kept = TABLE[how.name].keeps_result
        in_place = self.act.inplace if kept == "in place" else False
        closed = in_place or (self.after is not None and _is_untouched(self.after, self.classes[3]))
        if fresh and closed and is_invertible(how.name, how.param):
            return "output"
        # Where the activation keeps its output, a norm that keeps its input saves nothing.
        return "" if self.adds or in_place or kept == "always" else "input"

    def saves(self) -> str:
        """``way`` for the modules as they are now."""
        return self.way(_activation(self.act), self.conv is not None)

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        conv, norm, act = self.conv, self.norm, self.act
        of_norm, of_act, of_conv, _ = self.classes
        fresh = conv is not None and _is_untouched(conv, of_conv)
        if conv is not None:
            x = conv(x)
        if _is_untouched(norm, of_norm) and _is_untouched(act, of_act):
            z = self._fused(x, given if self.adds else None, fresh)
            if z is not None:
                return z
        x = norm(x)
        if self.adds:
            x += given
        return act(x)

    def _fused(self, x: Tensor, residual: Tensor | None, fresh: bool) -> Tensor | None:
        """The result of one op; None, with nothing done, if the stock modules must run."""
        norm, act = self.norm, self.act
        how = _activation(act)
        keep = self.way(how, fresh and not x._is_view())
        if not keep or how is None or not _takes(norm, x):
            return None
        if residual is not None and residual.dtype != x.dtype:
            return None
        if torch.is_autocast_enabled(x.device.type) and not self._keeps_dtypes(x, how):
            return None
        slope = act.weight if TABLE[how.name].learned else None
        # Running statistics move where a checkpoint runs a second time too, as those of the stock norm.
        given, of_call = OF_MODULE[self.classes[0]].call(norm, x, how, keep, residual, slope)
        try:
            check(OP, given, of_call)
        except (TypeError, ValueError):
            # The stock modules take what the op does not, or raise their own error.
            return None
        kept = None
        if keep == "output":
            kept = self.kept.refresh(given.weight, given.bias, how, x.dtype, residual is not None)
        return normalise_eagerly(given, of_call, kept)

    def _keeps_dtypes(self, x: Tensor, how: Activation) -> bool:
        """Whether autocast lets both modules return the dtype of ``x``."""
        row = TABLE[how.name]
        if not OF_MODULE[self.classes[0]].autocast or not row.autocast:
            return False
        return not row.learned or x.dtype == torch.get_autocast_dtype(x.device.type)


def _paired(steps: Sequence[Step]) -> Iterator[Step | NormAndAct]:
    """The steps, in which norms and activations that an op may serve are pairs."""
    i = 0
    while i < len(steps):
        pair, count = _pair_at(steps, i)
        if pair is not None and pair.saves():
            yield pair
            i += count
        else:
            yield steps[i]
            i += 1


def _pair_at(steps: Sequence[Step], i: int) -> tuple[NormAndAct | None, int]:
    """The pair that begins at a step, with the number of its steps."""
    first = i
    conv = steps[i] if type(steps[i]) in CONVS else None
    i += conv is not None
    norm, adds = steps[i] if i < len(steps) else None, steps[i + 1 : i + 2] == [Add()]
    i += 1 + adds
    act = steps[i] if i < len(steps) else None
    if type(norm) not in OF_MODULE or type(act) not in ACTIVATIONS:
        return None, 0
    after = steps[i + 1] if i + 1 < len(steps) and type(steps[i + 1]) in CONVS else None
    return NormAndAct(conv, norm, act, adds, after), i + 1 - first  # type: ignore[arg-type]


def _facts_of(module: nn.Module) -> tuple[object, ...]:
    """What decides what the forward of a container or a library block does: its children, and attributes."""
    own = module.__dict__
    return tuple(module._modules.values()), own.get("apply_se"), own.get("apply_stochastic_depth"), own.get("skip")


class BlockPlan:
    """What a call of a block does.

    steps: the modules that are called, and the pairs that ops may serve.  pairs: these pairs alone.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        # Modules whose call is the calls of their children, with their classes and facts.
        self._containers: list[tuple[nn.Module, type, tuple[object, ...]]] = []
        # Modules that return their input.
        self._idle: list[tuple[Any, type, bool]] = []
        flat = list(self._flat(block, top=True))
        self.steps = list(_paired(flat))
        self.pairs = [step for step in self.steps if isinstance(step, NormAndAct)]

    def _flat(self, module: nn.Module, top: bool = False) -> Iterator[Step]:
        steps = _steps_of(module)
        if steps is None or (not top and any(isinstance(step, Add) for step in steps)):
            yield module
            return
        self._containers.append((module, type(module), _facts_of(module)))
        for step in steps:
            if isinstance(step, Add):
                yield step
            elif type(step) is nn.Identity or (type(step) in DROPOUTS and step.p == 0):
                self._idle.append((step, type(step), type(step) in DROPOUTS))
            else:
                yield from self._flat(step)

    def fits(self, block: nn.Module) -> bool:
        """Whether this is the block that the plan is of, with the children that the plan knows.

        A replica of ``nn.DataParallel`` has all attributes of the block, and so its plan.
        """
        return self._block is block and all(_facts_of(module) == facts for module, _, facts in self._containers)

    def is_unseen(self) -> bool:
        """Whether nobody looks at the calls of the modules that a run leaves out."""
        if not all(_is_untouched(module, cls) for module, cls, _ in self._containers[1:]):
            return False
        return all(_is_untouched(module, cls) and not (drops and module.p != 0) for module, cls, drops in self._idle)

    def run(self, x: Tensor) -> Tensor:
        given = x
        for step in self.steps:
            if isinstance(step, (NormAndAct, Add)):
                x = step(x, given)
            else:
                x = step(x)
        return x


# The fused classes ---------------------------------------------------------------------------------------------------


def _is_usual(x: object) -> bool:
    """Whether autograd records ordinary calls of eager mode, which nothing else follows."""
    if not (type(x) is Tensor or type(x) is FakeTensor) or not torch.is_grad_enabled():
        return False
    if torch.jit.is_tracing() or _torch.are_functorch_transforms_active() or has_global_hooks():
        return False
    if _torch.forward_ad._current_level >= 0:
        return False
    # Modes that only measure memory; others may follow each op, or change what is saved.
    known = (FakeTensorMode, LiveBytes)
    return not _torch.len_torch_dispatch_stack() or all(isinstance(mode, known) for mode in _torch.dispatch_modes())


class FusedStock:
    """The first base class of a fused block; the second one is the stock class of the block."""

    _stock: type[Any]
    # The name of the plan among the attributes of a block.
    PLAN = "_fusedseg_plan"

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = made
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != self.PLAN}
        return _new, (self._stock,), state, *rest

    def __prepare_scriptable__(self) -> Any:
        """``torch.jit.script`` reads the source of forwards, so it gets the stock block, which stays stock."""
        return _reverted(self)


class FusedBlock(FusedStock):
    def forward(self, input: Any) -> Any:  # noqa: A002  the name in ``nn.Sequential``
        if torch.compiler.is_compiling() or not _is_usual(input):
            return self._stock.forward(self, input)
        plan = self.__dict__.get(self.PLAN)
        if plan is None or not plan.fits(self):
            plan = BlockPlan(self)  # type: ignore[arg-type]
            # A replica of ``nn.DataParallel`` lives for one call.  If it stored its plan, which holds the replica, both
            # would hold a copy of the parameters until the garbage collector runs.
            if "_is_replica" not in self.__dict__:
                self.__dict__[self.PLAN] = plan
        if not plan.pairs or not plan.is_unseen():
            return self._stock.forward(self, input)
        return plan.run(input)


class FusedPool(FusedStock):
    def forward(self, input: Any) -> Any:  # noqa: A002  the name in the stock module
        found = None if torch.compiler.is_compiling() or not _is_usual(input) else _pool_of(self, input)
        return self._stock.forward(self, input) if found is None else pools.max_pool(*found)


def _pool_of(module: Any, x: Tensor) -> tuple[Tensor, pools.Pool] | None:
    dims = POOLS[module._stock]
    if not x.requires_grad or x.layout is not torch.strided or x.numel() == 0 or x.dim() != dims + 2:
        return None
    kwargs = {"dilation": module.dilation, "ceil_mode": module.ceil_mode, "return_indices": module.return_indices}
    return pools.of_stock(dims, x, (module.kernel_size, module.stride, module.padding), kwargs)


@functools.cache
def _fused_class(stock: type) -> type:
    """The fused form of a stock class, which has its name, so that code that prints or reads names sees the same."""
    base = FusedPool if stock in POOLS else FusedBlock
    names = {
        "_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock)(stock.__name__, (base, stock), names)


def _new(stock: type) -> Any:
    """An empty module, for copies and pickles."""
    return object.__new__(_fused_class(stock))


def _reverted(module: Any) -> Any:
    module.__class__ = module._stock
    module.__dict__.pop(FusedStock.PLAN, None)
    return module


# The public functions ------------------------------------------------------------------------------------------------


def convert(model: Model) -> Model:
    """Lets blocks of a model run their norms, activations and max-pools as lean ops, in place, and returns the model.

    What a block's call reads and in which order is known from its class: ``nn.Sequential`` and its subclasses without a
    forward of their own, and blocks of nnU-Net and MONAI.  In such a block:

    * a norm and an activation in place after a convolution become one op that writes over the convolution's output and
      keeps this one tensor, if the activation has an inverse (LeakyReLU, ELU, SELU);
    * any other norm and an activation that keeps its input (PReLU, SiLU, GELU ...) become one op that keeps the norm's
      input, as the stock norm does, and drops the tensor between both.

    Max-pools keep one byte for each element of their output.  All else stays stock.
    ``print(fusedseg.conversion(model))`` shows what is served and what is left, with reasons.  A norm before ReLU is
    left, because backward of ReLU reads its output, which the next layer keeps too: use
    ``torch.compile(model, backend="fusedseg")`` for such networks.

    Only the class of blocks and pools changes, and it keeps its name.  Norms, activations and convolutions stay the
    same stock modules, so parameters, ``state_dict``, optimizers, hooks and code that calls or exchanges children go on
    as before.  In each call of a block the stock forward runs where the result could differ or somebody looks: hooks of
    a child or of all modules, a child of another class, parametrised modules, ``torch.compile``, ``torch.export``,
    ``torch.jit``, ``torch.func``, forward-mode derivatives, dispatch modes, tensor subclasses, sparse and empty
    tensors.  It runs without grad mode too, where there is nothing to keep.

    Values are those of the stock model up to rounding; on aten, without a GPU, outputs have the same bits.  An instance
    or group norm of an input in channels_last returns channels_last, where PyTorch's may copy it to contiguous.

    Args:
        model: any module; a part of a model may be converted by itself.  A second call does nothing new.

    Raises:
        TypeError: ``model`` is no module.

    A second derivative through a served norm raises a RuntimeError in backward; call ``revert`` first.
    ``torch.jit.script`` reverts the model that it is given.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, FusedStock):
            continue
        cls: Any = type(module)
        if cls in POOLS or (_steps_of(module) is not None and BlockPlan(module).pairs):
            module.__class__ = _fused_class(cls)
    return model


def revert(model: Model) -> Model:
    """Gives every block and pool its stock class back, in place, and returns the model; nothing else has changed."""
    for module in model.modules():
        if isinstance(module, FusedStock):
            _reverted(module)
    return model


class Served(NamedTuple):
    """A norm or a pool that an op serves: its name, its class, and what the op keeps."""

    name: str
    cls: str
    keeps: str


class Left(NamedTuple):
    """A norm or a pool that stays stock: its name, its class, and why."""

    name: str
    cls: str
    why: str


class Conversion(NamedTuple):
    """What ``convert`` has done with the norms and the pools of a model; ``print`` shows it in a few lines."""

    served: list[Served]
    left: list[Left]

    def __str__(self) -> str:
        lines = [f"fusedseg.convert serves {len(self.served)} norms and pools, and leaves {len(self.left)}."]
        for title, groups in (("Served", _grouped(self.served)), ("Left", _grouped(self.left))):
            lines += [f"{title}, {of}:\n    {names}" for of, names in groups.items()]
        if self.left:
            lines.append('For all of a model: torch.compile(model, backend="fusedseg")')
        return "\n".join(lines)


# A printed line has at most this many names; the attributes have all.
MOST_NAMES = 4


def _grouped(rows: Sequence[Served | Left]) -> dict[str, str]:
    """The names of the modules of equal class and text."""
    groups: dict[str, list[str]] = {}
    for name, cls, text in rows:
        groups.setdefault(f"{cls}: {text}", []).append(name or "the model itself")
    return {
        of: ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
        for of, names in groups.items()
    }


WAYS = {"output": "keeps the output of its activation alone", "input": "keeps its input, not the activation's"}
ANY_NORM = tuple(kind.base for kind in KINDS.values())


def conversion(model: nn.Module) -> Conversion:
    """Which norms and pools of a model ``convert`` serves, and which stay stock, with reasons."""
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    pairs: dict[Any, NormAndAct] = {pair.norm: pair for block in blocks for pair in BlockPlan(block).pairs}
    why = _reasons(model)
    served: list[Served] = []
    left: list[Left] = []
    for name, module in model.named_modules():
        cls: str = type(module).__name__
        if module in pairs:
            act = type(pairs[module].act).__name__
            served.append(Served(name, f"{cls} and {act}", WAYS[pairs[module].saves()]))
        elif isinstance(module, FusedPool):
            served.append(Served(name, cls, "keeps one byte for each element of its output"))
        elif isinstance(module, (*ANY_NORM, *POOLS)):
            left.append(Left(name, cls, why.get(module, "it is called by the model's own code")))
    return Conversion(served, left)


def _reasons(model: nn.Module) -> dict[Any, str]:
    """Why norms stay stock, from the modules that hold them."""
    why: dict[Any, str] = {}
    for parent in model.modules():
        steps = _steps_of(parent)
        cls: Any = _stock_class(parent)
        another = (cls.__module__, cls.__qualname__) in LIBRARY and _library_steps(cls) is None
        for child in parent.children():
            if steps is None and child not in why:
                why[child] = f"the forward of {'another version of ' if another else ''}{cls.__name__} calls it"
        for i, step in enumerate(steps or ()):
            if isinstance(step, ANY_NORM):
                why[step] = _reason(step, (*steps[i + 1 :], None)[0])  # type: ignore[index]
    return why


def _reason(norm: nn.Module, after: object) -> str:
    if type(norm) not in OF_MODULE:
        return "its class is not one of PyTorch's own norms"
    row = ACTIVATIONS.get(type(after)) if isinstance(after, nn.Module) else None
    if row is None:
        return "no activation that an op has follows it in its block"
    act = type(after).__name__
    if row.keeps_result:
        return f"{act} after it keeps its own output, which the next layer keeps too, so nothing would be saved"
    return f"no op has {act} with these attributes"
