"""Config translation, tensor names and vocabulary maps, without a file."""

import dataclasses

import pytest
import torch
import transformers

from aquiline.config import TOP, DraftConfig, RopeConfig, TargetConfig, UserError
from aquiline.files import draft_formats, target_formats

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hf(model_type="llama", **changes):
    """A small, complete config.json; a change to None removes the key."""
    config = {
        "architectures": [target_formats.ARCHITECTURES.get(str(model_type), "Unknown")],
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 5e5,
        "eos_token_id": 2,
    } | changes
    return {k: v for k, v in config.items() if v is not None}


TOP_HEAD = {"architectures": ["TopFeatureDraft"], "capture_after": "top"}


def target(**changes):
    return dataclasses.replace(target_formats.target_config(hf())[0], **changes)


def draft_config(**changes):
    base = DraftConfig(
        vocab_size=64,
        draft_vocab_size=16,
        hidden_size=48,
        target_hidden_size=48,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        norm_eps=1e-5,
        max_positions=512,
        rope=RopeConfig(5e5),
        capture_after=(1, 3, 4),
        trained_length=128,
    )
    return dataclasses.replace(base, **changes)


class TestTarget:
    def test_families_differ_by_their_switches(self):
        llama = target_formats.target_config(hf(attention_bias=True, mlp_bias=True))[0]
        assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
        mistral = target_formats.target_config(hf("mistral", attention_bias=True, sliding_window=4096))[0]
        assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias) == (False, False, False)
        qwen2 = target_formats.target_config(hf("qwen2"))[0]
        assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
        qwen3 = target_formats.target_config(hf("qwen3", attention_bias=True, head_dim=16))[0]
        assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 16)

    def test_explicit_head_dim_wins_over_the_quotient(self):
        assert target_formats.target_config(hf())[0].head_dim == 12
        assert target_formats.target_config(hf(head_dim=16))[0].head_dim == 16
        assert target_formats.target_config(hf("qwen3"))[0].head_dim == 128  # the class default, when the key is absent
        with pytest.raises(UserError, match="give head_dim"):
            target_formats.target_config(hf(num_attention_heads=5))

    def test_defaults_of_absent_keys(self):
        config = target_formats.target_config(hf(num_key_value_heads=None, rms_norm_eps=None, architectures=None))[0]
        assert (config.num_kv_heads, config.norm_eps, config.tied_head) == (4, 1e-6, False)
        assert (
            target_formats.target_config(hf(model_type=None, architectures=["Qwen2ForCausalLM"]))[0].family == "qwen2"
        )

    def test_end_of_turn_ids_from_both_files(self):
        assert target_formats.target_config(hf(eos_token_id=[5, 6]))[0].eos_token_ids == (5, 6)
        both = target_formats.target_config(hf(eos_token_id=5), {"eos_token_id": [6, 5, 7]})[0]
        assert both.eos_token_ids == (5, 6, 7)
        assert target_formats.target_config(hf(eos_token_id=None))[0].eos_token_ids == ()

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "mixtral"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
            ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
            ({"model_type": None, "architectures": None}, "None"),
            ({"text_config": {"model_type": "llama"}}, "text_config"),
            ({"hidden_act": "gelu"}, "gelu"),
            ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
            ({"vocab_size": None}, "vocab_size"),
            ({"hidden_size": "48"}, "hidden_size"),
            ({"num_hidden_layers": 8.5}, "num_hidden_layers"),
            ({"rope_parameters": {"rope_type": "no_such_type"}}, "no_such_type"),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"eos_token_id": "</s>"}, "eos_token_id"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
            ({"architectures": 5}, "architectures is 5"),
            ({"architectures": [{}]}, "architectures is"),
            ({"model_type": ["llama"]}, "model_type is"),
            ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "type is"),
            ({"head_dim": 13}, "head_dim 13 must be even"),
        ],
    )
    def test_what_is_not_supported_is_named(self, changes, named):
        with pytest.raises(UserError, match=named):
            target_formats.target_config(hf(**changes))

    def test_a_window_that_applies_cuts_the_context(self):
        config, notes = target_formats.target_config(hf("mistral", sliding_window=100))
        assert config.max_positions == 100
        assert "window of 100" in notes[0]
        config, notes = target_formats.target_config(hf("mistral", max_position_embeddings=9999))
        assert config.max_positions == 4096, "Mistral's class default is a window"
        on = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 4}
        assert target_formats.target_config(hf("qwen2", **on))[0].max_positions == 100
        assert target_formats.target_config(hf("qwen2", **on | {"max_window_layers": 0}))[0].max_positions == 100
        for wrong in ({"max_window_layers": "a"}, {"layer_types": [{}]}, {"layer_types": 3}):
            with pytest.raises(UserError, match=next(iter(wrong))):
                target_formats.target_config(hf("qwen2", **on | wrong))

    @pytest.mark.parametrize(
        "config",
        [
            hf("mistral", sliding_window=512),
            hf("mistral") | {"sliding_window": None},
            hf("qwen2", sliding_window=100, use_sliding_window=False),
            hf("qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=8),
            hf("qwen2", sliding_window=100, use_sliding_window=True, layer_types=["full_attention"] * 8),
            hf("llama", sliding_window=100),
        ],
    )
    def test_a_window_that_does_not_apply_cuts_nothing(self, config):
        translated, notes = target_formats.target_config(config)
        assert translated.max_positions == 512
        assert notes == []


class TestRope:
    def test_both_layouts_mean_the_same(self):
        old = target_formats.rope_config(hf(rope_theta=1e6, rope_scaling=LLAMA3))
        new = target_formats.rope_config(hf(rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 1e6}))
        legacy = {"type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
        assert old == new == target_formats.rope_config(hf(rope_theta=1e6, rope_scaling=legacy))
        assert (old.rope_theta, old.rope_type, old.factor) == (1e6, "llama3", 8.0)

    def test_theta_only_inside_rope_parameters(self):
        assert target_formats.rope_config(hf(rope_theta=None, rope_parameters={"rope_theta": 1e6})).rope_theta == 1e6

    def test_no_theta_is_10000(self):
        assert target_formats.rope_config({}) == RopeConfig(10000.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            {"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            {"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            {"rope_scaling": {"rope_type": "linear"}},
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            {"rope_scaling": LLAMA3 | {"short_factor": [1.0]}},
        ],
    )
    def test_contradictions_and_unknown_keys_are_refused(self, changes):
        with pytest.raises(UserError):
            target_formats.rope_config(hf(**changes))

    def test_original_length_is_settled_as_transformers_does(self):
        yarn = {"rope_type": "yarn", "factor": 2.0}
        assert target_formats.rope_config(hf(rope_scaling=yarn)).original_max_position_embeddings == 512
        inside = yarn | {"original_max_position_embeddings": 100}
        assert target_formats.rope_config(hf(rope_scaling=inside)).original_max_position_embeddings == 100
        outside = hf(rope_scaling=inside, original_max_position_embeddings=50)
        assert target_formats.rope_config(outside).original_max_position_embeddings == 50

    @pytest.mark.parametrize(
        "rope",
        [
            RopeConfig(1e6),
            RopeConfig(1e6, "linear", factor=2.0),
            RopeConfig(5e5, **LLAMA3),
            RopeConfig(1e6, "yarn", 4.0, 64, beta_fast=32.0, beta_slow=1.0, attention_factor=1.5),
        ],
    )
    def test_round_trip_and_what_transformers_reads(self, rope):
        written = target_formats.rope_to_dict(rope)
        assert target_formats.rope_config(written) == rope
        assert target_formats.rope_config({k: v for k, v in written.items() if k != "rope_parameters"}) == rope
        assert target_formats.rope_config({"rope_parameters": written["rope_parameters"]}) == rope
        theirs = transformers.LlamaConfig(max_position_embeddings=512, **written).rope_parameters
        assert target_formats.rope_config({"rope_parameters": theirs}) == rope

    def test_linear_is_written_with_the_two_keys_the_reference_accepts(self):
        block = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 9}
        written = target_formats.rope_to_dict(target_formats.rope_config(hf(rope_scaling=block)))
        assert written["rope_scaling"] == {"type": "linear", "factor": 2.0}
        assert written["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


class TestHfConfig:
    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
    def test_round_trip(self, family):
        config = target_formats.target_config(
            hf(family, head_dim=16, sliding_window=None, rope_scaling=LLAMA3, eos_token_id=[3, 4])
            | ({"sliding_window": None} if family == "mistral" else {})
        )[0]
        assert target_formats.target_config(target_formats.hf_config(config)) == (config, [])

    def test_a_mixture_transformers_has_not_is_refused(self):
        with pytest.raises(UserError, match="LlamaForCausalLM"):
            target_formats.hf_config(target(qkv_bias=True))
        with pytest.raises(UserError, match="LlamaForCausalLM"):
            target_formats.hf_config(target(qk_norm=True))


class TestGguf:
    FIELDS = {  # noqa: RUF012
        "general.architecture": "llama",
        "llama.block_count": 8,
        "llama.context_length": 512,
        "llama.embedding_length": 48,
        "llama.feed_forward_length": 40,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 500000.0,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 1,
    }
    SHAPES = {"token_embd.weight": (64, 48)}  # noqa: RUF012

    def test_metadata(self):
        config, notes = target_formats.gguf_target_config(self.FIELDS, self.SHAPES)
        expected = dataclasses.replace(target(), tied_head=True, eos_token_ids=(2, 5), bos_token_id=1)
        assert config == expected
        assert notes == []
        assert not target_formats.gguf_target_config(self.FIELDS, self.SHAPES | {"output.weight": (64, 48)})[
            0
        ].tied_head
        biased = target_formats.gguf_target_config(self.FIELDS, self.SHAPES | {"blk.0.attn_q.bias": (48,)})[0]
        assert (biased.qkv_bias, biased.o_bias) == (True, False)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"general.architecture": "gemma"}, "gemma"),
            ({"llama.expert_count": 8}, "experts"),
            ({"llama.rope.dimension_count": 6}, "dimension_count"),
            ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
            ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
            ({"llama.attention.head_count": [4, 4]}, "head_count"),
            ({"general.architecture": ["llama"]}, "general.architecture"),
            ({"llama.rope.scaling.type": [1]}, "scaling.type"),
            ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "a"}, "scaling.factor"),
            ({"tokenizer.ggml.eos_token_id": [[2]]}, "eos_token_id"),
        ],
    )
    def test_what_is_not_supported_is_named(self, changes, named):
        with pytest.raises(UserError, match=named):
            target_formats.gguf_target_config(self.FIELDS | changes, self.SHAPES)

    def test_window_and_scaling(self):
        config, notes = target_formats.gguf_target_config(
            self.FIELDS | {"llama.attention.sliding_window": 99}, self.SHAPES
        )
        assert config.max_positions == 99
        assert len(notes) == 1
        linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert target_formats.gguf_target_config(self.FIELDS | linear, self.SHAPES)[0].rope.factor == 4.0

    def test_llama3_factors_are_recognised_or_refused(self):
        hf_rope = transformers.LlamaConfig(
            hidden_size=48,
            num_attention_heads=4,
            head_dim=64,
            max_position_embeddings=131072,
            rope_parameters=LLAMA3 | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
        )
        scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_rope).inv_freq
        plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
        fields = self.FIELDS | {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
        rope = target_formats.gguf_target_config(fields, self.SHAPES, (plain / scaled).tolist())[0].rope
        assert rope == RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0)
        with pytest.raises(UserError, match="rope_freqs"):
            target_formats.gguf_target_config(fields, self.SHAPES, [1.0] * 31 + [7.0])

    def test_tensor_names(self):
        names = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output.weight": "lm_head.weight",
            "output_norm.weight": "model.norm.weight",
            "blk.11.attn_q.bias": "model.layers.11.self_attn.q_proj.bias",
            "blk.0.attn_k_norm.weight": "model.layers.0.self_attn.k_norm.weight",
            "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
            "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
            "blk.0.ffn_gate_exps.weight": "blk.0.ffn_gate_exps.weight",
            "blk.0.output.weight": "blk.0.output.weight",
        }
        assert {name: target_formats.gguf_tensor_name(name) for name in names} == names

    def test_unpermute_undoes_the_interleaving(self):
        halves = torch.arange(2 * 6).view(2, 6)  # two heads of six rows: a0 a1 a2 b0 b1 b2 rotate as (a_i, b_i)
        pairs = torch.stack((halves[:, :3], halves[:, 3:]), dim=2).reshape(12, 1)
        assert target_formats.unpermute_rope_rows(pairs, 2).flatten().tolist() == list(range(12))


class TestDraftConfig:
    def test_round_trip_of_the_common_form(self):
        config = draft_config()
        written = draft_formats.draft_config_to_dict(config, 8, {"aquiline": {}})
        assert draft_formats.draft_config_from_dict(written, target()) == (config, [])
        assert written["architectures"] == ["LlamaForCausalLMEagle3"]
        assert written["tie_word_embeddings"] is False
        assert written["norm_before_residual"] is False
        assert written["num_hidden_layers"] == 1
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
        absent = {"target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "rope_scaling", "fc_norm"}
        assert not absent & set(written)

    @pytest.mark.parametrize(
        ("changes", "architecture"),
        [
            ({"fc_norm": True}, "LlamaForCausalLMEagle3"),
            ({"norm_before_fc": True, "norm_output": True}, "LlamaForCausalLMEagle3"),
            ({"norm_before_residual": True}, "Eagle3LlamaForCausalLM"),
            ({"attention_bias": True}, "Eagle3LlamaForCausalLM"),
            ({"own_embedding": True}, "Eagle3LlamaForCausalLM"),
            ({"qk_norm": True}, "Eagle3Qwen3ForCausalLM"),
            ({"hidden_size": 32, "own_embedding": True}, "LlamaForCausalLMEagle3"),
            ({"draft_vocab_size": 64}, "LlamaForCausalLMEagle3"),
            ({"rope": RopeConfig(5e5, **LLAMA3)}, "LlamaForCausalLMEagle3"),
            ({"capture_after": (0, 2)}, "LlamaForCausalLMEagle3"),
            ({"capture_after": (5,)}, "Eagle3LlamaForCausalLM"),  # SGLang would skip fc
            ({"capture_after": TOP}, "TopFeatureDraft"),  # no engine knows it
            ({"capture_after": TOP, "qk_norm": True, "attention_bias": True}, "TopFeatureDraft"),
        ],
    )
    def test_round_trip_of_switches(self, changes, architecture):
        config = draft_config(**changes)
        written = draft_formats.draft_config_to_dict(config, 8)
        notes = []
        assert draft_formats.draft_config_from_dict(written, target()) == (config, notes)
        assert written["architectures"] == [architecture]

    def test_capture_layers_in_both_conventions(self):
        written = draft_formats.draft_config_to_dict(draft_config(capture_after=(0, 2, 5)), 8)
        assert written["capture_after"] == [0, 2, 5]
        assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
        assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
        few = draft_formats.draft_config_to_dict(draft_config(capture_after=(0, 1, 2)), 4)
        assert "eagle_config" in few, "below 7 layers there is no default"
        assert "num_aux_hidden_states" not in few
        two = draft_formats.draft_config_to_dict(draft_config(capture_after=(0, 2)), 8)
        assert two["num_aux_hidden_states"] == 2

    def foreign(self, **changes):
        return hf(draft_vocab_size=16, num_hidden_layers=1, rope_theta=None, **changes)

    def test_capture_layers_of_others(self):
        top, inner = "eagle_aux_hidden_state_layer_ids", {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
        read = draft_formats.draft_config_from_dict
        assert read(self.foreign(eagle_config=inner), target())[0].capture_after == (0, 2, 5)
        assert read(self.foreign(**{top: [1, 3, 6]}), target())[0].capture_after == (0, 2, 5)
        assert read(self.foreign(eagle_config=inner, **{top: [1, 3, 6]}), target())[0].capture_after == (0, 2, 5)
        with pytest.raises(UserError, match="disagree"):
            read(self.foreign(eagle_config=inner, **{top: [1, 3, 7]}), target())
        with pytest.raises(UserError, match="embedding"):
            read(self.foreign(**{top: [0, 3, 6]}), target())
        with pytest.raises(UserError, match="ascending"):
            read(self.foreign(capture_after=[5, 2, 8]), target())

    def test_missing_capture_layers_are_said(self):
        config, notes = draft_formats.draft_config_from_dict(self.foreign(), target())
        assert config.capture_after == (1, 3, 4)
        assert any("does not say which target layers" in note for note in notes)
        with pytest.raises(UserError, match="at least 7"):
            draft_formats.draft_config_from_dict(self.foreign(), target(num_layers=6))

    def test_no_theta_is_the_references_10000_never_the_targets(self):
        assert draft_formats.draft_config_from_dict(self.foreign(), target())[0].rope == RopeConfig(10000.0)

    def test_the_whole_rope_block_is_read(self):
        config, _ = draft_formats.draft_config_from_dict(self.foreign(rope_scaling=LLAMA3), target())
        assert config.rope == RopeConfig(10000.0, **LLAMA3)

    def test_positions_reach_as_far_as_the_target(self):
        config, notes = draft_formats.draft_config_from_dict(self.foreign(max_position_embeddings=64), target())
        assert (config.max_positions, config.trained_length) == (512, 64)
        assert any("untested" in note for note in notes)

    def test_absent_draft_vocabulary_is_the_targets(self):
        config = self.foreign() | {"draft_vocab_size": None}
        assert draft_formats.draft_config_from_dict(config, target())[0].draft_vocab_size == 64

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"vocab_size": 48}, "vocabulary 48, this target has 64"),
            ({"hidden_size": 32, "head_dim": 8}, "hidden size 32, this target has 48"),
            ({"speculators_config": {}}, "speculators"),
            ({"transformer_layer_config": {}}, "speculators"),
            ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
            ({"model_type": "deepseek_v3"}, "deepseek_v3"),
            ({"bias": True}, "bias"),
            ({"mlp_bias": True}, "mlp_bias"),
            ({"hidden_act": "gelu"}, "gelu"),
            ({"use_aux_norm": True}, "fc_norm"),
            ({"sliding_window": 64}, "sliding_window"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
            ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn"),
            ({"eagle_config": {"new_switch": True}}, "new_switch"),
            ({"fc_norm": True, "eagle_config": {"fc_norm": False}}, "fc_norm"),
            ({"fc_norm": True, "norm_before_fc": True}, "exclude"),
            ({"num_aux_hidden_states": 2}, "num_aux_hidden_states"),
            ({"rope_scaling": {"type": "no_such_type"}}, "no_such_type"),
            ({"architectures": 5}, "architectures is 5"),
            ({"architectures": [{}]}, "architectures is"),
            ({"model_type": []}, "model_type is"),
            ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
            ({"head_dim": 7}, "head_dim 7 must be even"),
            ({"capture_after": "top"}, "TopFeatureDraft and 'top' go together"),
            ({"architectures": ["TopFeatureDraft"], "capture_after": [1, 3, 4]}, "go together"),
            ({"architectures": ["TopFeatureDraft"]}, "go together"),
            ({"capture_after": [-1]}, "capture_after"),
            (TOP_HEAD | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "capture_after is 'top', yet"),
            (TOP_HEAD | {"fc_norm": True}, "has no fc"),
        ],
    )
    def test_what_would_change_results_is_refused(self, changes, named):
        with pytest.raises(UserError, match=named):
            draft_formats.draft_config_from_dict(self.foreign() | changes, target())

    def test_modelopts_harmless_switches_are_read(self):
        eagle = {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        }
        assert draft_formats.draft_config_from_dict(self.foreign(eagle_config=eagle), target())[1] == []
        with_norm = self.foreign(eagle_config=eagle | {"norm_before_fc": True})
        assert draft_formats.draft_config_from_dict(with_norm, target())[0].norm_before_fc

    def test_tied_head_is_never_believed(self):
        _, notes = draft_formats.draft_config_from_dict(self.foreign(tie_word_embeddings=True), target())
        assert any("tie_word_embeddings" in note for note in notes)


class TestDraftTensors:
    def test_names_of_all_writers(self):
        names = ["midlayer.mlp.up_proj.weight", "fc.weight", "d2t"]
        assert draft_formats.draft_tensor_names(names) == {n: n for n in names}
        theirs = ["model.layers.0.mlp.up_proj.weight", "model.fc.weight", "d2t", "rotary_emb.inv_freq"]
        assert list(draft_formats.draft_tensor_names(theirs).values()) == names
        assert list(draft_formats.draft_tensor_names(["aux_norm_mid.weight"]).values()) == ["fc_norm.1.weight"]
        with pytest.raises(UserError, match="layer 1"):
            draft_formats.draft_tensor_names(["layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"])
        with pytest.raises(UserError, match="twice"):
            draft_formats.draft_tensor_names(["layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"])

    def test_offsets_in_any_order(self):
        ids = torch.tensor([3, 0, 30, 7])  # as counted, not sorted
        d2t = ids - torch.arange(4)
        t2d = torch.zeros(32, dtype=torch.bool)
        t2d[ids] = True
        for marks in (t2d, None):
            got, notes = draft_formats.draft_target_ids(d2t, marks, 4, 32)
            assert got.tolist() == ids.tolist()
            assert notes == []

    def test_identity_is_zeros_and_arange_is_absolute(self):
        got, notes = draft_formats.draft_target_ids(torch.zeros(8, dtype=torch.long), None, 8, 8)
        assert got.tolist() == list(range(8))
        assert notes == []
        for vocab in (8, 32):  # in 32, 0 2 4 ... would be a map too
            got, notes = draft_formats.draft_target_ids(torch.arange(8), None, 8, vocab)
            assert got.tolist() == list(range(8))
            assert "absolute" in notes[0]

    def test_absolute_ids_are_recognised(self):
        ids = torch.tensor([3, 9, 30, 31])
        assert draft_formats.draft_target_ids(ids, None, 4, 32)[0].tolist() == ids.tolist(), (
            "31 + 3 leaves the vocabulary"
        )
        low = torch.tensor([3, 9, 11, 12])
        t2d = torch.zeros(32, dtype=torch.bool)
        t2d[low] = True
        assert draft_formats.draft_target_ids(low, t2d, 4, 32)[0].tolist() == low.tolist(), "t2d tells"
        got, notes = draft_formats.draft_target_ids(low, None, 4, 32)
        assert got.tolist() == [3, 10, 13, 15]
        assert "no t2d to tell" in notes[0]

    def test_a_reduced_vocabulary_needs_its_map(self):
        with pytest.raises(UserError, match="no d2t"):
            draft_formats.draft_target_ids(None, None, 8, 32)
        assert draft_formats.draft_target_ids(None, None, 8, 8)[0].tolist() == list(range(8))
        zeros = torch.zeros(8, dtype=torch.long)
        assert "first 8 tokens" in draft_formats.draft_target_ids(zeros, None, 8, 32)[1][0]

    @pytest.mark.parametrize(
        ("d2t", "t2d"),
        [
            (torch.tensor([0, 0, 40, 40]), None),  # out of range both ways
            (torch.tensor([1, 0, 5, 5]), None),  # 1, 1: repeats, and 5 twice
            (torch.tensor([-1, 0, 0, 0]), None),
            (torch.tensor([0, 0, 0]), None),
            (torch.zeros(4), None),
            (torch.zeros(4, dtype=torch.long), torch.zeros(40, dtype=torch.bool)),
            (torch.zeros(4, dtype=torch.long), torch.arange(32) < 5),
            (None, torch.arange(4) < 3),
        ],
    )
    def test_broken_maps_are_refused(self, d2t, t2d):
        with pytest.raises(UserError, match=r"d2t|t2d"):
            draft_formats.draft_target_ids(d2t, t2d, 4, 32 if d2t is not None else 4)

    def test_what_is_written_is_read_back(self):
        ids, head = torch.tensor([3, 9, 30, 31]), torch.arange(8.0)[:, None]
        tensors = draft_formats.vocab_tensors(head[:4], ids, 32)
        assert torch.equal(tensors["lm_head.weight"], head[:4])
        assert tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].dtype == torch.bool
        assert torch.equal(draft_formats.draft_target_ids(tensors["d2t"], tensors["t2d"], 4, 32)[0], ids)
        turned = torch.tensor([1, 2, 0, 7, 6, 5, 4, 3])
        tensors = draft_formats.vocab_tensors(head, turned, 8)
        assert set(tensors) == {"lm_head.weight"}
        assert tensors["lm_head.weight"][turned].tolist() == head.tolist()


def test_config_fields_are_all_written():
    """A new switch of DraftConfig must reach the file: every field is told apart by what is written."""
    base = draft_formats.draft_config_to_dict(draft_config(), 8)
    for field in dataclasses.fields(DraftConfig):
        value = getattr(draft_config(), field.name)
        changed = {bool: lambda v: not v, RopeConfig: lambda v: RopeConfig(7.0), tuple: lambda v: (0, 1, 2)}
        new = changed.get(type(value), lambda v: v * 2)(value)
        wider = {"own_embedding": True} if field.name in ("hidden_size", "target_hidden_size") else {}
        if field.name == "draft_vocab_size":
            new = 32
        config = draft_config(**{field.name: new}, **wider)
        written = draft_formats.draft_config_to_dict(config, 8)
        assert written != base, field.name
        fits = target(vocab_size=config.vocab_size, hidden_size=config.target_hidden_size)
        assert draft_formats.draft_config_from_dict(written, fits)[0] == config, field.name


def test_target_config_is_frozen_by_these_fields():
    """`hf_config` and the two readers know every field; a new one must be added to them, then here."""
    assert len(dataclasses.fields(TargetConfig)) == 19
