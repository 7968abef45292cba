"""Two processes with half of a batch each train as one process with the whole batch, if norms are synchronised.

Everything computes in float64, three steps of SGD with momentum.
"""

import pytest
import torch

from tests.integrations import jobs, nnunet_ddp
from tests.integrations.real import framework
from tests.tools.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def check(job, *args, logged=1e-9):
    """Returns what rank 0 says of its network, after a comparison with one process.

    ``logged`` is the relative tolerance of the losses.
    """
    losses, one = job(0, 1, *args)
    assert not one["norms"]
    results = on_ranks(2, job, *args)
    mean = torch.tensor([found for found, _ in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), rtol=logged, atol=0)
    assert losses[-1] < losses[0]
    for name, counts in one.get("counts", {}).items():
        assert torch.equal(sum(found["counts"][name] for _, found in results), counts)
    for _, found in results:
        torch.testing.assert_close(found["state"], one["state"], **CLOSE)
    return results[0][1]


def test_names_of_the_package():
    assert check(jobs.package)["norms"] == ["InPlaceABNSync"]


def test_the_trainer_of_nnunet():
    """Its network is converted before DDP; norms of each sample need no synchronisation."""
    check(jobs.nnunet_trainer)


# From here on the tests need the frameworks.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nonlin"),
    [("", "LeakyReLU"), ("Budget", "LeakyReLU"), ("", "ReLU")],
    ids=["leaky_relu", "a budget", "relu"],
)
def test_the_real_trainer_of_nnunet(name, nonlin, tmp_path):
    """Two processes, and one with nnU-Net's own trainer, whose loss adds in fp32 and is compared loosely."""
    # nnU-Net imports the modules of all trainers to find one; these import the most packages.
    framework("nnunetv2.training.nnUNetTrainer.primus.primus_trainers")
    norm = "InstanceNorm3d"
    args = str(tmp_path), f"nnUNetTrainerFusedseg{name}", norm, f"torch.nn.{nonlin}"
    found = check(nnunet_ddp.train, *args)
    assert not found["norms"]
    losses, stock = nnunet_ddp.train(0, 1, str(tmp_path), "nnUNetTrainer", norm, f"torch.nn.{nonlin}")
    torch.testing.assert_close(found["state"], stock["state"], rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(nnunet_ddp.train(0, 1, *args)[0], rel=1e-6)
