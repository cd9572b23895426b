"""`generate` and `chat`."""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aquiline.cli.shared import (
    DeviceFlag,
    DraftFlag,
    DtypeFlag,
    ExactFlag,
    FrequencyFlag,
    MinPFlag,
    PresenceFlag,
    QuantizeDraftFlag,
    QuantizeFlag,
    RepetitionFlag,
    SeedFlag,
    SystemFlag,
    TargetFlag,
    TemperatureFlag,
    TemplateFlag,
    TokensFlag,
    TopKFlag,
    TopPFlag,
    TreeFlag,
    app,
    check_settings,
    decoded,
    load_model,
    note,
    piped,
    print_json,
    template_settings,
)
from aquiline.config import Limits, SamplingConfig, UserError, require

if TYPE_CHECKING:
    from aquiline.api import Conversation, Model, Result
    from aquiline.measure.evaluate import Divergence
    from aquiline.serve.client import RemoteConversation, Summary


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
    template_kwarg: TemplateFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    quantize: QuantizeFlag = None,
    quantize_draft: QuantizeDraftFlag = "auto",
    exact: ExactFlag = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Answer one prompt."""
    settings = check_settings(
        max_new_tokens, tree, draft, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    require(not (compare and draft == "none"), "--compare needs a draft to compare with; leave --draft none out")
    text = piped(sys.stdin.buffer.read() if sys.stdin else b"") if prompt == "-" else prompt
    messages = ([] if system is None else [{"role": "system", "content": system}]) + [{"role": "user", "content": text}]
    model = load_model(
        target, draft, dtype, device, template_settings(template_kwarg), quantize=quantize,
        quantize_draft=quantize_draft, exact=exact,
    )  # fmt: skip
    if compare:
        _compare(model, messages, settings, as_json)
        return
    if as_json:
        print_json(_result_json(model.generate(messages, **settings)))
        return
    for delta in model.stream(messages, **settings):
        print(delta.text, end="", flush=True)
        if delta.result is not None:
            print(flush=True)
            note(_stats(delta.result))
            _note_full_context(delta.result)


def _note_full_context(result: "Result") -> None:
    if result.finish_reason == "context" and not result.token_ids:
        note(f"warning: the prompt's {result.prompt_tokens} tokens leave no room in the target's context")


def _compare(model: "Model", messages: list[dict[str, Any]], settings: dict[str, Any], as_json: bool) -> None:
    """Both ways in this process, on one loaded model; a few tokens first, so that neither pays for first uses."""
    from aquiline.measure.evaluate import divergence, speedup

    for plain in (True, False):
        model.generate(messages, plain=plain, **settings | {"max_new_tokens": min(16, settings["max_new_tokens"])})
    model.engine.forget()  # each way runs its prompt
    result = model.generate(messages, **settings)
    model.engine.forget()
    plain_result = model.generate(messages, plain=True, **settings)
    ids = model.prompt_ids(messages)
    parted = divergence(model.target, ids, plain_result.token_ids, result.token_ids)
    ratio = speedup(plain_result, result)
    if as_json:
        other = {k: v for k, v in _result_json(plain_result).items() if k not in ("cycles", "tau", "tree")}
        compared: dict[str, Any] = {"plain": other, "equal": parted is None, "speedup": ratio}
        if parted is not None:
            compared["divergence"] = {"position": parted.position, "logit_gap": parted.logit_gap}
        print_json(_result_json(result) | compared)
        return
    print(result.text, flush=True)
    note(f"speculative  {_stats(result)}")
    note(f"plain        {_stats(plain_result)}")
    note(_verdict(parted, ratio))


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
    elif result.tree is not None:
        parts.append(f"tree {result.tree}: no guess was checked")
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
    server: Annotated[
        str | None, typer.Option("--server", help="Talk to this OpenAI-compatible server; nothing is loaded here.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of the server. [default: the only one]")] = None,
    template_kwarg: TemplateFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    quantize: QuantizeFlag = None,
    quantize_draft: QuantizeDraftFlag = "auto",
    exact: ExactFlag = False,
) -> None:
    """Talk in the terminal, a line a turn. /color shows which tokens were drafted, /reset begins anew, /quit ends."""
    settings = check_settings(
        max_new_tokens, tree, draft, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    template_kwargs = template_settings(template_kwarg)
    if server is None:
        require(model is None, "--model names a model of a server; give --server too")
        talker = load_model(
            target, draft, dtype, device, template_kwargs, quantize=quantize, quantize_draft=quantize_draft, exact=exact
        )
        _talk_here(talker, system, settings)
        return
    given = {"--target": target != "default", "--draft": draft != "default", "--tree": tree, "--device": device}
    given |= {"--dtype": dtype, "--quantize": quantize, "--quantize-draft": quantize_draft != "auto", "--exact": exact}
    for flag, value in given.items():
        require(not value, f"--server and {flag} exclude each other: the server has its own")
    _talk_there(server, model, system, settings, template_kwargs)


def _talk_here(model: "Model", system: str | None, settings: dict[str, Any]) -> None:
    from aquiline.api import Conversation

    conversation = Conversation(model, system, **settings)
    _talk(lambda text, coloured: _reply(conversation, text, coloured), conversation.reset)


def _talk_there(
    url: str, model: str | None, system: str | None, settings: dict[str, Any], template_kwargs: dict[str, Any]
) -> None:
    from aquiline.data.server import Endpoint
    from aquiline.serve.client import RemoteConversation

    server = Endpoint(url, model)
    note(f"{server.model} at {url}")
    conversation = RemoteConversation(server, system, settings, template_kwargs)
    _talk(lambda text, coloured: _remote_reply(conversation, text, coloured), conversation.reset)


def _talk(reply: Callable[[str, bool], None], reset: Callable[[], None]) -> None:
    """Read turns and let them be replied to, till the end. `reply`: of a text, coloured or not."""
    coloured = False
    while (line := _read_turn()) is not None:
        text = line.strip()
        if text in ("/quit", "/exit"):
            break
        if text == "/help":
            note("/color shows which tokens were drafted, /reset begins anew, /quit ends")
            continue
        if text == "/reset":
            reset()
            note("begun anew")
        elif text == "/color":
            coloured = not coloured
            depths = ", ".join(_paint(str(depth), depth) for depth in range(1, len(_COLOURS)))
            note(f"coloured: drafted, at depth {depths} and beyond; plain: the target's own" if coloured else "plain")
        elif text:
            reply(text, coloured)


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
            note(_stats(delta.result))
            if delta.result.finish_reason == "context":
                note("the context is full: /reset begins anew")


def _remote_reply(conversation: "RemoteConversation", text: str, coloured: bool) -> None:
    told = False
    try:
        for piece in conversation.say(text, origins=coloured):
            told = told or piece.tokens is not None
            painted = [(piece.text, 0)] if piece.tokens is None or not coloured else piece.tokens
            print("".join(_paint(part, origin) for part, origin in painted), end="", flush=True)
    except UserError as error:
        if not _interactive():
            raise
        print(flush=True)
        note(f"error: {error}")  # the server may be busy now, and not a minute later
        return
    print(flush=True)
    if coloured and not told:
        note("this server does not tell which tokens were drafted")
    if conversation.summary is not None:
        note(_remote_stats(conversation.summary))


def _remote_stats(summary: "Summary") -> str:
    parts = []
    if summary.tokens is not None:
        parts = [f"{summary.tokens} tokens ({summary.finish_reason})"]
        parts.append(f"{summary.tokens / summary.seconds:.1f} tokens/s")
    return " · ".join(parts + ([] if summary.tau is None else [f"tau {summary.tau:.2f}"]))


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_turn() -> str | None:
    """The next line, None at the end."""
    if not _interactive():
        line = sys.stdin.buffer.readline() if sys.stdin else b""
        return decoded(line) if line else None
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
