"""Programs for the ``Trainer`` of Hugging Face, with the stock model and with the compiled one."""

import copy

import pytest
import torch

import fusedseg.compiler
from tests.integrations.real import framework, without_fusedseg

transformers = framework("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MODELS = """
import torch
import transformers

def segformer():
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=32,
        num_labels=3, drop_path_rate=0.0, classifier_dropout_prob=0.0))

def upernet():
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                                         layer_type="basic", out_features=["stage1", "stage2", "stage3", "stage4"])
    return transformers.UperNetForSemanticSegmentation(transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, use_auxiliary_head=True, auxiliary_in_channels=24,
        auxiliary_channels=8))

def upernet_swin():
    backbone = transformers.SwinConfig(embed_dim=12, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
                                       drop_path_rate=0.0, out_features=["stage1", "stage2", "stage3", "stage4"])
    return transformers.UperNetForSemanticSegmentation(transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, auxiliary_in_channels=48, auxiliary_channels=8))
"""
exec(MODELS, names := {})
NAMES = ("segformer", "upernet", "upernet_swin")


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, 64, 64, generator=generator)
    return [{"pixel_values": image, "labels": (image[0] > 0) * 1 + (image[1] > 0) * 1} for image in x]


def trained(model, folder):
    """The losses of a short training, by the trainer's own log."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data())
    trainer.train()
    trainer.save_model(str(folder))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_model(name, tmp_path):
    """The losses are those of eager mode, and ``save_model`` writes a stock checkpoint."""
    torch.manual_seed(0)
    stock = names[name]()
    ours = copy.deepcopy(stock)
    x = torch.stack([one["pixel_values"] for one in data()[:2]])
    for model in (stock, ours):
        # The package installs hooks in a model's first call.
        with torch.no_grad():
            model.eval()(x)
        model.train()
    ours.compile(backend="fusedseg", options={"codegen": "aten"})
    losses = trained(ours, tmp_path / "ours")
    assert len(losses) == 4
    # In fp32, where gradients of norms may be sums in another order.
    assert losses == pytest.approx(trained(stock, tmp_path / "stock"), rel=1e-5)
    eager, kept = fusedseg.compiler.report(ours).kept
    print(f"\ntransformers {name}, compiled: kept {eager / 2**20:.2f} -> {kept / 2**20:.2f} MiB", end="")
    assert kept < 0.75 * eager
    loaded = type(stock).from_pretrained(str(tmp_path / "ours"))
    assert list(loaded.state_dict()) == list(stock.state_dict())

    code = "import transformers\nmodel = transformers.AutoModelForSemanticSegmentation.from_pretrained(sys.argv[1])\n"
    code += "print(model.eval()(torch.ones(1, 3, 64, 64)).logits.double().sum().item())"
    with torch.no_grad():
        expected = ours.eval()(torch.ones(1, 3, 64, 64)).logits.double().sum().item()
    assert float(without_fusedseg("import torch\n" + code, tmp_path / "ours")) == pytest.approx(expected, rel=1e-4)
