"""What the verbs share: the app, common flags, messages, and how results are printed.

PyTorch and all that needs it is imported inside the verbs, so that `--help` and a bad flag answer at once. Results go
to stdout, everything about them to stderr. What the user can mend is one line on stderr and exit code 2.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aquiline.config import DEFAULT_TREE, Limits, SamplingConfig, TreeConfig, UserError, require

if TYPE_CHECKING:
    from aquiline.api import Model
    from aquiline.measure.quiet import Quiet
    from aquiline.measure.tasks import Prompt

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
QuantizeFlag = Annotated[
    str | None,
    typer.Option("--quantize", help="int8 or int4: the target's weights, with 8-bit activations. [default: none]"),
]
QuantizeDraftFlag = Annotated[
    str,
    typer.Option(
        "--quantize-draft",
        help="int8, int4 or none: the head's weights; auto is int8 where that is faster.",
    ),
]
DeviceFlag = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N. [default: cuda if there]")]
TreeFlag = Annotated[
    str | None,
    typer.Option(
        "--tree", help=f"DEPTH:TOPK:NODES, a chain of D being D:1:D, or auto: what pays here. [default: {DEFAULT_TREE}]"
    ),
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
PauseFlag = Annotated[
    Path | None,
    typer.Option(
        "--pause-file",
        envvar="AQUILINE_PAUSE_FILE",
        help="Training runs stand still while a measurement holds it. [default: $AQUILINE_PAUSE_FILE, else none]",
        show_envvar=False,
    ),
]
PromptFiles = Annotated[
    list[Path], typer.Argument(help="JSONL with 'turns', 'messages' or 'prompt'; or text, a prompt a line.")
]
JsonFlag = Annotated[str | None, typer.Option("--json", help="Write the record there; '-' is stdout.", metavar="OUT")]
AllowLoadFlag = Annotated[
    bool, typer.Option("--allow-load", help="Keep the times even if other processes kept the machine busy.")
]
SeedFlag = Annotated[int, typer.Option("--seed", help="Same seed, same text, with and without a draft.")]
TemplateFlag = Annotated[
    list[str] | None,
    typer.Option("--template-kwarg", help="KEY=VALUE for the chat template, such as enable_thinking=false."),
]
ExactFlag = Annotated[
    bool,
    typer.Option(
        "--exact", help="No token's numbers depend on what else is in its pass. Costs time without the kernel."
    ),
]
StrictFlag = Annotated[bool, typer.Option("--strict", help="Stop at the first row that is of no use.")]


def check_settings(max_new_tokens: int, tree: str | None, draft: str, **sampling: Any) -> dict[str, Any]:
    """The settings of a request; what is wrong with them is refused before anything is loaded."""
    SamplingConfig(**sampling)
    Limits(max_new_tokens)
    if tree is not None:
        TreeConfig.parse(tree)
        require(draft != "none", f"--tree {tree} was given with --draft none; leave one of them out")
    return sampling | {"max_new_tokens": max_new_tokens, "tree": tree}


def template_settings(pairs: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE, the value as JSON where it is JSON (false, 3), else as text."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        require(bool(key and equals), f"--template-kwarg {pair!r} is not KEY=VALUE, such as enable_thinking=false")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = {"True": True, "False": False}.get(value, value)
    return found


def load_model(
    target: str,
    draft: str,
    dtype: str | None,
    device: str | None,
    template_kwargs: dict[str, Any],
    *,
    quantize: str | None = None,
    quantize_draft: str = "auto",
    exact: bool = False,
) -> "Model":
    from aquiline import api

    model = api.load(
        target, draft, dtype=dtype, device=device, quantize=quantize, template_kwargs=template_kwargs, exact=exact,
        quantize_draft=quantize_draft,
    )  # fmt: skip
    where = f"{model.dtype} on {model.target.device}, {model.target.decoding}{', exact' if model.target.exact else ''}"
    head = f" in {model.quantised_draft}" if model.quantised_draft else ""
    note(f"{model.target_name}, draft {model.draft_name}{head}, {where}")
    return model


def piped(data: bytes) -> str:
    """A piped prompt; the line end that `echo` adds is not part of it."""
    text = decoded(data)
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not UTF-8 text: {error}") from error


def check_writable(path: Path) -> None:
    """UserError now rather than after the work."""
    require(not path.exists() or path.is_file(), f"{path} exists and is no file; give a file, or '-' for stdout")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def check_record(json_out: str | None, files: Sequence[Path]) -> None:
    """UserError where the record of a measurement cannot be written, or would overwrite its prompts."""
    if json_out in (None, "-"):
        return
    given = {path.resolve() for path in files}
    require(Path(json_out).resolve() not in given, f"--json {json_out} would overwrite a prompt file")
    require(
        not json_out.endswith(".jsonl"),
        f"--json {json_out} looks like a prompt file; --json takes the file that the record is written to",
    )
    check_writable(Path(json_out))


def read_tasks(files: Sequence[Path], limit: int | None = None) -> "dict[str, list[Prompt]]":
    """The prompts to measure, by task."""
    from aquiline.measure import tasks

    prompts: dict[str, list[Prompt]] = {}
    for path in files:
        name = tasks.task_name(path)
        require(name not in prompts, f"two files are named {name}, and a task is named after its file; rename one")
        prompts[name] = tasks.read_prompts(path, limit)
    return prompts


def note_load(machine: "Quiet", *, allow_load: bool) -> None:
    """Say it when a measurement did not have the machine to itself."""
    if machine.loaded:
        times = "the times are kept all the same" if allow_load else "the times are left out; --allow-load keeps them"
        note(f"warning: other processes took {machine.load:.0%} of the machine meanwhile: {times}")


def put_record(json_out: str | None, record: dict[str, Any], *tables: Table) -> None:
    """The record of a measurement where `--json` wants it, and its tables, which leave stdout to it."""
    from aquiline.files.disk import write_json_atomic

    if json_out == "-":
        print_json(record)
    elif json_out is not None:
        write_json_atomic(json_out, record)
    Console(stderr=json_out == "-").print(*tables)


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)  # in ASCII: stdout may be in any encoding


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal)
