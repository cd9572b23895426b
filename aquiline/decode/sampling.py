"""How one token is chosen from the target's logits: transforms in their fixed order, then a race.

At every position each token of the vocabulary has an arrival, an exponential random number that depends only on the
request's seed, the absolute position and the token. The token with the smallest arrival / probability is chosen, which
happens with just that probability (the Gumbel-max trick: an arrival is e^-g of a Gumbel number g). So text at a seed
is the same with and without a draft, whatever the tree or the batch, but for tokens that tie within rounding: at the
border of a top-k or top-p, or in the race.

And so the draft, which knows the arrivals before the target runs, can guess who wins instead of who is likely: two
distributions in the same race choose the same token with a chance of at least (1 - d) / (1 + d), d being their total
variation distance (Daliri, Musco and Suresh, arXiv 2408.07978). The tree may depend on the arrivals: the text does not
depend on the tree.

The same code chooses the tokens of plain decoding and of every node that verification visits.

Letters: V target vocabulary, W draft vocabulary, N rows of a pass.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aquiline.config import SamplingConfig, require
from aquiline.model import backend

BAN = -100.0  # a logit bias at or below this forbids the token (the OpenAI convention)

# A draft's distribution is flatter than the target's, as it spreads what it does not know: of the shipped head's first
# guesses at temperature 1 win 0.39 by its own logits, 0.42 by these times 1.2, 0.41 by 1.6 times (LOG.md).
SHARPNESS = 1.25

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
# SplitMix64's shifts, each with the factor behind it; a shift of 31 ends it.
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _mix64(z: int) -> int:
    for shift, factor in _MIX:
        z = ((z ^ (z >> shift)) * factor) & _WORD
    return z ^ (z >> 31)


def seed_key(seed: int) -> int:
    """Where a request's random numbers begin. Mixed: neighbouring seeds would lie on one another's sequences."""
    return _mix64((seed + _GAMMA) & _WORD)


def arrivals(key: int, position: int, ids: Tensor) -> Tensor:
    """Exponential random numbers of mean 1, float64 like int64 `ids`, above 0: when these tokens arrive at an absolute
    position. `key`: `seed_key` of the request's seed.

    SplitMix64 (Steele, Lea and Flood 2014) counted by position, and from there by token.
    """
    return _arrivals(_position_key(key, position), ids)


def _position_key(key: int, position: int) -> int:
    """As the bits of an int64."""
    return _signed(_mix64((key + (position + 1) * _GAMMA) & _WORD))


def _arrivals(position_key: int | Tensor, ids: Tensor) -> Tensor:
    z = (ids + 1) * _signed(_GAMMA) + position_key  # int64 wraps as a machine word does
    for shift, factor in _MIX:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    uniform = (_shifted(z ^ _shifted(z, 31), 11).double() + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-53))  # the last of them rounds to 1


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(z: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left, which `>>` fills with the sign."""
    return (z >> by) & (2 ** (64 - by) - 1)


def race(probs: Tensor, arrivals: Tensor) -> int:
    """The place of the token whose arrival is the earliest for its probability; never that of one of probability 0.
    `probs` need not sum to one. FloatingPointError where nothing can be chosen: some are no numbers, or all are 0.
    """
    quotients = arrivals / probs
    winner = int(quotients.argmin())  # of a NaN, if there is one
    if not quotients[winner].isfinite():
        raise FloatingPointError(backend.NO_WINNER)
    return winner


class Foresight(NamedTuple):
    """What a draft is told of a request's races, to guess who wins them."""

    key: int
    temperature: float  # 0: greedy, no race is run
    sharpness: float  # factor of the draft's logits

    @staticmethod
    def of(config: SamplingConfig) -> "Foresight":
        return Foresight(seed_key(config.seed), config.temperature, 1.0 if config.greedy else SHARPNESS)


def foresee(
    foresights: Sequence[Foresight], positions: Sequence[int], depth: int, ids_W: Tensor
) -> tuple[Tensor, Tensor]:
    """What makes a draft's logits scores of who wins, float32: each row's factor `[B]`, and what is to be added
    `[B, depth, W]`, at so many positions from the row's own one on: temperature times Gumbel noise, nothing for greedy
    rows. Of a whole distribution the token with the largest logit + noise wins.
    """
    device = ids_W.device
    rows = list(zip(foresights, positions, strict=True))
    keys = [[_position_key(f.key, at + d) for d in range(depth)] for f, at in rows]
    temperature_B11 = torch.tensor([f.temperature for f in foresights], device=device)[:, None, None]
    noise_BDW = -temperature_B11 * _arrivals(torch.tensor(keys, device=device)[..., None], ids_W).log()
    return torch.tensor([f.sharpness for f in foresights], device=device), noise_BDW.float()


def _keep_best(weights_V: Tensor, best: Tensor, count: int) -> Tensor:
    """The `count` largest weights, the others 0; among equals at the border the lowest ids, where `topk` takes any.

    `best`: the largest weights in descending order, at least `count` of them.
    """
    border = best[count - 1]
    keep_V = weights_V > border
    ties = (weights_V == border).nonzero()[:, 0]
    keep_V[ties[: count - int(keep_V.sum())]] = True
    return weights_V.where(keep_V, 0.0)


def _keep_share(weights_V: Tensor, share: float) -> Tensor:
    """The fewest largest weights that reach `share` of the total, the crossing one included; the others 0."""
    goal = share * weights_V.sum()
    for size in (min(1024, len(weights_V)), len(weights_V)):  # nearly always the head is enough, and far quicker
        best = weights_V.topk(size).values
        cumulative = best.cumsum(0)
        if cumulative[-1] >= goal:
            break
    return _keep_best(weights_V, best, min(int((cumulative < goal).sum()) + 1, size))


def warp(logits_V: Tensor, config: SamplingConfig) -> Tensor:
    """Temperature, top-k, top-p, min-p, in this order; each on what the one before left; float64 [V], summing to 1."""
    logits_V = logits_V.double()
    # Largest weight 1: so the smallest temperature only underflows, and min-p needs no normalising.
    weights_V = ((logits_V - logits_V.max()) / config.temperature).exp()
    if 0 < config.top_k < len(weights_V):
        weights_V = _keep_best(weights_V, weights_V.topk(config.top_k).values, config.top_k)
    if config.top_p < 1:
        weights_V = _keep_share(weights_V, config.top_p)
    if config.min_p > 0:
        weights_V = weights_V.where(weights_V >= config.min_p, 0.0)
    return weights_V / weights_V.sum()


class TokenLogprobs(NamedTuple):
    """Of one emitted token, by the target's raw distribution: before temperature, penalties, bans and grammar."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, log-probability), the likeliest first, of equals in any order


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of N tokens, each chosen by its row's logits, and of the `count` likeliest there."""
    logprobs_NV = logits_NV.float().log_softmax(-1)
    chosen = logprobs_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])[:, 0].tolist()
    values, ids = logprobs_NV.topk(min(count, logprobs_NV.shape[1]))
    return [
        TokenLogprobs(own, list(zip(best, top, strict=True)))
        for own, best, top in zip(chosen, ids.tolist(), values.tolist(), strict=True)
    ]


class Grammar(Protocol):
    """What a request's text must obey; it belongs to that request alone."""

    def allowed(self, path_tokens: Sequence[int]) -> Tensor:
        """Bool [V], True of at least one token: what may follow the committed tokens and these."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that were allowed, one after the other, have been emitted."""


class Sampler:
    """One request's way of choosing tokens: its settings and what its penalties and its grammar look back on."""

    def __init__(
        self,
        config: SamplingConfig,
        prompt_ids: Iterable[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammar: Grammar | None = None,
    ) -> None:
        self.config = config
        self.foresight = Foresight.of(config)
        self._grammar = grammar
        self._bias_V: Tensor | None = None
        if config.logit_bias:
            self._bias_V = _dense_bias(config.logit_bias, vocab_size).to(device)
        if config.penalised:
            self._prompt_seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._prompt_seen_V[torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64, device=device)] = True
            self._output_counts_V = torch.zeros(vocab_size, device=device)

    @property
    def plain_greedy(self) -> bool:
        """True if the choice is the arg-max of the raw logits: one `argmax` over a whole pass then serves all nodes."""
        return self.config.greedy and self._bias_V is None and not self.config.penalised and self._grammar is None

    def commit(self, tokens: Sequence[int]) -> None:
        """Add emitted tokens to the history: every one, once, the first token after the prompt included."""
        if self._grammar is not None:
            self._grammar.commit(tokens)
        if self.config.penalised:
            self._output_counts_V = self._counted(tokens)

    def _counted(self, tokens: Sequence[int]) -> Tensor:
        """Output counts as they stand after `tokens`."""
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=self._output_counts_V.device)
        return self._output_counts_V.index_add(0, ids, torch.ones_like(ids, dtype=torch.float32))

    def adjust(self, logits_V: Tensor, path_tokens: Sequence[int] = ()) -> Tensor:
        """Bans and bias, repetition, presence and frequency penalties, the grammar, in this order; float32 [V].

        `path_tokens`: tokens accepted earlier in this cycle, not yet committed; they count as output. Where the bans
        leave nothing that the grammar allows, the grammar wins.
        """
        raw_V = logits_V = logits_V.float()
        config = self.config
        if self._bias_V is not None:
            logits_V = logits_V + self._bias_V
        if config.penalised:
            counts_V = self._counted(path_tokens) if path_tokens else self._output_counts_V
            seen_V = self._prompt_seen_V | (counts_V > 0)
            # as Transformers has it: either way the logit falls
            penalty = config.repetition_penalty
            repeated_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V = torch.where(seen_V, repeated_V, logits_V)
            logits_V = logits_V - config.presence_penalty * (counts_V > 0) - config.frequency_penalty * counts_V
        if self._grammar is not None:
            allowed_V = self._grammar.allowed(path_tokens).to(logits_V.device)
            banned = self._bias_V is not None and not (allowed_V & (self._bias_V > -torch.inf)).any()
            logits_V = (raw_V if banned else logits_V).masked_fill(~allowed_V, -torch.inf)
        return logits_V

    def probs(self, logits_V: Tensor, path_tokens: Sequence[int] = ()) -> Tensor:
        """The distribution that is sampled, after all transforms; float64 [V]. Not for greedy settings."""
        return warp(self.adjust(logits_V, path_tokens), self.config)

    def choose(self, logits_V: Tensor, position: int, path_tokens: Sequence[int] = ()) -> int:
        """The token that stands at absolute `position`, given the target's raw logits [V] for it."""
        if self.config.greedy:
            return int(self.adjust(logits_V, path_tokens).argmax())  # of equals the first
        key = self.foresight.key
        if self.config.whole and backend.usable(torch.float32, logits_V.device):
            return backend.winner(self.adjust(logits_V, path_tokens), self.config.temperature, key, position)
        probs_V = self.probs(logits_V, path_tokens)
        able = probs_V.nonzero()[:, 0]  # often a few tokens: all others' arrivals would be for nothing
        return int(able[race(probs_V[able], arrivals(key, position, able))])


def _dense_bias(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> Tensor:
    """The bias of every token, float32 [V], bans as -inf; UserError for ids and values that cannot be meant."""
    bias_V = torch.zeros(vocab_size)
    for token, bias in logit_bias:
        require(
            0 <= token < vocab_size,
            f"logit_bias names token {token}, but the model's token ids are 0..{vocab_size - 1}",
        )
        require(
            not math.isnan(bias) and bias <= -BAN,
            f"logit_bias of token {token} is {bias}; give a number up to {-BAN:g}, or {BAN:g} or less to ban the token",
        )
        bias_V[token] += bias if bias > BAN else -torch.inf
    require(bool((bias_V > -torch.inf).any()), "logit_bias bans every token of the vocabulary; leave at least one")
    return bias_V
