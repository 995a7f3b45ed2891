"""Selection and attention ops under opcheck, and in one symbolic graph for several lengths."""

from __future__ import annotations

import pytest
import torch
from _opcheck import arrange, compiled_gradients_equal_eager, one_graph_for_lengths, opcheck_all
from _pages import spec
from _reference import causal_intervals

from dsafx import ops

HEADS, NOPE, ROPE, LATENT, VALUE, TOPK = 3, 7, 4, 12, 13, 2
SCALE = (NOPE + ROPE) ** -0.5
CASES = [
    pytest.param(0, "contiguous", torch.float32, id="no-token"),
    pytest.param(1, "sliced", torch.bfloat16, id="one-token-sliced-bf16"),
    pytest.param(5, "contiguous", torch.bfloat16, id="bf16"),
    pytest.param(5, "sliced", torch.float32, id="sliced"),
    pytest.param(5, "transposed", torch.float32, id="transposed"),
]


def operands(op: str, tokens: int, layout: str, dtype: torch.dtype):
    """Arguments of one call of ``op``, with ``tokens`` queries and as many keys."""
    torch.manual_seed(tokens)
    ks, ke = (torch.zeros(0, dtype=torch.int32),) * 2 if tokens == 0 else causal_intervals([tokens])

    def random(*shape: int):
        return arrange(torch.randn(shape).to(dtype), layout).requires_grad_()

    q_index, k_index = random(tokens, 8, 16).detach(), random(tokens, 16).detach()
    weights = arrange(torch.randn(tokens, 8), layout)
    indices = ops.index_select(q_index, k_index, weights, ks, ke, tokens, TOPK)
    mask = torch.rand(tokens, tokens) < 0.8
    q, k, v = (
        random(tokens, HEADS, NOPE + ROPE),
        random(tokens, HEADS, NOPE + ROPE),
        random(tokens, HEADS, VALUE),
    )
    kv = random(tokens, LATENT + ROPE)
    mla = (
        random(tokens, HEADS, NOPE),
        random(tokens, HEADS, ROPE),
        random(tokens, LATENT),
        random(tokens, ROPE),
        random(HEADS * (NOPE + VALUE), LATENT),
    )
    routed = (ks, ke, tokens, tokens)
    return {
        "causal_positions": [(ks, ke, tokens, TOPK), (ks, ke, tokens, 8, 9)],
        "index_scores": [(q_index, k_index, weights, ks, ke, mask)],
        "select_topk": [(arrange(torch.randn(tokens, tokens), layout), ks, ke, TOPK)],
        "index_select": [
            (q_index, k_index, weights, ks, ke, tokens, TOPK),
            (q_index, k_index, weights, ks, ke, tokens, TOPK, mask, True),
        ],
        "dense_mha": [
            (q, k, v, ks, ke, tokens, SCALE),
            (q, k, v, ks, ke, tokens, SCALE, 9, False, mla[1], mla[3]),
        ],
        "masked_mha": [
            (q, k, v, indices, ks, ke, SCALE),
            (q, k, v, indices, ks, ke, SCALE, True, mla[1], mla[3]),
        ],
        "sparse_mqa": [
            (random(tokens, HEADS, LATENT + ROPE), kv, indices, ks, SCALE, LATENT),
            (random(tokens, HEADS, LATENT + ROPE), kv, indices, ks, SCALE, LATENT, False, True),
        ],
        "sparse_mla": [
            (random(tokens, HEADS, LATENT), *mla[1:4], indices, ks, SCALE),
            (random(tokens, HEADS, LATENT), *mla[1:4], indices, ks, SCALE, False, True),
        ],
        "mla_attention": [
            (*mla, indices, *routed, TOPK, SCALE, spec("masked" if tokens else "auto")),
            (*mla, indices, *routed, TOPK, SCALE, spec("sparse"), True, True, False, None, True),
            (*mla, None, *routed, 9, SCALE, spec("auto")),
        ],
    }[op]


OPS = [
    "causal_positions",
    "index_scores",
    "select_topk",
    "index_select",
    "dense_mha",
    "masked_mha",
    "sparse_mqa",
    "sparse_mla",
    "mla_attention",
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("tokens", "layout", "dtype"), CASES)
def test_an_op_is_what_its_schema_and_fake_say(op, tokens, layout, dtype):
    opcheck_all(getattr(torch.ops.dsafx, op).default, operands(op, tokens, layout, dtype))


@pytest.mark.parametrize("op", OPS)
def test_one_symbolic_graph_serves_every_length(op):
    def make_args(tokens: int):
        args = operands(op, tokens, "contiguous", torch.float32)[0]
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)

    one_graph_for_lengths(getattr(ops, op), make_args, (5, 9, 6))


@pytest.mark.parametrize(
    "op", ["dense_mha", "masked_mha", "sparse_mqa", "sparse_mla", "mla_attention"]
)
def test_compiled_gradients_are_those_of_eager(op):
    for args in operands(op, 5, "contiguous", torch.float32):

        def differentiable(*args, op=op):
            results = getattr(ops, op)(*args)
            return tuple(x for x in results if x.numel())

        compiled_gradients_equal_eager(differentiable, args)
