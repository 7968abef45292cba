"""The files of the self-test's verdicts: folders that cannot be written, damaged files, and several processes."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from fusedseg.ops.self_test import verdicts
from fusedseg.ops.self_test.verdicts import Verdict

pytest.importorskip("triton")

DTYPE, CPU = torch.float16, torch.device("cpu")
FAILED = Verdict("wrong result", "z is off", 0.25)


@pytest.fixture
def of(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return verdicts.environment(CPU)


@pytest.fixture
def path(of):
    return verdicts.path_of("norm", DTYPE, of)


@pytest.mark.parametrize("verdict", [Verdict(), FAILED], ids=["passed", "failed"])
def test_a_verdict_is_read_as_it_was_written(path, of, verdict):
    assert verdicts.read(path, of) is None
    assert verdicts.write(path, of, verdict)
    assert verdicts.read(path, of) == verdict
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    # A user can read the file, too.
    content = json.loads(path.read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert content["verdict"]["kind"] == verdict.kind


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    # The specification says that a relative path is ignored.
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert verdicts.folder() == tmp_path / ".cache" / "fusedseg" / "self_test"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert verdicts.folder() == tmp_path / "other" / "fusedseg" / "self_test"


def test_a_user_without_a_home_has_no_files(monkeypatch, of):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", none)
    path = verdicts.path_of("norm", DTYPE, of)
    assert path is None
    assert verdicts.read(path, of) is None
    assert not verdicts.write(path, of, FAILED)


DAMAGED = {
    "empty": b"",
    "cut short": b'{"environment": {"gpu": "cpu", "arch',
    "no text": b"\xff\xfe\x00\x81" * 50,
    "another type": b"[1, 2, 3]",
    "a number": b"7",
    "no verdict": b'{"environment": {}}',
    "a verdict of another type": b'{"environment": {}, "verdict": []}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_replaced(path, of, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert verdicts.read(path, of) is None
    assert verdicts.write(path, of, FAILED)
    assert verdicts.read(path, of) == FAILED


def test_fields_of_a_wrong_type_are_no_verdict(path, of):
    verdicts.write(path, of, FAILED)
    for name, value in (("kind", 3), ("text", None), ("seconds", "long")):
        content = {"environment": of._asdict(), "verdict": FAILED._asdict() | {name: value}}
        path.write_text(json.dumps(content))
        assert verdicts.read(path, of) is None


def test_a_file_of_another_environment_is_no_verdict(path, of):
    """Two environments may have the same digest in their names."""
    verdicts.write(path, of._replace(driver="550.54"), FAILED)
    assert verdicts.read(path, of) is None


@pytest.mark.parametrize("obstacle", ["a file", "no permission", "a full disk"])
def test_a_folder_that_cannot_be_written_is_no_error(path, of, obstacle, tmp_path, monkeypatch):
    if obstacle == "a file":
        (tmp_path / "fusedseg").write_text("")
    elif obstacle == "no permission":
        # Root may write everywhere, so the call itself fails.
        def refused(*args, **options):
            raise PermissionError("mkdir")

        monkeypatch.setattr(Path, "mkdir", refused)
    else:

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
    assert not verdicts.write(path, of, FAILED)
    assert verdicts.read(path, of) is None
    # No half of a file is left.
    assert not path.parent.is_dir() or not [*path.parent.iterdir()]


def many_writes(path, of, count, number):
    for k in range(count):
        assert verdicts.write(path, of, Verdict("wrong result", f"{number} " * 2000, float(k)))


def test_two_processes_may_write_at_once(path, of):
    """A reader sees a whole file, of one process or the other."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=many_writes, args=(path, of, 100, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.append(verdicts.read(path, of))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen
    assert all(verdict is not None and len(set(verdict.text.split())) == 1 for verdict in seen)
