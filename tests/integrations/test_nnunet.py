"""nnU-Net v2: its losses as ours, and a real run with its own commands beside the stock trainer."""

import json
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedseg
import fusedseg.compiler
from fusedseg.__main__ import main
from fusedseg.compiler import estimate
from fusedseg.integrations import nnunet
from fusedseg.integrations.nnunet import fused_loss, plans
from tests.integrations import nnunet_ddp
from tests.integrations.jobs import FusedStandIn, Network, OfThree, StandIn, initialized
from tests.integrations.real import framework, without_fusedseg
from tests.nnunet import PlainConvUNet

TRAINERS = tuple(f"nnUNetTrainerFusedseg{end}" for end in ("", "NoGraphs", "Budget", "Bits8", "Bits4"))
# What the trainers ask of the backend on one GPU.
ON_A_GPU = {"memory_format": torch.channels_last, "cudagraphs": True}
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_the_folder_holds_trainers_alone(capsys):
    # nnU-Net forgets modules that it has imported from this folder, so that no other module may lie there.
    assert main(["nnunet-trainers"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == nnunet.TRAINERS
    assert {path.name for path in folder.glob("*.py")} == {"__init__.py", "nnUNetTrainerFusedseg.py"}
    named = re.findall(r"^class (\w+)", (folder / "nnUNetTrainerFusedseg.py").read_text(), re.MULTILINE)
    assert tuple(named) == TRAINERS
    page = (ROOT / "docs" / "nnunet.md").read_text()
    assert all(f"`{name}`" in page for name in TRAINERS)


def test_plan_of_a_plans_file_without_nnunet(monkeypatch, capsys):
    """nnU-Net had a planner of its own, which knew nothing of the backend."""
    network = partial(PlainConvUNet, widths=(8,))
    monkeypatch.setattr(plans, "read", lambda path, configuration: plans.Planned(network, 2, (1, 16, 16, 16)))
    assert main(["plan", "nnUNetPlans.json", "--budget", "1600GiB", "--codegen", "aten"]) == 0
    said = capsys.readouterr().out
    assert "fits batch 2" in said
    # nnU-Net's planner counts in 10^9 bytes.
    target = int(re.search(r"-gpu_memory_target\s+(\d+)`", said)[1])
    assert target > 1600 * 2**30 / 1e9
    assert main(["profile", "nnUNetPlans.json", "--codegen", "aten", "--batch", "3"]) == 0
    assert "nnUNetPlans.json, 3d_fullres on 3×1×16×16×16 fp32" in capsys.readouterr().out


def test_a_plans_file_that_cannot_be_read(monkeypatch, capsys):
    def absent(path, configuration):
        raise ModuleNotFoundError("No module named 'nnunetv2'")

    monkeypatch.setattr(plans, "read", absent)
    assert main(["profile", "nnUNetPlans.json"]) == 2
    said = "fusedseg profile: MODEL 'nnUNetPlans.json': ModuleNotFoundError: No module named 'nnunetv2'"
    assert capsys.readouterr().err.strip() == said
    assert main(["profile", "tests.resnet:ResNet18"]) == 2
    assert "--input is needed, unless MODEL is a plans file of nnU-Net" in capsys.readouterr().err


@pytest.mark.parametrize("ddp", [False, True])
def test_the_network_is_converted_for_training_alone(ddp, tmp_path, monkeypatch):
    monkeypatch.setenv("nnUNet_compile", "f")
    trainer = initialized(is_ddp=ddp)
    assert type(trainer.network[0][1]) is (nn.SyncBatchNorm if ddp else nn.BatchNorm2d)
    assert len(fusedseg.conversion(trainer.network).served) == (0 if ddp else 1)
    assert any("fusedseg.convert" in line for line in trainer.log)
    assert any("no equal of a loss of class L1Loss" in line for line in trainer.log)
    assert isinstance(trainer.loss, nn.L1Loss)
    # PyTorch's function works as before, and prediction gets a stock network.
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(8)), nn.SyncBatchNorm)
    assert not fusedseg.conversion(trainer.build_network_architecture(nn.BatchNorm2d(8))).served
    trainer.save_checkpoint(str(tmp_path / "checkpoint.pth"))
    saved = torch.load(tmp_path / "checkpoint.pth")
    assert saved["trainer_name"] == "StandIn"
    stock = StandIn.build_network_architecture(nn.BatchNorm2d(8))
    stock.load_state_dict(saved["network_weights"])


@pytest.mark.parametrize(
    ("passed", "processes", "expected"),
    [
        ({}, 1, ON_A_GPU),
        ({}, 2, ON_A_GPU | {"cudagraphs": False}),
        ({"budget": 0.3, "extra_flops": 0.1}, 1, ON_A_GPU | {"budget": 0.3, "extra_flops": 0.1}),
        ({"cudagraphs": False, "memory_format": "keep"}, 1, ON_A_GPU | {"cudagraphs": False, "memory_format": "keep"}),
    ],
    ids=["default", "two processes", "budget", "switched off"],
)
def test_what_is_asked_of_the_backend_on_a_gpu(passed, processes, expected, monkeypatch):
    """The trainer needed a variant of its own for channels_last, and recorded no CUDA graphs.  Nothing runs here."""
    used = []
    monkeypatch.setattr(Network, "compile", lambda self, **given: used.append(given))
    monkeypatch.setattr(FusedStandIn, "compile_options", passed)
    trainer = initialized(device=torch.device("cuda"), is_ddp=processes > 1)
    assert used == [{"backend": fusedseg.compiler.backend, "options": expected}]
    # nnU-Net itself compiles neither the network nor the loss.
    assert type(trainer.network) is Network
    assert not trainer.compiled
    assert not fusedseg.conversion(trainer.network).served
    call = f'network.compile(backend="fusedseg", options={expected})'
    assert f"fusedseg: the network stays stock, for {call}" in trainer.log
    assert not any("fusedseg.convert" in line for line in trainer.log)
    lies = (
        trainer.network[0][0].weight.stride() == torch.empty(8, 1, 3, 3).to(memory_format=torch.channels_last).stride()
    )
    assert lies == (expected["memory_format"] is torch.channels_last)


def test_no_graphs_are_recorded_where_nnunet_does_not_compile(monkeypatch):
    """On Windows, for example."""
    used = []
    monkeypatch.setattr(Network, "compile", lambda self, **given: used.append(given["options"]))
    monkeypatch.setattr(StandIn, "_do_i_compile", lambda self: False)
    for device, expected in (("cuda", ON_A_GPU | {"cudagraphs": False}), ("cpu", {})):
        initialized(device=torch.device(device))
        assert used.pop() == expected


def test_options_that_the_backend_refuses_raise_before_training(monkeypatch):
    monkeypatch.setattr(FusedStandIn, "compile_options", {"bits": 5})
    with pytest.raises(ValueError, match="option bits must be 8, 4 or None, got 5"):
        initialized()


def test_the_final_validation_runs_no_compiled_code_and_releases_graphs(monkeypatch):
    """A replay would write over the prediction that nnU-Net holds while the network runs on the mirrored window.

    The CUDA graphs of training held their memory, so the validation could run out of memory on a card that fits a step.
    """
    released = []

    def gradients():
        return [parameter.grad for parameter in trainer.network.parameters() if parameter.grad is not None]

    monkeypatch.setattr(fusedseg.compiler.backend, "reset", lambda: released.append(gradients()))
    trainer = initialized()
    trainer.train_step({"data": torch.randn(2, 1, 16, 16), "target": torch.zeros(2, 2, 14, 14)})
    trainer.perform_actual_validation()
    assert trainer.prediction.shape == (1, 2, 14, 14)
    # That of the training step alone.
    assert len(fusedseg.compiler.report(trainer.network).graphs) == 1
    # The gradients lie in the memory of the graphs, so they go first.
    assert released == [[]]


@pytest.mark.gpu
def test_training_with_graphs_and_without(device, monkeypatch):
    """Training, a validation in between, a batch of another size, and the final validation, whose batch has one image.

    The final validation holds a prediction while the network runs again, which a replay would write over.
    """

    class OnDevice(FusedStandIn):
        @staticmethod
        def build_network_architecture(norm):
            return StandIn.build_network_architecture(norm).to(device)

    def trained(options):
        torch._dynamo.reset()
        monkeypatch.setattr(FusedStandIn, "compile_options", options)
        torch.manual_seed(0)
        trainer, losses = initialized(OnDevice, nn.InstanceNorm2d(8, affine=True), device=device), []
        for batch in (2, 2, 2, 1, 2, 2):
            x = torch.randn(batch, 1, 16, 16).to(device)
            losses.append(trainer.train_step({"data": x, "target": torch.zeros(batch, 2, 14, 14, device=device)}))
            trainer.network.eval()
            with torch.no_grad():
                losses.append({"loss": trainer.network(x).square().mean().item()})
            trainer.network.train()
        trainer.perform_actual_validation()
        return [found["loss"] for found in losses], trainer.prediction.cpu()

    with warnings.catch_warnings():
        # The batch of another size is not recorded.
        warnings.filterwarnings("ignore", message=".*option cudagraphs has no effect")
        losses, prediction = trained({})
    expected, same = trained({"cudagraphs": False})
    assert losses == expected
    assert torch.equal(prediction, same)


def test_a_network_that_pytorch_does_not_compile_raises_before_training(monkeypatch):
    """``compile`` of a plain ``nn.Sequential`` does nothing, without an error."""
    monkeypatch.setattr(FusedStandIn, "build_network_architecture", staticmethod(lambda norm: nn.Sequential(norm)))
    with pytest.raises(ValueError, match=r"Sequential\.compile\(\) of PyTorch has no effect on classes of torch\.nn"):
        initialized()


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"budget": 0.4}], ids=str)
def test_the_log_says_what_the_backend_keeps(options, monkeypatch):
    """Once, after the first training step; the loss and the gradients are those of the stock trainer, or near."""
    monkeypatch.setattr(FusedStandIn, "compile_options", options)
    batch = {"data": torch.randn(8, 1, 32, 32), "target": torch.zeros(8, 2, 30, 30)}
    found = {}
    for kind in (StandIn, FusedStandIn):
        torch.manual_seed(0)
        trainer = initialized(kind)
        losses = [trainer.train_step(batch)["loss"] for _ in range(2)]
        found[kind] = losses, torch.cat([parameter.grad.flatten() for parameter in trainer.network.parameters()])
    assert found[StandIn][0] == found[FusedStandIn][0]
    stock, ours = (grads for _, grads in found.values())
    # Without bits the gradients of norms differ from those of eager mode in their last bits.
    assert (ours - stock).norm() <= (0.2 if "bits" in options else 1e-6) * stock.norm()
    (said,) = (line for line in trainer.log if line.startswith("fusedseg.compiler.report"))
    (graph,) = fusedseg.compiler.report(trainer.network).graphs
    share = graph.ours.kept / graph.eager.kept
    assert share_of("kept for backward", said) == pytest.approx(share, abs=0.005)
    assert graph.ours.kept < (0.4 if "bits" in options else 0.6) * graph.eager.kept


@pytest.mark.parametrize(("device", "variable"), [("cpu", "f"), ("mps", "t")])
def test_the_network_is_converted_where_it_is_not_compiled(device, variable, monkeypatch):
    """The log says why."""
    monkeypatch.setenv("nnUNet_compile", variable)
    trainer = initialized(device=torch.device(device))
    (said,) = (line for line in trainer.log if "fusedseg.convert" in line)
    assert said.startswith("fusedseg.convert, because the network is not compiled:\nfusedseg.convert serves 1 norms")
    trainer.train_step({"data": torch.randn(2, 1, 16, 16), "target": torch.zeros(2, 2, 14, 14)})
    assert not any("compiler.report" in line for line in trainer.log)


def test_a_checkpoint_of_a_network_of_its_own_names_the_trainer(tmp_path):
    """It named the stock trainer, whose network has other layers: prediction failed, or was wrong without an error."""
    trainer = initialized(OfThree)
    trainer.save_checkpoint(str(tmp_path / "checkpoint.pth"))
    assert torch.load(tmp_path / "checkpoint.pth")["trainer_name"] == "OfThree"


def test_plans_that_name_relu_need_no_trainer_of_their_own():
    """There was one that built the network with LeakyReLU, which converted blocks need to keep less."""

    def network(act):
        net = PlainConvUNet(widths=(8,))
        for block in [module for module in net.modules() if isinstance(module, nn.Sequential)]:
            if isinstance(block[-1], nn.LeakyReLU):
                block[-1] = act
        return net

    leaky, relu = (
        estimate(partial(network, act), (1, 1, 16, 16, 16), options={"codegen": "aten"}).steps()[1]
        for act in (nn.LeakyReLU(0.01, inplace=True), nn.ReLU(inplace=True))
    )
    assert relu.kept <= leaky.kept
    assert relu.peak <= leaky.peak


# From here on the tests need nnunetv2, whose packages take gigabytes, so that they run only where it is installed.


def test_deep_supervision_of_nnunet():
    """``losses/test_values.py`` compares the losses that are supervised."""
    pytest.importorskip("nnunetv2", reason="needs nnU-Net: pip install nnunetv2")
    from nnunetv2.training.loss import compound_losses, deep_supervision

    one = compound_losses.DC_and_CE_loss({"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}, {})
    stock = deep_supervision.DeepSupervisionWrapper(one, [0.6, 0.4, 0.0])
    outputs = [torch.randn(2, 3, size, size, dtype=torch.float64, requires_grad=True) for size in (8, 4, 2)]
    targets = [torch.randint(3, (2, 1, size, size)) for size in (8, 4, 2)]
    value, expected = (loss(outputs, targets) for loss in (fused_loss(stock), stock))
    # nnU-Net forms its sums and its one-hot tensors in fp32, also for float64 logits.
    torch.testing.assert_close(value, expected.to(value), rtol=1e-6, atol=1e-6)
    (*grads, last), (*others, of_last) = (torch.autograd.grad(v, outputs, allow_unused=True) for v in (value, expected))
    torch.testing.assert_close(grads, others, rtol=1e-6, atol=1e-6)
    assert last is of_last is None


# nnU-Net looks for a trainer in all of its modules, and this one imports timm.
ALL_TRAINERS = "nnunetv2.training.nnUNetTrainer.primus.primus_trainers"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of a preprocessed dataset, as environment variables of nnU-Net's commands."""
    framework(ALL_TRAINERS)
    pytest.importorskip("nilearn", reason="needs the demo's images: pip install -e '.[demo]'")
    from tests.integrations.nnunet_dataset import write_raw

    home = tmp_path_factory.mktemp("nnunet")
    env = {f"nnUNet_{name}": str(home / name) for name in ("raw", "preprocessed", "results")}
    env["nnUNet_def_n_proc"] = "1"
    # A graph from the compiler's cache is not counted.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(home / "compiled")
    # nnU-Net takes several folders for trainers.
    env["nnUNet_extTrainer"] = os.pathsep.join((str(HERE / "nnunet_short"), str(nnunet.TRAINERS)))
    write_raw(home / "raw")
    # The planner needs one process for the augmentation, and both trainings see the same batches with none.
    planning = env | {"nnUNet_n_proc_DA": "1"}
    command(planning, "nnUNetv2_plan_and_preprocess", "-d", "901", "-c", "3d_fullres", "-np", "1", "-npfp", "1")
    return env | {"nnUNet_n_proc_DA": "0"}


def command(env, name, *args):
    path = Path(sys.executable).with_name(name)
    done = subprocess.run([path, *args], env=os.environ | env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(log):
    return [float(value) for value in re.findall(r"(?:train|val)_loss (-?\d+\.\d+)", log)]


def share_of(label, log):
    return float(re.search(rf"{label} .* -> .* \((\d+\.\d+)\)", log)[1])


@pytest.mark.slow
def test_trains_as_the_stock_trainer_and_predicts_with_it(folders, tmp_path):
    logs = {
        name: command(folders, "nnUNetv2_train", "901", "3d_fullres", "0", "-tr", name, "-device", "cpu")
        for name in ("nnUNetTrainerShort", "nnUNetTrainerShortFused")
    }
    stock, ours = (curve(log) for log in logs.values())
    assert len(stock) == len(ours) == 4
    # Both runs see the same batches.  Rounding grows with the steps; after 12 of them it was below 0.002.
    assert stock == pytest.approx(ours, abs=0.02)
    # The report of the backend, as shares of eager mode's bytes.
    shares = [share_of(label, logs["nnUNetTrainerShortFused"]) for label in ("kept for backward", "at the peak")]
    print(f"\nnnU-Net, kept and peak of a training step on a CPU, of eager mode's: {shares}; losses {stock} and {ours}")
    assert shares[0] < 0.5
    assert shares[1] < 0.7

    # The checkpoint names the stock trainer, so that prediction needs no trainer of fusedseg.
    results = Path(folders["nnUNet_results"]) / "Dataset901_MNI152"
    trained = results / "nnUNetTrainerShortFused__nnUNetPlans__3d_fullres"
    saved = torch.load(trained / "fold_0" / "checkpoint_final.pth", weights_only=False)
    assert saved["trainer_name"] == "nnUNetTrainerShort"
    images = Path(folders["nnUNet_raw"]) / "Dataset901_MNI152" / "imagesTr"
    without = folders | {"nnUNet_extTrainer": str(HERE / "nnunet_short")}
    model = ("-m", str(trained), "-f", "0", "-device", "cpu", "--disable_tta")
    command(without, "nnUNetv2_predict_from_modelfolder", "-i", str(images), "-o", str(tmp_path), *model)
    assert len(list(tmp_path.glob("*.nii.gz"))) == 6


PREDICT = """
import torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
predictor = nnUNetPredictor(device=torch.device("cpu"))
predictor.initialize_from_trained_model_folder(sys.argv[1], (0,))
print(predictor.network.eval()(torch.linspace(-1, 1, 512).view(1, 1, 8, 8, 8)).double().abs().sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_predicts_without_fusedseg(name, tmp_path):
    """Every trainer that ``nnunet-trainers`` offers, with plans of ReLU; nnU-Net's predictor builds the network."""
    framework(ALL_TRAINERS)
    nnunet_ddp.folders(tmp_path)
    trainer = nnunet_ddp.initialized(name, "InstanceNorm3d", "torch.nn.ReLU")
    share = dict(zip(("data", "target"), nnunet_ddp.batch(), strict=True))
    trainer.network.train()
    trainer.train_step(share)
    # What nnU-Net writes into the folder of results.
    home = tmp_path / "model"
    (home / "fold_0").mkdir(parents=True)
    (home / "plans.json").write_text(json.dumps(trainer.plans_manager.plans))
    (home / "dataset.json").write_text(json.dumps(nnunet_ddp.DATASET))
    trainer.save_checkpoint(str(home / "fold_0" / "checkpoint_final.pth"))
    with torch.no_grad():
        x = torch.linspace(-1, 1, 512, dtype=torch.float64).view(1, 1, 8, 8, 8)
        expected = trainer.network.eval()(x)[0].abs().sum().item()
    # fp32 beside float64
    assert float(without_fusedseg(PREDICT, home)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "ChannelsLast", "Budget", "Bits8", "Bits4"])
def test_nnunets_own_steps_compiled(end, tmp_path, monkeypatch):
    """Twenty steps of nnU-Net's own ``train_step`` in float64 through the backend, and a validation; ``aten``."""
    framework(ALL_TRAINERS)
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    # A graph from the compiler's cache is not counted, and two variants have equal graphs.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    nnunet_ddp.folders(tmp_path)
    share = dict(zip(("data", "target"), nnunet_ddp.batch(), strict=True))
    found, log = {}, []
    monkeypatch.setattr(nnUNetTrainer, "print_to_log_file", lambda self, *args, **_: log.extend(map(str, args)))
    if end == "ChannelsLast":
        # As on a GPU.
        monkeypatch.setattr(nnunet.Fused, "compile_options", {"memory_format": torch.channels_last_3d})
        end = ""
    for name in ("nnUNetTrainer", f"nnUNetTrainerFusedseg{end}"):
        trainer = nnunet_ddp.initialized(name, "InstanceNorm3d")
        trainer.network.train()
        losses = [float(trainer.train_step(share)["loss"]) for _ in range(20)]
        trainer.network.eval()
        with torch.no_grad():
            checked = trainer.validation_step(share)
        found[name] = losses, float(checked["loss"])
    (stock, stock_end), (ours, ours_end) = found.values()
    (said,) = (line for line in log if line.startswith("fusedseg.compiler.report"))
    graph = fusedseg.compiler.report(trainer.network).graphs[0]
    print(f"\nnnU-Net compiled, {end or 'exact'}: {said}\nlast losses {stock[-1]:.6f}, {ours[-1]:.6f}", end="")
    assert graph.ours.kept < graph.eager.kept
    # The losses of nnU-Net are sums in fp32; ours are those of this package in both trainers.
    assert ours[0] == pytest.approx(stock[0], rel=1e-6)
    fall = stock[0] - stock[-1]
    assert fall > 0.2
    # The noise of rounding, which changes the weights after the first step.
    noise = 0.01 * fall if "Bits" in end else 1e-5
    assert abs(ours[-1] - stock[-1]) < noise
    assert abs(ours_end - stock_end) < 2 * noise


@pytest.mark.parametrize("name", ["nnUNetPlans.json", "dataset.json"])
def test_a_file_without_its_entries_is_one_line(name, tmp_path, capsys):
    """It was the traceback of a KeyError in nnU-Net."""
    framework("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
    contents = {"nnUNetPlans.json": nnunet_ddp.plans("InstanceNorm3d"), "dataset.json": nnunet_ddp.DATASET, name: {}}
    for file, content in contents.items():
        (tmp_path / file).write_text(json.dumps(content))
    path = str(tmp_path / "nnUNetPlans.json")
    assert main(["plan", path, "--budget", "4GiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fusedseg plan: MODEL '{path}': {path} and dataset.json beside it must be those of ")
    assert "KeyError: " in line


@pytest.mark.slow
def test_plan_reads_a_plans_file(folders, capsys):
    path = Path(folders["nnUNet_preprocessed"]) / "Dataset901_MNI152" / "nnUNetPlans.json"
    assert main(["plan", str(path), "--budget", "4GiB", "--codegen", "aten"]) == 0
    said = capsys.readouterr().out
    assert "PlainConvUNet in 4.00 GiB" in said
    assert "-gpu_memory_target" in said
    broken = path.with_name("broken.json")
    broken.write_text(json.dumps([1]))
    assert main(["plan", str(broken), "--budget", "4GiB"]) == 2
    assert "must hold a JSON object, got list" in capsys.readouterr().err
    assert main(["plan", str(path), "--budget", "4GiB", "--configuration", "3d"]) == 2
    assert "configuration must be one of" in capsys.readouterr().err
