"""Banks of parallel convolutions of one input, at the price of one convolution."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.fx import Proxy
from torch.nn import functional as F

from ..ops.convolution import parse_geometry, per_dimension
from .branch_sum import running_sum
from .conv_abn import has_hooks
from .leaf import as_leaf
from .unscriptable import Unscriptable

Size = int | Sequence[int]
# parameters added up at once
STACKED = 8
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class _ConvBank(Unscriptable, nn.Module):
    # nn.Conv2d and F.conv2d, or those of three dimensions, whose signatures differ in the lengths of tuples
    conv_class: Any
    convolve: Any
    dims: int
    # a ModuleList of conv_class, or of what took the place of one
    branches: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        branches: int | Sequence[Size] = 1,
        combine: str = "sum",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        name = self._name()
        if combine not in ("sum", "cat"):
            raise ValueError(f"{name}: combine must be 'sum' or 'cat', got {combine!r}")
        if padding_mode not in PADDING_MODES:
            raise ValueError(f"{name}: padding_mode must be one of {', '.join(PADDING_MODES)}, got {padding_mode!r}")
        kernel = per_dimension(name, "kernel_size", kernel_size, self.dims, 1)
        geometry, _ = parse_geometry(name, kernel, stride, padding, dilation, groups)
        _check_channels(name, "in_channels", in_channels, groups)
        sizes = [kernel] * _positive(name, "branches", branches) if isinstance(branches, int) else list(branches)
        if not sizes:
            raise ValueError(f"{name}: branches must be a number >= 1 or the kernel sizes of as many, got {branches!r}")
        self.in_channels, self.kernel_size, self.combine = in_channels, kernel, combine
        self.stride, padded, self.dilation, self.groups = geometry
        self.padding: str | tuple[int, ...] = "same" if padding == "same" else padded
        self.padding_mode = padding_mode
        self.branches = nn.ModuleList(self._branch(name, size, out_channels, bias, device, dtype) for size in sizes)

    @classmethod
    def _name(cls) -> str:
        return f"fusedseg.{cls.__name__}"

    def _branch(self, op: str, kernel_size: Size, out_channels: int, bias: bool, device, dtype) -> nn.Module:
        """A stock convolution whose taps have the same centre as those of ``self.kernel_size``."""
        kernel = per_dimension(op, "kernel_size", kernel_size, self.dims, 1)
        if any((k - own) % 2 for k, own in zip(kernel, self.kernel_size, strict=True)):
            raise ValueError(
                f"{op}: kernel_size must differ from the bank's {self.kernel_size} by even numbers, so that both have "
                f"one centre, got {kernel}"
            )
        _check_channels(op, "out_channels", out_channels, self.groups)
        padding = self._padding_of(kernel)
        own = padding if isinstance(padding, str) else tuple(max(p, 0) for p in padding)
        return self.conv_class(
            self.in_channels, out_channels, kernel, self.stride, own, self.dilation, self.groups, bias,
            self.padding_mode, device=device, dtype=dtype,
        )  # fmt: skip

    def _padding_of(self, kernel: Sequence[int]) -> str | tuple[int, ...]:
        """What makes a kernel read around the centres that ``self.kernel_size`` has; negative: cut off."""
        if isinstance(self.padding, str):
            return self.padding
        each = zip(self.padding, self.dilation, kernel, self.kernel_size, strict=True)
        return tuple(p + d * (k - own) // 2 for p, d, k, own in each)

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        each = [branch.out_channels for branch in self.branches]
        return each[0] if self.combine == "sum" else sum(each)

    def __len__(self) -> int:
        return len(self.branches)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        if not isinstance(x, Tensor):
            raise TypeError(f"{self._name()}: input must be a tensor, got {type(x).__name__}")
        if x.dim() not in (self.dims + 1, self.dims + 2) or x.shape[-self.dims - 1] != self.in_channels:
            raise ValueError(
                f"{self._name()}: input must have shape (N, {self.in_channels}) with {self.dims} spatial dimensions "
                f"after it, or one without N, got {tuple(x.shape)}"
            )
        if not self._is_merged():
            return self._each(x)
        kernel = tuple(map(max, self.kernel_size, *(branch.weight.shape[2:] for branch in self.branches)))
        weight, bias = self._summed(kernel) if self.combine == "sum" else self._stacked(kernel)
        padding = self._padding_of(kernel)
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads(kernel), mode=self.padding_mode), (0,) * self.dims
        y = self.convolve(x, weight, bias, self.stride, padding, self.dilation, self.groups)
        if self.combine == "cat" and self.groups > 1 and len(self.branches) > 1:
            y = self._in_order(y)
        return y

    def _is_merged(self) -> bool:
        """Not where a branch was replaced, or has hooks that want to see it called."""
        for branch in self.branches:
            # not type(branch): a parametrization makes a class of its own
            if not isinstance(branch, self.conv_class) or type(branch).forward is not self.conv_class.forward:
                return False
            if has_hooks(branch):
                return False
        return True

    def _each(self, x: Tensor) -> Tensor:
        """Every branch by itself."""
        outputs = (branch(self._cut(x, branch)) for branch in self.branches)
        return running_sum(self._name(), outputs) if self.combine == "sum" else torch.cat([*outputs], -self.dims - 1)

    def _cut(self, x: Tensor, branch: nn.Module) -> Tensor:
        padding = self._padding_of(getattr(branch, "kernel_size", self.kernel_size))
        if isinstance(padding, str) or min(padding) >= 0:
            return x
        return F.pad(x, [min(p, 0) for p in reversed(padding) for _ in range(2)])

    def _pads(self, kernel: Sequence[int]) -> list[int]:
        """What ``F.pad`` is to add."""
        padding = self._padding_of(kernel)
        if isinstance(padding, str):
            totals = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
            return [part for t in reversed(totals) for part in (t // 2, t - t // 2)]
        return [p for p in reversed(padding) for _ in range(2)]

    def _summed(self, kernel: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of the sum, added up in fp32 at least."""
        name = self._name()
        by_size: dict[torch.Size, list[Tensor]] = {}
        for branch in self.branches:
            by_size.setdefault(branch.weight.shape[2:], []).append(branch.weight)
        dtype = self.branches[0].weight.dtype
        # kernels of one size first: each size is embedded once
        sums = [_embedded(_sum(name, weights), kernel) for weights in by_size.values()]
        bias = None
        if self.branches[0].bias is not None:
            bias = _sum(name, [branch.bias for branch in self.branches]).to(dtype)
        return running_sum(name, sums).to(dtype), bias

    def _stacked(self, kernel: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Kernels and biases one after the other; in every group, where there are several."""
        weights = [_embedded(branch.weight, kernel) for branch in self.branches]
        biases = [branch.bias for branch in self.branches]
        return self._joined(weights), None if biases[0] is None else self._joined(biases)

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        if len(tensors) == 1:
            return tensors[0]
        if self.groups == 1:
            return torch.cat(tensors)
        joined = torch.cat([t.unflatten(0, (self.groups, -1)) for t in tensors], 1).flatten(0, 1)
        return joined.contiguous(memory_format=suggest_memory_format(tensors[0]))

    def _in_order(self, y: Tensor) -> Tensor:
        """Channels by branch and then group, from channels by group and then branch."""
        places = torch.arange(self.out_channels, device=y.device).view(self.groups, -1)
        widths = [branch.out_channels // self.groups for branch in self.branches]
        order = torch.cat([part.flatten() for part in places.split(widths, 1)])
        channels = -self.dims - 1
        last = y.movedim(channels, -1)
        if last.is_contiguous() and not y.is_contiguous():
            # index_select would return another memory format than it is given
            return last.index_select(-1, order).movedim(-1, channels)
        return y.index_select(channels, order)

    def grow(
        self,
        k: int = 1,
        kernel_size: Size | None = None,
        out_channels: int | None = None,
        init: str | Callable[[nn.Module], Any] | None = None,
    ) -> list[nn.Parameter]:
        """Adds ``k`` branches and returns their parameters, for an optimizer that has those of the others::

            optimizer.add_param_group({"params": bank.grow(2, kernel_size=5), "lr": 1e-3})

        The parameters that were there stay the same objects, and keep what the optimizer has learnt about them.  New
        ones take the device, dtype and memory format of the first branch's and require grad.

        Args:
            k: how many.
            kernel_size: of the new branches, by default that of the bank; also larger than any so far, around the same
                centres, so that the output keeps its size.
            out_channels: of each new branch where ``combine="cat"``, by default as many as the first has.
            init: "zeros"; "stock", as a new stock convolution; or a function that is called with each new branch under
                ``no_grad``.  By default "zeros" where ``combine="sum"``, so that the function stays what it was
                (they still learn: each branch of a sum has the same gradient, whatever its values), else "stock".

        Raises:
            ValueError: ``k`` < 1; a kernel size with another centre; other ``out_channels`` in a sum, or such that
                groups do not divide; an unknown ``init``.
        """
        name = f"{self._name()}.grow"
        first = self.branches[0]
        _positive(name, "k", k)
        if init is None:
            init = "zeros" if self.combine == "sum" else "stock"
        if init not in ("zeros", "stock") and not callable(init):
            raise ValueError(f"{name}: init must be 'zeros', 'stock' or a function of the new branch, got {init!r}")
        out_channels = first.out_channels if out_channels is None else out_channels
        if self.combine == "sum" and out_channels != first.out_channels:
            raise ValueError(
                f"{name}: out_channels must be {first.out_channels}, as in the sum so far, got {out_channels}"
            )
        size = self.kernel_size if kernel_size is None else kernel_size
        biased, weight = first.bias is not None, first.weight
        new = [self._branch(name, size, out_channels, biased, weight.device, weight.dtype) for _ in range(k)]
        with torch.no_grad():
            for branch in new:
                # torch declares Module.to without memory_format
                branch.to(memory_format=suggest_memory_format(weight))  # type: ignore[call-overload]
                branch.train(self.training)
                if callable(init):
                    init(branch)
                elif init == "zeros":
                    for parameter in branch.parameters():
                        parameter.zero_()
        self.branches.extend(new)
        return [parameter for branch in new for parameter in branch.parameters()]

    @classmethod
    def from_conv(cls, conv: nn.Conv2d | nn.Conv3d, *, combine: str = "sum"):
        """A bank of one branch, which is ``conv`` itself: optimizers of ``conv`` keep working, and it can grow."""
        name = f"{cls._name()}.from_conv"
        if type(conv) is not cls.conv_class:
            raise TypeError(f"{name}: conv must be an nn.{cls.conv_class.__name__}, got {type(conv).__name__}")
        made = cls(
            conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation,
            conv.groups, conv.bias is not None, conv.padding_mode, combine=combine, device="meta",
        )  # fmt: skip
        made.branches[0] = conv
        made.training = conv.training
        return made

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        for name in ("weight", "bias"):
            # of a stock convolution
            if prefix + name in state_dict:
                state_dict[f"{prefix}branches.0.{name}"] = state_dict.pop(prefix + name)
        start = f"{prefix}branches."
        count = len({key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)})
        if strict and count not in (0, len(self.branches)):
            way = f"grow({count - len(self.branches)})" if count > len(self.branches) else "a new bank of as many"
            errors.append(
                f"{self._name()}: the state dict must have {len(self.branches)} branches, as the bank has, "
                f"got {count}; use {way} before loading it"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        return f"combine={self.combine}"


def _sum(op: str, tensors: list[Tensor]) -> Tensor:
    """In fp32 at least.  Stacked a few at a time: fewer launches than one by one, less memory than all at once."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    parts = (tensors[i : i + STACKED] for i in range(0, len(tensors), STACKED))
    return running_sum(op, (torch.stack(part).sum(0, dtype=dtype) for part in parts))


def _embedded(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """The weight in the middle of zeros of a larger kernel."""
    around = [(k - own) // 2 for k, own in zip(kernel, weight.shape[2:], strict=True)]
    return F.pad(weight, [zeros for n in reversed(around) for zeros in (n, n)]) if any(around) else weight


def _positive(op: str, name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{op}: {name} must be an integer >= 1, got {value!r}")
    return value


def _check_channels(op: str, name: str, channels: int, groups: int) -> None:
    if _positive(op, name, channels) % groups:
        raise ValueError(f"{op}: {name} must be divisible by groups={groups}, got {channels}")


DOC = """Parallel convolutions of one input, summed or concatenated, at the price of one convolution, and able to grow.

    Equals, where ``branches`` are ``nn.Conv{dims}d`` of equal stride, dilation, groups and padding mode::

        torch.stack([branch(x) for branch in bank.branches]).sum(0)      # combine="sum"
        torch.cat([branch(x) for branch in bank.branches], dim=1)        # combine="cat"

    but x is convolved once, with the sum of the kernels or with all of them one after the other: time and memory of a
    sum do not depend on how many branches there are, their parameters and gradients aside.  All branches of a sum have
    the same gradient; they differ by their initial values, optimizer groups (rates, decay) and by being frozen
    (``bank.branches[0].requires_grad_(False)``).

    Shapes: (N, C, {sizes}) to (N, K, {out_sizes}), or both without N; K is ``bank.out_channels``, in a "cat" the sum of
    the branches' channels.  In any dtype and memory format that ``nn.Conv{dims}d`` takes.

    Args:
        in_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in ``nn.Conv{dims}d``.
        out_channels: of each branch.
        branches: how many of ``kernel_size``, or the kernel size of each.  Sizes may differ, also from ``kernel_size``,
            by even numbers in each dimension (all odd, say): all kernels then have the same centres.  ``padding`` is
            that of ``kernel_size`` K; a branch of size k has the padding ``padding + dilation * (k - K) / 2``, with
            which any stride and dilation give all branches one output size ("same": "same").  Where that is negative
            (a 1x1 beside a 3x3 without padding), the branch reads x without its border of that width.
        combine: "sum" or "cat".
        device, dtype: of the parameters.

    State: ``branches.<i>.weight`` and ``branches.<i>.bias``.  A state dict of an ``nn.Conv{dims}d`` loads into a bank
    of one branch; one of more branches than the bank has is an error that names the ``grow`` to call first, since the
    optimizer must hear of new parameters.

    Kept for backward: the input, and the one kernel it was convolved with (none beside the parameter itself for a
    single branch).  Half-precision kernels are summed in fp32; under autocast the fp32 sum is cast.

    Cost: one convolution of the largest kernel size in each dimension; a "cat" of very different sizes multiplies many
    zeros, and convolutions of their own in a ``torch.cat`` may be faster.  Those zeros turn an infinity in x into NaN
    around it.  A "cat" with groups brings its channels in order by one copy more.

    Falls back to calling every branch: one that was replaced by another module, or has hooks.  Parametrizations
    (``torch.nn.utils.parametrize``) do not need that.

    Raises:
        ValueError: arguments out of range; kernel sizes without one centre; channels that groups do not divide; an
            input of another number of channels or dimensions.
        TypeError: an input that is no tensor.
        RuntimeError: a state dict of another number of branches.
    """


class ConvBank2d(_ConvBank):
    __doc__ = DOC.format(dims=2, sizes="H, W", out_sizes="OH, OW")
    conv_class = nn.Conv2d
    convolve = staticmethod(F.conv2d)
    dims = 2


class ConvBank3d(_ConvBank):
    __doc__ = DOC.format(dims=3, sizes="D, H, W", out_sizes="OD, OH, OW")
    conv_class = nn.Conv3d
    convolve = staticmethod(F.conv3d)
    dims = 3
