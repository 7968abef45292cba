"""Tests the examples in the README and the pages of docs/: Python blocks are run, and commands are parsed.

The commands of the scripts that CI and a run on a GPU start are parsed too.

The rules that a page follows:

* Each ``python`` block runs by itself, in an empty folder.
* A ``text`` block that directly follows a ``python`` block is what that block prints.
* A ``python`` block that imports one of ``FRAMEWORKS`` runs in a process of its own, and is skipped without it.
* Each line of a ``bash`` block is a command that ``check_command`` knows.
"""

import ast
import contextlib
import importlib
import io
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fusedseg
from tests.integrations.real import LIBRARY, framework
from tests.tools.threads import threads
from tests.tools.warm import run_bare

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r'!\[[^\]]+\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"')
LARGEST_PICTURE = 150_000
FRAMEWORKS = "monai", "segmentation_models_pytorch", "timm", "lightning", "transformers", "diffusers", "nnunetv2"


class Block(NamedTuple):
    """A block of a page: its text, the output that the page shows under it, and its position."""

    text: str
    output: str | None
    where: str


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if match[1] == language:
                found.append(Block(match[2], match[3], f"{page.relative_to(ROOT)}:{line}"))
    return found


def frameworks_of(block: Block) -> list[str]:
    return [name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", block.text, re.MULTILINE)]


PYTHON = blocks("python")
WITH_FRAMEWORK = [block for block in PYTHON if frameworks_of(block)]
ALONE = [block for block in PYTHON if not frameworks_of(block)]
COMMANDS = [
    (command.strip(), block.where)
    for block in blocks("bash")
    for line in block.text.replace("\\\n", " ").splitlines()
    for command in line.split("&&")
]
SCRIPTS = ROOT / ".ci" / "run", ROOT / "bench" / "gpu" / "gpu.sh"
# A command whose arguments are ours, in a line of a script: settings and a folder may stand before it.
CALL = re.compile(
    r'(?:^\s*(?:\w+=\S+ )*(?:\S+/)?|"\$python" -m )((?:python -m )?(?:fusedseg|examples\.demo|bench\.report)(?: .*)?$)',
    re.MULTILINE,
)
PYTEST = re.compile(r"^\s*(?:\w+=\S+ )*(pytest .*)$", re.MULTILINE)
# A redirection or another command ends the arguments.
END = re.compile(r" \d?(?:[<>|;]|&&)")


def calls(pattern: re.Pattern[str], text: str) -> list[list[str]]:
    """The words of each command of a script that matches the pattern."""
    lines = text.replace("\\\n", " ")
    return [shlex.split(END.split(match[1])[0]) for match in pattern.finditer(lines)]


@pytest.mark.parametrize("block", ALONE, ids=[block.where for block in ALONE])
def test_a_python_block_runs(block, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if block.output is None and "torch.compile" in block.text:
        # What shows no output runs without Inductor's kernels, whose compilation takes up to ten seconds.
        request.getfixturevalue("kernels_that_do_nothing")
    printed = io.StringIO()
    # Empty lines come first, so that line numbers in a traceback are line numbers of the page.
    page, _, line = block.where.rpartition(":")
    # A report has the graphs of all networks of a class that this process has compiled.
    torch._dynamo.reset()
    code = compile("\n" * int(line) + block.text, page, "exec")
    with threads(1), contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    if block.output is not None:
        assert printed.getvalue().rstrip() == block.output.rstrip()


@pytest.mark.parametrize("block", WITH_FRAMEWORK, ids=[block.where for block in WITH_FRAMEWORK])
def test_a_block_with_a_framework_runs(block, tmp_path):
    """It runs in a process in which nothing has imported the framework, only PyTorch."""
    for name in frameworks_of(block):
        framework(name)
    head = f"import os, sys, warnings; os.chdir({str(tmp_path)!r}); sys.path[:] = {sys.path!r}\n"
    head += "warnings.simplefilter('ignore')\n"
    code = head + ("" if torch.version.cuda else LIBRARY) + block.text
    done = run_bare(code)
    assert done.returncode == 0, f"{block.where}: {done.stderr}"
    if block.output is not None:
        assert done.stdout.rstrip() == block.output.rstrip()


class Parsed(Exception):
    """Raised when a command has accepted its arguments, so that the command does not run."""


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes arguments to the command line of a module, which stops as soon as they are parsed."""
    import argparse

    original = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args, **kwargs):
        original(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
        importlib.import_module(module).main(arguments)


def extras_of(requirement: str) -> list[str]:
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", requirement)
    assert found, f"not this package: {requirement}"
    return found[1].split(",") if found[1] else []


def check_install(arguments: list[str]) -> None:
    assert arguments[:2] == ["install", "-e"]
    assert len(arguments) == 3
    for extra in extras_of(arguments[2]):
        assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE), f"pyproject.toml has no extra {extra!r}"


def check_pytest(arguments: list[str]) -> None:
    """Checks that pytest knows the options, that pyproject.toml names the markers, and that the paths exist."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-m":
            for marker in re.findall(r"\w+", next(rest)):
                assert marker in ("not", "or", "and") or re.search(rf'^    "{marker}: ', PYPROJECT, re.MULTILINE), (
                    marker
                )
        elif argument == "-k":
            name, paths = next(rest), [ROOT / one for one in arguments if one.endswith(".py")]
            assert any(re.search(rf"def \w*{name}", path.read_text()) for path in paths), name
        elif argument == "--device":
            assert next(rest) in ("cpu", "cuda")
        elif argument == "--ptx":
            assert next(rest) in ("sm_80", "sm_90")
        elif argument == "-n":
            assert next(rest).isdigit()
        else:
            assert argument == "-s" or (ROOT / argument).exists(), argument


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a command without running it."""
    match words:
        case ["python", "-m", "fusedseg", *arguments] | ["fusedseg", *arguments]:
            parse("fusedseg.__main__", arguments, monkeypatch)
        case ["python", "-m", "examples.demo", *arguments]:
            parse("examples.demo.__main__", arguments, monkeypatch)
        case ["python", "-m", "bench.report", *arguments]:
            parse("bench.report", arguments, monkeypatch)
        case ["python", "-m", "tests.integrations.nnunet_presets"]:
            assert (ROOT / "tests" / "integrations" / "nnunet_presets.py").exists()
        case ["python", "-m", "docs.make_pictures", *arguments]:
            pytest.importorskip("matplotlib")
            parse("docs.make_pictures", arguments, monkeypatch)
        case ["python", "-m", "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build"]:
            assert (ROOT / "docs" / "conf.py").exists()
        case ["nnUNet_extTrainer=$(python", "-m", "fusedseg", "nnunet-trainers)", "nnUNetv2_train", *arguments]:
            parse("fusedseg.__main__", ["nnunet-trainers"], monkeypatch)
            trainer = arguments[arguments.index("-tr") + 1]
            assert (ROOT / "fusedseg" / "integrations" / "nnunet" / "trainers" / f"{trainer}.py").exists()
        case ["python", "-m", "fusedseg.integrations.nnunet.predictor", *arguments]:
            # nnU-Net's own command reads the arguments.
            assert (ROOT / "fusedseg" / "integrations" / "nnunet" / "predictor.py").exists()
            assert arguments[::2] == ["-i", "-o", "-d", "-c", "-f"]
        case ["pip", *arguments]:
            check_install(arguments)
        case ["pytest", *arguments] | ["compute-sanitizer", "python", "-m", "pytest", *arguments]:
            check_pytest(arguments)
        case ["ruff", "check" | "format", *_] | ["mypy"]:
            assert "[tool.mypy]" in PYPROJECT
            assert "[tool.ruff]" in PYPROJECT
        case _:
            pytest.fail(f"no check knows this command: {shlex.join(words)}")


@pytest.mark.parametrize(("command", "where"), COMMANDS, ids=[f"{where} {command}" for command, where in COMMANDS])
def test_a_command_is_parsed(command, where, monkeypatch):
    check_command(shlex.split(command, comments=True), monkeypatch)


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_commands_of_a_script_are_parsed(path, monkeypatch):
    """``.ci/run`` once failed at its last line, after 25 minutes: the command had renamed the option --compare."""
    found = calls(CALL, path.read_text())
    assert found
    for command in found:
        words = command if command[0] in ("python", "fusedseg") else ["python", "-m", *command]
        with monkeypatch.context() as patch:
            check_command(words, patch)


def test_pytest_of_ci_gets_files_and_options_that_exist(monkeypatch):
    found = calls(PYTEST, (ROOT / ".ci" / "run").read_text())
    assert found
    for command in found:
        check_command([word for word in command if word != "${repeated[@]}"], monkeypatch)


def test_what_ci_leaves_out_exists():
    """pytest ignores names that are gone, and leaves out each test whose name begins with the given one."""
    for line in (ROOT / ".ci" / "repeated").read_text().splitlines():
        path, _, name = line.partition("::")
        name = name.partition("[")[0]
        assert (ROOT / path).exists(), line
        assert not name or len(re.findall(rf"def {name}", (ROOT / path).read_text())) == 1, line


def test_commands_write_different_files():
    """The second command of docs/memory.md failed: "memory.png exists"."""
    written = [name for command, _ in COMMANDS for name in re.findall(r"--(?:plot|curve|json) (\S+)", command)]
    assert "memory.png" in written
    assert len(set(written)) == len(written)


def test_the_pages_have_blocks_of_known_languages():
    """The tests above would skip a block with a misspelt language."""
    known = {"python", "bash", "text", "json"}
    for page in PAGES:
        text = page.read_text()
        languages = set(re.findall(r"^```(\w+)$", text, re.MULTILINE))
        assert languages <= known, page.name
        assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, f"{page.name}: a block does not end"


def test_every_picture_is_there_and_small():
    shown = [page.parent / (match[1] or match[2]) for page in PAGES for match in PICTURE.finditer(page.read_text())]
    assert shown
    assert not [path for path in shown if not path.is_file()]
    large = [path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.stat().st_size > LARGEST_PICTURE]
    assert not large


def test_links_within_the_readme_lead_somewhere():
    """Sphinx checks the links in docs/, so this test reads only the README."""
    for link, heading in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", (ROOT / link).read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]


def test_the_life_of_a_joint_graph_names_functions_that_exist():
    """The partitioner was cut into other files a day after the table had been written."""
    table = (ROOT / "docs" / "design.md").read_text().partition("## Life of a joint graph")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+\w?\. .*", table, re.MULTILINE)
    found = [pair for row in rows for pair in re.findall(r"`([\w/]+\.py)`((?:[:,] `\w+`)*)", row)]
    assert len(found) > 12
    for path, names in found:
        module = importlib.import_module(f"fusedseg.compiler.{path[:-3].replace('/', '.')}")
        for name in re.findall(r"\w+", names):
            assert hasattr(module, name), f"{path}: {name}"


def test_every_experimental_name_exists():
    """A name that was renamed would be marked as stable in the reference."""
    for name in importlib.import_module("docs.conf").EXPERIMENTAL:
        assert pkgutil.resolve_name(name), name


def test_every_public_name_is_marked_as_stable_or_experimental():
    """``docs/conf.py`` marks each function and class that the reference describes; settings have a mark in the text."""
    marked = set(re.findall(r"py:data:: (\w+)\n.*\n\n   \*(?:Stable|Experimental)\.\*\n", REFERENCE))
    assert marked == {"backend"}
    described = re.findall(r":: (fusedseg[\w.]*\.\w+)$", REFERENCE, re.MULTILINE)
    parts = [name.rpartition(".") for name in described if not name.startswith("fusedseg.integrations")]
    objects = [getattr(importlib.import_module(module), name) for module, _, name in parts]
    for name in ("functional", "memory"):
        assert f"automodule:: fusedseg.{name}\n   :members:\n   :imported-members:" in REFERENCE
        objects += [getattr(getattr(fusedseg, name), member) for member in getattr(fusedseg, name).__all__]
    missing = []
    for module in (fusedseg, fusedseg.compiler, fusedseg.losses, fusedseg.nn, fusedseg.unet):
        for name in set(module.__all__) - (marked if module is fusedseg else set()):
            if not any(getattr(module, name) is one for one in objects):
                missing.append(f"{module.__name__}.{name}")
    assert missing == []


def test_every_name_of_an_integration_is_in_the_reference():
    """The public functions and classes of each file, read from its source, because a framework may be absent."""
    home = ROOT / "fusedseg" / "integrations"
    named = {"nnunet": ["Fused", "fused_loss", "plans.read"]}
    for path in home.glob("*.py"):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        named[path.stem] = [node.name for node in nodes if not node.name.startswith("_")]
    names = [f"fusedseg.integrations.{module}.{name}" for module in named for name in named[module]]
    assert len(names) > 12
    assert [name for name in names if f":: {name}\n" not in REFERENCE] == []
