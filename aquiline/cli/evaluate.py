"""`eval`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

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
    SeedFlag,
    TargetFlag,
    TemperatureFlag,
    TemplateFlag,
    TokensFlag,
    TreeFlag,
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
from aquiline.config import DEFAULT_TREE, EvalConfig, TreeConfig, require

if TYPE_CHECKING:
    from aquiline.api import Model
    from aquiline.measure.evaluate import Rendered


@app.command("eval")
def evaluate(
    files: PromptFiles,
    json_out: JsonFlag = None,
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    max_new_tokens: TokensFlag = EvalConfig.max_new_tokens,
    temperature: TemperatureFlag = EvalConfig.temperature,
    seed: SeedFlag = EvalConfig.seed,
    tree: TreeFlag = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts per file. [default: all]")] = EvalConfig.limit,
    no_plain: Annotated[bool, typer.Option("--no-plain", help="Leave plain decoding out: tau only.")] = False,
    allow_load: AllowLoadFlag = False,
    template_kwarg: TemplateFlag = None,
    pause_file: PauseFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    quantize: QuantizeFlag = None,
    quantize_draft: QuantizeDraftFlag = "auto",
    exact: ExactFlag = False,
) -> None:
    """Measure acceptance and speed: every prompt with and without the draft, in turn."""
    shape = DEFAULT_TREE if tree is None else TreeConfig.parse(tree)
    config = EvalConfig(shape, max_new_tokens, temperature, seed, limit, not no_plain)
    require(draft != "none", "eval needs a draft to measure; leave --draft none out")
    check_record(json_out, files)
    prompts = read_tasks(files, limit)
    model = load_model(
        target, draft, dtype, device, template_settings(template_kwarg), quantize=quantize,
        quantize_draft=quantize_draft, exact=exact,
    )  # fmt: skip
    from aquiline.measure import evaluate as measure
    from aquiline.measure.quiet import quiet

    rendered = {name: measure.render(model, name, asked) for name, asked in prompts.items()}
    if pause_file is not None:
        note("waiting until training runs stand still")
    with quiet(pause_file) as machine:
        measure.warm_up(model, next(iter(rendered.values()))[0].ids, config)
        blocks = {name: _measure(model, name, asked, config) for name, asked in rendered.items()}
    record = measure.make_record(model, config, prompts, blocks, machine, allow_load=allow_load)
    note_load(machine, allow_load=allow_load)
    put_record(json_out, record, _eval_table(record))


def _measure(model: "Model", name: str, asked: "Sequence[Rendered]", config: EvalConfig) -> dict[str, Any]:
    """One task's block."""
    from aquiline.measure import evaluate as measure

    done: list[measure.Comparison] = []
    with progress() as bar:
        task = bar.add_task(name, total=len(asked), note="")
        for comparison in measure.compare(model, asked, config):
            done.append(comparison)
            tau = comparison.result.tau
            bar.update(task, advance=1, note="" if tau is None else f"tau {tau:.2f}")
    return measure.summarise(done, config, model.draft)


def _eval_table(record: dict[str, Any]) -> Table:
    s = record["settings"]
    table = Table(
        title=f"{s['target']}, draft {s['draft']}, tree {s['tree']}, {s['dtype']} on {record['machine']['cpu']}"
    )
    table.add_column("task")
    for name in ("prompts", "tau", "tokens/s", "plain", "speed-up (min to max)", "equal"):
        table.add_column(name, justify="right")

    def cell(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    for name, t in record["tasks"].items():
        low, high = t.get("speedup_min"), t.get("speedup_max")
        spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
        table.add_row(
            name,
            str(t["prompts"]),
            cell(t["tau"]),
            cell(t["tokens_per_second"], ".1f"),
            cell(t.get("plain_tokens_per_second"), ".1f"),
            cell(t.get("speedup_median")) + spread,
            cell(t.get("equal_share")),
        )
    mean = record["mean"]
    table.add_row("mean", "", cell(mean.get("tau")), "", "", cell(mean.get("speedup_median")), "", style="bold")
    return table
