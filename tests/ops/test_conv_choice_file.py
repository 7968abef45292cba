"""The file that stores which convolution was faster."""

import json

import pytest

from fusedseg.functional import load_conv_choices, save_conv_choices
from fusedseg.ops.conv import choice as conv_choice
from tests.ops.test_conv_choice import FASTER, SLOWER, WRONG, chosen, no_records, on_a_gpu, remember

# These names are fixtures.
__all__ = ["no_records", "on_a_gpu"]


def test_save_and_load(tmp_path, on_a_gpu):
    keys = {remember(FASTER): FASTER, remember(SLOWER, K=48): SLOWER, remember(WRONG, dims=3, size=4): WRONG}
    path = tmp_path / "choices.json"
    assert save_conv_choices(path) == 3
    conv_choice._records.clear()
    assert chosen() == "aten"
    assert load_conv_choices(str(path)) == 3
    assert conv_choice._records == keys
    assert chosen() == "triton"
    # The choices in a file replace the measured choices.
    remember(SLOWER)
    load_conv_choices(path)
    assert chosen() == "triton"


def test_save_does_not_overwrite_unasked(tmp_path):
    path = tmp_path / "choices.json"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"save_conv_choices: .*choices.json exists; pass overwrite=True"):
        save_conv_choices(path)
    assert path.read_text() == "mine"
    assert save_conv_choices(path, overwrite=True) == 0
    assert load_conv_choices(path) == 0


def test_load_of_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_conv_choices(tmp_path / "none.json")


def saved(tmp_path, change):
    """Writes a file of one record, and changes the record."""
    remember(FASTER)
    path = tmp_path / "choices.json"
    save_conv_choices(path)
    conv_choice._records.clear()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


MALFORMED = {
    "no versions": lambda content: content.pop("versions"),
    "no choices": lambda content: content.pop("choices"),
    "no measurement": lambda content: content["choices"][0].pop("measured"),
    "a field too few": lambda content: content["choices"][0]["convolution"].pop("kernel"),
    "a field too many": lambda content: content["choices"][0]["convolution"].update(color="red"),
    "a list for a convolution": lambda content: content["choices"][0].update(convolution=[1, 2]),
    "a list in a list": lambda content: content["choices"][0]["convolution"].update(kernel=[[3], [3]]),
    "a word for seconds": lambda content: content["choices"][0]["measured"].update(triton="fast"),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_load_of_a_malformed_file(tmp_path, change):
    path = saved(tmp_path, change)
    with pytest.raises(ValueError, match=r"load_conv_choices: .*choices.json holds no choices"):
        load_conv_choices(path)
    assert not conv_choice._records


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00\xff"])
def test_load_of_another_file(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"holds no choices"):
        load_conv_choices(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["versions"].update(torch="1.0"),
        # Fields may differ from version to version; such a file once raised an error.
        lambda content: (content["versions"].update(fusedseg="0.0"), content["choices"][0].update(convolution={})),
    ],
    ids=["torch", "fields of another fusedseg"],
)
def test_load_from_other_versions_takes_nothing(tmp_path, change):
    path = saved(tmp_path, change)
    with pytest.warns(UserWarning, match=r"was measured with .*, here is .* no choice is taken"):
        assert load_conv_choices(path) == 0
    assert not conv_choice._records


def test_without_triton_choices_can_be_saved(tmp_path, monkeypatch):
    """Only Linux has triton, so its version may be missing; saving choices then raised PackageNotFoundError."""
    version = conv_choice.importlib.metadata.version

    def no_triton(name):
        if name == "triton":
            raise conv_choice.importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(conv_choice.importlib.metadata, "version", no_triton)
    path = tmp_path / "choices.json"
    assert save_conv_choices(path) == 0
    assert load_conv_choices(path) == 0
