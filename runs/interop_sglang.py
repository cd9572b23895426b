"""What SGLang's own sources make of a head that `convert` wrote, where SGLang cannot be installed: it wants CUDA.

`models/llama_eagle3.py` out of its package runs here as it stands, loading included, over plain PyTorch layers in place
of its parallel ones: of these, attention and rope are ours, the rest is its code. So the names of tensors, the map of
the vocabulary, which halves are concatenated, what is normed and what is fed back are its own; not its kernels, nor the
drafting around the model. `versus` compares with our head.
"""

import ast
import contextlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aquiline.files import checkpoint
from aquiline.files.disk import read_json, read_weights
from aquiline.model.draft import Draft
from aquiline.model.target import Target

_TOKENS = 24
_FLAGS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "tp_size", "nnodes", "node_rank", "dist_init_addr",
)  # fmt: skip


class _RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = F.rms_norm(total, (total.shape[-1],), self.weight, self.eps)
        return normed if residual is None else (normed, total)


class _Stacked(nn.Module):
    """Several matrices in one, loaded part by part under the names that SGLang gives the parts."""

    def __init__(self, width: int, parts: dict[Any, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((sum(parts.values()), width), torch.nan))
        ends = torch.tensor(list(parts.values())).cumsum(0).tolist()
        self._rows = {name: slice(end - parts[name], end) for name, end in zip(parts, ends, strict=True)}
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, weight: nn.Parameter, loaded: Tensor, part: Any) -> None:
        weight.data[self._rows[part]] = loaded.float()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _qkv(width: int, head_dim: int, heads: int, kv_heads: int, **_: Any) -> _Stacked:
    return _Stacked(width, {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim})


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str, *_: Any) -> None:
        super().__init__()
        assert act == "silu"
        self.gate_up_proj, self.down_proj = _Stacked(width, {0: inner, 1: inner}), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.total_num_heads, self.total_num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.total_num_heads
        self.theta = config.rope_parameters["rope_theta"]
        self.o_proj = nn.Linear(self.total_num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        E, heads, kv = self.head_dim, self.total_num_heads, self.total_num_kv_heads
        parts = self.qkv_proj(hidden_states).split([heads * E, kv * E, kv * E], dim=-1)  # type: ignore[operator]
        q, k, v = (part.view(len(positions), -1, E).transpose(0, 1) for part in parts)
        angles = positions[:, None] * self.theta ** (-torch.arange(0, E, 2) / E)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (x * cos + torch.cat((-x[..., E // 2 :], x[..., : E // 2]), dim=-1) * sin for x in (q, k))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return self.o_proj(out.transpose(0, 1).flatten(1))


class _Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int = 0, **_: Any) -> None:
        super().__init__()
        self.hidden_size, self.self_attn = config.hidden_size, _Attention(config)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)


def _embedding(rows: int, width: int, **_: Any) -> nn.Embedding:
    return nn.Embedding(rows, width)


def _load(parameter: nn.Parameter, loaded: Tensor) -> None:
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


def _its_module(sources: Path) -> Any:
    """sglang.srt.models.llama_eagle3, with what it imports from SGLang in its place."""
    nothing = types.SimpleNamespace(speculative_draft_window_size=None, pp_group=None, SINGLE_GROUP=None)
    stand_ins: dict[str, dict[str, Any]] = {
        "configs.draft_parallel": {"DraftParallelSpec": lambda **_: None, "DraftTPExecution": nothing},
        "runtime_context": {"get_spec": lambda: nothing, "get_parallel": lambda: nothing},
        "utils": {"add_prefix": lambda name, prefix: f"{prefix}.{name}"},
        "layers.layer_boundary": {"layer_stack": contextlib.nullcontext},
        "layers.layernorm": {"RMSNorm": _RMSNorm},
        "layers.linear": {"QKVParallelLinear": _qkv},
        "layers.logits_processor": {"LogitsProcessor": lambda config: None},
        "layers.quantization.base_config": {"QuantizationConfig": object},
        "layers.vocab_parallel_embedding": {"ParallelLMHead": _embedding, "VocabParallelEmbedding": _embedding},
        "model_executor.forward_batch_info": {"ForwardBatch": object, "PPProxyTensors": object},
        "model_loader.weight_utils": {"default_weight_loader": _load},
        "models.llama": {"LlamaDecoderLayer": _Layer, "LlamaForCausalLM": nn.Module, "LlamaMLP": _MLP},
    }
    for name, members in stand_ins.items():
        parts = f"sglang.srt.{name}".split(".")
        for n in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
        module = sys.modules[".".join(parts)] = types.ModuleType(".".join(parts))
        vars(module).update(members)
    path = sources / "sglang" / "srt" / "models" / "llama_eagle3.py"
    spec = importlib.util.spec_from_file_location("sglang_llama_eagle3", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def versus(sources: Path, head: Path, target: Target, draft: Draft) -> dict[str, Any]:
    """Compare on one row of tokens, in float32: which tensors it loads, its map, its logits and what it feeds back."""
    from transformers import LlamaConfig

    config, written = LlamaConfig.from_pretrained(head), read_weights(head)
    its = _its_module(sources).LlamaForCausalLMEagle3(config).float()
    for p in its.parameters():
        p.data.fill_(torch.nan)
    its.load_weights(written.items())
    its.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)  # as its workers do
    unloaded = [name for name, p in its.named_parameters() if not bool(torch.isfinite(p).all())]
    hot = its.get_hot_token_id()
    ids = torch.arange(_TOKENS) * 37 % target.config.vocab_size
    aux = target(ids[None], torch.arange(_TOKENS)[None]).aux_BNA[0].float()
    mode = types.SimpleNamespace(is_extend=lambda: False)
    batch = types.SimpleNamespace(
        mm_input_embeds=None, forward_mode=mode, spec_info=types.SimpleNamespace(hidden_states=aux[:-1])
    )
    positions = torch.arange(_TOKENS - 1)
    hidden, (feature,) = its.model(ids[1:], positions, batch)
    logits = hidden @ its.lm_head.weight.T
    ours = draft(draft.embed(ids, target.embed)[None, 1:], draft.fuse(aux)[None, :-1], positions[None])
    want = draft.logits(ours.hidden_BNH[0])
    return {
        "tensors_not_loaded": unloaded,
        "map_equal": torch.equal(hot, draft.vocab.target_ids_W),
        "largest_difference": {
            "logits": float((logits - want).abs().max() / want.abs().max()),
            "fed back": float((feature - ours.feature_BNH[0]).abs().max() / ours.feature_BNH.abs().max()),
        },
        "captures": _captured(read_json(head / "config.json"), target.config.num_layers),
        "captures_here": [i + 1 for i in draft.config.capture_after],
        "flags_missing": sorted(set(_FLAGS) - _fields(sources)),
    }


def _captured(config: dict[str, Any], layers: int) -> list[int]:
    """Layers whose input it captures, by `set_eagle3_layers_to_capture` of its models/llama.py."""
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return [2, layers // 2, layers - 3] if given is None else [i + 1 for i in given]


def _fields(sources: Path) -> set[str]:
    """The names of its server's arguments, which are those of its flags."""
    found = set()
    for path in (sources / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


if __name__ == "__main__":  # python runs/interop_sglang.py SOURCES HEAD TARGET
    import json

    folder = Path(sys.argv[2])
    pair = checkpoint.load_pair(sys.argv[3], folder, torch.float32)
    print(json.dumps(versus(Path(sys.argv[1]), folder, *pair), indent=2))
