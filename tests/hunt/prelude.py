"""The definitions that random programs need.  A printed program imports all of them."""

import contextlib
import copy
import functools
import io
import operator  # noqa: F401
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # noqa: F401

import fusedseg
from fusedseg.compiler import backend
from fusedseg.compiler.capture import stock_norms as norms
from fusedseg.compiler.capture.prepare import prepare
from fusedseg.compiler.low_bit import choose_bits as compiled_bits
from fusedseg.compiler.rewrite import split_convolutions
from fusedseg.compiler.settings import Settings
from tests.hunt.rounding import BIASED, rounded_error, share_of_bias  # noqa: F401


class Log:
    """The results of one program, in the order in which it notes them."""

    def __init__(self):
        self.results, self.leaves, self.modules = [], {}, {}
        # The exception that ended the program, and the state of random numbers at its end.
        self.error = self.random = None

    def note(self, label, value):
        self.results.append((label, snapshot(value)))
        if isinstance(value, torch.Tensor):
            # Along one element a stride means nothing, and PyTorch's own kernels disagree about it.
            strides = [stride if size != 1 else "any" for size, stride in zip(value.shape, value.stride(), strict=True)]
            self.results.append((f"stride of {label}", str(strides)))

    def leaf(self, name, *args, **kwargs):
        """A tensor of a seed, whose value and gradient are noted."""
        self.leaves[name] = data(*args, **kwargs)
        return self.leaves[name]

    def module(self, name, seed, module):
        """A module whose parameters and statistics are those of a seed, and are noted with their gradients."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + 0.1)
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        self.modules[name] = module
        return module

    def gradients(self, when):
        for name, leaf in self.leaves.items():
            self.note(f"gradient of {name} {when}", leaf.grad)
            self.note(f"{name} {when}", leaf)
        for name, module in self.modules.items():
            for key, parameter in module.named_parameters():
                self.note(f"gradient of {name}.{key} {when}", parameter.grad)
            for key, value in module.state_dict().items():
                self.note(f"{name}.{key} {when}", value)

    @contextlib.contextmanager
    def attempt(self):
        """Surrounds a step that may raise; the exception is a result."""
        try:
            yield
        except Exception as error:
            self.note("a step raises", type(error).__name__)
        else:
            self.note("a step raises", "nothing")


def snapshot(value):
    """A copy that later steps cannot change."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.device.type == "meta":
        return f"meta {value.shape} {value.dtype}"
    with torch.no_grad():
        same = value.resolve_conj().clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(same) if same.is_complex() else same


def data(seed, shape, dtype=torch.float32, layout="dense", grad=True, scale=1.0):
    """A leaf of a seed.  Its values do not depend on the tensors that were made before it."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "strided":
        t = torch.randn((*shape[:-1], 2 * shape[-1] + 1), generator=generator)[..., 1::2]
    elif layout == "transposed":
        t = torch.randn(tuple(reversed(shape)), generator=generator).permute(*range(len(shape) - 1, -1, -1))
    else:
        t = torch.randn(shape, generator=generator)
    if layout == "channels_last":
        t = t.contiguous(memory_format=torch.channels_last)
    if dtype is torch.bool:
        return t > 0
    if not dtype.is_floating_point:
        return (t * 2).abs().to(dtype)
    return (t * scale).to(dtype).detach().requires_grad_(grad)


class SaveInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * 0.5

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g


class SaveOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * (1 - y)


class SaveBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        t = F.silu(torch.tanh(x))
        ctx.save_for_backward(t, x > 0)
        return t * 2 + x

    @staticmethod
    def backward(ctx, g):
        t, positive = ctx.saved_tensors
        return g * (1 + t * positive)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


class DirtySaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        F.leaky_relu_(x, 0.2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return torch.where(z > 0, g, g * 0.2)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, mask = F.relu(x), x > 0
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(mask)
        return y * 2, x + 1, mask

    @staticmethod
    def backward(ctx, g, h, _):
        x, y = ctx.saved_tensors
        return g * 2 * (y > 0) + h + 0 * x


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Asks each result for its storage, as memory trackers do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                t.untyped_storage().nbytes()
        return out


class Quiet(torch.overrides.TorchFunctionMode):
    """Passes each call on, as the modes of other libraries do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def reloaded(t):
    """What ``torch.load`` gives back for a tensor that was saved."""
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


def jitted(text):
    """A scripted function, whose calls no mode sees."""
    unit = torch.jit.CompilationUnit(f"def change(x: Tensor) -> Tensor:\n    return {text}")
    return unit.change


def filled(seed, shape):
    """Memory of numpy's, which the caller fills again."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def outcome(program, how):
    """The log of a program."""
    torch.manual_seed(0)
    log = Log()
    try:
        # PyTorch's compiler leaves inference mode on if it raises inside of it, also in the runs after this one.
        with torch.inference_mode(False):
            program(how, log)
    except Exception as error:
        log.error = error
    log.random = torch.get_rng_state()
    return log


def differs(expected, got):
    """How two results of one label differ; None if they are the same."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if type(expected) is type(got) and expected == got else f"{got} instead of {expected}"
    for what in ("dtype", "shape"):
        if getattr(expected, what) != getattr(got, what):
            return f"{what} {getattr(got, what)} instead of {getattr(expected, what)}"
    if torch.equal(expected, got):
        return None
    if expected.dtype.is_floating_point and torch.equal(expected.isnan(), got.isnan()):
        expected, got = expected.nan_to_num(7.0, 8.0, 9.0), got.nan_to_num(7.0, 8.0, 9.0)
        if torch.equal(expected, got):
            return None
        return f"values, by up to {(expected.double() - got.double()).abs().max().item():.3g}"
    return "values"


def refused(error):
    """Whether autograd refuses a backward pass, since a tensor that it had saved was modified in place."""
    return error is not None and "modified by an inplace operation" in str(error)


def difference(theirs, ours):
    """The first difference between two logs; None if there is none.

    If autograd refuses a program's backward pass in eager mode, compiled code may refuse it or accept it.
    """
    if theirs.error is None and ours.error is not None:
        return f"only compiled code raises: {type(ours.error).__name__}: {ours.error}"
    if theirs.error is not None and not refused(theirs.error) and type(theirs.error) is not type(ours.error):
        return f"compiled code raises {ours.error!r} instead of {theirs.error!r}"
    # Results after a refused pass are not compared: the lists end at the error.
    for (label, value), (other_label, other) in zip(theirs.results, ours.results, strict=theirs.error is None):
        how = f"it is {other_label}" if label != other_label else differs(value, other)
        if how is not None:
            return f"{label} differs: {how}"
    if theirs.error is None and theirs.random is not None and not torch.equal(theirs.random, ours.random):
        return "state of random numbers differs"
    return None


def network_difference(make, shape, later=None):
    """How a converted network differs from the stock one; None if it does not.

    A difference is relative to a tensor's own norm, or to a thousandth of the largest gradient, since a bias before a
    norm has a gradient of nothing but rounding.  ``later`` is a habit of ``LATER`` and a number that chooses its
    module; both networks get it after the first step.
    """
    stock, ours = make(), fusedseg.convert(make())
    for step in ("first", "second", "in eval mode"):
        if step == "second":
            if later is None:
                continue
            changes = [Change(stock, network, *later) for network in (stock, ours)]
        training, state = step != "in eval mode", copy.deepcopy(stock.state_dict())
        expected, got = network_results(stock, shape, training), network_results(ours, shape, training)
        if step == "second":
            for change, results in zip(changes, (expected, got), strict=True):
                results |= change.seen()
                change.undo.close()
        how = results_differ(expected, got)
        if how is not None and step != "second":
            other = make()
            other.load_state_dict(state)
            how = results_differ(expected, got, network_results(rounded(other), shape, training))
        if how is not None:
            return f"{how} (step {step})"
        if "error" in expected:
            return None
    return None


# Roundings of one network.
ROUNDINGS = 24


def rounded_difference(make, shape, bits):
    """How a compiled network with ``bits`` differs from the same one without; None if it is right on average.

    All gradients count together, since some are 0 but for rounding.  Errors of less than a millionth are those of
    exact tensors.
    """
    few = compiled_bits.FEWEST_VALUES
    try:
        # Statistics of these small networks have fewer values, and activations have more.
        compiled_bits.FEWEST_VALUES = 64
        options = {"codegen": "aten"}, {"codegen": "aten", "bits": bits}
        exact, ours = (compiled_by(functools.partial(backend, options=each), False)(make()) for each in options)
        state, got = ours.state_dict(), []
        state = {name: value.clone() for name, value in state.items()}
        expected = network_results(exact, shape, training=True)
        for times in range(10 * ROUNDINGS):
            # Where one number makes most of the error, the share is above its limit by chance in one of 120 networks.
            if times == ROUNDINGS and bias_of(expected, got) is None:
                break
            ours.load_state_dict(state)
            got.append(network_results(ours, shape, training=True))
            if "error" in got[-1] or "error" in expected:
                return results_differ(expected, got[-1])
            forward = {name: value for name, value in got[-1].items() if not name.startswith("gradient")}
            how = results_differ({name: expected[name] for name in forward}, forward)
            if how is not None:
                return how
    finally:
        compiled_bits.FEWEST_VALUES = few
    return bias_of(expected, got)


def bias_of(expected, got):
    """How the gradients of independent roundings are biased; None if they are right on average."""
    names = [name for name in expected if name.startswith("gradient of ")]
    right = torch.cat([expected[name].flatten() for name in names])
    if not right.isfinite().all():
        return None
    each = torch.stack([torch.cat([results[name].flatten() for name in names]) for results in got])
    if not each.isfinite().all():
        return "gradients differ: they are not finite"
    share = share_of_bias(right, each)
    return None if share < BIASED else f"gradients differ: {share:.2f} of their squared error is bias"


class Change:
    """A habit of users of a network that has been converted already: hooks, patches, and writes to its parameters.

    ``stock`` is the network that was not converted; the module has the same name in both.
    """

    def __init__(self, stock, network, habit, place):
        self.notes, self.undo = [], contextlib.ExitStack()
        wanted, do = LATER[habit]
        names = [name for name, module in stock.named_modules() if wanted(module)]
        if names:
            handle = do(self, network.get_submodule(names[place % len(names)]))
            if handle is not None:
                self.undo.callback(handle.remove)

    def note(self, module, into, out):
        """A hook that keeps a tensor, without a copy: it must stay as the hook sees it."""
        self.notes.append(out)

    def seen(self):
        tensors = [value[0] if isinstance(value, tuple) else value for value in self.notes]
        return {f"seen {i}": torch.zeros(()) if t is None else t.detach() for i, t in enumerate(tensors)}


def halved(module, into, out):
    return out * 0.5


def halved_gradients(module, into, out):
    return tuple(g if g is None else g * 0.5 for g in into)


def halved_everywhere(change, module):
    hook = nn.modules.module.register_module_forward_hook
    return hook(lambda m, args, out: out * 0.5 if m is module else None)


def patched(change, module):
    forward = module.forward
    module.forward = lambda x: forward(x) * 0.5
    change.undo.callback(delattr, module, "forward")


def masked(change, module):
    module.weight.data.mul_(torch.arange(len(module.weight)) % 2)


def zeroed(change, module):
    module.weight.data.zero_()


def is_conv(module):
    return isinstance(module, nn.modules.conv._ConvNd)


def is_norm(module):
    return isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))


def has_weight(module):
    return is_norm(module) and module.affine


# What users do to a converted network: which module they choose, and what they do to it.
LATER = {
    "note the output of a convolution": (is_conv, lambda change, m: m.register_forward_hook(change.note)),
    "note the output of a norm": (is_norm, lambda change, m: m.register_forward_hook(change.note)),
    "replace the output of a convolution": (is_conv, lambda change, m: m.register_forward_hook(halved)),
    "replace the output of a norm": (is_norm, lambda change, m: m.register_forward_hook(halved)),
    "replace the input of a norm": (
        is_norm,
        lambda change, m: m.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
    ),
    "note the gradients of a convolution": (is_conv, lambda change, m: m.register_full_backward_hook(change.note)),
    "note the gradients of a norm": (is_norm, lambda change, m: m.register_full_backward_hook(change.note)),
    "replace the gradients of a norm": (is_norm, lambda change, m: m.register_full_backward_hook(halved_gradients)),
    "replace outputs by a global hook": (is_conv, halved_everywhere),
    "patch the forward of a convolution": (is_conv, patched),
    "set the weight of a norm to zero": (has_weight, zeroed),
    "mask the weight of a norm": (has_weight, masked),
}


def rounded(network):
    """The network with parameters that differ by rounding."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + 4e-16 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return network


def results_differ(expected, got, rounded=None):
    """How results differ; None if they are the same.

    A gradient may differ ten times as much as it does in ``rounded``, the results of the stock network with parameters
    that differ by rounding: a norm of a constant magnifies rounding by 1 / sqrt(eps).
    """
    if "error" in expected:
        # A pass that autograd refuses may be right in a converted network, which keeps other tensors.
        return None if "error" in got or "inplace" in expected["error"] else f"nothing raises {expected['error']}"
    if "error" in got:
        return f"only the converted network raises: {got['error']}"
    if expected.keys() != got.keys():
        return f"results {sorted(expected.keys() ^ got.keys())} are missing or new"
    floor = 1e-3 * max((t.norm().item() for name, t in expected.items() if name.startswith("gradient")), default=0)
    for name, value in expected.items():
        if got[name].shape != value.shape or got[name].dtype != value.dtype:
            return f"{name} differs: {got[name].dtype} {got[name].shape} instead of {value.dtype} {value.shape}"
        if not torch.equal(got[name].isnan(), value.isnan()):
            if (
                name.endswith(".bias")
                and value.isnan().all()
                and not got[name].any()
                and _same_nan(name, expected, got)
            ):
                # The gradient of a bias before a norm is exactly zero by our formula, also where all others are NaN.
                continue
            return f"{name} differs: it is not a number elsewhere"
        least = floor if name.startswith("gradient") else 1e-300
        scale = max(value.nan_to_num().norm().item(), least, 1e-300)
        error = (got[name] - value).nan_to_num().norm().item() / scale
        if rounded is not None and name.startswith("gradient") and name in rounded:
            error = 0.0 if error < 10 * (rounded[name] - value).nan_to_num().norm().item() / scale else error
        if error >= 1e-9:
            return f"{name} differs: by {error:.3g}"
    return None


def _same_nan(bias, expected, got):
    """Whether the gradient of the weight beside a bias is NaN in both networks."""
    weight = bias.removesuffix("bias") + "weight"
    return weight in got and bool((expected[weight].isnan() & got[weight].isnan()).all())


def network_results(network, shape, training):
    network.train(training)
    network.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    try:
        # The input is a view of the leaf, and a network may write over it.
        out = network(x.view_as(x))
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
        (out * weights).sum().backward()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    results = {"output": out.detach().clone(), "gradient of x": torch.zeros(shape) if x.grad is None else x.grad}
    # A network may write over its input.
    results["x"] = x.detach().clone()
    results |= {f"gradient of {n}": p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
    return results | {n: b.double().clone() for n, b in network.named_buffers()}


def seeded(network, seed):
    """A network in float64 whose parameters and statistics are those of a seed."""
    return Log().module("network", seed, network.double())


def eager_call(target):
    """In place of a compiler."""
    return target


def compiled_by(compiler, dynamic):
    """What compiles a function, or a network in place."""

    def compiled(target):
        torch._dynamo.reset()
        # PyTorch's compiler refuses a second backward pass of a graph for all sizes otherwise.
        torch._functorch.config.donated_buffer = False
        options = {"backend": compiler, "dynamic": dynamic or None}
        if isinstance(target, nn.Module):
            target.compile(**options)
            return target
        return torch.compile(target, **options)

    return compiled


def aot_eager(dynamic):
    """PyTorch's own compiler with PyTorch's own kernels."""
    return compiled_by("aot_eager", dynamic)


def aot_eager_of_rewritten(graph, inputs):
    """The same, with interpolation and pools as this package computes them."""
    return torch._dynamo.lookup_backend("aot_eager")(prepare(graph, Settings(codegen="aten")), inputs)


def finish(found, log):
    """Notes what a compiled function returns, and its gradients."""
    for name, value in found.items():
        log.note(name, value)
        log.note(f"{name}.requires_grad", value.requires_grad)
    # Forward may write to leaves and buffers, and draw random numbers, without a loss too.
    log.gradients("after forward")
    log.note("random numbers after forward", torch.get_rng_state())
    loss = found.get("loss")
    if loss is not None and loss.requires_grad:
        loss.backward(retain_graph=True)
        log.gradients("after one backward pass")
        loss.backward()
        log.gradients("after two backward passes")


def joined(*tensors):
    """The last tensors that have a gradient, side by side."""
    found = [t for t in tensors if t.is_floating_point() and t.requires_grad][-3:]
    return torch.cat([t.flatten() for t in found or tensors[-1:]])


def network_logs(make, shape, how):
    """What a network gives in two steps of training and in eval mode."""
    log, network = Log(), how(make())
    for step in ("first step", "second step", "eval mode"):
        results = network_results(network, shape, step != "eval mode")
        if "error" in results:
            log.error = RuntimeError(results["error"])
            break
        for name, value in {**results, "random numbers": torch.get_rng_state()}.items():
            log.note(f"{name} in the {step}", value)
    return log


def compiled_difference(run, dynamic, tell=lambda phase: None, **options):
    """How a function or a network differs in the backend: the kind of the verdict, and the difference.

    run: what gives the log, for a compiler.  options: the backend's, beside the codegen.  The results must be those of
    aot_eager, or else those of eager mode: interpolation has eager mode's bits in the backend, and other bits in
    aot_eager.
    """
    expected = run(eager_call)
    if expected.error is not None and not refused(expected.error):
        return "raises", str(expected.error)
    stock = run(aot_eager(dynamic))
    refuses = expected.error is not None
    if stock.error is not None and not (refuses and refused(stock.error)):
        return "impossible", str(stock.error)
    tell("ours")
    graphs = []

    def ours(graph, inputs):
        graphs.append(graph)
        # Divided convolutions, which come with a budget, may differ in last bits, and so may the gradients of the op of
        # norms; everything else must not.
        divided = (
            mock.patch.object(split_convolutions, "split_backward") if "budget" in options else contextlib.nullcontext()
        )
        with mock.patch.object(norms, "is_served", return_value=False), divided:
            return backend(graph, inputs, options={"codegen": "aten", **options})

    found = run(compiled_by(ours, dynamic))
    how, as_stock = difference(stock, found), difference(expected, stock) is None
    if how is None:
        return ("same" if as_stock else "as aot_eager") if graphs else "nothing captured", ""
    # Where eager mode refuses the backward pass, nothing after it says whether aot_eager has eager mode's bits.
    if refuses or not as_stock:
        if not refuses and difference(expected, found) is None:
            return "same", ""
        # aot_eager is wrong where it computes a value again from an argument that forward overwrites.
        others = stock, expected, run(compiled_by(aot_eager_of_rewritten, dynamic))
        if found.error is None and each_is_in(found.results, [logs.results for logs in others]):
            return "as aot_eager", ""
    if difference(expected, run(eager_call)) is not None:
        return "unstable", ""
    return "failure", how


def each_is_in(results, others):
    """Whether each result is that of one of the other runs."""

    def is_in(place):
        label, value = results[place]
        same = [other[place] for other in others if len(other) == len(results) and other[place][0] == label]
        return any(differs(wanted, value) is None for _, wanted in same)

    return all(map(is_in, range(len(results))))


def compiled_failure(run, dynamic, **options):
    """How the backend changes a program; None if it does not."""
    kind, how = compiled_difference(run, dynamic, **options)
    return how if kind == "failure" else None
