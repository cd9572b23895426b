"""The command `aquiline`: its verbs, and what becomes of errors."""

import io
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from aquiline.cli import (  # noqa: F401 (their import declares the verbs)
    data,
    decode,
    doctor,
    evaluate,
    export,
    measure,
    serve,
    train,
)
from aquiline.cli.shared import app, note
from aquiline.config import AquilineWarning, UserError

# What typer makes of a wrong command line, whichever click it brings along.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `aquiline`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a reply may hold what the terminal's encoding lacks
    with warnings.catch_warnings():
        warnings.simplefilter("always", AquilineWarning)
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {' '.join(str(message).split())}")
        try:
            command = typer.main.get_command(app)
            given = sys.argv[1:] if arguments is None else arguments
            code = command.main(list(given) or ["--help"], prog_name="aquiline", standalone_mode=False)
        except UserError as error:
            note(f"error: {' '.join(str(error).split())}")
            code = 2
        except OSError as error:
            note(f"error: {error.filename or 'output'}: {error.strerror or error}")
            code = 2
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx else "aquiline"
            note(f"error: {' '.join(error.format_message().split())}; see {where} --help")
            code = 2
        except (KeyboardInterrupt, typer.Abort):
            code = 130
    sys.exit(code)
