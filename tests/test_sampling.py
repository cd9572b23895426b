"""Choosing one token: every transform against a slow reference and against Transformers, the race."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import transformers as hf

from aquiline.config import SamplingConfig, UserError
from aquiline.decode.sampling import Foresight, Sampler, _mix64, arrivals, foresee, race, seed_key, warp
from aquiline.model import backend


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


CRITICAL = {3: 16.27, 19: 43.82, 99: 148.23}  # chi-square at level 1e-3, by degrees of freedom


def slow_adjust(
    logits: list[float], config: SamplingConfig, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Bias and penalties, one token at a time."""
    adjusted = []
    for token, logit in enumerate(logits):
        for biased, bias in config.logit_bias:
            if biased == token:
                logit += -math.inf if bias <= -100 else bias
        if token in prompt or token in output:
            logit = logit / config.repetition_penalty if logit > 0 else logit * config.repetition_penalty
        if token in output:
            logit -= config.presence_penalty
        adjusted.append(logit - config.frequency_penalty * output.count(token))
    return adjusted


def slow_probs(adjusted: list[float], config: SamplingConfig) -> list[float]:
    """Temperature, top-k, top-p, min-p over a dictionary of the tokens still in, best first and lowest id first."""

    def softmax(tokens: list[int]) -> dict[int, float]:
        total = math.fsum(math.exp((adjusted[t] - top) / config.temperature) for t in tokens)
        return {t: math.exp((adjusted[t] - top) / config.temperature) / total for t in tokens}

    top = max(adjusted)
    tokens = sorted(range(len(adjusted)), key=lambda t: (-adjusted[t], t))
    if config.top_k:
        tokens = tokens[: config.top_k]
    probs, kept = softmax(tokens), []
    for token in tokens:
        kept.append(token)
        if config.top_p < 1 and math.fsum(probs[t] for t in kept) >= config.top_p:
            break
    probs = softmax(kept)
    probs = softmax([t for t in kept if probs[t] >= config.min_p * probs[kept[0]]])
    return [probs.get(t, 0.0) for t in range(len(adjusted))]


def random_config(rng: random.Random, vocab_size: int) -> SamplingConfig:
    bias = [
        (rng.randrange(vocab_size), rng.choice([-100.0, -math.inf, -2.5, 0.5, 3.0])) for _ in range(rng.randint(0, 3))
    ]
    return SamplingConfig(
        temperature=rng.choice([0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 3, vocab_size + 5]),
        top_p=rng.choice([1.0, 0.87, 0.53, 1e-6]),
        min_p=rng.choice([0.0, 0.07, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.6, -0.6]),
        frequency_penalty=rng.choice([0.0, 0.25]),
        logit_bias=tuple(bias),
    )


def test_all_transforms_equal_the_slow_reference() -> None:
    """Logits in steps of 1/2, so that ties abound, at the borders of top-k and top-p too."""
    rng = random.Random(0)
    for _ in range(400):
        vocab_size = rng.randint(4, 12)
        config = random_config(rng, vocab_size)
        prompt, output, path = ([rng.randrange(vocab_size) for _ in range(rng.randint(0, 4))] for _ in range(3))
        logits = [rng.randint(-6, 6) / 2 for _ in range(vocab_size)]
        sampler = Sampler(config, prompt, vocab_size)
        sampler.commit(output)
        adjusted = slow_adjust(logits, config, prompt, output + path)
        logits_V = torch.tensor(logits)
        torch.testing.assert_close(sampler.adjust(logits_V, path), torch.tensor(adjusted))
        expected = slow_probs(sampler.adjust(logits_V, path).tolist(), config)
        torch.testing.assert_close(sampler.probs(logits_V, path), torch.tensor(expected, dtype=torch.float64))
        sampler.commit(path)  # history through the path and through commit is one
        torch.testing.assert_close(sampler.adjust(logits_V), torch.tensor(adjusted))
        assert logits_V.tolist() == logits  # untouched


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_transforms_equal_those_of_transformers(settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    config = SamplingConfig(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    processors = [
        hf.RepetitionPenaltyLogitsProcessor(config.repetition_penalty),
        hf.TemperatureLogitsWarper(config.temperature),
        hf.TopKLogitsWarper(config.top_k or 10**9),
        hf.TopPLogitsWarper(config.top_p),
        hf.MinPLogitsWarper(config.min_p),
    ]
    for _ in range(20):
        ids = torch.randint(3000, (40,), generator=generator)  # vocabulary beyond the first try of top-p
        logits_V = 2 * torch.randn(3000, generator=generator)
        scores = hf.LogitsProcessorList(processors)(ids[None], logits_V[None])[0]  # type: ignore[arg-type]
        sampler = Sampler(config, ids[:30].tolist(), 3000)
        sampler.commit(ids[30:].tolist())
        probs_V = sampler.probs(logits_V)
        torch.testing.assert_close(probs_V, scores.double().softmax(0), rtol=1e-4, atol=1e-9)


def test_top_k_and_top_p_at_ties_keep_the_lowest_ids() -> None:
    logits_V = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    probs_V = Sampler(SamplingConfig(temperature=1.0, top_k=4), [], 6).probs(logits_V)
    assert probs_V.nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    quarters_V = torch.zeros(4)  # the second of four reaches 0.5 exactly, a hair more takes a third
    for top_p, kept in [(0.25, [0]), (0.5, [0, 1]), (0.5001, [0, 1, 2]), (1e-9, [0]), (0.9999999, [0, 1, 2, 3])]:
        probs_V = Sampler(SamplingConfig(temperature=1.0, top_p=top_p), [], 4).probs(quarters_V)
        assert probs_V.nonzero()[:, 0].tolist() == kept
    many_V = torch.zeros(5000)  # needs more than the head of 1024
    assert int((Sampler(SamplingConfig(temperature=1.0, top_p=0.5), [], 5000).probs(many_V) > 0).sum()) == 2500


def test_temperatures_near_zero_stay_finite() -> None:
    logits_V = torch.tensor([1.0, 3.0, -torch.inf, 3.0])
    for temperature in (1e-30, 1e-300, 5e-324):
        assert Sampler(SamplingConfig(temperature=temperature), [], 4).probs(logits_V).tolist() == [0, 0.5, 0, 0.5]


def test_greedy_is_the_argmax_after_bias_and_penalties_lowest_id_first() -> None:
    logits_V = torch.zeros(50_000)
    logits_V[[40_000, 7, 20_000]] = 2.0
    assert Sampler(SamplingConfig(), [], 50_000).choose(logits_V, 0) == 7
    assert Sampler(SamplingConfig(logit_bias=((7, -100.0),)), [], 50_000).choose(logits_V, 0) == 20_000
    assert Sampler(SamplingConfig(repetition_penalty=1.1), [7, 20_000], 50_000).choose(logits_V, 0) == 40_000
    sampler = Sampler(SamplingConfig(presence_penalty=0.5), [7], 50_000)  # the prompt does not count
    assert [sampler.choose(logits_V, 0), sampler.choose(logits_V, 0, [7])] == [7, 20_000]
    assert torch.stack([logits_V] * 3).argmax(-1).tolist() == [7] * 3  # what stands in for plain greedy requests


def test_plain_greedy_is_claimed_only_where_the_raw_argmax_decides() -> None:
    assert Sampler(SamplingConfig(top_k=3, top_p=0.5, seed=4), [], 8).plain_greedy
    for settings in (
        {"temperature": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ):
        assert not Sampler(SamplingConfig(**settings), [], 8).plain_greedy


@pytest.mark.parametrize("bias", [((8, 1.0),), ((-1, 1.0),), ((1, math.nan),), ((1, math.inf),), ((1, 101.0),)])
def test_a_bias_that_cannot_be_meant_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UserError, match="logit_bias"):
        Sampler(SamplingConfig(logit_bias=bias), [], 8)


def test_banning_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="bans every token"):
        Sampler(SamplingConfig(logit_bias=tuple((t, -100.0) for t in range(8))), [], 8)


GAMMA = 0x9E3779B97F4A7C15


def slow_arrival(seed: int, position: int, token: int) -> float:
    """In Python's whole numbers."""

    def mixed(z: int) -> int:
        z %= 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    word = mixed(mixed(mixed(seed + GAMMA) + (position + 1) * GAMMA) + (token + 1) * GAMMA)
    return -math.log1p(-((word >> 11) + 0.5) / 2**53)


def times(seed: int, position: int, ids: Sequence[int]) -> list[float]:
    return arrivals(seed_key(seed), position, torch.tensor(ids)).tolist()  # type: ignore[no-any-return]


def test_arrivals_are_pinned() -> None:
    """Text at a seed must survive a new version. SplitMix64's first output from state 0 is the published one."""
    assert _mix64(GAMMA) == 0xE220A8397B1DCDAF
    for seed, position in ((0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6)):
        ids = [0, 1, 777, 150_000]
        assert times(seed, position, ids) == pytest.approx([slow_arrival(seed, position, i) for i in ids], rel=1e-14)
    assert times(0, 0, [0, 1]) == pytest.approx([0.14932332876109483, 3.5439857557095973], rel=1e-14)


@pytest.mark.parametrize("of", ["positions", "seeds", "tokens", "tokens from the end of the words"])
def test_arrivals_are_exponential_and_unrelated_to_their_neighbours(of: str) -> None:
    n = range(20_001)
    if of.startswith("tokens"):
        drawn = times(5, 3, [i + (2**31 if "end" in of else 0) for i in n])
    else:
        drawn = [times(5, i, [9])[0] if of == "positions" else times(i, 5, [9])[0] for i in n]
    values = [-math.expm1(-time) for time in drawn]  # uniform
    bins = Counter(int(20 * u) for u in values)
    assert chi_square([bins[i] for i in range(20)], [20_001 / 20] * 20) < CRITICAL[19]
    for lag in (1, 7):
        count = len(values) - lag
        pairs = Counter((int(10 * a), int(10 * b)) for a, b in zip(values, values[lag:], strict=False))
        assert chi_square([pairs[divmod(i, 10)] for i in range(100)], [count / 100] * 100) < CRITICAL[99]


def test_seeds_positions_and_tokens_do_not_mirror_one_another() -> None:
    drawn = {time for seed in range(40) for position in range(40) for time in times(seed, position, range(40))}
    assert len(drawn) == 40**3


def test_the_earliest_for_its_probability_wins() -> None:
    assert race(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.4, 0.6])) == 1
    assert race(torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 0.4, 0.6])) == 1  # whatever they sum to
    assert race(torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64), torch.tensor([1e-17, 37.0, 1e-17]).double()) == 1
    generator = torch.Generator().manual_seed(0)
    for seed in range(300):
        probs_V = torch.rand(30, generator=generator, dtype=torch.float64)
        probs_V[torch.rand(30, generator=generator) < 0.7] = 0
        probs_V[13] += 0.01
        drawn = times(seed, 4, range(30))
        quotients = [time / p if p > 0 else math.inf for time, p in zip(drawn, probs_V.tolist(), strict=True)]
        assert race(probs_V, torch.tensor(drawn)) == quotients.index(min(quotients))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.4}])
def test_first_token_over_many_seeds_follows_the_distribution(settings: dict[str, float]) -> None:
    logits_V = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    chosen: Counter[int] = Counter()
    for seed in range(6000):
        config = SamplingConfig(**{"temperature": 1.0, "seed": seed} | settings)  # type: ignore[arg-type]
        chosen[Sampler(config, [], 4).choose(logits_V, 9)] += 1
    expected = [(t, 6000 * p) for t, p in enumerate(warp(logits_V, config).tolist()) if p > 0]
    assert set(chosen) == {t for t, _ in expected}
    critical = {2: 13.82} | CRITICAL  # chi-square at level 1e-3
    assert chi_square([chosen[t] for t, _ in expected], [e for _, e in expected]) < critical[len(expected) - 1]


def test_the_first_tokens_of_neighbouring_positions_are_independent() -> None:
    logits_V = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(8000):
        sampler = Sampler(SamplingConfig(temperature=1.0, seed=seed), [], 4)
        pairs[tuple(sampler.choose(logits_V, at) for at in (9, 10))] += 1
    probs = logits_V.exp().tolist()
    both = list(product(range(4), repeat=2))
    assert chi_square([pairs[a, b] for a, b in both], [8000 * probs[a] * probs[b] for a, b in both]) < 37.7  # 15, 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_largest_logit_with_noise_is_the_token_chosen(temperature: float) -> None:
    """What the draft is told of a race, on the target's own logits, tells who wins it."""
    logits_V = 3 * torch.randn(500, generator=torch.Generator().manual_seed(1))
    for seed in range(200):
        sampler = Sampler(SamplingConfig(temperature=temperature, seed=seed), [], 500)
        greedy = Foresight.of(SamplingConfig(seed=seed))
        sharpness_B, noise_BDV = foresee([greedy, sampler.foresight], [9, seed + 7], 3, torch.arange(500))
        for depth in range(3):
            assert int((logits_V + noise_BDV[1, depth]).argmax()) == sampler.choose(logits_V, seed + 7 + depth)
        assert sharpness_B[0] == 1
        assert not noise_BDV[0].any()


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("logits", [[math.nan] * 3, [1, math.nan, 2], [1, math.inf, 2], [-math.inf] * 3])
def test_logits_by_which_nothing_can_be_drawn_are_an_error(kernel, logits, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    if not kernel:
        monkeypatch.setattr(backend, "library", lambda: None)
    with pytest.raises(FloatingPointError, match="no token can be drawn"):
        Sampler(SamplingConfig(temperature=1.0), [], 3).choose(torch.tensor(logits), 5)


def test_another_distribution_in_the_same_race_agrees_as_often_as_is_proved() -> None:
    """At least (1 - d) / (1 + d) of the time, at a total variation distance d; drawn on its own it would be less."""
    generator, agreed, bound, alone = torch.Generator().manual_seed(3), 0, 0.0, 0.0
    for seed in range(4000):
        p_V, q_V = torch.rand(2, 6, generator=generator, dtype=torch.float64).pow(2)
        p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
        drawn = torch.tensor(times(seed, 1, range(6)))
        agreed += race(p_V, drawn) == race(q_V, drawn)
        distance = float((p_V - q_V).abs().sum()) / 2
        bound += (1 - distance) / (1 + distance)
        alone += float((p_V * q_V).sum())
    spread = 3 * 4000**0.5 / 2
    assert agreed > bound - spread
    assert bound - spread > alone + spread
