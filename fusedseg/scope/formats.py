"""Functions that keep channels_last in the scope of a converted model, as its fused norms do.

PyTorch's instance norm and its average pool of volumes copy channels_last to contiguous planes, in forward and in
backward, and the convolution after them copies back.  So does its group norm on a GPU.  The functions of this file take
the arguments of PyTorch's, and their results have other last bits.
"""

from collections.abc import Callable
from inspect import getcallargs
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..activation import Activation
from ..ops.avg_pool import avg_pool3d
from ..ops.layout import is_rows
from ..ops.norm.checks import check
from ..ops.norm.op import normalise
from ..ops.norm.spec import NAMES, Passed, Spec
from .plain import plain

IDENTITY = Activation("identity", 0.0)


def _normalised(given: dict[str, Any], **how: Any) -> Tensor:
    vectors = {name: given.get(name) for name in ("weight", "bias", "running_mean", "running_var")}
    passed = Passed(given["input"], **vectors)
    spec = Spec("input", IDENTITY, given["eps"], **how)
    check(NAMES["input"], passed, spec)
    return normalise(passed, spec, None)


def _instance_norm(*args: Any, **kwargs: Any) -> Tensor:
    given = getcallargs(F.instance_norm, *args, **kwargs)
    return _normalised(given, momentum=given["momentum"], own=given["use_input_stats"], kind="instance")


def _group_norm(*args: Any, **kwargs: Any) -> Tensor:
    given = getcallargs(F.group_norm, *args, **kwargs)
    return _normalised(given, kind="group", groups=given["num_groups"])


KEEPING: dict[Any, Callable[..., Tensor]] = {
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.avg_pool3d: avg_pool3d,
}


def that_keeps(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function to call in place of ``func``, one of ``KEEPING``: ``func`` itself if it need not or cannot copy."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not plain(x) or not is_rows(x):
        return func
    # PyTorch's group norm keeps the format on a CPU.  For one position its instance norm raises an error.
    stock = x.is_cpu if func is F.group_norm else func is F.instance_norm and x[0, 0].numel() == 1
    return func if stock else KEEPING[func]
