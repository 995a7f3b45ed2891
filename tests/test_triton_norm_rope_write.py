"""The norms with their cache writes, of the triton provider, equal their parts bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_norm_rope_write import operands, small, write_separately

from dsafx.ops import norm_rope_index, use_provider
from dsafx.ops.cache_layouts import LAYOUTS, SCALE_STORES
from dsafx.ops.norm_rope_write import norm_rope_index_write, norm_rope_write

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("scale_store", SCALE_STORES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_write_equals_norm_rope_and_the_writes_after_it(dtype, layout, scale_store):
    for strides, hadamard in (("contiguous", False), ("sliced", True)):
        norm, mla, index = operands(9, layout, dtype, strides, hadamard=hadamard)
        index["scale_store"] = scale_store
        mla["slot_mapping"][2] = -1
        index["index_slot_mapping"][5] = -1
        fresh = {**mla, "cache": mla["cache"].clone()}
        with use_provider("triton"):
            expected, cache, index_cache = write_separately(norm, mla, index)
            out = norm_rope_index_write(**norm, **mla, **index)
            without = norm_rope_write(**small(norm), **fresh)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert torch.equal(mla["cache"], cache)
        assert torch.equal(index["index_cache"], index_cache)
        assert cache.flatten(0, 1)[3:12].any(1).tolist() == [row != 2 for row in range(9)]
        torch.testing.assert_close(without, expected[:3], rtol=0, atol=0)
        assert torch.equal(fresh["cache"], cache)


def test_rows_without_a_slot_are_returned_all_the_same():
    norm, mla, index = operands(3, "bf16")
    mla["slot_mapping"].fill_(-1)
    index["index_slot_mapping"].fill_(-1)
    with use_provider("triton"):
        out = norm_rope_index_write(**norm, **mla, **index)
        torch.testing.assert_close(out, norm_rope_index(**norm), rtol=0, atol=0)
    assert not mla["cache"].any()
    assert not index["index_cache"].any()


@pytest.mark.parametrize("wrong", ["slot_mapping", "index_slot_mapping", "scale"])
def test_a_bad_operand_of_either_write_leaves_both_caches_alone(wrong):
    norm, mla, index = operands(3, "fp8")
    if wrong == "scale":
        mla["scale"] = torch.tensor(0.0)
    else:
        (mla if wrong in mla else index)[wrong][1] = 24
    with use_provider("triton"), pytest.raises(ValueError, match=wrong):
        norm_rope_index_write(**norm, **mla, **index)
    assert not mla["cache"].any()
    assert not index["index_cache"].any()
