from __future__ import annotations

import math
import struct

import pytest
import torch
from _fp8 import e4m3_code, e4m3_value, index_key_bytes, latent_bytes, power_of_two_from

from dsafx.ops.cache_layouts import (
    LAYOUTS,
    SCALE_STORES,
    decode_scale,
    encode_scale,
    index_cache_shape,
    index_planes,
    mla_cache_shape,
    mla_fields,
    mla_rope_dim,
    new_index_cache,
    new_mla_cache,
    power_of_two_above,
    quantise_index_key,
    quantise_latent,
    to_fp8,
)


def codes(values: torch.Tensor) -> list[int]:
    return values.view(torch.uint8).tolist()


def test_the_rows_of_deepseek_v32_and_glm_have_the_published_sizes():
    assert {layout: mla_cache_shape(3, 64, layout)[2] for layout in LAYOUTS} == {
        "bf16": 576,
        "fp8": 576,
        "fp8_ds_mla": 656,
    }
    assert mla_fields("fp8_ds_mla", 512, 64) == (slice(0, 512), slice(512, 528), slice(528, 656))
    assert mla_fields("bf16", 512, 64) == (slice(0, 512), slice(512, 512), slice(512, 576))
    assert index_cache_shape(3, 64) == (3, 64, 132)
    assert index_cache_shape(3, 64, index_head_dim=32) == (3, 64, 36)


def test_new_caches_are_zero_and_of_the_layouts_dtype():
    for layout, dtype, size in (
        ("bf16", torch.bfloat16, 1152),
        ("fp8", torch.uint8, 576),
        ("fp8_ds_mla", torch.uint8, 656),
    ):
        cache = new_mla_cache(2, 4, layout)
        assert (cache.dtype, cache.shape[2] * cache.element_size()) == (dtype, size)
        assert not cache.any()
    assert new_mla_cache(1, 1, "bf16", dtype=torch.float32).dtype == torch.float32
    assert new_index_cache(2, 4).shape == (2, 4, 132)
    assert new_index_cache(2, 4).dtype == torch.uint8


def test_the_width_of_a_row_tells_the_rotated_part():
    for layout in LAYOUTS:
        for rope_dim in (1, 8, 64):
            width = mla_cache_shape(1, 1, layout, 256, rope_dim)[2]
            assert mla_rope_dim(layout, width, 256) == rope_dim
    for width in (512, 528, 529):
        with pytest.raises(ValueError, match=f"cache has rows of {width} elements"):
            mla_rope_dim("fp8_ds_mla", width, 512)


def test_an_index_block_is_planar():
    cache = torch.arange(2 * 3 * 6, dtype=torch.uint8).view(2, 3, 6)
    keys, scales = index_planes(cache)
    assert keys[1].tolist() == [[18, 19], [20, 21], [22, 23]]
    assert scales[1].tolist() == [[24, 25, 26, 27], [28, 29, 30, 31], [32, 33, 34, 35]]
    scales[0, 2] = 255
    assert cache.flatten()[14:18].tolist() == [255] * 4


def test_a_power_of_two_is_rounded_up_exactly_next_to_every_power():
    powers = torch.tensor([2.0**k for k in range(-40, 121)])
    above = torch.nextafter(powers, torch.tensor(math.inf))
    below = torch.nextafter(powers, torch.tensor(0.0))
    assert torch.equal(power_of_two_above(powers), powers)
    assert torch.equal(power_of_two_above(above), powers * 2)
    assert torch.equal(power_of_two_above(below), powers)
    x = torch.rand(1000) + 1e-6
    assert power_of_two_above(x).tolist() == [power_of_two_from(value) for value in x.tolist()]


def test_e4m3_rounds_to_even_stops_at_448_and_shows_infinities_as_nan():
    halfway = [(e4m3_value(code) + e4m3_value(code + 1)) / 2 for code in range(126)]
    x = torch.tensor([*halfway, 448.0, 449.0, 464.0, 480.0, 1e30, 0.0, 1e-9, 3e38])
    for signed in (x, -x):
        assert codes(to_fp8(signed)) == [e4m3_code(value) for value in signed.tolist()]
    assert codes(to_fp8(torch.tensor([1e30, -1e30]))) == [0x7E, 0xFE]
    assert codes(to_fp8(torch.tensor([math.inf, -math.inf, math.nan]))) == [0x7F] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_index_keys_of_any_size_are_quantised_to_the_bytes_worked_out_by_hand(dtype):
    x = torch.randn(4, 128) * torch.tensor([[1e-4], [1.0], [1e4], [0.0]])
    x = x.to(dtype)
    values, scale = quantise_index_key(x)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    for row, key in enumerate(x.float().tolist()):
        expected, expected_scale = index_key_bytes(key)
        assert bytes(codes(values[row])) == expected
        assert scale[row].item() == expected_scale


def test_the_floor_of_an_index_key_is_one_of_amax():
    x = torch.tensor([[0.0], [1e-7], [1e-4], [1.1e-4], [448.0], [448.1]])
    values, scale = quantise_index_key(x)
    assert scale.tolist() == [2.0**-22, 2.0**-22, 2.0**-22, 2.0**-21, 1.0, 2.0]
    assert codes(values[0]) == [0]
    # 1e-7 / 2**-22 = 0.419 lies between 0.40625 and 0.4375.
    assert codes(values[1]) == [e4m3_code(1e-7 * 2**22)] == [0x2D]


def test_latents_are_quantised_in_tiles_of_128_to_the_bytes_worked_out_by_hand():
    size = torch.tensor([1e-4, 1.0, 1e4, 0.0]).repeat_interleave(128)
    x = torch.randn(2, 512) * size
    values, scales = quantise_latent(x)
    assert scales.shape == (2, 4)
    for row in range(2):
        expected, expected_scales = latent_bytes(x[row].tolist())
        assert bytes(codes(values[row])) == expected
        assert scales[row].tolist() == expected_scales


def test_the_floor_of_a_latent_is_one_of_the_scale():
    x = torch.zeros(4, 128)
    x[1, 5], x[2, 5], x[3, 5] = 1e-4, 448 * 2.0**-13, 448 * 2.0**-12
    values, scales = quantise_latent(x)
    assert scales[:, 0].tolist() == [2.0**-13, 2.0**-13, 2.0**-13, 2.0**-12]
    assert values[:, 5].float().tolist() == [0.0, e4m3_value(e4m3_code(1e-4 * 2**13)), 448.0, 448.0]


@pytest.mark.parametrize("quantise", [quantise_index_key, quantise_latent])
def test_an_infinity_or_nan_is_stored_as_nan_and_spoils_no_other_value(quantise):
    x = torch.randn(3, 128)
    clean, clean_scale = quantise(x)
    x[0, 3], x[1, 4], x[2, 5] = math.inf, -math.inf, math.nan
    values, scale = quantise(x)
    bad = torch.zeros(3, 128, dtype=torch.bool)
    bad[0, 3] = bad[1, 4] = bad[2, 5] = True
    assert torch.equal(values.float().isnan(), bad)
    assert torch.equal(scale, clean_scale)
    assert torch.equal(values.view(torch.uint8)[~bad], clean.view(torch.uint8)[~bad])


def test_quantised_values_are_within_half_a_step_and_exact_in_bfloat16():
    x = torch.randn(64, 512)
    for values, scale in (
        quantise_index_key(x.unflatten(1, (4, 128))),
        quantise_latent(x),
    ):
        back = values.float().view(64, 4, 128) * scale[..., None]
        step = torch.maximum(x.view(64, 4, 128).abs() * 2.0**-4, scale[..., None] * 2.0**-10)
        assert bool(((back - x.view(64, 4, 128)).abs() <= step).all())
        assert torch.equal(back.bfloat16().float(), back)


def test_a_scale_is_stored_as_a_float32_or_as_four_equal_exponent_bytes():
    scale = torch.tensor([2.0**-22, 1.0, 2.0**100])
    exact = [list(struct.pack("<f", value)) for value in scale.tolist()]
    assert encode_scale(scale, "fp32").tolist() == exact
    assert encode_scale(scale, "ue8m0").tolist() == [[105] * 4, [127] * 4, [227] * 4]
    for store in SCALE_STORES:
        assert torch.equal(decode_scale(encode_scale(scale, store), store), scale)
    assert decode_scale(torch.zeros(0, 4, dtype=torch.uint8), "ue8m0").shape == (0,)


def test_impossible_layouts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"layout must be one of bf16, fp8, fp8_ds_mla, got 'fp4'"):
        mla_cache_shape(1, 64, "fp4")
    with pytest.raises(ValueError, match=r"kv_lora_rank must be a multiple of 128 .* got 500"):
        new_mla_cache(1, 64, "fp8_ds_mla", kv_lora_rank=500)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        mla_cache_shape(1, 0, "bf16")
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        new_index_cache(0, 64)
    with pytest.raises(ValueError, match="index_head_dim must be 1 to 128, got 129"):
        index_cache_shape(1, 64, 129)
    with pytest.raises(TypeError, match=r"cache must be float16.*got int8"):
        new_mla_cache(1, 64, "bf16", dtype=torch.int8)
