"""``ConvBank2d`` and ``ConvBank3d``: parallel convolutions of one input, at the price of one convolution."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from .._module_hooks import is_called_unseen
from .._torch import suggest_memory_format
from ..ops.check import check_choice, check_positive, check_tensor
from ..ops.conv.convolution import RawGeometry, parse_geometry, per_dimension
from .leaf import Unscriptable, as_leaf

Size = int | Sequence[int]
# The number of parameters that are stacked and added up at once.
STACKED = 8
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class _ConvBank(Unscriptable, nn.Module):
    # nn.Conv2d and F.conv2d, or nn.Conv3d and F.conv3d; typed Any, because their signatures differ.
    conv_class: type[nn.Module]
    convolve: Callable[..., Tensor]
    dims: int
    # A ModuleList of conv_class; the user may have replaced some of them by other modules.
    branches: Any

    @classmethod
    def _name(cls) -> str:
        return f"fusedseg.nn.{cls.__name__}"

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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = self._name()
        check_choice(name, "padding_mode", padding_mode, PADDING_MODES)
        kernel = per_dimension(name, "kernel_size", kernel_size, self.dims, 1)
        geometry, _ = parse_geometry(name, RawGeometry(kernel, stride, padding, dilation, groups))
        _check_channels(name, "in_channels", in_channels, groups)
        if isinstance(branches, int):
            check_positive(name, "branches", branches)
            branches = [kernel] * branches
        sizes = list(branches)
        if not sizes:
            raise ValueError(
                f"{name}: branches must be an integer >= 1, or the kernel size of each branch, got {branches!r}"
            )
        self.in_channels = in_channels
        self.kernel_size = kernel
        self.stride, padded, self.dilation, self.groups = geometry
        self.padding: str | tuple[int, ...] = "same" if padding == "same" else padded
        self.padding_mode = padding_mode
        self.branches = nn.ModuleList(self._branch(name, size, out_channels, bias, device, dtype) for size in sizes)

    def _branch(self, op: str, kernel_size: Size, out_channels: int, bias: bool, device, dtype) -> nn.Module:
        """Makes a stock convolution whose kernel has the same centre as one of ``self.kernel_size``."""
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
            self.in_channels, out_channels, kernel, stride=self.stride, padding=own, dilation=self.dilation,
            groups=self.groups, bias=bias, padding_mode=self.padding_mode, device=device, dtype=dtype,
        )  # fmt: skip

    def _padding_of(self, kernel: Sequence[int]) -> str | tuple[int, ...]:
        """The padding with which a kernel reads around the same centres as one of ``self.kernel_size``.

        A negative padding means that the input is cut off at the border.
        """
        if isinstance(self.padding, str):
            return self.padding
        each = zip(self.padding, self.dilation, kernel, self.kernel_size, strict=True)
        return tuple(p + d * (k - own) // 2 for p, d, k, own in each)

    @property
    def out_channels(self) -> int:
        """The number of channels of the output."""
        return self.branches[0].out_channels

    def __len__(self) -> int:
        return len(self.branches)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        check_tensor(self._name(), x)
        if x.dim() not in (self.dims + 1, self.dims + 2) or x.shape[-self.dims - 1] != self.in_channels:
            raise ValueError(
                f"{self._name()}: x must have shape (N, {self.in_channels}) with {self.dims} spatial dimensions "
                f"after it, or one without N, got {tuple(x.shape)}"
            )
        if not self._is_merged():
            return self._each(x)
        kernel = tuple(map(max, self.kernel_size, *(branch.weight.shape[2:] for branch in self.branches)))
        weight, bias = _summed(self.branches, kernel)
        padding = self._padding_of(kernel)
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads(kernel), mode=self.padding_mode), (0,) * self.dims
        return self.convolve(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def _is_merged(self) -> bool:
        """Whether one convolution may stand for all branches: none was replaced, and nobody looks at their calls."""
        for branch in self.branches:
            # A parametrization gives a branch a class of its own, so that type(branch) does not tell.
            if not isinstance(branch, self.conv_class) or type(branch).forward is not self.conv_class.forward:
                return False
        return is_called_unseen(*self.branches)

    def _each(self, x: Tensor) -> Tensor:
        """Calls every branch by itself, and adds up their outputs."""
        first, *others = self.branches
        total = first(self._cut(x, first))
        for i, branch in enumerate(others, 1):
            y = branch(self._cut(x, branch))
            if y.shape != total.shape:
                raise ValueError(
                    f"{self._name()}: branch {i} must return shape {tuple(total.shape)}, as the branches before it, "
                    f"got {tuple(y.shape)}"
                )
            total = total + y
        return total

    def _cut(self, x: Tensor, branch: nn.Module) -> Tensor:
        padding = self._padding_of(getattr(branch, "kernel_size", self.kernel_size))
        if isinstance(padding, str) or min(padding) >= 0:
            return x
        return F.pad(x, [min(p, 0) for p in reversed(padding) for _ in range(2)])

    def _pads(self, kernel: Sequence[int]) -> list[int]:
        """The argument of ``F.pad`` that pads for a kernel."""
        padding = self._padding_of(kernel)
        if isinstance(padding, str):
            totals = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
            return [part for t in reversed(totals) for part in (t // 2, t - t // 2)]
        return [p for p in reversed(padding) for _ in range(2)]

    def grow(
        self,
        k: int = 1,
        kernel_size: Size | None = None,
        init: str | Callable[[nn.Module], object] = "zeros",
    ) -> list[nn.Parameter]:
        """Adds ``k`` branches, and returns their parameters for the optimizer::

            optimizer.add_param_group({"params": bank.grow(2, kernel_size=5), "lr": 1e-3})

        The parameters of earlier branches stay the same objects, so that the optimizer keeps its state for them.  New
        parameters have the device, dtype and memory format of the first branch, and require grad.

        Args:
            k: the number of new branches.
            kernel_size: the kernel size of the new branches; the default is the bank's.  It may be larger than all
                other kernels, because all kernels have the same centres and the output keeps its size.
            init: "zeros", with which the function stays the same, "stock" (as a new stock convolution), or a function
                that is called with each new branch under ``no_grad``.  Branches of zeros still learn: all branches
                have the same gradient, whatever their values.

        Raises:
            ValueError: ``k`` is below 1; the kernel size has another centre; ``init`` is unknown.
        """
        name = f"{self._name()}.grow"
        first = self.branches[0]
        check_positive(name, "k", k)
        if init not in ("zeros", "stock") and not callable(init):
            raise ValueError(f"{name}: init must be 'zeros', 'stock' or a function of the new branch, got {init!r}")
        size = self.kernel_size if kernel_size is None else kernel_size
        biased, weight = first.bias is not None, first.weight
        new = [self._branch(name, size, first.out_channels, biased, weight.device, weight.dtype) for _ in range(k)]
        with torch.no_grad():
            for branch in new:
                # PyTorch's type stubs declare Module.to without memory_format.
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
    def from_conv(cls, conv: nn.Conv2d | nn.Conv3d):
        """Makes a bank whose only branch is ``conv`` itself, so that optimizers of ``conv`` keep working.

        Raises:
            TypeError: ``conv`` is no stock convolution of the bank's dimensions.
        """
        name = f"{cls._name()}.from_conv"
        if type(conv) is not cls.conv_class:
            raise TypeError(f"{name}: conv must be an nn.{cls.conv_class.__name__}, got {type(conv).__name__}")
        made = cls(
            conv.in_channels, conv.out_channels, conv.kernel_size, stride=conv.stride, padding=conv.padding,
            dilation=conv.dilation, groups=conv.groups, bias=conv.bias is not None, padding_mode=conv.padding_mode,
            device="meta",
        )  # fmt: skip
        made.branches[0] = conv
        made.training = conv.training
        return made

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        for name in ("weight", "bias"):
            # The state dict of a stock convolution has these names without a branch.
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


def _summed(convs: Sequence[nn.Conv2d | nn.Conv3d], kernel: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The sums of kernels and of biases, added up in fp32 or wider.

    ``kernel`` is the largest size in each dimension; smaller kernels get zeros around them.
    """
    by_size: dict[torch.Size, list[Tensor]] = {}
    for conv in convs:
        by_size.setdefault(conv.weight.shape[2:], []).append(conv.weight)
    dtype = convs[0].weight.dtype
    # Kernels of one size are added up first, so that each size is embedded only once.
    first, *others = [_embedded(_sum(weights), kernel) for weights in by_size.values()]
    biases = [conv.bias for conv in convs if conv.bias is not None]
    return sum(others, first).to(dtype), _sum(biases).to(dtype) if biases else None


def _sum(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors in fp32 or wider.

    It stacks a few at a time, which takes fewer launches than one by one and less memory than all at once.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    parts = [torch.stack(tensors[i : i + STACKED]).sum(0, dtype=dtype) for i in range(0, len(tensors), STACKED)]
    return sum(parts[1:], parts[0])


def _embedded(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """The weight in the middle of a larger kernel, with zeros around it."""
    around = [(k - own) // 2 for k, own in zip(kernel, weight.shape[2:], strict=True)]
    return F.pad(weight, [zeros for n in reversed(around) for zeros in (n, n)]) if any(around) else weight


def _check_channels(op: str, name: str, channels: int, groups: int) -> None:
    check_positive(op, name, channels)
    if channels % groups:
        raise ValueError(f"{op}: {name} must be divisible by groups={groups}, got {channels}")


DOC = """The sum of parallel convolutions of one input, at the price of one.  The bank can grow.

    Equals, if ``branches`` are ``nn.Conv{dims}d`` of equal stride, dilation, groups and padding mode::

        torch.stack([branch(x) for branch in bank.branches]).sum(0)

    x is convolved only once, with the sum of the kernels.  So time and memory do not depend on the number of branches,
    apart from their parameters and gradients.  All branches have the same gradient.  They differ in their initial
    values, in their optimizer groups (rates, decay), and in whether they are frozen
    (``bank.branches[0].requires_grad_(False)``).

    Shapes: (N, C, {sizes}) to (N, K, {out_sizes}), or both without N.  Any dtype and memory format that
    ``nn.Conv{dims}d`` takes.

    Args:
        in_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in ``nn.Conv{dims}d``.
        out_channels: the channels of the output.
        branches: the number of branches of ``kernel_size``, or the kernel size of each branch.  Sizes may differ from
            each other and from ``kernel_size`` by even numbers in each dimension, so that all kernels have the same
            centres.  ``padding`` belongs to ``kernel_size`` K; a branch of size k has the padding
            ``padding + dilation * (k - K) / 2``, so that all branches have one output size for any stride and dilation.
            With "same", every branch has "same".  If its padding is negative (a 1x1 beside a 3x3 without padding), a
            branch reads x without a border of that width.
        device, dtype: the device and dtype of the parameters.

    State: ``branches.<i>.weight`` and ``branches.<i>.bias``.  A state dict of an ``nn.Conv{dims}d`` loads into a bank
    of one branch.  If a state dict has more branches than the bank, the error names the call of ``grow`` that must come
    first, because the optimizer must receive the new parameters.

    Kept for backward: the input, and the summed kernel.  With a single branch the kernel is the
    parameter itself.  Half-precision kernels are summed in fp32; under autocast the fp32 sum is cast.

    Cost: one convolution with the largest kernel size in each dimension.  A smaller kernel gets zeros around it, which
    turn an infinity in x into NaN around it.

    It falls back to calling every branch if a branch was replaced by another module, has hooks or another ``forward``,
    or if there are global module hooks.  Parametrizations
    (``torch.nn.utils.parametrize``) need no fallback.

    Raises:
        ValueError: an argument is out of range; the kernels have no common centre; the groups do not divide the
            channels; the input has another number of channels or dimensions.
        TypeError: the input is no tensor.
        RuntimeError: a state dict has another number of branches.

    Source: Ding et al., "Diverse Branch Block: Building a Convolution as an Inception-like Unit", CVPR 2021, adds up
    kernels after training; a bank does it in every step.
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
