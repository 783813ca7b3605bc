"""How the `specar` command speaks beside its results: on standard error, an error in one line and with an exit code."""

import logging
import os
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .errors import SpecarError, UsageError

stderr = Console(stderr=True, highlight=False, soft_wrap=True)
WrongUsage: Any = typer.BadParameter.__base__  # click's UsageError, from wherever this typer has it


def say(text: str) -> None:
    stderr.print(text, markup=False)


class Said(logging.Handler):
    """The library's log, above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class Guarded(TyperGroup):
    """Turns errors into one line on standard error and an exit code."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """As in typer, which frames what it says of a wrong option in five lines."""
        try:
            code = super().main(*arguments, **{**options, "standalone_mode": False})
        except WrongUsage as error:
            if message := error.format_message():  # none where the help was shown instead
                command = error.ctx.command_path if error.ctx else "specar"
                say(f"specar: {message.rstrip('.')}; see `{command} --help`")
            code = error.exit_code
        except typer.Abort:  # what older releases of typer make of Ctrl-C
            code = 130
        if code == 130:
            say("specar: interrupted")
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except UsageError as error:
            fail(str(error), 2)
        except SpecarError as error:
            fail(str(error), 1)
        except OSError as error:
            if error.filename is None:  # standard output: what it has not taken is not offered again
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            fail(f"cannot write to {error.filename or 'standard output'}: {error.strerror}", 1)


def fail(message: str, code: int) -> None:
    say(f"specar: {message}")
    raise typer.Exit(code)
