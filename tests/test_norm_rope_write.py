from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _norm_rope_cases import DTYPES, SAMPLES, norm_rope_index_args
from _norm_rope_cases import D as INDEX_DIM
from _opcheck import one_graph_for_lengths, opcheck_all
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsafx.ops import norm_rope, norm_rope_index
from dsafx.ops.cache_layouts import LAYOUTS, SCALE_STORES, new_index_cache, new_mla_cache
from dsafx.ops.index_cache import index_cache_write
from dsafx.ops.mla_cache import mla_cache_write
from dsafx.ops.norm_rope_write import norm_rope_index_write, norm_rope_write

BLOCK = 4


def operands(
    rows: int,
    layout: str,
    dtype: torch.dtype = torch.float32,
    strides: str = "contiguous",
    grad: bool = False,
    hadamard: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arguments of ``norm_rope_index``, of the MLA write and of the index write, by name."""
    *args, _ = norm_rope_index_args(rows, dtype, strides, grad)
    names = (
        "q_c q_weight kv_c kv_weight k_pe index_k index_weight index_bias cos sin"
        " eps style index_eps index_style"
    )
    norm = dict(zip(names.split(), args, strict=True)) | {"hadamard": hadamard}
    if layout == "fp8_ds_mla":
        norm["kv_c"] = norm["kv_c"].detach().repeat(1, 16).requires_grad_(grad)
        norm["kv_weight"] = norm["kv_weight"].detach().repeat(16).requires_grad_(grad)
    latent, rope_dim = norm["kv_c"].shape[1], norm["k_pe"].shape[1]
    mla = {
        "cache": new_mla_cache(6, BLOCK, layout, latent, rope_dim, dtype=torch.float32),
        "slot_mapping": torch.arange(rows) + 3,
        "layout": layout,
        "scale": torch.tensor(0.02) if layout == "fp8" else None,
    }
    index = {
        "index_cache": new_index_cache(6, BLOCK, INDEX_DIM),
        "index_slot_mapping": torch.arange(rows).flip(0) + 1,
        "scale_store": "ue8m0",
    }
    return norm, mla, index


def small(norm: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``norm_rope`` among those of ``norm_rope_index``."""
    return {k: v for k, v in norm.items() if "index" not in k and k != "hadamard"}


def write_separately(
    norm: dict[str, Any], mla: dict[str, Any], index: dict[str, Any]
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Outputs and caches of ``norm_rope_index`` and the two writes after it."""
    cache, index_cache = mla["cache"].clone(), index["index_cache"].clone()
    out = norm_rope_index(**norm)
    mla_cache_write(out[1], out[2], cache, mla["slot_mapping"], mla["layout"], mla["scale"])
    index_cache_write(out[3], index_cache, index["index_slot_mapping"], index["scale_store"])
    return out, cache, index_cache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_write_equals_norm_rope_and_the_writes_after_it(dtype, layout):
    for strides, hadamard in (("contiguous", False), ("sliced", True), ("transposed", False)):
        norm, mla, index = operands(9, layout, dtype, strides, hadamard=hadamard)
        mla["slot_mapping"][2] = -1
        index["index_slot_mapping"][5] = -1
        expected, cache, index_cache = write_separately(norm, mla, index)
        fresh = {**mla, "cache": mla["cache"].clone()}
        out = norm_rope_index_write(**norm, **mla, **index)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert torch.equal(mla["cache"], cache)
        assert torch.equal(index["index_cache"], index_cache)
        assert cache.flatten(0, 1)[3:12].any(1).tolist() == [row != 2 for row in range(9)]
        without = norm_rope_write(**small(norm), **fresh)
        torch.testing.assert_close(without, expected[:3], rtol=0, atol=0)
        assert torch.equal(fresh["cache"], cache)


def test_rows_without_a_slot_are_returned_all_the_same():
    norm, mla, index = operands(3, "bf16")
    mla["slot_mapping"].fill_(-1)
    index["index_slot_mapping"].fill_(-1)
    out = norm_rope_index_write(**norm, **mla, **index)
    torch.testing.assert_close(out, norm_rope_index(**norm), rtol=0, atol=0)
    assert not mla["cache"].any()
    assert not index["index_cache"].any()


def test_the_returned_tensors_share_no_memory_with_caches_or_inputs():
    norm, mla, index = operands(3, "bf16")
    out = norm_rope_index_write(**norm, **mla, **index)
    before = mla["cache"].clone(), index["index_cache"].clone(), norm["kv_c"].clone()
    for tensor in out:
        tensor.fill_(9.0)
    assert torch.equal(mla["cache"], before[0])
    assert torch.equal(index["index_cache"], before[1])
    assert torch.equal(norm["kv_c"], before[2])


@pytest.mark.parametrize("wrong", ["slot_mapping", "index_slot_mapping", "scale", "index_bias"])
def test_a_bad_operand_of_either_write_leaves_both_caches_alone(wrong):
    norm, mla, index = operands(3, "fp8")
    if wrong == "scale":
        mla["scale"] = torch.tensor(0.0)
    elif wrong == "index_bias":
        norm["index_bias"] = norm["index_bias"][1:]
    else:
        (mla if wrong in mla else index)[wrong][1] = 24
    with pytest.raises(ValueError, match=f"^{wrong} must"):
        norm_rope_index_write(**norm, **mla, **index)
    assert not mla["cache"].any()
    assert not index["index_cache"].any()
    if wrong in ("slot_mapping", "scale"):
        with pytest.raises(ValueError, match=f"^{wrong} must"):
            norm_rope_write(**small(norm), **mla)
        assert not mla["cache"].any()


def test_bad_shapes_are_refused_by_name():
    norm, mla, index = operands(3, "bf16")

    def refuse(match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            norm_rope_index_write(**{**norm, **mla, **index, **changes})

    refuse("index_slot_mapping must have 3", index_slot_mapping=torch.arange(2))
    refuse("slot_mapping must be int64", TypeError, slot_mapping=torch.arange(3, dtype=torch.int32))
    refuse("cache must have 12 in dimension 2", cache=mla["cache"][..., 1:].contiguous())
    refuse("layout must be one of", layout="fp4")
    refuse("scale_store must be one of", scale_store="bf16")
    refuse("q_c must have 3 in dimension 0|must have 2 in dimension 0", q_c=norm["q_c"][1:])
    refuse("style must be one of", style="neox")
    refuse("index_k must have", index_k=norm["index_k"][1:])
    assert not mla["cache"].any()


@pytest.mark.parametrize("with_index", [False, True])
def test_gradients_are_those_of_norm_rope_and_the_caches_are_written(with_index):
    norm, mla, index = operands(4, "fp8_ds_mla", grad=True)
    plain: Callable[..., Any] = norm_rope_index if with_index else norm_rope
    wanted = norm if with_index else small(norm)
    parameters = [x for x in wanted.values() if isinstance(x, Tensor) and x.requires_grad]
    expected = torch.autograd.grad(
        torch.cat([x.flatten() for x in plain(**wanted)]).square().sum(), parameters
    )
    if with_index:
        out = norm_rope_index_write(**norm, **mla, **index)
    else:
        out = norm_rope_write(**small(norm), **mla)
    grads = torch.autograd.grad(torch.cat([x.flatten() for x in out]).square().sum(), parameters)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    assert mla["cache"].any()
    assert not mla["cache"].requires_grad
    assert bool(index["index_cache"].any()) == with_index


def test_the_fused_writes_pass_opcheck():
    ops = torch.ops.dsafx
    for number, (rows, strides) in enumerate(SAMPLES):
        layout = LAYOUTS[(number + rows) % 3]
        dtype = DTYPES[number // 2 % 2]
        norm, mla, index = operands(rows, layout, dtype, strides, hadamard=number % 4 < 2)
        index["scale_store"] = SCALE_STORES[number % 2]
        everything = norm | mla | index
        for op in (ops.norm_rope_write.default, ops.norm_rope_index_write.default):
            opcheck_all(op, [tuple(everything[arg.name] for arg in op._schema.arguments)])


def step(norm: dict[str, Any], mla: dict[str, Any], index: dict[str, Any]) -> tuple[Tensor, ...]:
    return norm_rope_index_write(**norm, **mla, **index)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_serves_three_lengths(layout):
    one_graph_for_lengths(step, lambda rows: operands(rows, layout), (3, 7, 19))


@pytest.mark.parametrize("backend", ["inductor", "dsafx"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_write_works_in_place_and_copies_no_cache(layout, backend):
    torch.manual_seed(1)
    norm, mla, index = operands(6, layout)
    expected, cache, index_cache = write_separately(norm, mla, index)
    out, (code,) = run_and_get_code(
        torch.compile(step, backend=backend, fullgraph=True), norm, mla, index
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert torch.equal(mla["cache"], cache)
    assert torch.equal(index["index_cache"], index_cache)
    assert "dsafx.norm_rope_index_write.default" in code
    for written in (cache, index_cache):
        assert str(tuple(written.shape)) in code
        for shape in (str(tuple(written.shape)), f"({written.numel()}, )"):
            assert f"empty_strided_cpu({shape}" not in code
    assert "clone" not in code
    assert "copy_" not in code


def test_gradients_and_writes_survive_compilation():
    torch.manual_seed(1)
    norm, mla, index = operands(4, "bf16", grad=True)
    _, cache, index_cache = write_separately(norm, mla, index)
    parameters = [x for x in norm.values() if isinstance(x, Tensor) and x.requires_grad]

    def loss(run: Callable[..., tuple[Tensor, ...]], *args: Any) -> Tensor:
        return torch.cat([x.flatten() for x in run(*args)]).square().sum()

    expected = torch.autograd.grad(loss(lambda: norm_rope_index(**norm)), parameters)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(loss(compiled, norm, mla, index), parameters)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    assert torch.equal(mla["cache"], cache)
    assert torch.equal(index["index_cache"], index_cache)
