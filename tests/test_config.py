"""DSAConfig: the values of public config files and the quirks of their keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.axk2.modeling_axk2 import AXK2Attention, AXK2RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaRotaryEmbedding,
)

from dsafx.models.config import DSAConfig
from dsafx.ops import routing

DEEPSEEK_V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}

GLM_52: dict[str, Any] = {
    **GLM_5,
    "head_dim": 192,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
}

AXK2_LIGHT: dict[str, Any] = {
    "model_type": "axk2",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rms_norm_eps": 1e-6,
}

PUBLIC = {"v3.2": DEEPSEEK_V32, "glm-5": GLM_5, "glm-5.2": GLM_52, "a.x-k2": AXK2_LIGHT}

MODULES = {
    "axk2": (AXK2Attention, AXK2RotaryEmbedding),
    "deepseek_v32": (DeepseekV32Attention, DeepseekV32RotaryEmbedding),
    "glm_moe_dsa": (GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding),
}


def transformers_config(raw: dict[str, Any]) -> PreTrainedConfig:
    """What transformers makes of the ``config.json`` that holds ``raw``."""
    return AutoConfig.for_model(**raw)


def test_deepseek_v32_has_half_split_index_rope_and_the_squared_yarn_factor_in_its_scale():
    config = DSAConfig.from_transformers(DEEPSEEK_V32)
    assert config.mla_rope_style == "interleaved_to_half"
    assert config.index_rope_style == "half"
    assert config.rope_theta == 10000.0
    assert config.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    assert config.softmax_scale == 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert config.index_weight_scale == 128**-0.5 * 64**-0.5
    assert config.schedule == ("full",) * 61
    assert config.topk == 2048


def test_glm_5_has_interleaved_index_rope_and_the_norm_eps_of_its_classes():
    config = DSAConfig.from_transformers(GLM_5)
    assert config.index_rope_style == "interleaved_to_half"
    assert config.softmax_scale == 256**-0.5
    assert config.index_weight_scale == 128**-0.5 * 32**-0.5
    assert (config.norm_eps, config.index_norm_eps) == (1e-6, 1e-6)
    assert config.rope_theta == 1e6
    assert config.schedule == ("full",) * 78


def test_glm_52_shares_a_selection_between_four_layers():
    config = DSAConfig.from_transformers(GLM_52)
    full = [layer for layer, kind in enumerate(config.schedule) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)]
    assert config.schedule.count("shared") == 57
    assert [config.is_followed(layer) for layer in (0, 1, 2, 3, 5, 77)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("raw", PUBLIC.values(), ids=PUBLIC)
def test_a_config_object_and_its_json_read_alike(raw: dict[str, Any]):
    assert DSAConfig.from_transformers(transformers_config(raw)) == DSAConfig.from_transformers(raw)


@pytest.mark.parametrize("raw", PUBLIC.values(), ids=PUBLIC)
def test_a_public_config_describes_the_modules_that_transformers_builds_from_it(
    raw: dict[str, Any],
):
    config, theirs = DSAConfig.from_transformers(raw), transformers_config(raw)
    attention_class, rotary_class = MODULES[raw["model_type"]]
    for layer in range(7):
        with torch.device("meta"):
            module = attention_class(theirs, layer)
        owns_indexer = module.indexer is not None
        assert owns_indexer == (config.schedule[layer] == "full")
        assert module.scaling == config.softmax_scale
        norms = (module.q_a_layernorm, module.kv_a_layernorm)
        assert {norm.variance_epsilon for norm in norms} == {config.norm_eps}
        width = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        assert module.kv_b_proj.weight.shape == (width, config.kv_lora_rank)
        if owns_indexer:
            indexer = module.indexer
            assert indexer.k_norm.eps == config.index_norm_eps
            scale = indexer.softmax_scale * indexer.n_heads**-0.5
            assert scale == config.index_weight_scale
            assert indexer.index_topk == config.topk
    frequencies = rotary_class(theirs).inv_freq
    assert len(frequencies) == config.qk_rope_head_dim // 2
    expected = config.rope_theta ** (-2 / config.qk_rope_head_dim)
    assert float(frequencies[1]) == pytest.approx(expected, rel=1e-5)


def test_a_null_index_topk_freq_makes_every_layer_full():
    config = DSAConfig.from_transformers(
        {**GLM_52, "index_topk_freq": None, "index_skip_topk_offset": None}
    )
    assert config.schedule == ("full",) * 78


def test_indexer_types_win_over_a_frequency_that_says_otherwise():
    raw = {**GLM_52, "indexer_types": ["full"] * 78}
    assert DSAConfig.from_transformers(raw).schedule == ("full",) * 78
    assert DSAConfig.from_transformers(transformers_config(raw)).schedule == ("full",) * 78


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("freq", [1, 2, 4])
def test_frequency_and_offset_give_the_schedule_that_transformers_derives(freq: int, offset: int):
    raw = {**GLM_52, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    expected = tuple(transformers_config(raw).to_dict()["indexer_types"])
    assert DSAConfig.from_transformers(raw).schedule == expected


def test_head_dim_is_not_read():
    configs = [DSAConfig.from_transformers({**GLM_5, "head_dim": dim}) for dim in (64, 192, None)]
    assert configs[0] == configs[1] == configs[2] == DSAConfig.from_transformers(GLM_5)


def test_the_norms_of_the_latents_do_not_follow_rms_norm_eps():
    assert DSAConfig.from_transformers({**GLM_5, "rms_norm_eps": 1e-3}).norm_eps == 1e-6


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}, 0.1 * math.log(40) + 1),
        ({"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 0.5}, 0.05 * math.log(8) + 1),
        ({"rope_type": "yarn", "factor": 40, "mscale": 1.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40, "mscale_all_dim": 0}, 1.0),
        ({"rope_type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"rope_type": "default", "factor": 40, "mscale_all_dim": 1.0}, 1.0),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_softmax_scale_holds_the_squared_yarn_factor(
    rope: dict[str, Any], factor: float, key: str
):
    raw = {k: v for k, v in DEEPSEEK_V32.items() if k != "rope_scaling"}
    config = DSAConfig.from_transformers({**raw, key: rope})
    assert config.softmax_scale == 192**-0.5 * factor**2


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_nested_rope_theta_is_found_under_either_key(key: str):
    raw = {k: v for k, v in GLM_5.items() if k != "rope_parameters"}
    rope = {"rope_type": "default", "rope_theta": 8e6}
    assert DSAConfig.from_transformers({**raw, key: rope}).rope_theta == 8e6
    assert DSAConfig.from_transformers(raw).rope_theta == 1e4


def test_indexer_types_win_over_pattern_and_frequency():
    small = {**GLM_52, "num_hidden_layers": 3}
    listed = {**small, "indexer_types": ["full", "shared", "shared"], "index_topk_pattern": "FFF"}
    assert DSAConfig.from_transformers(listed).schedule == ("full", "shared", "shared")
    pattern = {**small, "index_topk_pattern": "FSF"}
    assert DSAConfig.from_transformers(pattern).schedule == ("full", "shared", "full")


def test_a_schedule_that_starts_on_a_shared_layer_is_an_error():
    raw = {**GLM_52, "num_hidden_layers": 2, "indexer_types": ["shared", "full"]}
    with pytest.raises(ValueError, match="layer 0 full"):
        DSAConfig.from_transformers(raw)


def test_two_values_of_rope_theta_must_agree():
    agreeing = {**GLM_5, "rope_theta": 1e6}
    assert DSAConfig.from_transformers(agreeing).rope_theta == 1e6
    with pytest.raises(ValueError, match=r"rope_theta = 10000 .*rope_theta = 1e\+06"):
        DSAConfig.from_transformers({**GLM_5, "rope_theta": 1e4})


def test_an_unknown_model_type_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="axk2, deepseek_v32, glm_moe_dsa, got 'llama'"):
        DSAConfig.from_transformers({**GLM_5, "model_type": "llama"})


def test_the_index_rope_style_can_be_overridden_and_is_checked():
    config = DSAConfig.from_transformers(DEEPSEEK_V32, index_rope_style="interleaved")
    assert config.index_rope_style == "interleaved"
    with pytest.raises(ValueError, match="index_rope_style must be one of half"):
        DSAConfig.from_transformers(DEEPSEEK_V32, index_rope_style="neox")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": None}, "no index_topk"),
        ({"index_topk": 0}, "index_topk must be at least 1, got 0"),
    ],
)
def test_a_missing_or_impossible_size_is_an_error(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DSAConfig.from_transformers({**GLM_5, **change})


def test_the_route_spec_carries_the_sizes():
    layer = routing.LayerCapabilities(dense_mha=True)
    kernels = routing.KernelCapabilities(dense_mha=True)
    spec = DSAConfig.from_transformers(GLM_5).route_spec(layer, kernels, routing.RouteConfig())
    assert (spec.topk, spec.num_heads, spec.kv_lora_rank) == (2048, 64, 512)
    assert (spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim) == (192, 64, 256)
    assert (spec.layer, spec.kernels) == (layer, kernels)
