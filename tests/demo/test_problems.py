"""The data of the demos: real images without a download, split into front and back."""

import socket

import pytest
import torch

pytest.importorskip("nilearn")

from examples.demo import encoders, mni152, slices, volume
from examples.demo.problem import Problem

CPU = torch.device("cpu")
DEMOS = {"slices": slices, "volume": volume, "encoders": encoders}


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args):
            raise AssertionError("a demo reached for the network")

        patch.setattr(socket.socket, "connect", refuse)
        return {name: demo.problem(CPU) for name, demo in DEMOS.items()}


@pytest.fixture(params=DEMOS)
def problem(request, problems) -> Problem:
    return problems[request.param]


def test_images_are_registered_and_labels_complete(problem):
    whole = problem.whole
    assert len(whole.images) == len(problem.inputs)
    for image in whole.images:
        assert image.shape == whole.labels.shape
        assert image.isfinite().all()
    for part in (problem.split.trained(whole), problem.split.held_out(whole)):
        counts = torch.bincount(part.labels.flatten(), minlength=len(problem.classes))
        # Active grey matter is the rarest class.
        assert counts.min() > 500, dict(zip(problem.classes, counts.tolist(), strict=True))


def test_the_parts_lie_apart(problem):
    seen, held_out = (part(problem.whole) for part in (problem.split.trained, problem.split.held_out))
    # The gap is larger than any voxel, and than most of the smoothing of the activation map.
    assert held_out.y.min() - seen.y.max() >= 8
    assert torch.equal(problem.held_out.labels.flatten(), held_out.labels.flatten())


def test_the_split_does_not_see_the_mirror_symmetry():
    """The template's left and right halves are nearly mirror images, so a split of left and right would leak."""
    t1 = mni152.load(2, CPU).images[0]
    assert torch.corrcoef(torch.stack([t1.flatten(), t1.flip(2).flatten()]))[0, 1] > 0.98


def test_batches_come_from_what_is_trained_on_and_repeat_with_the_seed(problem):
    first, again = (problem.batch(torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first.images, again.images, strict=True))
    assert first.labels.shape == (problem.size.batch, *first.images[0].shape[2:])
    assert all(image.shape[:2] == (problem.size.batch, 1) for image in first.images)
    seen = problem.split.trained(problem.whole).labels
    if first.labels.dim() == 3:
        # A batch of images consists of whole slices of the trained part.
        assert all(any(torch.equal(one, other) for other in seen) for one in first.labels)
    else:
        assert first.labels.shape[1:] == (volume.PATCH,) * 3


def test_views_leave_pictures(problem):
    for at in problem.views.values():
        assert problem.held_out.labels[at].dim() == 2
        assert problem.held_out.images[0][:, 0][at].dim() == 2
