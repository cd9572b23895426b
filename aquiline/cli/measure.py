"""`bench`, and `plot`, which draws its records and those of `eval`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aquiline.cli.shared import (
    AllowLoadFlag,
    DeviceFlag,
    DraftFlag,
    DtypeFlag,
    ExactFlag,
    JsonFlag,
    PauseFlag,
    PromptFiles,
    QuantizeDraftFlag,
    QuantizeFlag,
    TargetFlag,
    TemplateFlag,
    TokensFlag,
    app,
    check_record,
    load_model,
    note,
    note_load,
    progress,
    put_record,
    read_tasks,
    template_settings,
)
from aquiline.config import PHASES, BenchConfig, TreeConfig, require


@app.command()
def bench(
    files: PromptFiles,
    json_out: JsonFlag = None,
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.", metavar="N,N")] = ",".join(
        map(str, BenchConfig.batches)
    ),
    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help=f"Repeatable; as in generate. [default: {', '.join(map(str, BenchConfig.trees))}]"),
    ] = None,
    max_new_tokens: TokensFlag = BenchConfig.max_new_tokens,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds of each batch size.")] = BenchConfig.repeats,
    allow_load: AllowLoadFlag = False,
    template_kwarg: TemplateFlag = None,
    pause_file: PauseFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    quantize: QuantizeFlag = None,
    quantize_draft: QuantizeDraftFlag = "auto",
    exact: ExactFlag = False,
) -> None:
    """Measure speed by batch size and tree, and where the time goes: plain decoding and every tree in turn."""
    trees = BenchConfig.trees if tree is None else tuple(map(TreeConfig.parse, tree))
    config = BenchConfig(trees, _sizes(batch), max_new_tokens, repeats)
    require(draft != "none", "bench needs a draft to compare with; leave --draft none out")
    check_record(json_out, files)
    tasks = read_tasks(files)
    if pause_file is not None:
        note("waiting until training runs stand still")
    from aquiline.measure import bench as measure
    from aquiline.measure.evaluate import render
    from aquiline.measure.quiet import quiet

    with quiet(pause_file) as machine:
        began = time.perf_counter()
        model = load_model(
            target, draft, dtype, device, template_settings(template_kwarg), quantize=quantize,
            quantize_draft=quantize_draft, exact=exact,
        )  # fmt: skip
        startup = {"load": time.perf_counter() - began}
        prompts = measure.in_turn([render(model, name, asked) for name, asked in tasks.items()])
        engine = measure.make_engine(model, prompts, config)
        startup |= measure.start_up(model, engine, prompts[0], config)
        measure.warm_up(model, engine, prompts, config)
        done: list[measure.Run] = []
        with progress() as bar:
            task = bar.add_task("runs", total=measure.number_of_runs(config), note="")
            for run in measure.runs(model, engine, prompts, config):
                done.append(run)
                way = "plain" if run.tree is None else str(run.tree)
                bar.update(task, advance=1, note=f"batch {run.batch}, {way}: {run.rate:.1f} tokens/s")
    blocks = measure.summarise(done, config)
    record = measure.make_record(model, engine, config, tasks, blocks, startup, machine, allow_load=allow_load)
    note_load(machine, allow_load=allow_load)
    put_record(json_out, record, *_tables(record))


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    require(all(p.isdecimal() for p in parts), f"--batch {text!r} is not numbers, such as 1,4,16")
    return tuple(map(int, parts))


def _tables(record: dict[str, Any]) -> tuple[Table, Table]:
    """Speed, and where the time of a cycle goes."""
    s = record["settings"]
    speed = Table(title=f"{s['target']}, draft {s['draft']}, {s['dtype']} on {record['machine']['cpu']}")
    parts = Table(title="of a cycle, in percent")
    for name in ("batch", "tree", "tokens/s", "speed-up (min to max)", "tau", "equal", "first, ms"):
        speed.add_column(name, justify="right")
    for name in ("batch", "tree", "cycle, ms", *PHASES):
        parts.add_column(name, justify="right")

    def cell(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    for batch, block in record["batches"].items():
        for name, way in {"plain": block["plain"], **block["trees"]}.items():
            low, high = way.get("speedup_min"), way.get("speedup_max")
            spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
            speed.add_row(
                batch,
                name,
                cell(way["tokens_per_second"], ".1f"),
                cell(way.get("speedup")) + spread,
                cell(way.get("tau")),
                cell(way.get("equal_share")),
                cell(way["first_token_ms"], ".0f"),
            )
            share = (way["breakdown"] or {}).get("share", {})
            shares = [cell(100 * share[phase] if share else None, ".1f") for phase in PHASES]
            parts.add_row(batch, name, cell((way["breakdown"] or {}).get("cycle_ms"), ".1f"), *shares)
        speed.add_section()
        parts.add_section()
    return speed, parts


@app.command()
def plot(
    record: Annotated[Path, typer.Argument(help="A record that `bench` or `eval` wrote.")],
    out: Annotated[Path, typer.Argument(help="The SVG file to write.")],
) -> None:
    """Draw a record: speed-up against batch, tau against nodes, measured against modelled costs, as it has them."""
    from aquiline.files.disk import read_json, write_text_atomic
    from aquiline.measure import report

    require(out.suffix == ".svg", f"{out} is no .svg file; the picture is written as one")
    write_text_atomic(out, report.picture(read_json(record), record))
    note(f"{out} written")
