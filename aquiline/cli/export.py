"""`convert`."""

from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.shared import app


@app.command()
def convert(
    draft: Annotated[str, typer.Argument(help="Folder, hub id or 'default'; of any layout that is read.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; with --to gguf, the .gguf file.")],
    to: Annotated[str, typer.Option("--to", help="sglang (aquiline's own layout), speculators, openvino or gguf.")],
    target: Annotated[
        str | None, typer.Option("--target", help="As of generate, where the target is needed: a message says so.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write even a head whose switches the engine would ignore.")
    ] = False,
) -> None:
    """Write a head for another engine: SGLang, vLLM, OpenVINO or llama.cpp. Prints what was changed on the way."""
    from aquiline import api
    from aquiline.files import convert as converting

    tokenizer = None if target is None else lambda: api.load_chat(target)
    for line in converting.convert(draft, out, to, target, force=force, tokenizer=tokenizer):
        print(line)
