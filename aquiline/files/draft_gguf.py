"""A head as a GGUF file of llama.cpp's architecture `eagle3`.

Written are the target's tokenizer, which llama.cpp wants in every file, absolute target ids as `d2t`, the layers whose
INPUT is captured as `target_layers`, and q and k with their rows in neighbouring pairs, as for `llama`. Matrices keep
their dtype; vectors are float32, as everywhere in GGUF. Source: src/models/eagle3.cpp and conversion/llama.py of the
llama.cpp in llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from aquiline.config import DraftConfig, RopeConfig, UserError, require
from aquiline.files.disk import one_line
from aquiline.files.target_formats import GGUF_ROPE_FACTORS, GGUF_TENSORS, permute_rope_rows
from aquiline.model.layers import rope_frequencies

ARCHITECTURE = "eagle3"
_OURS = {ours.removeprefix("model."): theirs for theirs, ours in GGUF_TENSORS.items()}
_OURS |= {"hidden_norm": "attn_norm_2", "fc": "fc", "input_norm": "enc.output_norm"}
_KINDS = {
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.float32: gguf.GGMLQuantizationType.F32,
}
_FILE_TYPES = {
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.float32: gguf.LlamaFileType.ALL_F32,
}


def gguf_name(ours: str) -> str:
    """The GGUF name of one of a draft's tensors."""
    inner = ours.removeprefix("midlayer.")
    name = _OURS[inner.removesuffix(".weight")]
    return ("blk.0." if inner != ours else "") + f"{name}.weight"


def write_gguf(
    path: Path, config: DraftConfig, tensors: Mapping[str, Tensor], target_ids_W: Tensor, target_file: Path
) -> None:
    """Write the file. `target_file` is the GGUF of the target, whose tokenizer is copied."""
    tokenizer = _tokenizer(target_file, config.vocab_size)
    odd = [name for name, t in tensors.items() if t.dtype not in _KINDS]
    require(not odd, f"{', '.join(odd)}: a GGUF holds bfloat16, float16 and float32; convert them first")
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_config(writer, config)
    writer.add_file_type(_FILE_TYPES[tensors["lm_head.weight"].dtype])
    for name, (value, types) in tokenizer.items():
        writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    for name, tensor in tensors.items():
        _add_tensor(writer, gguf_name(name), _permuted(name, tensor, config))
    if config.draft_vocab_size < config.vocab_size:
        writer.add_tensor("d2t", target_ids_W.long().numpy())
    if config.rope.rope_type == "llama3":
        writer.add_tensor(GGUF_ROPE_FACTORS, _rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, c: DraftConfig) -> None:
    writer.add_block_count(1)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope.rope_theta)
    _add_rope_scaling(writer, c.rope)
    for key in ("target_layers", "extract_layers"):  # the name since mid-2026, and the one before
        # The state after layer i is what enters layer i + 1.
        writer.add_array(f"{ARCHITECTURE}.{key}", [i + 1 for i in c.capture_after])
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", c.target_hidden_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", c.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", c.norm_before_fc)  # before mid-2026 its tensor is refused


def _add_rope_scaling(writer: gguf.GGUFWriter, rope: RopeConfig) -> None:
    if rope.rope_type not in ("linear", "yarn"):
        return  # llama3's is a tensor
    assert rope.factor is not None
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope.rope_type))
    writer.add_rope_scaling_factor(rope.factor)
    if rope.original_max_position_embeddings is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)


def _rope_factors(c: DraftConfig) -> np.ndarray:
    """What each frequency is divided by."""
    plain, scaled = (
        rope_frequencies(r, c.head_dim, c.max_positions)[0] for r in (RopeConfig(c.rope.rope_theta), c.rope)
    )
    return (plain / scaled).numpy()


def _permuted(name: str, tensor: Tensor, c: DraftConfig) -> Tensor:
    heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads}.get(name.split(".")[-2])
    return tensor if heads is None else permute_rope_rows(tensor, heads)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.ndim == 1:
        tensor = tensor.float()
    # As bytes: NumPy has no bf16.
    data = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=_KINDS[tensor.dtype])


def _tokenizer(target_file: Path, vocab_size: int) -> dict[str, tuple[Any, list[gguf.GGUFValueType]]]:
    """The tokenizer's metadata: values with their types."""
    try:
        fields = gguf.GGUFReader(target_file).fields
    except Exception as error:  # the package's reader has no error of its own
        raise UserError(f"{target_file} cannot be read as a GGUF: {one_line(error)}") from error
    found = {name: (f.contents(), f.types) for name, f in fields.items() if name.startswith("tokenizer.")}
    tokens = found.get("tokenizer.ggml.tokens", ([], []))[0]
    require(
        len(tokens) == vocab_size,
        f"{target_file} has {len(tokens)} tokens, and the draft is for {vocab_size}: llama.cpp needs as many",
    )
    return found
