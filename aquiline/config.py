"""Every setting: small frozen dataclasses, checked where they are made, and `UserError`, the error a user can mend.

A setting has one home, here; the command line takes its defaults from these classes. Nothing here knows about files
or other projects' names: `files/target_formats.py` and `files/draft_formats.py` translate a `config.json`, at the edge.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any


class UserError(Exception):
    """Something the user gave is wrong: the message says what was given, what was expected and what to do.

    `reason`: the same few words for every row of data with this fault; rows of no use are counted by it. Of a head that
    is refused: the part that is at fault, a tensor's name or an id of `aquiline doctor`'s causes.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class AquilineWarning(UserWarning):
    """Something is legal but may lower acceptance: said once, loudly."""


def require(condition: bool, message: str, reason: str = "") -> None:
    """Raise `UserError(message, reason)` unless `condition` holds."""
    if not condition:
        raise UserError(message, reason)


ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """The rotary block of a model, in the names of Transformers' `rope_parameters`; None means "not given"."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn

    def __post_init__(self) -> None:
        require(
            self.rope_type in ROPE_TYPES,
            f"rope_type {self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}",
        )
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor",),
        }.get(self.rope_type, ())
        for key in needed:
            require(getattr(self, key) is not None, f"rope_type {self.rope_type!r} needs {key!r}, which is missing")


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    require(
        num_heads % num_kv_heads == 0,
        f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
    )
    # The rotary embedding turns pairs, and its frequencies are computed before a weight's shape could contradict.
    require(head_dim % 2 == 0 and 0 < head_dim <= 2**16, f"head_dim {head_dim} must be even, and at most 65536")


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetConfig:
    """One target. Those of `FAMILIES` differ only by these switches; of others it has the sizes that a head takes."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int  # the longest context, in tokens
    rope: RopeConfig
    tied_head: bool = False  # lm_head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    structure: str = ""  # of a family that Transformers computes: what else its config says, hashed

    def __post_init__(self) -> None:
        known = self.family in FAMILIES or bool(self.structure)
        require(known, f"unknown model family {self.family!r}; supported: {', '.join(FAMILIES)}")
        _check_heads(self.num_heads, self.num_kv_heads, self.head_dim)


# In place of layer ids: the target's final state, after its final norm, which its head reads (EAGLE's feature before
# EAGLE-3). The draft then has no fc. For comparison with heads that read several layers.
TOP = (-1,)


def capture_name(capture_after: tuple[int, ...]) -> list[int] | str:
    """What files and messages call it: the layer ids, or "top"."""
    return "top" if capture_after == TOP else list(capture_after)


def default_capture_after(num_layers: int) -> tuple[int, int, int]:
    """The usual low, middle and high layers, as 0-based ids: the states that ENTER layers 2, N//2 and N-3.

    Raises UserError below 7 layers, where these three are not distinct.
    """
    require(
        num_layers >= 7,
        f"the target has {num_layers} layers; the default capture layers need at least 7. "
        "Give three distinct ascending layers with --capture-after A,B,C (0-based, state after the block)",
    )
    return (1, num_layers // 2 - 1, num_layers - 4)


QUANTIZE = ("int8", "int4")  # ways to quantise a target


def check_quantize(name: str | None) -> None:
    """UserError for what is none of them."""
    require(
        name is None or name in QUANTIZE,
        f"quantize {name!r} is not supported; expected int8 (llama.cpp's Q8_0) or int4 (its Q4_1)",
    )


def check_quantize_draft(name: str) -> None:
    """UserError for what is neither a way, nor `auto` or `none`."""
    require(
        name in (*QUANTIZE, "auto", "none"),
        f"quantize_draft {name!r} is not supported; expected auto, none, int8 (llama.cpp's Q8_0) or int4 (its Q4_1)",
    )


def check_capture_after(capture_after: tuple[int, ...], num_layers: int) -> None:
    """Raise UserError unless the ids are distinct, ascending and inside the target, or are `TOP`."""
    if capture_after == TOP:
        return
    inside = all(0 <= i < num_layers for i in capture_after)
    ascending = all(a < b for a, b in itertools.pairwise(capture_after))
    require(
        bool(capture_after) and inside and ascending,
        f"capture_after {list(capture_after)} must be distinct, ascending and within 0..{num_layers - 1} "
        f"(the target has {num_layers} layers)",
        "capture_layers",
    )


# What a head may be trained with beyond the plain form: fields of `DraftConfig`.
SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norm", "attention_bias")


@dataclass(frozen=True)
class DraftConfig:
    """The EAGLE-3 head: sizes, the target it belongs to, and the switches of the dialects (all off by default)."""

    vocab_size: int  # the target's vocabulary, V
    draft_vocab_size: int  # the draft's vocabulary, W
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    capture_after: tuple[int, ...]
    trained_length: int | None = None  # longest row it was trained on, in tokens; acceptance beyond it is untested
    fc_norm: bool = False  # one RMSNorm per captured state before fc
    norm_before_fc: bool = False  # one RMSNorm over all captured states before fc
    norm_output: bool = False  # the fed-back feature is norm(h) instead of h
    norm_before_residual: bool = False  # the residual stream is hidden_norm(g) instead of g
    qk_norm: bool = False
    attention_bias: bool = False
    own_embedding: bool = False  # keeps its own embedding; otherwise the target's is used

    def __post_init__(self) -> None:
        _check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} must be between 1 and the target's vocabulary {self.vocab_size}",
        )
        require(
            not (self.fc_norm and self.norm_before_fc),
            "fc_norm and norm_before_fc are both on; they exclude each other: switch one off",
        )
        require(
            self.own_embedding or self.hidden_size == self.target_hidden_size,
            f"the draft is {self.hidden_size} wide and the target {self.target_hidden_size}: "
            "the target's embedding does not fit, so the draft needs its own",
        )
        if self.top:
            require(
                not (self.fc_norm or self.norm_before_fc),
                "a draft that reads the target's final state has no fc, so fc_norm and norm_before_fc must be off",
            )
            require(
                self.hidden_size == self.target_hidden_size,
                f"a draft that reads the target's final state is as wide as the target, {self.target_hidden_size}, "
                f"not {self.hidden_size}",
            )

    @property
    def top(self) -> bool:
        """It reads the target's final state, without fc."""
        return self.capture_after == TOP

    @property
    def aux_width(self) -> int:
        """Width A of the concatenated captured states."""
        return len(self.capture_after) * self.target_hidden_size


@dataclass(frozen=True)
class TreeConfig:
    """The drafted tree of one cycle, written DEPTH:TOPK:NODES; a chain of D tokens is D:1:D.

    With `auto`, written just that, the three are limits, and every cycle has the tree that pays (decode/cost.py).
    """

    depth: int
    top_k: int
    num_nodes: int  # the root is not counted
    auto: bool = False

    def __post_init__(self) -> None:
        require(
            all(isinstance(n, int) and 1 <= n <= 4096 for n in (self.depth, self.top_k, self.num_nodes)),
            f"tree {self} must have a depth, top-k and nodes that are whole numbers from 1 to 4096",
        )

    def __str__(self) -> str:
        return "auto" if self.auto else f"{self.depth}:{self.top_k}:{self.num_nodes}"

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @staticmethod
    def parse(text: str) -> "TreeConfig":
        """Read DEPTH:TOPK:NODES, or auto; UserError on anything else."""
        if text == "auto":
            return AUTO_TREE
        parts = text.split(":")
        require(
            len(parts) == 3 and all(p.isdecimal() and len(p) < 8 for p in parts),
            f"tree {text!r} is neither auto nor DEPTH:TOPK:NODES; for example 6:8:60, or 4:1:4 for a chain of four",
        )
        depth, top_k, num_nodes = (int(p) for p in parts)
        return TreeConfig(depth, top_k, num_nodes)


REFERENCE_TREE = TreeConfig(6, 8, 60)  # the tree by which tau is judged
AUTO_TREE = TreeConfig(8, 8, 63, auto=True)  # what a step costs and gains decides
DEFAULT_TREE = AUTO_TREE  # what decoding uses unless told otherwise


@dataclass(frozen=True)
class SamplingConfig:
    """How one token is chosen from the target's logits; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added); at -100 and below the token is banned
    seed: int = 0

    def __post_init__(self) -> None:
        def number(name: str, low: float, high: float, *, above: bool = False) -> None:
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and math.isfinite(value)
            ok = ok and (low < value if above else low <= value) and value <= high
            require(ok, f"{name} {value!r} must be {'above' if above else 'at least'} {low:g} and at most {high:g}")

        number("temperature", 0.0, 100.0)
        number("top_k", 0, 2**31)
        for name in ("top_k", "seed"):
            require(isinstance(getattr(self, name), int), f"{name} {getattr(self, name)!r} must be a whole number")
        pairs = self.logit_bias if isinstance(self.logit_bias, tuple) else None
        require(
            pairs is not None and all(isinstance(p, tuple) and len(p) == 2 for p in pairs),
            f"logit_bias {self.logit_bias!r} must be a tuple of (token id, bias) pairs",
        )
        number("top_p", 0.0, 1.0, above=True)
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 0.01, 100.0)  # logits are divided by it, and must stay numbers
        number("presence_penalty", -100.0, 100.0)
        number("frequency_penalty", -100.0, 100.0)
        require(0 <= self.seed < 2**63, f"seed {self.seed} must be between 0 and 2**63-1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def whole(self) -> bool:
        """Whether neither top-k nor top-p nor min-p cuts the distribution."""
        return (self.top_k, self.top_p, self.min_p) == (0, 1.0, 0.0)

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


DEFAULT_DRAFT_VOCAB = 8192


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Lengths are in tokens, learning rates per update."""

    optimizer: str = "muon"  # muon (matrices; AdamW for the rest) or adamw
    learning_rate: float = 3e-3  # of Muon's matrices; adamw has no use for it
    adamw_learning_rate: float = (
        1.5e-3  # of what Muon leaves to AdamW: lm_head, norms, biases; with adamw, of everything
    )
    weight_decay: float = 0.0
    warmup_share: float = 0.03  # of all steps
    final_share: float = 0.02  # the cosine ends at this share of the learning rate
    clip: float = 0.5
    ttt_steps: int = 7
    ttt_decay: float = 0.8  # the loss of step k weighs ttt_decay ** k
    batch_tokens: int = 2048  # tokens of one pack, all rows counted
    accumulate: int = 1  # packs of one optimiser update
    max_length: int = 2048  # longer rows are cut
    epochs: float = 1.0
    draft_vocab_size: int | None = None  # None: that of the head the run starts from, else DEFAULT_DRAFT_VOCAB
    loss: str = "ce"  # ce: soft cross-entropy; lk: -log of the probability that the target accepts the draft's token
    feature_loss: bool = False  # only with the target's final state: also regress the next feature (train/ttt.py)
    switches: tuple[str, ...] = ()  # of SWITCHES; sorted, for their order means nothing
    init: str = "random"  # random, or target-layer: the head's layer starts as the target's last one
    train_lm_head: bool = True  # False: lm_head stays what it starts as
    checkpoint_activations: bool = False  # keep less for the backward, and compute it again there
    skip_outside: bool = True  # leave rows whose teacher arg-max is outside the draft vocabulary out of the loss
    eval_every: int = 100  # optimiser updates
    save_every: int = 100
    decode_every: int = 10  # evaluations; then, and at the end, some held-out prompts are really decoded; 0: never
    patience: int = 0  # evaluations without a better accepted length after which the run ends; 0: never
    held_out: int = 48  # greedy rows kept apart for the walk
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.optimizer in ("muon", "adamw"), f"optimizer {self.optimizer!r} must be muon or adamw")
        require(self.loss in ("ce", "lk"), f"loss {self.loss!r} must be ce or lk")
        require(self.init in ("random", "target-layer"), f"init {self.init!r} must be random or target-layer")
        for name in self.switches:
            require(name in SWITCHES, f"switch {name!r} is not known; known: {', '.join(SWITCHES)}")
        require(len(set(self.switches)) == len(self.switches), f"a switch is given twice: {', '.join(self.switches)}")
        object.__setattr__(self, "switches", tuple(sorted(self.switches)))
        require(
            self.accumulate == 1 or not self.feature_loss,
            f"accumulate {self.accumulate} and the feature loss, an ablation, do not go together",
        )
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                require(math.isfinite(value) and value >= 0, f"{f.name} {value} must be a number, not negative")
        positive = ("ttt_steps", "batch_tokens", "accumulate", "max_length", "eval_every", "save_every")
        for name in (*positive, "draft_vocab_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} {value} must be at least 1")


@dataclass(frozen=True)
class Limits:
    """When a request ends: `max_new_tokens`, stop ids (the end-of-turn ids are added by the loader), stop strings."""

    max_new_tokens: int = 256
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 0,
            f"max_new_tokens {self.max_new_tokens!r} must be a whole number, not negative",
        )
        require(all(self.stop_strings), "a stop string is empty; leave it out or give at least one character")


@dataclass(frozen=True)
class EvalConfig:
    """One measurement of a target with its draft: the same prompts plainly and speculatively."""

    tree: TreeConfig = DEFAULT_TREE
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0  # of every prompt
    limit: int | None = None  # prompts per task; None: all
    plain: bool = True  # False: tau only

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 2, f"max_new_tokens {self.max_new_tokens} must be at least 2 to have a cycle")
        require(self.limit is None or self.limit >= 1, f"limit {self.limit} must be at least 1")
        SamplingConfig(temperature=self.temperature, seed=self.seed)


PHASES = ("draft", "target", "accept", "keep", "other")  # of a cycle, for whoever times it


@dataclass(frozen=True)
class BenchConfig:
    """Plain decoding and several trees, at several batch sizes."""

    trees: tuple[TreeConfig, ...] = (TreeConfig(2, 4, 7), AUTO_TREE)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    max_new_tokens: int = 128
    repeats: int = 5  # of each batch size, with other prompts as far as there are others

    def __post_init__(self) -> None:
        for name, values in (("tree", self.trees), ("batch", self.batches)):
            require(0 < len(values) == len(set(values)), f"--{name} must name something, and nothing twice")
        require(min(self.batches) >= 1, f"batch {min(self.batches)} must be at least 1")
        require(self.max_new_tokens >= 2, f"max_new_tokens {self.max_new_tokens} must be at least 2 to have a cycle")
        require(self.repeats >= 1, f"repeats {self.repeats} must be at least 1")


@dataclass(frozen=True)
class AnswerConfig:
    """How the target answers prompts for training. Lengths are in tokens."""

    temperatures: tuple[float, ...] = (0.0,)  # each prompt has one of them, chosen by its id
    max_new_tokens: int = 512  # of a reply
    max_length: int = 2048  # of a conversation
    system: str | None = None  # for conversations without a system message
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    in_flight: int | None = None  # conversations at a time; None: 8 on this machine, 64 on a server

    def __post_init__(self) -> None:
        require(bool(self.temperatures), "no temperature was given; for example 0, or 0,0.7,1")
        for temperature in self.temperatures:
            SamplingConfig(temperature=temperature, seed=self.seed)
        for name in ("max_new_tokens", "max_length", "in_flight"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} {value} must be at least 1")


@dataclass(frozen=True)
class InventConfig:
    """How the target makes up prompts. Lengths are in tokens."""

    count: int = 1000  # prompts that are kept
    temperature: float = 1.0
    max_new_tokens: int = 256  # longer ones are left out as unfinished
    system: str | None = None
    seed: int = 0
    in_flight: int = 8

    def __post_init__(self) -> None:
        SamplingConfig(temperature=self.temperature, seed=self.seed)
        for name in ("count", "max_new_tokens", "in_flight"):
            require(getattr(self, name) >= 1, f"{name} {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class ServeConfig:
    """A server: where it listens and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8  # requests decoded at a time
    context: int | None = None  # tokens of prompt and reply; None: what the target allows
    queue: int = 128  # requests that may wait beyond those
    timeout: float = 600.0  # seconds that a request may take at most
    patience: float = 60.0  # seconds for a client to send what it has begun, and to read what it is sent

    def __post_init__(self) -> None:
        require(0 <= self.port < 2**16, f"port {self.port} must be between 0 and 65535; 0 takes a free one")
        require(self.max_batch >= 1, f"max_batch {self.max_batch} must be at least 1")
        require(self.context is None or self.context >= 2, f"context {self.context} must be at least 2 tokens")
        require(self.queue >= 0, f"queue {self.queue} must not be negative")
        require(self.timeout > 0, f"timeout {self.timeout:g} must be above 0 seconds")
        require(self.patience > 0, f"patience {self.patience:g} must be above 0 seconds")

    @property
    def is_local(self) -> bool:
        """Nobody on another machine can call it."""
        return self.host in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class DoctorConfig:
    """On what a head is examined."""

    max_new_tokens: int = 96  # of a reply
    limit: int = 8  # prompts per file
    system: str | None = None  # that of the head's training; None: what its run.json says

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 8, f"max_new_tokens {self.max_new_tokens} must be at least 8 to tell anything")
        require(self.limit >= 1, f"limit {self.limit} must be at least 1")
