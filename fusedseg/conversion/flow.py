"""The flow of a model: the calls of one forward in their order, with the values that they read and make.

A value is a result of one call.  A call that writes over its argument makes a new value in the same memory, so that a
later call that reads the tensor reads the new value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from ..activation import OF_MODULE, OTHERS

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm)
POOLS = (nn.MaxPool2d, nn.MaxPool3d)
UPSAMPLINGS = (nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
# Modules of these packages count as one call.  The blocks of fusedseg.unet do not: their calls are seen one by one.
LEAVES = ("torch.nn.", "torch.ao.nn.", "torch.jit", "fusedseg.nn.", "fusedseg.conversion.")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# The names of functions by kind.  In-place forms are found without their trailing underscore.
KINDS = {
    "conv": {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"},
    "norm": {"batch_norm", "instance_norm", "group_norm"},
    "activation": {row.name for row in OF_MODULE.values()} | {other.name for other in OTHERS},
    "add": {"add", "iadd", "__add__", "__iadd__", "__radd__"},
    "pool": {"max_pool1d", "max_pool2d", "max_pool3d"},
    "join": {"cat", "concat", "concatenate", "interpolate", "upsample", "pad"},
}
MODULE_KINDS: dict[str, tuple[type, ...]] = {
    "conv": CONVS,
    "norm": NORMS,
    "activation": (*OF_MODULE, *(other.module for other in OTHERS if other.module is not None)),
    "pool": POOLS,
    "join": UPSAMPLINGS,
}


def kind_of(name: str, module: nn.Module | None) -> str:
    """The kind of a call: conv, norm, activation, add, pool, join or other.  A subclass of a stock class is "other"."""
    if module is not None:
        return next((kind for kind, classes in MODULE_KINDS.items() if type(module) in classes), "other")
    name = name if name.endswith("__") else name.rstrip("_")
    return next((kind for kind, names in KINDS.items() if name in names), "other")


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of the module counts as one call, although it may call other modules and functions inside."""
    home = type(module).__module__
    # DataParallel and similar modules wrap a model, whose calls must be seen.
    return home.startswith(LEAVES) and not home.startswith("torch.nn.parallel.") and type(module) not in CONTAINERS


@dataclass(eq=False)
class Call:
    """One call of a leaf module, or of a function.

    where: the path of the module whose forward makes the call.
    reads, makes: the values that it reads and makes.
    nbytes, shape: the size of the first tensor that it makes; None if sizes are not known.
    """

    name: str
    module: nn.Module | None
    where: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.module)

    @property
    def title(self) -> str:
        return f"{self.name}()" if self.module is None else self.name


@dataclass
class Flow:
    """The calls of one forward, with indices of the values.

    how: "observed in training mode", for example.
    returned: values that leave the model, or that something outside this forward still holds.
    passed: values that went through a call that changes nothing, such as dropout in eval mode.
    overwritten: values over which a later call writes.
    seen_by: for each value, the modules that get or return it, containers too: their hooks see it.
    """

    how: str
    calls: list[Call] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    seen_by: dict[int, dict[nn.Module, None]] = field(default_factory=dict)

    _readers: dict[int, list[Call]] = field(default_factory=dict)
    _maker: dict[int, Call] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        self.calls.append(call)
        for value in dict.fromkeys(call.reads):
            self._readers.setdefault(value, []).append(call)
        for value in call.makes:
            self._maker[value] = call

    def sees(self, module: nn.Module, value: int) -> None:
        self.seen_by.setdefault(value, {})[module] = None

    def maker(self, value: int) -> Call | None:
        """The call that made a value; None for an input, a parameter or a constant."""
        return self._maker.get(value)

    def readers(self, value: int) -> list[Call]:
        return self._readers.get(value, [])

    def only_reader(self, value: int) -> Call | None:
        """The only call that reads a value; None if several calls read it or it leaves the model."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and value not in self.returned else None

    def of(self, module: nn.Module) -> list[Call]:
        return [call for call in self.calls if call.module is module]


def paths_of(root: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """All names under which each module is registered; the root's own name is ""."""
    found: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(path)
    return {module: tuple(paths) for module, paths in found.items()}


def listed(titles: Iterable[str]) -> str:
    """Joins titles as in "a", "a and b" or "a, b and c"; a repeated title appears once."""
    *head, last = dict.fromkeys(titles)
    return f"{', '.join(head)} and {last}" if head else last
