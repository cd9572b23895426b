"""How one token is chosen from the target's logits: transforms in their fixed order, one uniform, one draw.

The same code chooses the tokens of plain decoding and of every node that verification visits. The uniform depends only
on the request's seed and the token's absolute position, so text at a seed is the same with and without a draft,
whatever the tree or the batch, but for tokens that tie within rounding at the border of a top-k or top-p.

Letters: V target vocabulary, N rows of a pass.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aquiline.config import SamplingConfig, require

BAN = -100.0  # a logit bias at or below this forbids the token (the OpenAI convention)

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1), a function of the request's seed and the absolute position of the token to draw.

    SplitMix64 (Steele, Lea and Flood 2014) counted by position. The seed is mixed first: neighbouring seeds would
    otherwise lie on one another's sequences.
    """
    key = _mix64((seed + _GAMMA) & _WORD)
    return (_mix64((key + (position + 1) * _GAMMA) & _WORD) >> 11) * 2.0**-53


def draw(probs_V: Tensor, u: float) -> int:
    """The token at `u` of the cumulative distribution in token order, summed in float64; never one of probability 0.

    `probs_V` need not sum to one, but must hold something above 0.
    """
    support = probs_V.nonzero()[:, 0]  # so that no rounding of the sum can return a token of probability 0
    cumulative = probs_V[support].double().cumsum(0)
    assert cumulative[-1:].gt(0).any(), "nothing to draw from: no token has a probability above 0"
    at = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(support[min(at, len(support) - 1)])  # u * total may round up to the total


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
        return draw(self.probs(logits_V, path_tokens), uniform(self.config.seed, position))


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
