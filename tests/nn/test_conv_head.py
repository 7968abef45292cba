"""ConvHead2d and ConvHead3d: a stock convolution in eval mode, unformed logits in training."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.functional import ConvLogits


@pytest.mark.parametrize(("dims", "mode"), [(2, "bilinear"), (3, "trilinear")])
@pytest.mark.parametrize("align", [False, True], ids=["", "aligned"])
def test_as_stock(dims, mode, align):
    """Logits, labels, and the loss of a training step equal those of the stock modules, from their state dict."""
    head = getattr(fusedseg, f"ConvHead{dims}d")(6, 4, scale_factor=2, align_corners=align, dtype=torch.float64)
    conv = getattr(nn, f"Conv{dims}d")(6, 4, 1, dtype=torch.float64)
    head.load_state_dict(conv.state_dict())
    h = torch.randn(2, 6, *(3, 4, 5)[:dims], dtype=torch.float64, requires_grad=True)
    loss = fusedseg.DiceCELoss(softmax=True, to_onehot_y=True)
    for size in (None, (8, 7, 6)[:dims]):
        stock = F.interpolate(conv(h), size or [2 * n for n in h.shape[2:]], mode=mode, align_corners=align)
        labels = torch.randint(4, (2, 1, *stock.shape[2:]))
        assert torch.equal(head.eval()(h, size), stock)
        assert torch.equal(head(h, size, labels=True), stock.argmax(1).byte())
        logits = head.train()(h, size)
        assert isinstance(logits, ConvLogits)
        assert logits.shape == stock.shape
        assert torch.equal(head(h, size, labels=True), stock.argmax(1).byte())
        found, expected = loss(logits, labels), loss(stock, labels)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(
            torch.autograd.grad(found, (h, *head.parameters())), torch.autograd.grad(expected, (h, *conv.parameters()))
        )


def test_fullgraph():
    """A compiled step from features to the loss, and compiled labels, without a break of the graph."""
    head, loss = fusedseg.ConvHead2d(6, 4, scale_factor=2), fusedseg.DiceCELoss(softmax=True, to_onehot_y=True)
    h, labels = torch.randn(2, 6, 4, 5, requires_grad=True), torch.randint(4, (2, 1, 8, 10), dtype=torch.uint8)

    def step(h):
        return loss(head(h), labels)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(h), (h, *head.parameters())) for f in (compiled, step))
    torch.testing.assert_close(found, expected)
    predicted = torch.compile(lambda h: head(h, labels=True), fullgraph=True, backend="aot_eager")(h)
    assert torch.equal(predicted, head(h, labels=True))


def test_a_compiled_network_returns_it():
    """The loss stays outside of the compiled part, as in most training loops."""
    net = nn.Sequential(nn.Conv2d(2, 6, 3), fusedseg.ConvHead2d(6, 4))
    x, labels = torch.randn(2, 2, 5, 6), torch.randint(4, (2, 3, 4))
    loss = fusedseg.CrossEntropyLoss()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")
    found, expected = (torch.autograd.grad(loss(f(x), labels), [*net.parameters()]) for f in (compiled, net))
    torch.testing.assert_close(found, expected)


def test_distributed_data_parallel_finds_its_tensors(tmp_path):
    """With find_unused_parameters, DDP looks for tensors in the output; parameters it does not find get no gradient."""
    net = nn.Sequential(nn.Conv2d(2, 6, 1), fusedseg.ConvHead2d(6, 4))
    x, labels = torch.randn(2, 2, 3, 3), torch.randint(4, (2, 3, 3))
    expected = torch.autograd.grad(fusedseg.CrossEntropyLoss()(net(x), labels), [*net.parameters()])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        fusedseg.CrossEntropyLoss()(parallel(x), labels).backward()
        torch.testing.assert_close([p.grad for p in net.parameters()], [*expected])
        # A run of the tests hung here.  The reducer was the last owner of the group: its destructor waited for a
        # thread of gloo, and this thread waited for Python.
        del parallel
    finally:
        torch.distributed.destroy_process_group()


class DeepHeads(nn.Module):
    """The last layers of nnU-Net's PlainConvUNet with deep supervision: a head for each resolution."""

    def __init__(self):
        super().__init__()
        self.body, self.down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 2, 2)
        self.seg_layers = nn.ModuleList([nn.Conv2d(6, 4, 1), nn.Conv2d(8, 4, 1, bias=False)])

    def forward(self, x):
        h = self.body(x)
        return [head(of) for head, of in zip(self.seg_layers, (h, self.down(h)), strict=True)]


def test_from_the_convolutions_of_a_network():
    """The heads have the parameters themselves, and deep supervision gives the loss and gradients of stock heads."""
    net = DeepHeads().double()
    x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    labels = [torch.randint(4, (2, 1, *size)) for size in ((6, 8), (3, 4))]
    loss = fusedseg.losses.DeepSupervision(fusedseg.losses.DC_and_CE_loss({}, {}), [2 / 3, 1 / 3])
    params, names, logits = [*net.parameters()], [*net.state_dict()], net(x)
    expected = loss(logits, labels)
    grads = torch.autograd.grad(expected, params)
    for i, conv in enumerate(net.seg_layers):
        net.seg_layers[i] = fusedseg.ConvHead2d.from_conv(conv)
    assert all(new is old for new, old in zip(net.parameters(), params, strict=True))
    assert [*net.state_dict()] == names
    outputs = net(x)
    assert all(isinstance(of, ConvLogits) for of in outputs)
    found = loss(outputs, labels)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, params), grads)
    assert all(torch.equal(*pair) for pair in zip(net.eval()(x), logits, strict=True))


def test_from_a_convolution_keeps_its_mode_and_dtype():
    conv = nn.Conv3d(3, 2, 1, dtype=torch.bfloat16).eval()
    head = fusedseg.ConvHead3d.from_conv(conv, scale_factor=2, align_corners=True)
    assert (head.training, head.weight, head.scale_factor, head.align_corners) == (False, conv.weight, 2, True)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_from_a_convolution_whose_padding_has_a_name(padding):
    """It was refused, although it pads nothing."""
    conv, x = nn.Conv2d(3, 2, 1, padding=padding), torch.randn(1, 3, 4, 5)
    assert torch.equal(fusedseg.ConvHead2d.from_conv(conv).eval()(x), conv(x))
