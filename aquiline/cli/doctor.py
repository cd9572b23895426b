"""`doctor`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aquiline.cli.shared import (
    DeviceFlag,
    DtypeFlag,
    JsonFlag,
    TemplateFlag,
    TokensFlag,
    app,
    check_record,
    note,
    put_record,
    read_tasks,
    template_settings,
)
from aquiline.config import DoctorConfig, require

_CERTAIN = 1  # the exit code where something is certainly wrong


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'default'.")] = "default",
    draft: Annotated[str, typer.Argument(help="Folder, hub id or 'default'; of any layout that is read.")] = "default",
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="Repeatable; a file as eval reads it. [default: eleven prompts of five kinds]"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts per file.")] = DoctorConfig.limit,
    max_new_tokens: TokensFlag = DoctorConfig.max_new_tokens,
    system: Annotated[
        str | None,
        typer.Option("--system", help="The system message of the head's training. [default: what its run.json says]"),
    ] = None,
    template_kwarg: TemplateFlag = None,
    json_out: JsonFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
) -> None:
    """Say why few tokens are accepted: likely causes first, with evidence. Exit code 1 if something is surely wrong."""
    config = DoctorConfig(max_new_tokens, limit, system)
    require(draft not in ("ngram", "none"), f"doctor examines a head, and {draft!r} is none: give a head's folder")
    check_record(json_out, prompts or [])
    given = read_tasks(prompts, config.limit) if prompts else None
    settings = template_settings(template_kwarg)
    from aquiline import api
    from aquiline.files import checkpoint
    from aquiline.measure import doctor as measure
    from aquiline.measure.evaluate import machine, prompts_hash, versions
    from aquiline.measure.replies import own_prompts

    where = api.pick_device(device)
    kind = api.pick_dtype(dtype, target, where)
    folder = checkpoint.draft_path(draft)
    pair = measure.open_pair(target, folder, api.load_chat(target), kind, where)
    asked = given or own_prompts()
    found = with_system = None
    if pair.draft is not None:
        note("the target answers some prompts, then the head is tried on them in some twenty ways")
        answers, with_system = measure.ask(pair, asked, config, settings)
        found = measure.examine(pair, answers, with_system)
    record = measure.make_record(pair, found) | {
        "settings": {
            "target": checkpoint.target_name(target),
            "draft": checkpoint.draft_name(folder),
            "dtype": str(kind).removeprefix("torch."),
            "max_new_tokens": max_new_tokens,
            "limit": limit,
            "system": None if with_system is None else with_system.system,
            "prompts": [str(path.name) for path in prompts or []],
            "prompts_sha256": prompts_hash(asked),
            "template_kwargs": settings,
        },
        "machine": machine(where),
        "versions": versions(),
    }
    put_record(json_out, record, *_tables(record))
    tell = note if json_out == "-" else print
    for line in _verdict(record["causes"]):
        tell(line)
    if found is not None and not record["causes"]:
        tell(measure.summary(found.figures))
    if any(cause["certain"] for cause in record["causes"]):
        raise typer.Exit(_CERTAIN)


def _verdict(causes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for number, cause in enumerate(causes, 1):
        lines.append(f"{number}. {cause['id']}, {'certain' if cause['certain'] else 'possible'}: {cause['evidence']}")
        lines.append(f"   {cause['advice']}")
    return lines


def _tables(record: dict[str, Any]) -> list[Table]:
    """What does not agree in the pair, and what was accepted."""
    s, figures = record["settings"], record["figures"]
    pair = Table("", "the head", "here", title=f"{s['target']}, draft {s['draft']}, {s['dtype']}")
    for fact in record["pair"]:
        differs = fact["head"] not in (None, fact["here"])
        pair.add_row(fact["what"], fact["head"] or "", fact["here"], style="bold" if differs else None)
    if figures is None:
        return [pair] if record["pair"] else []
    taken = Table(title=f"{figures['tokens']} tokens of the target, a chain of {figures['tree'].partition(':')[0]}")
    for name in ("", "cycles", "tau", "covered"):
        taken.add_column(name, justify="left" if not name else "right")

    def row(name: str, part: dict[str, Any]) -> None:
        tau, covered = part["tau"], part.get("coverage")
        shown = ("-" if tau is None else f"{tau:.2f}", "" if covered is None else f"{covered:.0%}")
        taken.add_row(name, str(part["cycles"]), *shown)

    row("all", figures)
    if "tau_with_system" in figures and figures["tau_with_system"] is not None:
        taken.add_row("with its system message", "", f"{figures['tau_with_system']:.2f}", "")
    taken.add_section()
    for name, part in figures["by_source"].items():
        row(name, part)
    taken.add_section()
    for name, part in figures["by_position"].items():
        row(f"tokens {name}", part)
    depth = Table(title="accepted, of those drafted at a depth")
    for n in range(len(figures["n_alpha"])):
        depth.add_column(str(n + 1), justify="right")
    depth.add_row(*("-" if share is None else f"{share:.0%}" for share in figures["n_alpha"]))
    return [pair, taken, depth]
