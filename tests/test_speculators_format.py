"""The configs of vLLM's speculators, read and written, without a file."""

import pytest

from aquiline.config import RopeConfig, UserError
from aquiline.files import draft_formats, speculators_format
from tests.test_formats import LLAMA3, draft_config, target

AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def written(config, layers=8):
    plain = draft_formats.draft_config_to_dict(config, layers, {"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    return speculators_format.speculators_config(plain, config, "someone/target", ["LlamaForCausalLM"])


def foreign(layer=None, **changes):
    """What speculators' own code saves: no word of ours in it."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": 16,
        "target_hidden_size": None,
        AUX_IDS: [2, 4, 5],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformers_version": "5.5.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/target"}},
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    }
    config["transformer_layer_config"] |= layer or {}
    config |= changes
    config["transformer_layer_config"] = {k: v for k, v in config["transformer_layer_config"].items() if v is not None}
    return config


def read(hf):
    return draft_formats.draft_config_from_dict(hf, target())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True},
        {"qk_norm": True},
        {"attention_bias": True},
        {"hidden_size": 32, "own_embedding": True},
        {"draft_vocab_size": 64},
        {"rope": RopeConfig(5e5, **LLAMA3)},
        {"rope": RopeConfig(5e5, "linear", 2.0)},
        {"capture_after": (0, 2, 5)},
        {"capture_after": (0, 2)},
    ],
)
def test_round_trip(changes):
    config = draft_config(**changes)
    assert read(written(config)) == (config, [])


def test_every_switch_is_written_for_readers_that_differ_about_a_missing_one():
    config = written(draft_config())
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        assert config[name] is False
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["attention_bias"] is False
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] >= 1
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert config[AUX_IDS] is None, "the usual three"
    assert written(draft_config(qk_norm=True))["transformer_layer_config"]["model_type"] == "qwen3"


def test_layers_are_counted_as_vllm_does():
    config = written(draft_config(capture_after=(0, 2)))
    assert config[AUX_IDS] == [1, 3]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2, "vLLM's Llama class sizes fc by it"
    assert written(draft_config(), layers=0)[AUX_IDS] == [2, 4, 5], "written where nobody knows what is usual"


@pytest.mark.parametrize("name", ["Eagle3DraftModel", "Eagle3Speculator"])
def test_heads_of_others(name):
    config, notes = read(foreign(architectures=[name]))
    expected = draft_config(norm_before_residual=True, norm_before_fc=True, norm_output=True, trained_length=None)
    assert config == expected
    assert any(f"{AUX_IDS} [2, 4, 5] is read as vLLM does" in note for note in notes)
    assert read(foreign(**{AUX_IDS: None}))[0] == expected


def test_qwen3_layers_have_the_defaults_of_their_class():
    config = read(foreign({"model_type": "qwen3", "head_dim": None, "num_attention_heads": 32,
                           "num_key_value_heads": None}))[0]  # fmt: skip
    assert (config.qk_norm, config.head_dim, config.num_kv_heads) == (True, 128, 32)
    assert not read(foreign())[0].qk_norm


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (foreign(speculators_model_type="eagle"), "speculators_model_type is 'eagle'"),
        (foreign(speculators_model_type=None), "speculators_model_type is None"),
        (foreign(architectures=["DFlashDraftModel"]), "DFlashDraftModel"),
        (foreign(norm_before_residual=None), "no norm_before_residual: vLLM reads true"),
        (foreign({"model_type": None}), "model_type of transformer_layer_config is None"),
        (foreign({"model_type": "mistral"}), "'mistral'"),
        (foreign(transformer_layer_config={}), "no transformer_layer_config"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "transformer_layer_config": 3},
         "no transformer_layer_config"),
        (foreign({"vocab_size": 60}), "vocabulary 60"),
        (foreign({"mlp_bias": True}), "mlp_bias"),
        (foreign({"sliding_window": 64}), "sliding_window"),
        (foreign(sliding_window=64), "sliding_window"),
        (foreign(parallel_drafting=True), "parallel_drafting"),
        (foreign(eagle_config={"eh_proj_before_attn": True}), "eh_proj_before_attn"),
        (foreign({"layer_types": ["sliding_attention"]}), "layer_types has sliding_attention"),
        (foreign({"hidden_act": "gelu"}), "gelu"),
        (foreign(fc_norm=True), "exclude"),
        (foreign(**{AUX_IDS: [0, 4, 5]}), "embedding"),
        (foreign(**{AUX_IDS: [2, 4, 9]}), r"within 0..7"),
        (foreign(capture_after=[0, 2, 5]), "disagree"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config, named):
    with pytest.raises(UserError, match=named):
        read(config)


def test_names():
    assert speculators_format.speculators_tensor_name("midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert speculators_format.speculators_tensor_name("fc.weight") == "fc.weight"
    assert speculators_format.verifier_name(foreign()) == "someone/target"
    assert speculators_format.verifier_name({}) is None
