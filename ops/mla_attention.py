"""One layer's attention over one segment: ``routing.decide`` says which kernel runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from . import providers, routing
from ._attend import attend, promoted_dtype
from ._attend_backward import attend_backward
from ._checks import (
    require_floating,
    require_interval,
    require_rank,
    require_same_device,
    require_size,
)
from ._dtypes import wide_dtype
from ._library import define_op
from ._options import current
from .masked_mha import check_selection


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    max_query_len: int,
    topk: int,
    scale: float,
    spec: str,
    own_selection: bool = True,
    masked: bool = False,
    captured: bool = False,
    capture_bound: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over its selected keys, by the route that ``decide()`` answers.

    Activations of unlike dtypes are promoted to the widest, which is the dtype of the result;
    ``kv_b_weight`` is cast to it.

    Args:
        q_nope: [T, N, P]; q_pe: [T, N, R], rotated.
        kv_c: [S, L], normed latents, packed; k_pe: [S, R], rotated.
        kv_b_weight: [N * (P + V), L], rows of each head ``[P | V]``.
        indices: [T, K] int32 positions relative to ``ks``; may be None where the route is dense.
        ks, ke: [T] int32, the visible interval of packed keys.
        max_kv_len: host upper bound on ``ke - ks``, cached keys included.
        max_query_len: host upper bound on the query tokens of a request.
        topk: K.
        scale: softmax scale, ``(P + R)**-0.5``, times the squared yarn factor.
        spec: layer capabilities and config, from ``routing.encode_spec``.
        own_selection: whether ``indices`` were made in this step for exactly these rows, by this
            layer or its group's leader.
        masked: whether the selection came from a mask operand.
        captured, capture_bound: contract C6.
        return_lse: whether the log-sum-exp is wanted; excludes kernels without it.

    Returns:
        out [T, N, V]; lse [T, N] float32 (float64 for float64 inputs), natural log, or an empty
        tensor.

    Raises:
        ValueError: shapes or devices that do not fit together, a forced mode that is illegal, or
            ``indices=None`` on a route that reads them.
        TypeError: a dtype outside of those above.
    """
    _check(q_nope, q_pe, kv_c, k_pe, kv_b_weight, indices, ks, ke)
    return _op(
        q_nope,
        q_pe,
        kv_c,
        k_pe,
        kv_b_weight,
        indices,
        ks,
        ke,
        max_kv_len,
        max_query_len,
        topk,
        scale,
        spec,
        own_selection,
        masked,
        captured,
        capture_bound,
        return_lse,
    )


def _check(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
) -> None:
    ranks = {"q_nope": 3, "q_pe": 3, "kv_c": 2, "k_pe": 2, "kv_b_weight": 2}
    tensors = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_b_weight": kv_b_weight,
    }
    for name, tensor in tensors.items():
        require_rank(name, tensor, ranks[name])
        require_floating(name, tensor)
    require_size("q_pe", q_pe, 0, q_nope.shape[0], "the tokens of q_nope")
    require_size("q_pe", q_pe, 1, q_nope.shape[1], "the heads of q_nope")
    require_size("k_pe", k_pe, 0, kv_c.shape[0], "the keys of kv_c")
    require_size("k_pe", k_pe, 1, q_pe.shape[2], "the rotated dims of q_pe")
    require_size("kv_b_weight", kv_b_weight, 1, kv_c.shape[1], "the latent dim of kv_c")
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    if kv_b_weight.shape[0] % heads or kv_b_weight.shape[0] // heads <= nope:
        raise ValueError(
            f"kv_b_weight must have {heads} * ({nope} + v_head_dim) rows, got"
            f" {kv_b_weight.shape[0]}"
        )
    require_interval(ks, ke, q_nope.shape[0])
    if indices is not None:
        check_selection(indices, q_nope)
    require_same_device(**tensors, ks=ks, ke=ke)


class Operands(NamedTuple):
    """The arguments of ``mla_attention`` in schema order, as an op body or a pass sees them."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_b_weight: Tensor
    indices: Tensor | None
    ks: Tensor
    ke: Tensor
    max_kv_len: int
    max_query_len: int
    topk: int
    scale: float
    spec: str
    own_selection: bool = True
    masked: bool = False
    captured: bool = False
    capture_bound: int | None = None
    return_lse: bool = False

    def route_spec(self, kernels: routing.KernelCapabilities) -> routing.RouteSpec:
        """What ``decide()`` must know about the layer and the kernels it would run on."""
        layer, config = routing.decode_spec(self.spec)
        heads = self.q_nope.shape[1]
        return routing.RouteSpec(
            layer=layer,
            kernels=kernels if kernels.returns_lse or not self.return_lse else _SPARSE_ONLY,
            config=config,
            topk=self.topk,
            num_heads=heads,
            qk_nope_head_dim=self.q_nope.shape[2],
            qk_rope_head_dim=self.q_pe.shape[2],
            v_head_dim=self.kv_b_weight.shape[0] // heads - self.q_nope.shape[2],
            kv_lora_rank=self.kv_c.shape[1],
        )

    def batch_facts(self) -> routing.BatchFacts:
        """What ``decide()`` must know about the segment."""
        return routing.BatchFacts(
            max_kv_len=self.max_kv_len,
            max_query_len=self.max_query_len,
            own_selection=self.own_selection,
            masked=self.masked,
            captured=self.captured,
            capture_bound=self.capture_bound,
            workspace_bytes=current().workspace_bytes,
        )


_SPARSE_ONLY = routing.KernelCapabilities()


def _decide(call: Operands) -> tuple[routing.Route, routing.RouteSpec]:
    spec = call.route_spec(providers.kernel_capabilities(call.q_nope.device.type))
    decision = routing.decide(spec, call.batch_facts())
    if call.indices is None and decision.route is not routing.Route.DENSE_MHA:
        raise ValueError(f"indices must be given where the route reads them, got None: {decision}")
    return decision.route, spec


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    call = Operands(*args)
    route, spec = _decide(call)
    return attend(
        route,
        call.q_nope,
        call.q_pe,
        call.kv_c,
        call.k_pe,
        call.kv_b_weight,
        call.indices,
        call.ks,
        call.ke,
        call.max_kv_len,
        call.scale,
        return_lse=call.return_lse,
        batch_invariant=spec.config.batch_invariant,
    )


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = Operands(*args)
    tokens, heads, nope = call.q_nope.shape
    dtype = promoted_dtype(call.q_nope, call.q_pe, call.kv_c, call.k_pe)
    out = call.q_nope.new_empty(
        (tokens, heads, call.kv_b_weight.shape[0] // heads - nope), dtype=dtype
    )
    return out, out.new_empty((tokens, heads) if call.return_lse else (0,), dtype=wide_dtype(out))


_DIFFERENTIABLE = 5


def _backward_reference(
    grad_out: Tensor, grad_lse: Tensor | None, weight_grad: bool, *args: Any
) -> tuple[Tensor, ...]:
    call = Operands(*args)
    route, _ = _decide(call)
    return attend_backward(
        route,
        grad_out,
        grad_lse,
        call.q_nope,
        call.q_pe,
        call.kv_c,
        call.k_pe,
        call.kv_b_weight,
        call.indices,
        call.ks,
        call.ke,
        call.scale,
        weight_grad,
    )


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, weight_grad: bool, *args: Any
) -> tuple[Tensor, ...]:
    *operands, weight = args[:_DIFFERENTIABLE]
    grads = [tensor.new_empty(tensor.shape) for tensor in operands]
    return (*grads, weight.new_empty(weight.shape if weight_grad else 0))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Operands(*inputs)
    ctx.save_for_backward(*call[: Operands._fields.index("max_kv_len")])
    ctx.call = call[Operands._fields.index("max_kv_len") :]
    ctx.return_lse = call.return_lse


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    weight_grad = ctx.needs_input_grad[_DIFFERENTIABLE - 1]
    *grads, grad_weight = _backward_op(
        grad_out,
        grad_lse if ctx.return_lse else None,
        weight_grad,
        *ctx.saved_tensors,
        *ctx.call,
    )
    others = [None] * (len(Operands._fields) - _DIFFERENTIABLE)
    return (*grads, grad_weight if weight_grad else None, *others)


_ARGUMENTS = (
    "Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor kv_b_weight, Tensor? indices,"
    " Tensor ks, Tensor ke, SymInt max_kv_len, SymInt max_query_len, SymInt topk, float scale,"
    " str spec, bool own_selection=True, bool masked=False, bool captured=False,"
    " SymInt? capture_bound=None, bool return_lse=False"
)

_backward_op = define_op(
    f"mla_attention_backward(Tensor grad_out, Tensor? grad_lse, bool weight_grad, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
)

_op = define_op(
    f"mla_attention({_ARGUMENTS}) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
