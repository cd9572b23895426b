"""Which engine computes which switch: the table, row by row, against what is written down here."""

import pytest

from aquiline.config import TOP, RopeConfig
from aquiline.files import engines
from aquiline.files.engines import LLAMA_CPP, OPENVINO, REFERENCE, SGLANG, VLLM
from tests.test_formats import LLAMA3, draft_config

YARN = RopeConfig(1e4, "yarn", 4.0, 64)
# A head, and the engines that ignore something of it, and those that have no room for it.
TABLE = [
    ({}, set(), set()),
    ({"norm_before_residual": True}, {SGLANG, OPENVINO, REFERENCE}, set()),
    ({"norm_before_fc": True}, {OPENVINO, REFERENCE}, set()),
    ({"fc_norm": True}, {OPENVINO, LLAMA_CPP, REFERENCE}, set()),
    ({"norm_output": True}, {OPENVINO, LLAMA_CPP, REFERENCE}, set()),
    ({"qk_norm": True}, {SGLANG, OPENVINO, LLAMA_CPP, REFERENCE}, set()),
    ({"attention_bias": True}, {SGLANG, OPENVINO, LLAMA_CPP, REFERENCE}, set()),
    ({"capture_after": (0, 2)}, set(), {OPENVINO, LLAMA_CPP, REFERENCE}),
    ({"capture_after": (5,)}, {SGLANG}, {OPENVINO, LLAMA_CPP, REFERENCE}),
    ({"capture_after": (0, 2, 5)}, set(), set()),
    ({"draft_vocab_size": 64}, set(), set()),
    ({"own_embedding": True}, {SGLANG, OPENVINO}, set()),
    ({"own_embedding": True, "hidden_size": 32}, set(), {OPENVINO}),
    ({"rope": RopeConfig(1e4, "linear", 2.0)}, set(), set()),
    ({"rope": RopeConfig(1e4, **LLAMA3)}, set(), {REFERENCE}),
    ({"rope": YARN}, set(), {REFERENCE}),
    ({"rope": RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=1.5)}, set(), {REFERENCE, LLAMA_CPP}),
    ({"capture_after": TOP}, set(), {SGLANG, VLLM, OPENVINO, LLAMA_CPP, REFERENCE}),
]


@pytest.mark.parametrize(("changes", "ignoring", "without_room"), TABLE)
def test_the_table(changes, ignoring, without_room):
    config = draft_config(**changes)
    for engine in (SGLANG, VLLM, OPENVINO, LLAMA_CPP, REFERENCE):
        assert bool(engines.left_out(config, engine)) == (engine in ignoring), engine
        assert bool(engines.no_room(config, engine)) == (engine in without_room), engine


def test_what_is_ignored_is_named():
    config = draft_config(norm_before_residual=True, norm_output=True, qk_norm=True)
    assert engines.left_out(config, SGLANG) == ["norm_before_residual", "qk_norm"]
    assert engines.left_out(config, LLAMA_CPP) == ["norm_output", "qk_norm"]
    assert "2 captured layers" in engines.no_room(draft_config(capture_after=(0, 2)), LLAMA_CPP)[0]
