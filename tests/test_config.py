"""DSAConfig: the values of public config files and the quirks of their keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

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


@pytest.mark.parametrize("raw", [DEEPSEEK_V32, GLM_5, GLM_52], ids=["v3.2", "glm-5", "glm-5.2"])
def test_a_config_object_and_its_json_read_alike(raw: dict[str, Any]):
    classes = {"deepseek_v32": DeepseekV32Config, "glm_moe_dsa": GlmMoeDsaConfig}
    made = classes[raw["model_type"]](
        **{key: value for key, value in raw.items() if key != "model_type"}
    )
    assert DSAConfig.from_transformers(made) == DSAConfig.from_transformers(raw)


def test_a_null_index_topk_freq_makes_every_layer_full():
    config = DSAConfig.from_transformers(
        {**GLM_52, "index_topk_freq": None, "index_skip_topk_offset": None}
    )
    assert config.schedule == ("full",) * 78


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
    with pytest.raises(ValueError, match="deepseek_v32, glm_moe_dsa, got 'llama'"):
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
