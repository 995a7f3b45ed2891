"""What the schemas, fakes and gradients of the paged ops promise."""

from __future__ import annotations

import pytest
import torch
from _opcheck import one_graph_for_lengths, opcheck_all
from _pages import (
    HEADS,
    LATENT,
    ROPE,
    SCALE,
    TOPK,
    filled_index_cache,
    filled_mla_cache,
    index_inputs,
    mla_inputs,
    pages,
    spec,
)

from dsafx import ops
from dsafx.ops.index_select_paged import index_select_paged
from dsafx.ops.mla_attention_paged import mla_attention_paged
from dsafx.ops.sparse_mqa_paged import sparse_mqa_paged


def operands(op: str, rows: int):
    """Arguments of calls of ``op`` with ``rows`` rows, of which the last is padding."""
    torch.manual_seed(rows)
    at = pages(lengths=(9,), new=max(rows - 1, 1))
    q, keys, weights = index_inputs(at)
    inputs = mla_inputs(at)
    cache = filled_mla_cache(at, *inputs[2:4], "bf16", None)
    packed = filled_mla_cache(at, *inputs[2:4], "fp8_ds_mla", None)
    kept = [row % at.lens.shape[0] for row in range(rows)]
    row_request, lens = at.row_request[kept], at.lens[kept]
    row_request[-1:] = -1
    paged = at.block_table, row_request, lens
    indices = ops.causal_positions(torch.zeros_like(lens), lens, 9, TOPK)
    absorbed = torch.randn(rows, HEADS, LATENT + ROPE)
    heads = inputs[0][kept], inputs[1][kept]
    routing_facts = (9, rows, TOPK, SCALE)
    return {
        "index_select_paged": [
            (q[kept], filled_index_cache(at, keys), weights[kept], *paged, 9, TOPK, "fp32"),
            (q[kept], filled_index_cache(at, keys), weights[kept], *paged, 9, TOPK, "fp32", True),
        ],
        "sparse_mqa_paged": [
            (absorbed, cache, indices, *paged, SCALE, LATENT, "bf16"),
            (absorbed, packed, indices, *paged, SCALE, LATENT, "fp8_ds_mla", None, False, True),
        ],
        "mla_attention_paged": [
            (*heads, cache, inputs[4], indices, *paged, *routing_facts, spec("sparse"), "bf16"),
            (
                *(*heads, packed, inputs[4], indices, *paged, *routing_facts, spec("masked")),
                *("fp8_ds_mla", None, True, False, None, True),
            ),
        ],
    }[op]


OPS = ["index_select_paged", "sparse_mqa_paged", "mla_attention_paged"]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("op", OPS)
def test_a_paged_op_is_what_its_schema_and_fake_say(op, rows):
    opcheck_all(getattr(torch.ops.dsafx, op).default, operands(op, rows))


@pytest.mark.parametrize("op", OPS)
def test_one_symbolic_graph_serves_every_number_of_rows(op):
    functions = {
        "index_select_paged": index_select_paged,
        "sparse_mqa_paged": sparse_mqa_paged,
        "mla_attention_paged": mla_attention_paged,
    }
    one_graph_for_lengths(functions[op], lambda rows: operands(op, rows)[0], (7, 8, 10))


@pytest.mark.parametrize("op", ["sparse_mqa_paged", "mla_attention_paged"])
def test_a_gradient_through_a_paged_cache_is_refused_and_not_lost(op):
    args = operands(op, 3)[0]
    args = (args[0].requires_grad_(), *args[1:])
    out, _ = getattr(torch.ops.dsafx, op)(*args)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        out.sum().backward()
