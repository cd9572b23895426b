"""The Python API, which the command line uses too: load a target with its draft, then generate, stream or converse.

from aquiline.api import load

model = load()  # the default target with the head that comes with the package
print(model.generate("Why is the sky blue?").text)
for delta in model.stream("Write a haiku.", temperature=0.7, seed=3):
    print(delta.text, end="")
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from aquiline.config import (
    DEFAULT_TREE,
    AquilineWarning,
    Limits,
    SamplingConfig,
    TreeConfig,
    UserError,
    check_quantize,
    check_quantize_draft,
    require,
)
from aquiline.data.chat import Chat, Message, StopMatcher
from aquiline.decode.engine import Engine, Request, check_tree_and_draft
from aquiline.decode.sampling import Grammar
from aquiline.files import checkpoint, disk
from aquiline.files.checkpoint import DEFAULT
from aquiline.model.backend import eight_bits_pay, fast_bf16, usable
from aquiline.model.draft import Draft
from aquiline.model.target import Target

NGRAM, NONE = "ngram", "none"  # drafts without weights: prompt lookup, and plain decoding
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_JUDGED_CYCLES = 32  # fewer say nothing about a draft
_HOPELESS_TAU = 1.05
_JUDGED_STEPS, _IDLE_SHARE = 64, 0.85  # of them without a tree


@dataclass(frozen=True)
class Result:
    """A finished reply. `token_ids` hold the end-of-turn token, `text` does not."""

    text: str
    token_ids: list[int]
    origins: list[int]  # per token: 0 the target's own choice, else the depth it was drafted at
    finish_reason: str  # stop, length, context or cancelled
    prompt_tokens: int
    cycles: int
    tau: float | None  # tokens per speculative cycle; None without a cycle
    tree: str | None  # DEPTH:TOPK:NODES; None: plain decoding
    seconds: float  # from request to last token
    decode_seconds: float  # from first to last token

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Without prefill: the tokens after the first. None where there are none."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.generated_tokens > 1 else None


@dataclass(frozen=True)
class Delta:
    """What one step adds to a reply; the last one carries the whole result."""

    text: str  # becomes visible now; may lag behind the tokens while a character or a stop string is incomplete
    token_ids: list[int]
    origins: list[int]
    result: Result | None = None


@dataclass(eq=False)
class Model:
    """A target with its tokenizer and, maybe, a draft; packed for decoding."""

    target: Target
    draft: Draft | str | None  # a head, "ngram" for prompt lookup, or None
    chat: Chat
    target_name: str
    draft_name: str
    draft_folder: Path | None = None
    fingerprint: str = ""  # of the target
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # the chat template's arguments for every prompt
    _cycles: int = field(default=0, init=False)
    _emitted: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)  # with `auto`
    _plain: int = field(default=0, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    @cached_property
    def engine(self) -> Engine:
        """Runs `generate` and `stream`; made at first use, as its cache is large."""
        return Engine(self.target, self.draft)

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def quantised_draft(self) -> str | None:
        """How the head's weights are quantised."""
        return self.draft.quantised if isinstance(self.draft, Draft) else None

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends a reply."""
        return self.chat.end_of_turn_ids | frozenset(self.target.config.eos_token_ids)

    def prompt_ids(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """Ids of a user's text or of a conversation, by the target's chat template; ids are taken as they are."""
        if isinstance(prompt, str):
            return self.chat.render([{"role": "user", "content": prompt}], **self.template_kwargs)
        if prompt and all(isinstance(i, int) for i in prompt):
            return [i for i in prompt if isinstance(i, int)]
        messages = [m for m in prompt if not isinstance(m, int)]
        require(len(messages) == len(prompt), "the prompt mixes token ids and messages; give one of them")
        return self.chat.render(messages, **self.template_kwargs)

    def request(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        max_new_tokens: int = Limits.max_new_tokens,
        stop: str | Sequence[str] = (),
        tree: TreeConfig | str | None = None,
        plain: bool = False,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        **sampling: Any,
    ) -> Request:
        """The request that `generate` and `stream` run.

        `tree` is the default one unless given; `plain` decodes without the draft; `grammar` and `logprobs` are as
        in `Request`; `sampling` are the fields of `SamplingConfig`: temperature, top_k, top_p, min_p, seed and so on.
        """
        if isinstance(tree, str):
            tree = TreeConfig.parse(tree)
        check_tree_and_draft(self.draft, tree)
        limits = Limits(max_new_tokens, self.stop_ids, (stop,) if isinstance(stop, str) else tuple(stop))
        return Request(
            self.prompt_ids(prompt),
            SamplingConfig(**sampling),
            limits,
            None if plain or self.draft is None else tree or DEFAULT_TREE,
            self.chat.stop_matcher(limits),
            grammar,
            logprobs,
        )

    def generate(self, prompt: str | Sequence[Message] | Sequence[int], **settings: Any) -> Result:
        """The whole reply. `settings` are those of `request`."""
        return self.run(self.request(prompt, **settings))

    def stream(self, prompt: str | Sequence[Message] | Sequence[int], **settings: Any) -> Iterator[Delta]:
        """The reply as it is made, step by step; leaving the loop early cancels it."""
        return self.follow(self.request(prompt, **settings), self.engine)

    def run(self, request: Request) -> Result:
        """Run a request to its end."""
        self.engine.run([request])
        return self._finished(request)

    def follow(self, request: Request, engine: Engine) -> Iterator[Delta]:
        """Run a request on an engine of this model."""
        assert isinstance(request.matcher, StopMatcher)
        sent = 0
        for pairs in engine.stream(request):
            text = request.matcher.text
            yield Delta(text[sent:], [token for token, _ in pairs], [origin for _, origin in pairs])
            sent = len(text)
        result = self._finished(request)
        yield Delta(result.text[sent:], [], [], result)

    def _finished(self, request: Request) -> Result:
        assert isinstance(request.matcher, StopMatcher)
        assert request.finish_reason is not None
        assert request.finished_at is not None
        self.watch(request)
        return Result(
            text=request.matcher.text,
            token_ids=list(request.output_ids),
            origins=list(request.origins),
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            cycles=request.cycles,
            tau=request.tau,
            tree=None if request.tree is None else str(request.tree),
            seconds=request.finished_at - request.submitted_at,
            decode_seconds=0.0 if request.first_token_at is None else request.finished_at - request.first_token_at,
        )

    def watch(self, request: Request) -> None:
        """Say it when the draft hardly ever helps: the text stays right, so nobody would notice."""
        if not isinstance(self.draft, Draft) or request.tree is None:
            return
        # A step for which a head makes no tree at all (its scores are not numbers) is a cycle that yields one token.
        idle = request.trees[0, 0] if request.cycles == 0 and not request.tree.auto else 0
        if request.tree.auto:  # which makes none where none pays
            self._watch_choice(request)
        self._cycles += request.cycles + idle
        self._emitted += sum(request.cycle_lengths) + idle
        if self._cycles >= _JUDGED_CYCLES and self._emitted < _HOPELESS_TAU * self._cycles:
            self._warn_once(
                "acceptance",
                f"the draft's tokens are hardly ever accepted (tau {self._emitted / self._cycles:.2f} over "
                f"{self._cycles} cycles), so it only costs time: was it trained for this target, this chat template "
                "and these captured layers? `--draft none` decodes without it",
            )
        trained, length = self.draft.config.trained_length, len(request.prompt_ids) + len(request.output_ids)
        if trained is not None and length > trained:
            self._warn_once(
                "length",
                f"decoding went past the {trained} tokens the draft was trained to; acceptance is untested there "
                "(the text stays right)",
            )

    def _watch_choice(self, request: Request) -> None:
        self._steps += request.trees.total()
        self._plain += request.trees[0, 0]
        if self._steps >= _JUDGED_STEPS and self._plain > _IDLE_SHARE * self._steps:
            self._warn_once(
                "idle",
                f"in {self._plain} of {self._steps} steps no drafted tree was expected to pay: the draft's tokens are "
                "not accepted, or a pass over several tokens costs too much here. "
                "`aquiline eval --tree 6:8:60 --no-plain` shows which",
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, AquilineWarning, stacklevel=4)


class Conversation:
    """Turns with one model. The cache lives on between them: a turn runs only what is new."""

    def __init__(self, model: Model, system: str | None = None, **settings: Any) -> None:
        """`settings` of every turn are those of `Model.request`."""
        self.model = model
        self.messages: list[Message] = []
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._settings = settings
        # Its own: there the next of the model's requests would take the only slot.
        self._engine = Engine(model.target, model.draft)
        self.reused_tokens = 0  # of the last turn's prompt, taken from the cache

    def say(self, text: str) -> Iterator[Delta]:
        """Add a user's turn and stream the reply. A reply that is left early, or has no token, leaves no trace."""
        question: Message = {"role": "user", "content": text}
        request = self.model.request([*self._system, *self.messages, question], **self._settings)
        try:
            for delta in self.model.follow(request, self._engine):
                yield delta
                if delta.result is not None and delta.result.token_ids:
                    self.messages += [question, {"role": "assistant", "content": delta.result.text}]
        finally:
            self.reused_tokens = request.reused_tokens

    def reset(self) -> None:
        """Begin anew."""
        self._engine.forget()
        self.messages = []


def pick_device(name: str | None) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`; None: CUDA where there is one. UserError for others."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not known; expected cpu, cuda or cuda:N") from error
    require(device.type in ("cpu", "cuda"), f"device {name!r} is not supported; expected cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    require((device.index or 0) < count, f"device {name!r} is not there: PyTorch sees {count} CUDA devices")
    return device


def pick_dtype(name: str | None, target: str | Path, device: torch.device, *, trains: bool = False) -> torch.dtype:
    """A dtype by its name; None: the weights' own where this device computes it fast, else float32.

    What decodes bf16 by the kernel reads half as much as float32 and is faster on any CPU; training is not.
    """
    if name is not None:
        require(name in DTYPES, f"dtype {name!r} is not supported; expected one of {', '.join(DTYPES)}")
        return DTYPES[name]
    path = checkpoint.target_path(target)
    own = "bfloat16"  # what a GGUF is rounded to
    if path.is_dir():
        config = disk.read_json(path / "config.json")
        own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if own == "bfloat16":
        fast = fast_bf16(device.type) or (
            not trains and usable(torch.bfloat16, device) and not checkpoint.read_target_config(path).structure
        )
    else:
        fast = device.type == "cuda" and own == "float16"
    return DTYPES[own] if fast else torch.float32


def load_chat(target: str | Path) -> Chat:
    """The tokenizer and chat template that come with a target."""
    path = checkpoint.target_path(target)
    ends = checkpoint.read_target_config(path).eos_token_ids
    return Chat.from_folder(path, ends) if path.is_dir() else Chat.from_gguf(path, ends)


def load_target(target: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
    """A target on its own, not packed, that captures nothing a draft would read."""
    last = checkpoint.read_target_config(target).num_layers - 1
    return checkpoint.load_target(target, dtype, device, (last,))


def load(
    target: str | Path = DEFAULT,
    draft: str | Path = DEFAULT,
    *,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    exact: bool = False,
    quantize_draft: str = "auto",
) -> Model:
    """Load a target (folder, .gguf file, hub id or `default`) and a draft (folder, hub id, `default`, `ngram`, `none`).

    `dtype` and `device` as in `pick_dtype` and `pick_device`; `quantize` (int8, int4) rounds the target's weights,
    which makes another target of it, that the same draft fits; `template_kwargs` go to the chat template with every
    prompt, such as {"enable_thinking": False}. `exact`: no token's numbers may depend on what else is in its pass, so
    that in 16 bits, too, plain and speculative text are one; with the kernel they never do (model/exact.py).
    `quantize_draft` (int8, int4, none) is of the head's weights; the target has the last word on the text all the same;
    auto is int8 where that is faster (backend.eight_bits_pay). UserError says what does not fit.
    """
    settings = dict(template_kwargs or {})
    check_quantize_draft(quantize_draft)
    _check_computed_here(quantize, exact, target)
    where = pick_device(device)
    kind = pick_dtype(dtype, target, where)
    name = checkpoint.target_name(target)
    if str(draft) in (NGRAM, NONE):
        require(
            quantize_draft in ("auto", "none"),
            f"--quantize-draft {quantize_draft} is of a head's weights, and draft {draft} has none: leave it out",
        )
        chat = load_chat(target)
        model = load_target(target, kind, where)
        fingerprint = checkpoint.target_fingerprint(model)  # packing takes the weights away
        _quantise(model, quantize, target)
        ngram = NGRAM if str(draft) == NGRAM else None
        return Model(_packed(model, exact), ngram, chat, name, str(draft), None, fingerprint, settings)
    folder = checkpoint.draft_path(draft)  # first: a misspelt draft should not cost the loading of the target
    chat = load_chat(target)
    try:
        model, head = checkpoint.load_pair(
            target, folder, kind, where, tokenizer=chat.fingerprint(), template=chat.template_fingerprint()
        )
    except UserError as error:
        if str(draft) == DEFAULT and str(target) != DEFAULT:
            hint = "the default draft belongs to the default target: give --draft a head for this one, ngram or none"
            raise UserError(f"{hint} ({error})") from error
        raise
    fingerprint = checkpoint.target_fingerprint(model)
    _quantise(model, quantize, target)
    _check_template_kwargs(folder, settings)
    if quantize_draft == "auto":
        quantize_draft = "int8" if eight_bits_pay(kind, where) else "none"
    if quantize_draft != "none":
        head.quantise(quantize_draft)
        _warn_slow(f"--quantize-draft {quantize_draft}", model, 3)
    packed, called = _packed(model, exact), checkpoint.draft_name(folder)
    return Model(packed, head.pack(), chat, name, called, folder, fingerprint, settings)


def _packed(target: Target, exact: bool) -> Target:
    packed = target.pack()
    if exact:
        packed.make_exact()
    return packed


def _check_computed_here(how: str | None, exact: bool, target: str | Path) -> None:
    """Before anything is loaded: what only targets of our own forward can do."""
    check_quantize(how)
    if not (how or exact) or not (config := checkpoint.read_target_config(target)).structure:
        return
    asked = f"--quantize {how}" if how else "--exact"
    advice = "a folder that Transformers itself quantised runs as it is" if how else "in float32 passes differ least"
    raise UserError(
        f"{asked} is for targets of our own forward, and a {config.family} target runs as Transformers has it: leave "
        f"it out; {advice}"
    )


def _quantise(model: Target, how: str | None, target: str | Path) -> None:
    if how is None:
        return
    model.quantise(how, checkpoint.stored_integers(target))
    _warn_slow(f"--quantize {how}", model, 4)


def _warn_slow(asked: str, model: Target, level: int) -> None:
    if not usable(model.dtype, model.device):
        warnings.warn(
            f"{asked} is fast in the CPU kernel, which does not run here ({model.decoding}): decoding is right, and "
            "slower than without it",
            AquilineWarning,
            stacklevel=level,
        )


def _check_template_kwargs(folder: Path, settings: dict[str, Any]) -> None:
    """Say it when the head was trained on text that was written with other template arguments, as far as it tells."""
    path = folder / "run.json"
    data = disk.read_json(path).get("data") if path.is_file() else None
    trained = data.get("template_kwargs") if isinstance(data, dict) else None
    if trained and settings not in trained:
        warnings.warn(
            "the draft was trained on text written with the template arguments "
            f"{' or '.join(map(str, trained))}, and here they are {settings}: fewer guesses may be accepted "
            "(--template-kwarg sets them)",
            AquilineWarning,
            stacklevel=3,
        )
