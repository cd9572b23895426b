"""Writes docs/cli.md from the command line's own declarations: `python runs/cli_reference.py`. A test compares them."""

import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.models import OptionInfo

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # works from a checkout, installed or not

from aquiline.cli.main import app  # noqa: E402

OUT = ROOT / "docs" / "cli.md"
VALUES = {int: "N", float: "X", Path: "PATH"}


def reference() -> str:
    """The whole page."""
    page = ["# Command line", "", str(app.info.help), "", "This page is written by `python runs/cli_reference.py`."]
    apps = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, command in ((prefix, command) for prefix, part in apps for command in part.registered_commands):
        page += ["", *_verb(prefix + (command.name or command.callback.__name__), command.callback)]
    return "\n".join(page) + "\n"


def _verb(name: str, function: Callable[..., Any]) -> list[str]:
    usage, rows, options = [f"aquiline {name}"], [], False
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, info = typing.get_args(hints[parameter.name])
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(info, OptionInfo):
            shown = _flag(kind, info)
            options |= not needed
        else:
            shown = parameter.name.upper() + ("..." if typing.get_origin(kind) is list else "")
        if needed:
            usage.append(shown)
        empty = parameter.default is None or kind is bool
        default = "required" if needed else "" if empty else f"`{parameter.default}`"
        rows.append(f"| `{shown}` | {default} | {info.help or ''} |")
    line = " ".join([*usage, "[OPTIONS]"] if options else usage)
    text = inspect.getdoc(function) or ""
    return [f"## aquiline {name}", "", text, "", "```text", line, "```", "", "| | default | |", "|---|---|---|", *rows]


def _flag(kind: Any, info: OptionInfo) -> str:
    """The flag and what is written behind it. Inside Annotated, typer keeps the first name in `default`."""
    name = next(n for n in (info.default, *(info.param_decls or ())) if str(n).startswith("--"))
    if kind is bool:
        return str(name)
    plain = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
    return f"{name} {info.metavar or VALUES.get(plain, 'TEXT')}"


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(reference(), "utf-8")
    print(OUT.relative_to(ROOT))
