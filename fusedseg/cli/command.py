"""The parser of every command, and one-line errors.  A help has at most 80 columns and an example."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# The width of the help.  Two columns stay free, as argparse leaves them.
COLUMNS = 80


class Refused(Exception):
    """Raised if a command cannot do its task.  The message says why and what to do; it becomes one line on stderr."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, which names the help, and exits with 2."""

    def __init__(self, **options: Any) -> None:
        width = min(COLUMNS, shutil.get_terminal_size().columns) - 2
        formatter = partial(argparse.RawDescriptionHelpFormatter, width=width, max_help_position=22)
        options["description"] = textwrap.fill(options["description"], width)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    summary: str,
    description: str,
    examples: Sequence[str],
    run: Callable[..., int],
) -> Parser:
    """Adds a command to the result of ``add_subparsers``.

    ``run`` is called with the parsed arguments, and returns the exit status.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    title = "example" if len(examples) == 1 else "examples"
    command = commands.add_parser(name, help=summary, description=description, epilog=f"{title}:\n{lines}")
    command.set_defaults(run=run, command=command.prog)
    return command


def first_line(error: BaseException) -> str:
    """The first line of an error, without the name of the fusedseg function that has raised it."""
    message = (str(error).strip() or "no message").splitlines()[0]
    own = re.match(r"fusedseg[\w.]*: ", message)
    return message[own.end() :] if own else f"{type(error).__name__}: {message}"


def check_new(path: str | None, overwrite: bool) -> None:
    """Raises Refused if the file exists, if it is a folder, or if there is no folder for it."""
    if path and Path(path).is_dir():
        raise Refused(f"{path} is a folder: name a file in it")
    if path and Path(path).exists() and not overwrite:
        raise Refused(f"{path} exists: choose another path, or pass --overwrite")
    if path and not Path(path).parent.is_dir():
        raise Refused(f"{path}: there is no folder {Path(path).parent}")
