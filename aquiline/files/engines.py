"""Which switches of a head each engine computes: what it would leave out, and what it has no room for.

Source: the loaders of SGLang 0.5, vLLM 0.32 (with speculators 0.9), optimum-intel 2.2 and llama.cpp of mid-2026.
"""

from collections.abc import Callable

from aquiline.config import DraftConfig

SGLANG, VLLM, OPENVINO, LLAMA_CPP, REFERENCE = "SGLang", "vLLM", "OpenVINO GenAI", "llama.cpp", "SafeAILab/EAGLE"

# What each is, in a user's words, and whether a head has it. All but the last are fields of DraftConfig; that one
# follows from the sizes, and only SGLang, which tells a feature that needs fc by its width, goes by them.
SWITCHES: dict[str, tuple[str, Callable[[DraftConfig], bool]]] = {
    "norm_before_residual": ("the residual stream is normed", lambda c: c.norm_before_residual),
    "norm_before_fc": ("one norm over all captured states before fc", lambda c: c.norm_before_fc),
    "fc_norm": ("a norm on each captured state before fc", lambda c: c.fc_norm),
    "norm_output": ("the normed state is fed back", lambda c: c.norm_output),
    "qk_norm": ("norms on the heads of q and k", lambda c: c.qk_norm),
    "attention_bias": ("biases of q, k and v", lambda c: c.attention_bias),
    "own_embedding": (
        "an embedding that is not the target's",
        lambda c: c.own_embedding and c.hidden_size == c.target_hidden_size,
    ),
    "fc": ("an fc from a width to the same width", lambda c: not c.top and c.aux_width == c.hidden_size),
}
_BEYOND_PLAIN = {"norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias"}
_LEFT_OUT: dict[str, set[str]] = {
    SGLANG: {"norm_before_residual", "qk_norm", "attention_bias", "own_embedding", "fc"},
    VLLM: set(),
    # Its exporter's class has none of these tensors, and Transformers only logs what a class has no place for.
    OPENVINO: {"norm_before_residual", *_BEYOND_PLAIN, "own_embedding"},
    LLAMA_CPP: _BEYOND_PLAIN - {"norm_before_fc"},
    REFERENCE: {"norm_before_residual", *_BEYOND_PLAIN},
}


def left_out(config: DraftConfig, engine: str) -> list[str]:
    """The names of the switches that this head has on and that the engine ignores."""
    return [name for name, (_, on) in SWITCHES.items() if name in _LEFT_OUT[engine] and on(config)]


def no_room(config: DraftConfig, engine: str) -> list[str]:
    """In words, what of this head the engine cannot hold at all."""
    c = config
    if c.top:
        return ["a head on the target's final state, without fc, which is no EAGLE-3 head to any engine"]
    out = []
    if engine in (OPENVINO, LLAMA_CPP, REFERENCE) and len(c.capture_after) != 3:
        out.append(f"{len(c.capture_after)} captured layers; it takes three")
    if engine == OPENVINO and c.hidden_size != c.target_hidden_size:
        out.append(f"a draft {c.hidden_size} wide for a target {c.target_hidden_size} wide, whose embedding it uses")
    own_yarn = (c.rope.attention_factor, c.rope.beta_fast or 32.0, c.rope.beta_slow or 1.0) != (None, 32.0, 1.0)
    if engine == LLAMA_CPP and c.rope.rope_type == "yarn" and own_yarn:
        out.append("a yarn rope with attention_factor, beta_fast or beta_slow of its own")
    if engine == REFERENCE and c.rope.rope_type not in ("default", "linear"):
        out.append(f"a rope of type {c.rope.rope_type}")
    return out
