"""`data answer`, `data invent` and `data show`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aquiline.cli.shared import (
    DeviceFlag,
    DtypeFlag,
    SeedFlag,
    StrictFlag,
    SystemFlag,
    TargetFlag,
    TemplateFlag,
    TokensFlag,
    app,
    check_writable,
    load_model,
    note,
    progress,
    template_settings,
)
from aquiline.config import AnswerConfig, InventConfig, TrainConfig, UserError, require

if TYPE_CHECKING:
    from aquiline.api import Model
    from aquiline.data.answer import Report
    from aquiline.data.server import Server

data = typer.Typer(help="Make and look at training data.", rich_markup_mode=None)
app.add_typer(data, name="data")

OwnDraftFlag = Annotated[
    str | None,
    typer.Option("--draft", help="As of generate. [default: the head that comes with the default target, else none]"),
]


@data.command()
def answer(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="JSONL with 'messages', 'conversations', 'turns' or 'prompt'; text, a prompt a line; or a Hugging "
            "Face data set, NAME[:SPLIT] or a folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write, or to go on with.")],
    target: TargetFlag = "default",
    draft: OwnDraftFlag = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Let this OpenAI-compatible server answer; it runs --target.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of the server. [default: the only one]")] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", help="Conversations at a time. [default: 8, of a server 64]")
    ] = AnswerConfig.in_flight,
    temperature: Annotated[
        str, typer.Option("--temperature", help="One, or several: 0,0.7,1 gives each prompt one of them.")
    ] = "0",
    max_new_tokens: TokensFlag = AnswerConfig.max_new_tokens,
    max_length: Annotated[
        int, typer.Option("--max-length", help="Of a conversation, in tokens.")
    ] = AnswerConfig.max_length,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message, where a prompt has none.")
    ] = AnswerConfig.system,
    template_kwarg: TemplateFlag = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts. [default: all]")] = None,
    seed: SeedFlag = AnswerConfig.seed,
    strict: StrictFlag = False,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
) -> None:
    """Let the target answer prompts, turn by turn. The same command goes on where a stopped one left off."""
    config = AnswerConfig(
        _numbers(temperature),
        max_new_tokens,
        max_length,
        system,
        template_settings(template_kwarg),
        seed,
        in_flight,
    )
    require(
        server is None or draft is None, "--server and --draft exclude each other: the server does its own drafting"
    )
    require(server is not None or model is None, "--model names a model of a server; give --server too")
    _check_output(out, prompts)
    from aquiline.data import answer as answering
    from aquiline.data.prompts import read_prompts
    from aquiline.data.rows import Dropped

    dropped = Dropped(strict)
    asked = read_prompts(prompts, dropped, limit)
    read = len(asked) + dropped.counts.total()
    require(
        bool(asked), f"no prompt in {', '.join(prompts)}: {dropped}. The first: {dropped.first or 'there was none'}"
    )
    writer: Model | Server
    if server is None:
        writer, chat, longest = _own(target, draft, dtype, device, config.template_kwargs)
    else:
        writer, chat, longest = _served(server, model, target, config)
    config = dataclasses.replace(config, max_length=min(max_length, longest))
    with progress() as bar:
        counts = answering.answer(asked, out, writer, chat, config, dropped, _report(bar, "answering", len(asked)))
    note(answering.summary(counts, read))


def _own(
    target: str, draft: str | None, dtype: str | None, device: str | None, template_kwargs: dict[str, Any]
) -> tuple["Model", Any, int]:
    draft = draft or ("default" if target == "default" else "none")
    model = load_model(target, draft, dtype, device, template_kwargs)
    return model, model.chat, model.target.config.max_positions


def _served(url: str, model: str | None, target: str, config: AnswerConfig) -> tuple["Server", Any, int]:
    from aquiline import api
    from aquiline.data.server import Server
    from aquiline.files import checkpoint

    chat = api.load_chat(target)
    served = Server(url, chat, config.template_kwargs, model)
    note(f"{served.model} at {url}, with the chat template of {target}")
    return served, chat, checkpoint.read_target_config(target).max_positions


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--temperature {text!r} is not a number or several, such as 0,0.7,1") from error


def _check_output(out: Path, sources: list[str]) -> None:
    require(out.resolve() not in {Path(s).resolve() for s in sources}, f"{out} is one of the prompt files")
    require(out.suffix == ".jsonl", f"{out} is written as JSON lines; give it a name that ends in .jsonl")
    check_writable(out)


def _report(bar: Any, what: str, total: int) -> "Report":
    task = bar.add_task(what, total=total, note="")
    shown = 0

    def report(done: int, text: str) -> None:
        nonlocal shown
        bar.update(task, completed=done, note=text)
        if bar.disable and done >= shown + 100:  # for a log: a line now and then
            shown = done
            note(f"{done}/{total} · {text}")

    return report


@data.command()
def invent(
    out: Annotated[Path, typer.Argument(help="The JSONL file to write, or to go on with.")],
    target: TargetFlag = "default",
    draft: OwnDraftFlag = None,
    count: Annotated[int, typer.Option("--count", help="Prompts to end up with.")] = InventConfig.count,
    in_flight: Annotated[int, typer.Option("--in-flight", help="Prompts at a time.")] = InventConfig.in_flight,
    temperature: Annotated[float, typer.Option("--temperature")] = InventConfig.temperature,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="A longer prompt is left out.")
    ] = InventConfig.max_new_tokens,
    system: SystemFlag = InventConfig.system,
    seed: SeedFlag = InventConfig.seed,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
) -> None:
    """Let the target make up prompts, for `data answer`. The same command goes on where a stopped one left off."""
    config = InventConfig(count, temperature, max_new_tokens, system, seed, in_flight)
    _check_output(out, [])
    from aquiline.data import invent as inventing

    model, _, _ = _own(target, draft, dtype, device, {})
    with progress() as bar:
        counts = inventing.invent(model, out, config, _report(bar, "inventing", count))
    tried, rejected = counts["tried_in_this_run"], counts["rejected_in_this_run"]
    note(f"{counts['prompts']} prompts in {out}; {tried - sum(rejected.values())} of {tried} attempts usable")
    for reason, number in sorted(rejected.items()):
        note(f"left out: {number} {reason}")


@data.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="What train would be given.")],
    target: TargetFlag = "default",
    rows: Annotated[int, typer.Option("--rows", help="How many to print.")] = 3,
    max_length: Annotated[int, typer.Option("--max-length", help="As of train.")] = TrainConfig.max_length,
    strict: StrictFlag = False,
) -> None:
    """Show training data as the trainer reads it: rows, lengths, coverage of draft vocabularies, what is dropped."""
    require(rows >= 0, f"--rows {rows} must not be negative")
    from aquiline import api
    from aquiline.data import preview
    from aquiline.data.dataset import read_documents
    from aquiline.files import checkpoint

    chat, config = api.load_chat(target), checkpoint.read_target_config(target)
    reading = read_documents(files, chat, config.vocab_size, min(max_length, config.max_positions), strict)
    console = Console(highlight=False)
    for document in reading.documents[:rows]:
        console.print(preview.preview(document, chat))
    console.print(preview.lengths(reading.documents))
    console.print(preview.coverage_table(reading.documents, chat, config.vocab_size))
    console.print(preview.facts(reading))
