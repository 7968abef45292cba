"""The help of every command, and the one-line errors and the progress line that all commands share."""

import argparse
import io
import re
import shlex
import threading

import pytest

from fusedseg import __main__ as command_line
from fusedseg import progress
from fusedseg.__main__ import main, parser

(SUBPARSERS,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
COMMANDS = ["", *SUBPARSERS.choices]


def help_of(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "fusedseg")
def test_help_is_readable_in_80_columns(command, capsys, monkeypatch):
    lines = help_of(command, capsys, monkeypatch).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: fusedseg {command}".rstrip())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "fusedseg")
def test_help_has_examples_that_parse(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch).replace("\\\n", " ")
    lines = text.partition("\nexample")[2].splitlines()[1:]
    examples = [line.partition("fusedseg ")[2] for line in lines if "COMMAND" not in line]
    assert examples
    for example in examples:
        assert callable(parser().parse_args(shlex.split(example)).run)


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_every_argument_has_help(command):
    for action in SUBPARSERS.choices[command]._actions:
        assert action.help, action.dest


def test_an_abbreviated_option_is_refused(capsys):
    """An abbreviation that works today may name two options tomorrow."""
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--over"])
    assert capsys.readouterr().err == "fusedseg: unrecognized arguments: --over; see fusedseg --help\n"


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"fusedseg \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(*options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "fusedseg: interrupted\n"


class Terminal(io.StringIO):
    """Replaces stderr.  ``drawn`` is set when the progress line is drawn."""

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal, self.drawn = is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        count = super().write(text)
        if "batch 8" in text:
            self.drawn.set()
        return count


def test_progress_is_drawn_on_a_terminal_and_wiped(monkeypatch):
    terminal = Terminal(True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.01)
    with progress.Progress("fusedseg plan") as shown:
        shown.update("eager, batch 8")
        assert terminal.drawn.wait(10)
    assert "\r\x1b[Kfusedseg plan: eager, batch 8 (0 s)" in terminal.getvalue()
    assert terminal.getvalue().endswith(progress.CLEAR)


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "quiet"),
    [(True, 60.0, None), (False, 0.0, None), (True, 0.0, 60.0)],
    ids=["a short command", "into a file", "as long as the caller says"],
)
def test_progress_is_silent(monkeypatch, is_terminal, seconds, quiet):
    terminal = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_SECONDS", seconds)
    with progress.Progress("fusedseg plan", quiet) as shown:
        shown.update("eager, batch 8")
        assert not terminal.drawn.wait(0.1)
    assert terminal.getvalue() == ""
    assert not [thread for thread in threading.enumerate() if thread.daemon and "_redraw" in thread.name]
