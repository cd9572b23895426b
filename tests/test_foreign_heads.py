"""Heads as other trainers save them compute here what they compute there, the step that feeds back included.

Theirs is, in turn, a reference written from the layout's description alone, SpecForge's own draft class and that of
speculators (these two where the packages are; `make interop` has them).
"""

import json
import math

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from aquiline.files import checkpoint
from tests.conftest import tiny_target
from tests.tiny_chat import byte_chat

pytestmark = pytest.mark.filterwarnings("ignore::aquiline.config.AquilineWarning")  # of its rope, of norm_output
LAYERS, W, T = (1, 3, 4), 24, 9
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "vocab_size": 64, "hidden_act": "silu",
}  # fmt: skip


# ---------------------------------------------------------------- the reference


def reference(tensors, theta, ids, aux_TA, fc_norm=False, feed_normed=False):
    """Logits of the first two steps, `[T-1, W]` and `[T-2, W]`, from a head's tensors, row by row.

    Row t reads the embedding of x_{t+1} and the target's states at t, at position t; at step 1 that of x_{t+2} and its
    own output of step 0, at position t+1, and it sees the rows of step 0 up to t and itself.
    """
    H, E, G = SIZES["hidden_size"], SIZES["head_dim"], SIZES["num_key_value_heads"]
    heads = SIZES["num_attention_heads"]

    def w(name):
        return tensors[f"{name}.weight"].float()

    def norm(x, name):
        return x / (x.pow(2).mean() + SIZES["rms_norm_eps"]).sqrt() * w(name)

    def turned(x, position):  # pairs (i, i + E/2) of each head
        out = x.clone().view(-1, E)
        for i in range(E // 2):
            angle = position * theta ** (-2 * i / E)
            a, b = out[:, i].clone(), out[:, i + E // 2].clone()
            out[:, i], out[:, i + E // 2] = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
        return out

    def layer(token, g, position, keys, values):
        """(its output, its key, its value), seeing these keys and its own."""
        x = torch.cat((norm(w("embed_tokens")[token], "midlayer.input_layernorm"), norm(g, "midlayer.hidden_norm")))
        q, key = (turned(w(f"midlayer.self_attn.{n}_proj") @ x, position) for n in "qk")
        value = (w("midlayer.self_attn.v_proj") @ x).view(G, E)
        k, v = torch.stack([*keys, key]), torch.stack([*values, value])
        mixed = []
        for head in range(heads):
            group = head * G // heads
            weights = (k[:, group] @ q[head] / math.sqrt(E)).softmax(0)
            mixed.append(weights @ v[:, group])
        h = g + w("midlayer.self_attn.o_proj") @ torch.cat(mixed)
        y = norm(h, "midlayer.post_attention_layernorm")
        gated = F.silu(w("midlayer.mlp.gate_proj") @ y) * (w("midlayer.mlp.up_proj") @ y)
        return h + w("midlayer.mlp.down_proj") @ gated, key, value

    keys, values, outputs, first, second = [], [], [], [], []
    for t in range(len(ids) - 1):
        states = aux_TA[t].split(H)
        if fc_norm:
            states = [norm(s, f"fc_norm.{i}") for i, s in enumerate(states)]
        h, key, value = layer(ids[t + 1], w("fc") @ torch.cat(list(states)), t, keys, values)
        keys.append(key)
        values.append(value)
        outputs.append(norm(h, "norm") if feed_normed else h)
        first.append(w("lm_head") @ norm(h, "norm"))
    for t in range(len(ids) - 2):
        h, _, _ = layer(ids[t + 2], outputs[t], t + 1, keys[: t + 1], values[: t + 1])
        second.append(w("lm_head") @ norm(h, "norm"))
    return torch.stack(first), torch.stack(second)


# ---------------------------------------------------------------- theirs


def given():
    generator = torch.Generator().manual_seed(4)
    target = tiny_target(capture_after=LAYERS, tied_head=True).bfloat16().float()  # as it is saved
    ids = torch.randint(0, 64, (T,), generator=generator)
    with torch.no_grad():
        return target, ids, target(ids[None], torch.arange(T)[None]).aux_BNA[0]


def chosen_ids():
    return torch.randperm(64, generator=torch.Generator().manual_seed(1))[:W].sort().values


def maps():
    """d2t and t2d as the SafeAILab layout has them."""
    ids = chosen_ids()
    return {"d2t": ids - torch.arange(W), "t2d": torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True)}


def by_reference(folder, target, ids, aux, **switches):
    """Random tensors in SpecForge's layout."""
    generator = torch.Generator().manual_seed(2)
    H, width = 32, 8
    shapes = {
        "midlayer.self_attn.q_proj": (4 * width, 2 * H), "midlayer.self_attn.k_proj": (2 * width, 2 * H),
        "midlayer.self_attn.v_proj": (2 * width, 2 * H), "midlayer.self_attn.o_proj": (H, 4 * width),
        "midlayer.mlp.gate_proj": (48, H), "midlayer.mlp.up_proj": (48, H), "midlayer.mlp.down_proj": (H, 48),
        "midlayer.input_layernorm": (H,), "midlayer.hidden_norm": (H,), "midlayer.post_attention_layernorm": (H,),
        "norm": (H,), "fc": (H, 3 * H), "lm_head": (W, H),
    } | ({f"fc_norm.{i}": (H,) for i in range(3)} if switches.get("fc_norm") else {})  # fmt: skip
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    tensors |= {"embed_tokens.weight": target.model.embed_tokens.weight.clone()}
    config = SIZES | switches | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": W, "tie_word_embeddings": False, "rope_theta": 500.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors | maps(), folder / "model.safetensors")
    return reference(
        tensors, 500.0, ids, aux, switches.get("fc_norm", False), feed_normed=switches.get("norm_output", False)
    )


def by_specforge(folder, target, ids, aux):
    """SpecForge's draft class, as initialised there, saved by Transformers as its trainer does."""
    eagle = pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **SIZES, num_hidden_layers=1, draft_vocab_size=W, pad_token_id=0, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, norm_output=False,
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)}, architectures=["LlamaForCausalLMEagle3"],
    )  # fmt: skip
    torch.manual_seed(3)
    head = eagle.LlamaForCausalLMEagle3(config).float().eval()
    head.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    for name, mapped in maps().items():
        getattr(head, name).copy_(mapped)
    head.save_pretrained(folder)
    cache, positions, out = [[], []], torch.arange(T - 1)[None], []
    mask = eagle.prepare_decoder_attention_mask(torch.ones(1, T - 1, dtype=torch.bool), (1, T - 1), aux[None], 0)
    with torch.no_grad():
        g = head.project_hidden_states(aux[None, :-1])
        for step in range(2):  # its trainer shifts the ids and pads; rows without a token are left out below
            tokens = torch.cat((ids[1 + step :], ids.new_zeros(step)))
            g = head.backbone(head.embed_input_ids(tokens[None]), g, cache, mask, positions, use_cache=True)
            out.append(head.lm_head(head.norm(g))[0])
    return out[0], out[1][:-1]


def by_speculators(folder, target, ids, aux):
    """speculators' draft class, made and saved by its own code; logits from inside its training step."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

    verifier = folder.with_name("verifier")
    checkpoint.export_target(target, byte_chat(), verifier)
    layer = LlamaConfig(**SIZES, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    torch.manual_seed(3)
    head = Eagle3DraftModel.from_training_args(
        layer, **maps(), draft_vocab_size=W, verifier_name_or_path=str(verifier), draft_attn_impl="eager", ttt_steps=3,
        norm_before_residual=True, norm_before_fc=True, norm_output=True, target_layer_ids=[i + 1 for i in LAYERS],
    )  # fmt: skip
    head = head.float().eval()
    head.save_pretrained(folder)
    out = []
    head.lm_head.register_forward_hook(lambda *args: out.append(args[2][0].detach()))
    documents = torch.zeros(1, T - 1, dtype=torch.long)
    with torch.no_grad():
        head(aux[None, :-1], ids[None, 1:], documents, ttt_steps=2)
    return out[0], out[1][:-1]


def by_reference_with_norms(*args):
    return by_reference(*args, fc_norm=True, norm_output=True)


@pytest.mark.parametrize("theirs", [by_reference, by_reference_with_norms, by_specforge, by_speculators])
def test_a_head_of_another_trainer_computes_here_what_it_does_there(theirs, tmp_path):
    target, ids, aux = given()
    want = theirs(tmp_path / "head", target, ids, aux)
    draft = checkpoint.load_draft(tmp_path / "head", target)
    assert draft.vocab.target_ids_W.tolist() == chosen_ids().tolist()
    with torch.no_grad():
        embeds, g = draft.embed(ids, target.embed), draft.fuse(aux)
        out = draft(embeds[None, 1:], g[None, :-1], torch.arange(T - 1)[None])
        first = draft.logits(out.hidden_BNH[0])
        second = []
        for t in range(T - 2):  # rows 0..t, then the node that reads what row t fed back
            tokens = torch.cat((embeds[1 : t + 2], embeds[t + 2 : t + 3]))[None]
            features = torch.cat((g[: t + 1], out.feature_BNH[0, t : t + 1]))[None]
            again = draft(tokens, features, torch.arange(t + 2)[None])
            second.append(draft.logits(again.hidden_BNH[0, -1]))
    for got, expected in ((first, want[0]), (torch.stack(second), want[1])):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, atol=1e-5, rtol=1e-4), (got - expected).abs().max()
    assert float(want[0].std()) > 1e-3  # not all alike
