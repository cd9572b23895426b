"""The verbs: flags -> config -> load -> call one function -> print. Flags and printing live here and nowhere else.

PyTorch and all that needs it is imported inside the verbs, so that `--help` and a bad flag answer at once. Results go
to stdout, everything about them to stderr. What the user can mend is one line on stderr and exit code 2.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aquiline.config import (
    DEFAULT_TREE,
    AquilineWarning,
    EvalConfig,
    Limits,
    SamplingConfig,
    TrainConfig,
    TreeConfig,
    UserError,
    require,
)

if TYPE_CHECKING:
    from aquiline.api import Conversation, Model, Result
    from aquiline.measure.evaluate import Divergence
    from aquiline.train import loop
    from aquiline.train.run import TrainingRun

app = typer.Typer(
    help="Train, prove and run EAGLE-3 draft heads: the target's own text, in fewer passes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetFlag = Annotated[str, typer.Option("--target", help="Folder, .gguf file, hub id or 'default'.")]
DraftFlag = Annotated[str, typer.Option("--draft", help="Folder, hub id, 'default', 'ngram' or 'none'.")]
DtypeFlag = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="bfloat16, float16 or float32. [default: the weights' own where it is fast, else float32]"
    ),
]
DeviceFlag = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N. [default: cuda if there]")]
TreeFlag = Annotated[
    str | None,
    typer.Option("--tree", help=f"DEPTH:TOPK:NODES; a chain of D is D:1:D. [default: {DEFAULT_TREE}]"),
]
TokensFlag = Annotated[int, typer.Option("--max-new-tokens", help="The most tokens of a reply.")]
SystemFlag = Annotated[str | None, typer.Option("--system", help="A system message.")]
TemperatureFlag = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKFlag = Annotated[int, typer.Option("--top-k", help="0 is off.")]
TopPFlag = Annotated[float, typer.Option("--top-p")]
MinPFlag = Annotated[float, typer.Option("--min-p")]
RepetitionFlag = Annotated[float, typer.Option("--repetition-penalty", help="Over prompt and output; 1 is off.")]
PresenceFlag = Annotated[float, typer.Option("--presence-penalty", help="Over output.")]
FrequencyFlag = Annotated[float, typer.Option("--frequency-penalty", help="Over output.")]
SeedFlag = Annotated[int, typer.Option("--seed", help="Same seed, same text, with and without a draft.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; '-' reads it from stdin.")],
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    system: SystemFlag = None,
    max_new_tokens: TokensFlag = Limits.max_new_tokens,
    temperature: TemperatureFlag = SamplingConfig.temperature,
    top_k: TopKFlag = SamplingConfig.top_k,
    top_p: TopPFlag = SamplingConfig.top_p,
    min_p: MinPFlag = SamplingConfig.min_p,
    repetition_penalty: RepetitionFlag = SamplingConfig.repetition_penalty,
    presence_penalty: PresenceFlag = SamplingConfig.presence_penalty,
    frequency_penalty: FrequencyFlag = SamplingConfig.frequency_penalty,
    seed: SeedFlag = SamplingConfig.seed,
    tree: TreeFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Answer one prompt."""
    settings = _check_settings(
        max_new_tokens, tree, draft, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    require(not (compare and draft == "none"), "--compare needs a draft to compare with; leave --draft none out")
    text = _piped(sys.stdin.buffer.read() if sys.stdin else b"") if prompt == "-" else prompt
    messages = ([] if system is None else [{"role": "system", "content": system}]) + [{"role": "user", "content": text}]
    model = _load(target, draft, dtype, device)
    if compare:
        _compare(model, messages, settings, as_json)
        return
    if as_json:
        _print_json(_result_json(model.generate(messages, **settings)))
        return
    for delta in model.stream(messages, **settings):
        print(delta.text, end="", flush=True)
        if delta.result is not None:
            print(flush=True)
            _note(_stats(delta.result))
            _note_full_context(delta.result)


def _note_full_context(result: "Result") -> None:
    if result.finish_reason == "context" and not result.token_ids:
        _note(f"warning: the prompt's {result.prompt_tokens} tokens leave no room in the target's context")


def _compare(model: "Model", messages: list[dict[str, Any]], settings: dict[str, Any], as_json: bool) -> None:
    """Both ways in this process, on one loaded model; a few tokens first, so that neither pays for first uses."""
    from aquiline.measure.evaluate import divergence, speedup

    for plain in (True, False):
        model.generate(messages, plain=plain, **settings | {"max_new_tokens": min(16, settings["max_new_tokens"])})
    result = model.generate(messages, **settings)
    plain_result = model.generate(messages, plain=True, **settings)
    ids = model.prompt_ids(messages)
    parted = divergence(model.target, ids, plain_result.token_ids, result.token_ids)
    ratio = speedup(plain_result, result)
    if as_json:
        other = {k: v for k, v in _result_json(plain_result).items() if k not in ("cycles", "tau", "tree")}
        compared: dict[str, Any] = {"plain": other, "equal": parted is None, "speedup": ratio}
        if parted is not None:
            compared["divergence"] = {"position": parted.position, "logit_gap": parted.logit_gap}
        _print_json(_result_json(result) | compared)
        return
    print(result.text, flush=True)
    _note(f"speculative  {_stats(result)}")
    _note(f"plain        {_stats(plain_result)}")
    _note(_verdict(parted, ratio))


def _verdict(parted: "Divergence | None", ratio: float | None) -> str:
    speed = "speed-up -" if ratio is None else f"speed-up {ratio:.2f}"
    if parted is None:
        return f"equal        yes · {speed}"
    return f"equal        no, from token {parted.position} on (top two logits {parted.logit_gap:.4f} apart) · {speed}"


def _result_json(result: "Result") -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "cycles": result.cycles,
        "tau": result.tau,
        "tokens_per_second": result.tokens_per_second,
        "decode_tokens_per_second": result.decode_tokens_per_second,
        "tree": result.tree,
    }


def _stats(result: "Result") -> str:
    parts = [
        f"{result.generated_tokens} tokens ({result.finish_reason})",
        f"{result.tokens_per_second:.1f} tokens/s",
    ]
    if result.tau is not None:
        parts.append(f"tau {result.tau:.2f} over {result.cycles} cycles, tree {result.tree}")
    return " · ".join(parts)


@app.command()
def chat(
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    system: SystemFlag = None,
    max_new_tokens: TokensFlag = Limits.max_new_tokens,
    temperature: TemperatureFlag = SamplingConfig.temperature,
    top_k: TopKFlag = SamplingConfig.top_k,
    top_p: TopPFlag = SamplingConfig.top_p,
    min_p: MinPFlag = SamplingConfig.min_p,
    repetition_penalty: RepetitionFlag = SamplingConfig.repetition_penalty,
    presence_penalty: PresenceFlag = SamplingConfig.presence_penalty,
    frequency_penalty: FrequencyFlag = SamplingConfig.frequency_penalty,
    seed: SeedFlag = SamplingConfig.seed,
    tree: TreeFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
) -> None:
    """Talk in the terminal, a line a turn. /color shows which tokens were drafted, /reset begins anew, /quit ends."""
    settings = _check_settings(
        max_new_tokens, tree, draft, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    model = _load(target, draft, dtype, device)
    from aquiline.api import Conversation

    conversation = Conversation(model, system, **settings)
    coloured = False
    while (line := _read_turn()) is not None:
        text = line.strip()
        if text in ("/quit", "/exit"):
            break
        if text == "/help":
            _note("/color shows which tokens were drafted, /reset begins anew, /quit ends")
            continue
        if text == "/reset":
            conversation.reset()
            _note("begun anew")
        elif text == "/color":
            coloured = not coloured
            depths = ", ".join(_paint(str(depth), depth) for depth in range(1, len(_COLOURS)))
            _note(f"coloured: drafted, at depth {depths} and beyond; plain: the target's own" if coloured else "plain")
        elif text:
            _reply(conversation, text, coloured)


def _reply(conversation: "Conversation", text: str, coloured: bool) -> None:
    pieces = conversation.model.chat.text_stream()
    for delta in conversation.say(text):
        if coloured:
            for token, origin in zip(delta.token_ids, delta.origins, strict=True):
                print(_paint(pieces.push([token]), origin), end="", flush=True)
        else:
            print(delta.text, end="", flush=True)
        if delta.result is not None:
            print(pieces.finish() if coloured else "", flush=True)
            _note(_stats(delta.result))
            if delta.result.finish_reason == "context":
                _note("the context is full: /reset begins anew")


def _read_turn() -> str | None:
    """The next line, None at the end."""
    if sys.stdin is None or not sys.stdin.isatty():
        line = sys.stdin.buffer.readline() if sys.stdin else b""
        return _decoded(line) if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (its import gives input() a line editor)
    try:
        return input("> ")
    except EOFError:
        print()
        return None


_COLOURS = (32, 36, 34, 35, 33, 31)  # ANSI, by depth; the deepest one serves all beyond


def _paint(text: str, origin: int) -> str:
    return f"\x1b[{_COLOURS[min(origin, len(_COLOURS)) - 1]}m{text}\x1b[0m" if origin and text else text


@app.command("eval")
def evaluate(
    files: Annotated[list[Path], typer.Argument(help="JSONL with 'turns' or 'messages'; the task is the file's stem.")],
    json_out: Annotated[
        str | None, typer.Option("--json", help="Write the record there; '-' is stdout.", metavar="OUT")
    ] = None,
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    max_new_tokens: TokensFlag = EvalConfig.max_new_tokens,
    temperature: TemperatureFlag = EvalConfig.temperature,
    seed: SeedFlag = EvalConfig.seed,
    tree: TreeFlag = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts per file. [default: all]")] = EvalConfig.limit,
    no_plain: Annotated[bool, typer.Option("--no-plain", help="Leave plain decoding out: tau only.")] = False,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
) -> None:
    """Measure acceptance and speed: every prompt with and without the draft, in turn."""
    shape = DEFAULT_TREE if tree is None else TreeConfig.parse(tree)
    config = EvalConfig(shape, max_new_tokens, temperature, seed, limit, not no_plain)
    require(draft != "none", "eval needs a draft to measure; leave --draft none out")
    if json_out not in (None, "-"):
        given = {path.resolve() for path in files}
        require(Path(json_out).resolve() not in given, f"--json {json_out} would overwrite a prompt file")
        require(
            not json_out.endswith(".jsonl"),
            f"--json {json_out} looks like a prompt file; --json takes the file that the record is written to",
        )
        _check_writable(Path(json_out))
    from aquiline.measure import tasks

    prompts: dict[str, list[tasks.Prompt]] = {}
    for path in files:
        name = tasks.task_name(path)
        require(name not in prompts, f"two files are named {name}, and a task is named after its file; rename one")
        prompts[name] = tasks.read_prompts(path, limit)
    model = _load(target, draft, dtype, device)
    from aquiline.files.disk import write_json_atomic
    from aquiline.measure import evaluate as measure

    rendered = {name: measure.render(model, name, asked) for name, asked in prompts.items()}
    measure.warm_up(model, next(iter(rendered.values()))[0].ids, config)
    blocks = {}
    for name, asked in rendered.items():
        with _progress() as bar:
            task = bar.add_task(name, total=len(asked), note="")
            done: list[measure.Comparison] = []
            for comparison in measure.compare(model, asked, config):
                done.append(comparison)
                tau = comparison.result.tau
                bar.update(task, advance=1, note="" if tau is None else f"tau {tau:.2f}")
        blocks[name] = measure.summarise(done, config, model.draft)
    record = measure.make_record(model, config, prompts, blocks)
    if json_out == "-":
        _print_json(record)
    elif json_out is not None:
        write_json_atomic(json_out, record)
    Console(stderr=json_out == "-").print(_eval_table(record))


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


@app.command("export-target")
def export_target(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'default'.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write a target and its tokenizer, in bf16, as a folder that Transformers and other engines load."""
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"{out} exists and is not empty; give a new folder",
    )
    import torch

    from aquiline import api
    from aquiline.files import checkpoint

    checkpoint.export_target(api.load_target(target, torch.bfloat16), api.load_chat(target), out)
    _note(f"{checkpoint.target_name(target)} written to {out}")


@app.command()
def train(
    data: Annotated[list[Path], typer.Argument(help="JSONL: stored answers, or conversations with 'messages'.")],
    out: Annotated[Path, typer.Option("--out", help="The run's folder; the head is in OUT/head.")],
    target: TargetFlag = "default",
    features: Annotated[
        Path | None, typer.Option("--features", help="Keep the target's features there. [default: computed each time]")
    ] = None,
    capture_after: Annotated[
        str | None, typer.Option("--capture-after", help="Layers A,B,C whose output the draft reads.")
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs")] = TrainConfig.epochs,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="Of one update.")] = TrainConfig.batch_tokens,
    max_length: Annotated[int, typer.Option("--max-length", help="Rows are cut there.")] = TrainConfig.max_length,
    ttt_steps: Annotated[int, typer.Option("--ttt-steps", help="Steps of the unroll.")] = TrainConfig.ttt_steps,
    draft_vocab_size: Annotated[int, typer.Option("--draft-vocab-size")] = TrainConfig.draft_vocab_size,
    optimizer: Annotated[str, typer.Option("--optimizer", help="muon or adamw.")] = TrainConfig.optimizer,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = TrainConfig.learning_rate,
    adamw_learning_rate: Annotated[
        float, typer.Option("--adamw-learning-rate", help="Of what muon leaves to AdamW.")
    ] = TrainConfig.adamw_learning_rate,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Greedy rows kept apart to measure tau.")
    ] = TrainConfig.held_out,
    eval_every: Annotated[int, typer.Option("--eval-every", help="Updates.")] = TrainConfig.eval_every,
    save_every: Annotated[int, typer.Option("--save-every", help="Updates.")] = TrainConfig.save_every,
    seed: Annotated[int, typer.Option("--seed")] = TrainConfig.seed,
    dtype: DtypeFlag = None,
) -> None:
    """Train a head. The same command goes on where a stopped run left off."""
    config = TrainConfig(
        optimizer=optimizer, learning_rate=learning_rate, adamw_learning_rate=adamw_learning_rate,
        ttt_steps=ttt_steps, batch_tokens=batch_tokens, max_length=max_length, epochs=epochs,
        draft_vocab_size=draft_vocab_size, eval_every=eval_every, save_every=save_every, held_out=held_out, seed=seed,
    )  # fmt: skip
    layers = None if capture_after is None else _layers(capture_after)
    from aquiline import api
    from aquiline.train.run import TrainingRun

    kind = api.pick_dtype(dtype, target, api.pick_device("cpu"))
    chat = api.load_chat(target)
    run = TrainingRun.prepare(
        data, out, target, chat, config,
        dtype=kind, capture_after=layers, features=features, command=["aquiline", *_plain_command(sys.argv[1:])],
    )  # fmt: skip
    _print_run(run)
    stopped: list[int] = []
    with _progress() as bar:
        report = _training_report(bar)
        before = {
            s: signal.signal(s, lambda number, _: stopped.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            complete = run.run(report, lambda: bool(stopped))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if not complete:
        _note(f"stopped and saved in {out}; the same command goes on from there")
        raise typer.Exit(128 + stopped[0])
    _note(f"complete; the head is {run.head}")


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    require(all(p.isdecimal() for p in parts), f"--capture-after {text!r} is not layers A,B,C; for example 1,14,26")
    return tuple(int(p) for p in parts)


def _plain_command(arguments: Sequence[str]) -> list[str]:
    """A command line without this machine's paths: of each, the last part."""
    return [a if os.sep not in a else a[: a.find("=") + 1] + os.path.basename(a.rstrip(os.sep)) for a in arguments]


def _print_run(run: "TrainingRun") -> None:
    from aquiline.data.features import FeatureStore

    table = Table(title="what the draft computes with")
    for name in ("tensor", "shape", "", "from"):
        table.add_column(name, no_wrap=name == "tensor")
    for row in run.tensors():
        table.add_row(*row)
    console = Console(stderr=True)
    console.print(table)
    data, target = run.record["data"], run.target
    needed = FeatureStore.bytes_needed(target, data["tokens"] + sum(map(len, run.held_out)))
    kept = f"kept in {run.features}" if run.features else "computed each time (--features would keep them)"
    _note(f"target {run.info.target} in {run.info.target_dtype}, captured after layers {list(target.capture_after)}")
    _note(
        f"{data['documents']} documents, {data['tokens']} tokens, {data['supervised_tokens']} of them supervised; "
        f"{data['held_out']} held out; {data['cut']} cut at the longest length, {data['dropped']} dropped with nothing "
        "supervised left"
    )
    _note(
        f"draft vocabulary {run.config.draft_vocab_size}: {data['coverage']:.1%} of the supervised tokens; "
        f"longest row {run.draft.config.trained_length}"
    )
    _note(f"features: {needed / 2**30:.2f} GiB on disk, {kept}")
    if (run.out / "state" / "state.pt").exists():
        _note(f"going on from the state in {run.out}")


def _training_report(bar: Progress) -> "Callable[[loop.Progress], None]":
    """Show every update on a terminal; elsewhere, for a log, a line now and then and at every evaluation."""
    task = bar.add_task("training", total=None, note="")
    tau = ""

    def report(progress: "loop.Progress") -> None:
        nonlocal tau
        if progress.evaluation is not None and progress.evaluation.tau is not None:
            tau = f" · tau {progress.evaluation.tau:.3f}"
        accuracy = " ".join(f"{a:.2f}" for a in progress.accuracy)
        skipped = f" · {progress.skipped} updates skipped, not finite" if progress.skipped else ""
        note = f"loss {progress.loss:.3f} · accuracy {accuracy}{tau}{skipped}"
        bar.update(task, completed=progress.step, total=progress.total, note=note)
        if bar.disable and (progress.evaluation is not None or progress.step % 10 == 0 or progress.step == 1):
            _note(f"{progress.step}/{progress.total} · {progress.seconds / 60:.1f} min · {note}")

    return report


# ---------------------------------------------------------------- shared


def _check_settings(max_new_tokens: int, tree: str | None, draft: str, **sampling: Any) -> dict[str, Any]:
    """The settings of a request; what is wrong with them is refused before anything is loaded."""
    SamplingConfig(**sampling)
    Limits(max_new_tokens)
    if tree is not None:
        TreeConfig.parse(tree)
        require(draft != "none", f"--tree {tree} was given with --draft none; leave one of them out")
    return sampling | {"max_new_tokens": max_new_tokens, "tree": tree}


def _load(target: str, draft: str, dtype: str | None, device: str | None) -> "Model":
    from aquiline import api

    model = api.load(target, draft, dtype=dtype, device=device)
    _note(f"{model.target_name}, draft {model.draft_name}, {model.dtype} on {model.target.device}")
    return model


def _piped(data: bytes) -> str:
    """A piped prompt; the line end that `echo` adds is not part of it."""
    text = _decoded(data)
    return text.removesuffix("\n").removesuffix("\r")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not UTF-8 text: {error}") from error


def _check_writable(path: Path) -> None:
    """UserError now rather than after the work."""
    require(not path.exists() or path.is_file(), f"{path} exists and is no file; give a file, or '-' for stdout")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)  # in ASCII: stdout may be in any encoding


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal)


# What typer makes of a wrong command line, whichever click it brings along.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `aquiline`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a reply may hold what the terminal's encoding lacks
    with warnings.catch_warnings():
        warnings.simplefilter("always", AquilineWarning)
        warnings.showwarning = lambda message, *_, **__: _note(f"warning: {' '.join(str(message).split())}")
        try:
            command = typer.main.get_command(app)
            given = sys.argv[1:] if arguments is None else arguments
            code = command.main(list(given) or ["--help"], prog_name="aquiline", standalone_mode=False)
        except UserError as error:
            _note(f"error: {' '.join(str(error).split())}")
            code = 2
        except OSError as error:
            _note(f"error: {error.filename or 'output'}: {error.strerror or error}")
            code = 2
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx else "aquiline"
            _note(f"error: {' '.join(error.format_message().split())}; see {where} --help")
            code = 2
        except (KeyboardInterrupt, typer.Abort):
            code = 130
    sys.exit(code)
