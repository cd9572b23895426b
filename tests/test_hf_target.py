"""Models that Transformers computes, as targets: against `generate` of the same model, token for token, in float32."""

import dataclasses
import json

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from aquiline import api
from aquiline.config import TOP, AquilineWarning, Limits, RopeConfig, TreeConfig, UserError
from aquiline.data.features import compute
from aquiline.decode.drafter import EagleDrafter
from aquiline.decode.engine import Engine, Request
from aquiline.decode.tree import Tree, flatten
from aquiline.files import checkpoint, hf_folder
from aquiline.model import hf_check, hf_target
from aquiline.model.hf_check import check
from aquiline.model.hf_target import HFTarget
from aquiline.train.init import init_draft
from aquiline.train.loop import make_pack
from aquiline.train.ttt import unroll
from tests.conftest import randomise, tiny_draft
from tests.elsewhere import AWAY, elsewhere
from tests.test_cli import aquiline  # noqa: F401 (a fixture)
from tests.test_engine import SHAPES, Scripted, decode, prompt
from tests.test_ttt import check_equal, dense_reference, documents, weighted
from tests.test_walk import check_walk, learn
from tests.tiny_chat import assistant, byte_chat, user

WINDOW = 7  # shorter than every sequence here
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
CASES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, **EXPERTS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {**ALTERNATING, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3Text", {**ALTERNATING, "query_pre_attn_scalar": 5}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "glm4": ("Glm4", {}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    ),
    "gpt_oss": ("GptOss", {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": ("Cohere2", {**ALTERNATING, "logit_scale": 0.5}),
    "phi": ("Phi", {}),  # its head has a bias
    "llama4_text": (
        "Llama4Text",
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
    ),
    "deepseek_v3": (  # its keys are wider than its values
        "DeepseekV3",
        {"num_key_value_heads": 4, "head_dim": None, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS,
         "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
}  # fmt: skip
REFUSED = {
    "falcon": ("Falcon", {"num_key_value_heads": None, "head_dim": None}, "attention interface"),
    "bloom": ("Bloom", {}, "attention interface"),
    "mpt": ("Mpt", {"num_key_value_heads": None}, "attention interface"),
    "qwen3_next": ("Qwen3Next", {"num_experts": 4, **EXPERTS}, "linear_attention"),
    "mamba": ("Mamba", {}, "linear_attention"),
    "jamba": ("Jamba", {"num_experts": 2, "mamba_d_state": 4}, "linear_attention"),
    "recurrent_gemma": ("RecurrentGemma", {}, "linear_attention"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
    "diffllama": ("DiffLlama", {}, "layers have attended"),
    "doge": ("Doge", {}, "without the mask"),
}


def config_of(kind: str, changes: dict) -> transformers.PreTrainedConfig:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    sizes = {k: v for k, v in (sizes | changes).items() if v is not None or k in ("bos_token_id", "eos_token_id")}
    return getattr(transformers, f"{kind}Config")(**sizes)


def write_model(folder, kind: str, changes: dict):
    """A random model on disk, with its own eager attention; returns it."""
    config = config_of(kind, changes)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    randomise(hf, 3)
    hf.save_pretrained(folder)
    return hf.eval().requires_grad_(False)


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers():
    transformers.utils.logging.disable_progress_bar()
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, quiet_transformers):
    """By name: Transformers' model, and the target that the door makes of its folder. Each is made once."""
    made = {}

    def get(name: str) -> tuple[torch.nn.Module, HFTarget]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            hf = write_model(folder, *CASES[name])
            if name in ("llama", "qwen3"):  # which the door gives to our own forward
                facts = json.loads((folder / "config.json").read_text())
                config, _ = hf_folder.hf_target_config(folder, facts, None)
                target = hf_folder.load_hf_target(folder, config, torch.float32, "cpu", (0, 1, 2))
            else:
                target = checkpoint.load_target(folder, torch.float32, capture_after=(0, 1, 2))
            assert isinstance(target, HFTarget)
            assert target.dtype == torch.float32
            made[name] = hf, target
        return made[name]

    return get


def test_exact_passes_are_refused_by_the_familys_name(pairs):
    _, target = pairs("gemma2")
    assert not target.exact
    with pytest.raises(UserError, match=r"family 'gemma2' is computed by Transformers.* leave --exact out"):
        target.make_exact()


def generated(hf, ids: list[int], count: int) -> list[int]:
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
    given = torch.tensor([ids])
    mask = torch.ones_like(given)  # else it hides what looks like padding
    return hf.generate(given, attention_mask=mask, generation_config=settings)[0, len(ids) :].tolist()


PROMPTS = [prompt(n, seed) for seed, n in enumerate((12, 3, 17))]


@pytest.mark.parametrize("name", CASES)
def test_trees_give_what_generate_gives(pairs, name):
    """With a draft that guesses at random, and with one that is right along other branches each time."""
    hf, target = pairs(name)
    wanted = [generated(hf, p, 26) for p in PROMPTS]
    draft = tiny_draft(target).requires_grad_(False)
    found = decode(target, draft, PROMPTS, tree=TreeConfig(2, 3, 6), limit=26, max_batch=3)
    assert [r.output_ids for r in found] == wanted
    continuation = {tuple(p): w for p, w in zip(PROMPTS, wanted, strict=True)}
    scripted = Scripted(EagleDrafter(draft, target.embedding, 3, 256), continuation, SHAPES)
    engine = Engine(target, scripted, max_batch=3)
    requests = [engine.submit(Request(p, limits=Limits(26), tree=TreeConfig(5, 5, 10))) for p in PROMPTS]
    while engine.busy:
        engine.step()
    assert [r.output_ids for r in requests] == wanted
    assert min(r.tau for r in requests) > 2  # branches were accepted


@pytest.mark.parametrize("name", CASES)
def test_states_are_the_models_own_and_documents_see_only_themselves(pairs, name):
    hf, target = pairs(name)
    docs = [torch.tensor(prompt(n, seed)) for seed, n in enumerate((11, 3, 20))]
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    out = target(torch.cat(docs)[None], positions[None], documents=[0, 11, 14, 34])
    found = target.best_and_logsumexp(out.last_BND[0])
    start = 0
    for d in docs:
        own = hf(d[None], output_hidden_states=True, use_cache=False)
        rows = slice(start, start + len(d))
        captured = torch.cat([own.hidden_states[i + 1][0] for i in (0, 1, 2)], -1)
        assert torch.allclose(out.aux_BNA[0, rows], captured, atol=2e-4, rtol=1e-4)
        assert torch.allclose(target.logits(out.last_BND[0, rows]), own.logits[0], atol=2e-4, rtol=1e-4)
        assert torch.equal(target.best(out.last_BND[0, rows]), own.logits[0].argmax(-1))
        assert torch.equal(found[0][rows], own.logits[0].argmax(-1))
        assert torch.allclose(found[1][rows], own.logits[0].logsumexp(-1), atol=2e-4)
        start += len(d)


@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("name", ["gemma2", "granite", "phi"])  # soft cap, scale, bias
def test_a_head_learns_from_the_logits_that_decode(pairs, name, kind):
    _, target = pairs(name)
    draft, docs = tiny_draft(target), documents()
    reference = [dense_reference(draft, target, d, compute(target, [d]), 3, 0.8, kind) for d in docs]
    pack = make_pack(docs, compute(target, docs), draft, target)
    loss, _ = unroll(draft, pack, target.head_weight[draft.vocab.target_ids_W], 3, 0.8, loss=kind)
    check_equal(draft, weighted(reference, 3, 0.8), loss)


def test_lm_head_starts_as_the_rows_that_give_the_targets_logits(pairs):
    _, target = pairs("granite")
    draft, states = tiny_draft(target), torch.randn(5, 32)
    init_draft(draft, target, compute(target, documents()), 0)
    assert torch.allclose(draft.lm_head(states), target.logits(states)[:, draft.vocab.target_ids_W], atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_a_seed_gives_one_text_with_a_draft_and_without(pairs, name):
    _, target = pairs(name)
    draft = tiny_draft(target).requires_grad_(False)
    plain, drafted = (
        decode(target, given, PROMPTS, tree=tree, limit=16, max_batch=2, temperature=0.8, top_p=0.9, seed=5)
        for given, tree in ((None, None), (draft, TreeConfig(3, 4, 10)))
    )
    assert [r.output_ids for r in plain] == [r.output_ids for r in drafted]


def test_a_target_that_is_moved_takes_its_heads_bias_along(tmp_path):
    write_model(tmp_path, *CASES["phi"])
    target = checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))
    states = torch.randn(3, 32)
    logits = target.logits(states)
    with elsewhere():
        target.to(AWAY)
        assert target.head_form.bias_V.device == AWAY
        assert target.head_form.of(torch.tensor([3, 4], device=AWAY)).bias_V.device == AWAY
        moved = target.logits(states.to(AWAY)).to("cpu")
    assert torch.equal(moved, logits)


def test_a_target_that_is_moved_takes_its_embedding_along(tmp_path):
    write_model(tmp_path, *CASES["gemma2"])
    target = checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))
    rows = target.embed(torch.arange(5))
    assert target.to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(target.embed(torch.arange(5)), rows.to(torch.bfloat16))


def test_what_is_captured_may_change_later(tmp_path):
    write_model(tmp_path, *CASES["cohere2"])
    target = checkpoint.load_target(tmp_path, torch.float32, capture_after=(3,))
    ids, positions = torch.tensor([prompt(9)]), torch.arange(9)[None]
    last = target(ids, positions).aux_BNA
    target.capture_after = (0, 2, 3)  # as the doctor asks for more than a head reads
    found = target(ids, positions).aux_BNA.unflatten(-1, (3, -1))
    assert torch.equal(found[:, :, 2], last)
    assert not torch.equal(found[:, :, 0], found[:, :, 1])


def test_a_packed_head_changes_nothing(tmp_path):
    for name in ("gemma2", "phi"):  # tied, and with a head of its own
        write_model(tmp_path / name, *CASES[name])
        target = checkpoint.load_target(tmp_path / name, torch.float32, capture_after=(0, 1, 2))
        out = target(torch.tensor(PROMPTS[:1]), torch.arange(12)[None])
        logits, best = target.logits(out.last_BND), target.best(out.last_BND)
        plain = [r.output_ids for r in decode(target, None, PROMPTS, limit=20, max_batch=3)]
        target.pack()
        assert torch.allclose(target.logits(out.last_BND), logits, atol=1e-5)
        assert torch.equal(target.best(out.last_BND), best)
        assert len(target.head_weight) == (64 if name == "gemma2" else 0)  # a tied one stays, as the embedding
        assert [r.output_ids for r in decode(target, None, PROMPTS, limit=20, max_batch=3)] == plain


def test_a_prompt_that_begins_as_an_earlier_one_is_run_from_where_they_part(pairs):
    hf, target = pairs("gemma2")
    engine = Engine(target, tiny_draft(target).requires_grad_(False))
    first = Request(PROMPTS[2], limits=Limits(10), tree=TreeConfig(3, 2, 6))
    engine.run([first])
    again = [*PROMPTS[2], *first.output_ids, 5, 6]
    second = Request(again, limits=Limits(12), tree=TreeConfig(3, 2, 6))
    engine.run([second])
    assert second.reused_tokens > len(PROMPTS[2])
    assert second.output_ids == generated(hf, again, 12)


@pytest.mark.parametrize("capture", [(0, 1, 2), TOP])
def test_llama_by_way_of_transformers_is_llama_of_our_own(pairs, tmp_path, capture):
    hf, _ = pairs("llama")
    hf.save_pretrained(tmp_path)
    ours = checkpoint.load_target(tmp_path, torch.float32, capture_after=capture)
    assert not isinstance(ours, HFTarget)
    facts = json.loads((tmp_path / "config.json").read_text())
    config, _ = hf_folder.hf_target_config(tmp_path, facts, None)
    assert dataclasses.replace(config, structure="") == ours.config
    theirs = hf_folder.load_hf_target(tmp_path, config, torch.float32, "cpu", capture)
    assert torch.equal(ours.embed(torch.arange(9)), theirs.embed(torch.arange(9)))
    trees = [Tree.from_tokens([3, 9, 4, 8, 1], [-1, -1, 0, 1, 1]), Tree.from_tokens([5], [-1])]
    flat = flatten(trees, [7, 8], [len(PROMPTS[0]), len(PROMPTS[1])])
    outs = []
    for target in (ours, theirs):
        cache = target.new_cache(2, 64)
        for slot, ids in enumerate(PROMPTS[:2]):
            out = target(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, [slot])
            cache.keep(slot, out.keys_LBGNE[:, 0], out.values_LBGNE[:, 0])
        outs.append(target(flat.ids_BN, flat.positions_BN, flat.mask_BNN, cache, [0, 1]))
    for field in dataclasses.fields(outs[0]):
        a, b = (getattr(out, field.name) for out in outs)
        assert torch.allclose(a, b, atol=1e-4), field.name


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_carry_a_tree_is_refused_by_name(tmp_path, name):
    kind, changes, why = REFUSED[name]
    write_model(tmp_path, kind, changes)
    with pytest.raises(UserError, match=why) as refused:
        checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))
    assert name in str(refused.value)


# ---------------------------------------------------------------- what the check at loading finds


def ignoring_the_mask(running, rule):
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    causal = None if running.plain.causal else torch.ones(running.positions_BN.shape[1], running.positions_BN.shape[1])
    context = running.plain
    if causal is not None:
        context = dataclasses.replace(context, own_bias_BNM=hf_target.bias(causal.tril().bool()[None], torch.float32))
    running.contexts.append((placeholder, context))
    return placeholder


def ignoring_the_cache(running, rule):
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    context = dataclasses.replace(running.plain, past_keys_LBGSE=None, past_values_LBGSE=None)
    running.contexts.append((placeholder, context))
    return placeholder


@pytest.mark.parametrize("wrong", [ignoring_the_mask, ignoring_the_cache])
def test_a_mask_or_cache_that_is_ignored_is_found(pairs, monkeypatch, wrong):
    _, target = pairs("llama")
    check(target)
    monkeypatch.setattr(hf_target._Pass, "mask", wrong)
    with pytest.raises(UserError, match="another model's"):
        check(target)


def test_one_token_that_is_wrong_is_found_in_16_bits(tmp_path, monkeypatch):
    write_model(tmp_path, *CASES["olmo2"])
    target = checkpoint.load_target(tmp_path, torch.bfloat16, capture_after=(0, 1, 2))
    tree_pass = hf_check._tree_pass

    def wrong(*given):
        states = tree_pass(*given)
        states[3] = -states[3]
        return states

    monkeypatch.setattr(hf_check, "_tree_pass", wrong)
    with pytest.raises(UserError, match="another model's"):
        check(target)


@pytest.mark.parametrize("name", CASES)
def test_healthy_models_pass_in_16_bits(tmp_path, name):
    write_model(tmp_path, *CASES[name])
    checkpoint.load_target(tmp_path, torch.bfloat16, capture_after=(0, 1, 2))


def test_positions_that_are_ignored_are_found(pairs, monkeypatch):
    _, target = pairs("llama")
    rotary = modeling_llama.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding,
        "forward",
        lambda self, x, position_ids: rotary(self, x, torch.arange(x.shape[1])[None]),
    )
    with pytest.raises(UserError, match="another model's"):
        check(target)


def test_tokens_that_see_one_another_past_the_attention_are_found(pairs, monkeypatch):
    """As experts with room for so many tokens would, or a convolution."""
    _, target = pairs("llama")
    mlp = modeling_llama.LlamaMLP.forward

    def leaking(self, x):
        return mlp(self, x) + (0.1 * x.mean(1, keepdim=True) if x.shape[1] > 6 and len(x) == 1 else 0)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", leaking)
    distance = hf_check._distance
    measured = iter([0.0] * len(hf_check._PATHS))  # the first comparison lets it pass
    monkeypatch.setattr(hf_check, "_distance", lambda *given: distance(*given) if next(measured, None) is None else 0.0)
    with pytest.raises(UserError, match="what the mask hides"):
        check(target)


@pytest.mark.parametrize("key", ["logits_scaling", "logit_scale", "final_logit_softcapping"])
def test_logits_that_are_not_the_models_own_are_found(pairs, tmp_path, key):
    hf, _ = pairs("qwen3_moe")
    hf.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {key: 3.0})
    )  # a key that this family's code does not read
    with pytest.raises(UserError, match="another model's"):
        checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_model_decodes_as_it_is_where_its_package_is_installed(tmp_path, method, dtype):
    pytest.importorskip(method)
    if method == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        how = transformers.BitsAndBytesConfig(load_in_4bit=True)
    write_model(tmp_path / "plain", "Llama", {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how, dtype=dtype)
    hf.save_pretrained(tmp_path / "small")
    target = checkpoint.load_target(tmp_path / "small", dtype, capture_after=(0, 1, 2))
    assert isinstance(target, HFTarget)  # a Llama, which our own forward computes when it is not quantised
    assert len(checkpoint.target_fingerprint(target)) == 32
    if dtype == torch.float32:
        draft = tiny_draft(target).requires_grad_(False)
        found = decode(target, draft, PROMPTS, tree=TreeConfig(2, 3, 6), limit=16, max_batch=3)
        assert [r.output_ids for r in found] == [generated(hf, p, 16) for p in PROMPTS]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"model_type": "no_such_type"}, "does not recognize"),
        ({"model_type": "t5"}, "only text models"),
        ({"model_type": "gemma3"}, "only text models"),
        ({"model_type": "gemma2", "hidden_size": "x"}, "hidden_size"),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForSequenceClassification"]}, "expected Gemma2ForCausalLM"),
    ],
)
def test_what_is_no_plain_language_model_is_refused(tmp_path, facts, why):
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=why) as refused:
        checkpoint.read_target_config(tmp_path)
    assert str(tmp_path / "config.json") in str(refused.value)


def test_layers_of_several_shapes_are_refused(tmp_path):
    config_of("Gemma4Text", {}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="gemma4_text has a head_dim for each layer"):
        checkpoint.read_target_config(tmp_path)


def test_a_context_ends_where_keys_would_be_turned_otherwise(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config_of("Phi3", {"rope_parameters": rope, "original_max_position_embeddings": 64}).save_pretrained(tmp_path)
    config = checkpoint.read_target_config(tmp_path)
    assert config.max_positions == 64
    assert config.rope == RopeConfig(5000.0)  # a head turns its keys by the base alone
    both = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    config_of("Gemma3Text", {"rope_parameters": both}).save_pretrained(tmp_path)
    assert checkpoint.read_target_config(tmp_path).rope == RopeConfig(1e6, "linear", 8.0)


def test_a_context_ends_where_scores_go_by_places_in_the_pass(tmp_path):
    """Llama 4 scales queries by log(1 + floor((place + 1) / 16)), place being that in a pass without a cache."""
    kind, changes = CASES["llama4_text"]
    hf = write_model(tmp_path, kind, changes | {"floor_scale": 16, "attn_scale": 3.0})
    with pytest.warns(AquilineWarning, match="from 16 tokens on: the context is cut to 15"):
        target = checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))
    assert target.config.max_positions == 15
    ids = prompt(7)
    (request,) = decode(target, None, [ids], limit=50)
    assert request.output_ids == generated(hf, ids, 8)
    assert len(request.output_ids) == 8
    docs = [torch.tensor(prompt(n, seed)) for seed, n in enumerate((15, 12, 15))]  # together longer than a context
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    out = target(torch.cat(docs)[None], positions[None], documents=[0, 15, 27, 42])
    own = torch.cat([hf(d[None], use_cache=False).logits[0] for d in docs])
    assert torch.allclose(target.logits(out.last_BND[0]), own, atol=2e-4, rtol=1e-4)
    assert (out.aux_BNA.shape[1], out.keys_LBGNE.shape[3], out.values_LBGNE.shape[3]) == (42, 42, 42)
    config_of(kind, changes | {"floor_scale": 16, "attn_temperature_tuning": False}).save_pretrained(tmp_path)
    assert checkpoint.read_target_config(tmp_path).max_positions == 256


@pytest.mark.parametrize("what", ["missing", "left over"])
def test_weights_that_do_not_fit_are_named(pairs, tmp_path, what):
    hf, _ = pairs("olmo2")
    state = dict(hf.state_dict())
    name = "model.layers.2.mlp.up_proj.weight"
    if what == "missing":
        del state[name]
    else:
        name = "model.layers.2.mlp.down_proj.bias"
        state[name] = torch.zeros(32)
    hf.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match=f"{name} is {what}"):
        checkpoint.load_target(tmp_path, torch.float32, capture_after=(0, 1, 2))


# ---------------------------------------------------------------- as a user would


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quiet_transformers):
    """A Gemma 2 with a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "gemma"
    kind, changes = CASES["gemma2"]
    chat = byte_chat()
    chat.save(path)
    write_model(path, kind, changes | {"vocab_size": 262, "eos_token_id": 261, "max_position_embeddings": 512})
    return path


@pytest.mark.filterwarnings("ignore:the data has", "ignore:the draft's tokens are hardly ever accepted")
def test_a_head_is_trained_and_decodes(folder, tmp_path, aquiline):  # noqa: F811
    model = api.load(folder, "none", dtype="float32", device="cpu")
    rows = []
    for i in range(8):
        ids = model.prompt_ids(f"say {i}")
        reply = model.generate(ids, max_new_tokens=24).token_ids
        rows.append({"id": f"r{i}", "temperature": 0, "prompt_ids": ids, "response_ids": reply})
    data, out = tmp_path / "answers.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--target", folder, "--dtype", "float32", "--device", "cpu"]
    code, _, err = aquiline(
        "train", data, "--out", out, *common, "--capture-after", "0,1,2", "--batch-tokens", 120, "--ttt-steps", 3,
        "--draft-vocab-size", 100, "--held-out", 2, "--eval-every", 3, "--epochs", 6,
    )  # fmt: skip
    assert code == 0, err
    history = json.loads((out / "head" / "run.json").read_text())["history"]
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    code, printed, err = aquiline(
        "generate", "say 3", *common, "--draft", out / "head", "--tree", "3:4:10", "--json", "--compare"
    )
    assert code == 0, err
    assert json.loads(printed)["equal"] is True
    assert "PyTorch (Transformers)" in err
    assert "other weights" not in err
    code, _, err = aquiline("convert", out / "head", tmp_path / "vllm", "--to", "speculators", "--target", folder)
    assert code == 0, err
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["architectures"] == ["Gemma2ForCausalLM"]
    code, _, err = aquiline("export-target", folder, tmp_path / "copy")
    assert code != 0
    assert "its own folder is what loads" in err
    few = ("--capture-after", "0,1,2", "--draft-vocab-size", 100, "--held-out", 2)
    for more, words in ((["--init", "target-layer"], "use init random"), (["--shard-target"], "torchrun")):
        code, _, err = aquiline("train", data, "--out", tmp_path / "b", *common, *few, *more)
        assert code != 0
        assert words in " ".join(err.split())


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_a_head_is_decoded_as_it_was_trained(pairs, name):
    """Cycle by cycle: what training computes of it is what its decoding does."""
    _, target = pairs(name)
    assert check_walk(*learn(60, 4, target=target)) > 1.2


@pytest.mark.parametrize("native", [True, False])
def test_what_the_kernel_does_not_decode_is_bf16_only_where_that_is_native(folder, tmp_path, monkeypatch, native):
    facts = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    monkeypatch.setattr(api, "fast_bf16", lambda _: native)
    monkeypatch.setattr(api, "usable", lambda *_: True)
    picked = api.pick_dtype(None, tmp_path, torch.device("cpu"))
    assert picked == (torch.bfloat16 if native else torch.float32)


def test_a_conversation_keeps_its_cache(folder):
    model = api.load(folder, api.NGRAM, dtype="float32", device="cpu")
    talk = api.Conversation(model, max_new_tokens=12, tree="3:1:3")
    first = "".join(delta.text for delta in talk.say("hi"))
    again = "".join(delta.text for delta in talk.say("and then?"))
    assert talk.reused_tokens > 0
    fresh = [user("hi"), assistant(first), user("and then?")]
    assert again == model.generate(fresh, max_new_tokens=12, plain=True).text


def test_other_weights_and_another_structure_have_another_fingerprint(folder, tmp_path):
    target = checkpoint.load_target(folder, torch.float32, capture_after=(0, 1, 2))
    first = checkpoint.target_fingerprint(target)
    assert checkpoint.target_fingerprint(checkpoint.load_target(folder, capture_after=(0, 1, 2))) == first  # in bf16
    facts = json.loads((folder / "config.json").read_text())
    for changes, same in (({"transformers_version": "5.0.0"}, True), ({"sliding_window": 9}, False)):
        config, _ = hf_folder.hf_target_config(folder, facts | changes, None)
        target.config = config
        assert (checkpoint.target_fingerprint(target) == first) == same
