"""The target against Transformers: every family, prefill and cached steps, with and without a tree mask, float32."""

import dataclasses

import pytest
import torch
import transformers

from aquiline.config import FAMILIES, TOP, RopeConfig, UserError
from aquiline.decode.tree import Tree, flatten
from aquiline.model import target as target_module
from aquiline.model.layers import Context, rope_frequencies
from aquiline.model.target import LlamaTarget
from tests.conftest import randomise, tiny_target, tiny_target_config

SWITCHES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True, "tied_head": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}
ROPES = {
    "llama3": RopeConfig(
        rope_theta=5000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "linear": RopeConfig(rope_type="linear", factor=4.0),
    "yarn": RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
}  # fmt: skip


def rope_dict(rope: RopeConfig) -> dict:
    return {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}


def pair(family: str, rope: RopeConfig | None = None) -> tuple[LlamaTarget, torch.nn.Module]:
    """Our target and Transformers' model with the same weights."""
    config = tiny_target_config(family=family, rope=rope or RopeConfig(rope_theta=1e6), **SWITCHES[family])
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    extra = {} if family == "qwen2" else {"head_dim": config.head_dim}
    if family == "mistral":
        extra["sliding_window"] = None
    hf_config = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_positions, rope_parameters=rope_dict(config.rope),
        tie_word_embeddings=config.tied_head, attn_implementation="eager", **extra,
    )  # fmt: skip
    hf = getattr(transformers, f"{kind}ForCausalLM")(hf_config).eval().requires_grad_(False)
    randomise(hf, 3)
    target = LlamaTarget(config, (1, 3, 4)).eval().requires_grad_(False)
    state = hf.state_dict()
    if config.tied_head:
        state.pop("lm_head.weight", None)
    target.load_state_dict(state)
    return target, hf


CASES = [(f, None) for f in FAMILIES] + [("llama", r) for r in ROPES]


@pytest.mark.parametrize(("family", "rope"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_equal_to_transformers_prefill_and_cached_steps(family, rope, packed):
    target, hf = pair(family, ROPES.get(rope))
    ids = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    expected = hf(ids, output_hidden_states=True)
    if packed:
        target.pack()
    cache = target.new_cache(1, 64)
    logits, aux = [], []
    for a, b in ((0, 9), (9, 10), (10, 11), (11, 20), (20, 24)):  # two prefill chunks, single steps, a block
        out = target(ids[:, a:b], torch.arange(a, b)[None], None, cache, [0])
        assert out.last_BND.dtype == torch.float32  # the precision that really ran
        cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        logits.append(target.logits(out.last_BND))
        aux.append(out.aux_BNA)
    assert torch.allclose(torch.cat(logits, 1), expected.logits, atol=2e-4)
    # Captured AFTER layers 1, 3, 4: the states that enter layers 2, 4, 5.
    want = torch.cat([expected.hidden_states[i + 1] for i in (1, 3, 4)], dim=-1)
    assert torch.allclose(torch.cat(aux, 1), want, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_of_a_tree_equals_running_that_path_alone(family):
    target, hf = pair(family)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 64, (1, 7), generator=generator)
    tokens = torch.randint(0, 64, (9,), generator=generator).tolist()
    parents = [-1, -1, 0, 0, 1, 2, 2, 4, 7]
    tokens[1] = (tokens[0] + 1) % 64
    tokens[3], tokens[6] = (tokens[2] + 1) % 64, (tokens[5] + 1) % 64
    tree = Tree.from_tokens(tokens, parents)
    cache = target.new_cache(1, 32)
    out = target(prompt[:, :-1], torch.arange(6)[None], None, cache, [0])
    cache.keep(0, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    flat = flatten([tree], [int(prompt[0, -1])], [6])
    out = target(flat.ids_BN, flat.positions_BN, flat.mask_BNN, cache, [0])
    logits = target.logits(out.last_BND)[0]
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] != -1:
            path.insert(0, parents[path[0]])
        ids = torch.cat((prompt[0], torch.tensor([tokens[i] for i in path])))[None]
        assert torch.allclose(logits[1 + node], hf(ids).logits[0, -1], atol=2e-4), node


def test_rows_of_different_lengths_do_not_disturb_each_other():
    target = tiny_target()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 64, (n,), generator=generator) for n in (3, 17, 10)]
    cache = target.new_cache(3, 32)
    for slot, ids in enumerate(rows):
        out = target(ids[None], torch.arange(len(ids))[None], None, cache, [slot])
        cache.keep(slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
    nxt = torch.tensor([[5], [6], [7]])
    for slots in ([0, 1, 2], [2, 0]):
        positions = torch.tensor([[len(rows[s])] for s in slots])
        together = target(nxt[slots], positions, None, cache, slots)
        for b, s in enumerate(slots):
            alone = target(torch.cat((rows[s], nxt[s]))[None], torch.arange(len(rows[s]) + 1)[None])
            assert torch.allclose(together.last_BND[b, 0], alone.last_BND[0, -1], atol=1e-4)
            assert torch.allclose(together.aux_BNA[b, 0], alone.aux_BNA[0, -1], atol=1e-4)


def test_packed_documents_see_only_themselves():
    target = tiny_target()
    generator = torch.Generator().manual_seed(2)
    docs = [torch.randint(0, 64, (n,), generator=generator) for n in (5, 11, 8)]
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    out = target(torch.cat(docs)[None], positions[None], documents=[0, 5, 16, 24])
    start = 0
    for d in docs:
        alone = target(d[None], torch.arange(len(d))[None])
        assert torch.allclose(out.aux_BNA[0, start : start + len(d)], alone.aux_BNA[0], atol=1e-4)
        start += len(d)


@pytest.mark.parametrize("kind", ["packed documents", "cached tokens", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_bit_for_bit_what_the_parts_of_its_layers_compute(kind, dtype):
    target = tiny_target(qkv_bias=True, qk_norm=True).to(dtype)
    ids, positions = torch.arange(3, 9)[None], torch.arange(6)[None]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None]
    cache, slots, documents = None, None, None
    if kind == "packed documents":
        documents, positions = [0, 2, 6], torch.tensor([[0, 1, 0, 1, 2, 3]])
    else:
        cache, slots, positions = target.new_cache(1, 16), [0], positions + 4
        before = target(torch.arange(4)[None], torch.arange(4)[None])
        cache.keep(0, before.keys_LBGNE[:, 0], before.values_LBGNE[:, 0])
        mask[0, 4, 3] = kind != "tree"
    mask = mask if kind == "tree" else None
    out = target(ids, positions, mask, cache, slots, documents)
    context = Context.make(mask, 6, cache, slots, ids.device, dtype)
    context.documents = documents
    x, captured = target.embed(ids), []
    cos, sin = target.rotary(positions, dtype)
    for i, layer in enumerate(target.model.layers):
        q, k, v = layer.self_attn.queries_keys_values(layer.input_layernorm(x), cos, sin)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        x = x + layer.self_attn.o_proj(context.attend(i, q, k, v))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        assert torch.equal(out.keys_LBGNE[i], k)
        assert torch.equal(out.values_LBGNE[i], v)
        captured += [x] if i in target.capture_after else []
    assert torch.equal(out.aux_BNA, torch.cat(captured, -1))
    assert torch.equal(out.last_BND, target.model.norm(x))


def test_keep_writes_the_chosen_tokens_in_order():
    target = tiny_target()
    ids = torch.tensor([[3, 9, 4, 8]])
    out = target(ids, torch.arange(4)[None])
    cache = target.new_cache(2, 8)
    kept = torch.tensor([0, 3, 1])
    cache.keep(1, out.keys_LBGNE[:, 0, :, kept], out.values_LBGNE[:, 0, :, kept])
    assert cache.lengths == [0, 3]
    keys, values = cache.read([1])
    assert torch.equal(keys[:, 0, :, 1], out.keys_LBGNE[:, 0, :, 3])
    assert torch.equal(values[:, 0, :, 2], out.values_LBGNE[:, 0, :, 1])


@pytest.mark.parametrize("rope", [RopeConfig(rope_theta=1e6), *ROPES.values()], ids=lambda r: r.rope_type)
def test_frequencies_equal_transformers(rope):
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope_dict(rope)
    )
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    inv_freq, scale = rope_frequencies(rope, 32, 512)
    assert torch.allclose(inv_freq, module.inv_freq, rtol=1e-6)
    assert scale == pytest.approx(module.attention_scaling)


def test_the_top_is_the_state_that_the_head_reads():
    target = tiny_target(capture_after=TOP)
    out = target(torch.arange(6)[None], torch.arange(6)[None])
    assert torch.equal(out.aux_BNA, out.last_BND)


def bf16_target(scale: float) -> tuple[LlamaTarget, torch.Tensor]:
    """With logits of about this size, 512 of them, and states of 3,000 tokens."""
    target = tiny_target(vocab_size=512, tied_head=False)
    generator = torch.Generator().manual_seed(3)
    target.lm_head.weight.copy_(torch.randn(512, 32, generator=generator) * scale / 32**0.5)
    return target.to(torch.bfloat16), torch.randn(3000, 32, generator=generator).bfloat16()


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("scale", [0.1, 4.0, 40.0])
def test_best_and_logsumexp_in_bf16_are_those_of_float32(monkeypatch, scale, noise):
    """Also where sums are off before they are rounded, here far more than another order of summing makes them."""
    target, last = bf16_target(scale)
    exact = target.logits(last)
    rounded = torch.nn.functional.linear(last, target.head_weight).float()
    assert float((rounded.argmax(-1) != exact.argmax(-1)).sum()) > 5  # bf16 alone would be wrong
    monkeypatch.setattr(target_module, "fast_bf16", lambda _: True)
    called = []
    monkeypatch.setattr(LlamaTarget, "logits", lambda *_: called.append(1))
    off = 1.0 + noise * (2 * torch.rand(exact.shape, generator=torch.Generator().manual_seed(0)) - 1)
    if noise:
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: (exact * off).bfloat16())
    best, total = target.best_and_logsumexp(last)
    assert not called
    assert torch.equal(best, exact.argmax(-1))
    wanted = exact.logsumexp(-1)
    # The bound of the docstring, where only the best is counted as computed again, and float32 rounding of its own.
    elsewhere = 1 - (exact.amax(-1) - wanted).exp()
    if not noise:
        assert bool(((total - wanted).abs() <= 2**-7 * exact.abs().amax(-1) * elsewhere + 1e-4).all())
        assert float((total - wanted).abs().max()) < float((rounded.logsumexp(-1) - wanted).abs().max())


def test_where_nearly_all_logits_tie_they_are_computed_in_float32(monkeypatch):
    target, last = bf16_target(4.0)
    monkeypatch.setattr(target_module, "fast_bf16", lambda _: True)
    target.lm_head.weight.copy_(target.lm_head.weight[:1].expand(512, 32))
    best, total = target.best_and_logsumexp(last)
    assert best.tolist() == [0] * 3000
    assert torch.allclose(total, target.logits(last).logsumexp(-1))


@pytest.mark.parametrize("why", ["float32 weights", "no bf16 units", "packed"])
def test_elsewhere_best_and_logsumexp_are_of_float32_logits(monkeypatch, why):
    target, last = bf16_target(4.0)
    exact = target.logits(last)
    monkeypatch.setattr(target_module, "fast_bf16", lambda _: why != "no bf16 units")
    target = target.float() if why == "float32 weights" else target.pack() if why == "packed" else target
    best, total = target.best_and_logsumexp(last)
    assert torch.equal(best, exact.argmax(-1))
    assert torch.allclose(total, exact.logsumexp(-1), atol=1e-5)


def test_unknown_rope_type_and_bad_capture_layers_are_refused():
    with pytest.raises(UserError, match="no_such_type"):
        RopeConfig(rope_type="no_such_type")
    for bad in ((3, 1), (1, 1, 2), (0, 9), ()):
        with pytest.raises(UserError, match="capture_after"):
            LlamaTarget(tiny_target_config(), bad)
