"""Tiny random models for every test: seeded, float32, on the CPU."""

import dataclasses

import pytest
import torch

from aquiline.config import DraftConfig, RopeConfig, TargetConfig
from aquiline.model.draft import Draft
from aquiline.model.target import LlamaTarget
from aquiline.model.vocab import VocabMap

torch.set_num_threads(1)  # tiny tensors: a second thread only waits


def tiny_target_config(**changes) -> TargetConfig:
    base = TargetConfig(
        family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2,
        head_dim=8, norm_eps=1e-5, max_positions=256, rope=RopeConfig(), tied_head=False,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def randomise(module: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    """Weights large enough that the arg-max of a tiny random model is not a near tie."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.1 * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * scale / p.shape[1] ** 0.5)


def tiny_target(seed: int = 0, capture_after: tuple[int, ...] = (1, 3, 4), **changes) -> LlamaTarget:
    target = LlamaTarget(tiny_target_config(**changes), capture_after)
    randomise(target, seed)
    return target.eval().requires_grad_(False)


def tiny_draft_config(target: TargetConfig, draft_vocab_size: int = 40, **changes) -> DraftConfig:
    base = DraftConfig(
        vocab_size=target.vocab_size, draft_vocab_size=draft_vocab_size, hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        norm_eps=1e-5, max_positions=256, rope=target.rope, capture_after=(1, 3, 4),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def tiny_draft(target: LlamaTarget, seed: int = 1, draft_vocab_size: int = 40, **changes) -> Draft:
    config = tiny_draft_config(target.config, draft_vocab_size, capture_after=target.capture_after, **changes)
    generator = torch.Generator().manual_seed(seed + 100)
    order = torch.randperm(target.config.vocab_size, generator=generator)
    vocab = VocabMap.of(order[:draft_vocab_size].sort().values, target.config.vocab_size)
    draft = Draft(config, vocab)
    randomise(draft, seed)
    return draft


@pytest.fixture(autouse=True)
def no_kept_costs(monkeypatch) -> None:
    """What passes cost in one test is nothing to the next, nor to the user's cache."""
    monkeypatch.setattr("aquiline.decode.engine.cache_folder", lambda: None)


@pytest.fixture
def target() -> LlamaTarget:
    return tiny_target()


@pytest.fixture
def draft(target: LlamaTarget) -> Draft:
    return tiny_draft(target)
