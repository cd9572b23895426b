"""`convert`, and `serve-command`, which says how other engines serve a head."""

from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.shared import app, note


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


@app.command("serve-command")
def serve_command(
    draft: Annotated[str, typer.Argument(help="Folder, hub id or 'default', in a layout that the engine reads.")],
    engine: Annotated[str, typer.Option("--engine", help="vllm or sglang.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Folder or hub id. [default: what the head's config names]")
    ] = None,
    record: Annotated[
        list[str] | None, typer.Option("--record", help="Repeatable: of bench or eval; the fastest tree is taken.")
    ] = None,
    tree: Annotated[str | None, typer.Option("--tree", help="DEPTH:TOPK:NODES, in place of a record's.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="Of each machine.")] = 1,
    nodes: Annotated[int, typer.Option("--nodes", help="Machines.")] = 1,
) -> None:
    """Print the commands that serve a head on vLLM or SGLang: one a machine."""
    from aquiline.config import TreeConfig, require
    from aquiline.measure import serving

    require(tree is None or not record, "--tree and --record both say what is drafted: give one")
    head, served, config = serving.read_head(draft, target)
    if tree is not None:
        chosen, why = TreeConfig.parse(tree), "as asked for"
    else:
        chosen, why = serving.best_tree(record or [], engine)
    for line in serving.commands(head, served, config, engine, chosen, gpus, nodes):
        print(line)
    note(f"tree {chosen}: {why}")
