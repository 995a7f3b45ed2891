"""``mla_attention`` on latents in a paged cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import providers, routing
from ._attend import attend, promoted_dtype
from ._blocks import row_blocks
from ._checks import require_floating, require_rank, require_same_device, require_size
from ._dtypes import wide_dtype
from ._library import define_op
from ._paged import by_request, require_paged_rows, visible_lens
from .cache_layouts import require_mla_cache
from .masked_mha import check_selection
from .mla_attention import Operands
from .mla_cache import load_latents, mla_cache_gather, require_scale_value
from .sparse_mqa_paged import no_gradient, sparse_mqa_paged


def mla_attention_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    max_kv_len: int,
    max_query_len: int,
    topk: int,
    scale: float,
    spec: str,
    layout: str,
    cache_scale: Tensor | None = None,
    own_selection: bool = True,
    captured: bool = False,
    capture_bound: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one segment over its selected keys, by the route that ``decide()`` answers.

    Equal to ``mla_attention`` on the dequantised latents of each row's request: every route reads
    keys as the cache stores them, in the dtype of the result (contract C14). Has no gradient.

    With a provider that is graph-safe no value of the device is read on the host, whatever the
    route. Dense and masked attention then make room for, and expand, ``max_kv_len`` keys of every
    request in ``block_table``, or of T requests where these are fewer, however many there are: give
    a table of no more requests than the rows are of.

    Args:
        q_nope: [T, N, P]; q_pe: [T, N, R], rotated. Unlike dtypes are promoted to the wider, which
            is the dtype of the result; ``kv_b_weight`` is cast to it.
        cache: [num_blocks, block_size, width], see ``cache_layouts``.
        kv_b_weight: [N * (P + V), L], rows of each head ``[P | V]``.
        indices: [T, K] int32 positions from the request's first token; may be None where the route
            is dense.
        block_table: [B, blocks] int32, the blocks of each request in order. Columns past what a
            row sees may hold anything: they are not read.
        row_request: [T] int32, the request of each row. A request that the table does not have,
            such as -1, marks a padding row: out 0, lse -inf.
        lens: [T] int32, how many of its request's first tokens each row sees.
        max_kv_len: host upper bound on ``lens``.
        max_query_len, topk, scale, spec: see ``mla_attention``.
        layout: one of ``cache_layouts.LAYOUTS``.
        cache_scale: one float32, for the layout ``fp8`` and no other.
        own_selection, captured, capture_bound, return_lse: see ``mla_attention``.

    Returns:
        out [T, N, V]; lse [T, N] float32 (float64 for float64 queries), natural log, or an empty
        tensor.

    Raises:
        ValueError: shapes, strides, devices, a layout or a scale that do not fit together, a
            forced mode that is illegal, ``indices=None`` on a route that reads them, a row beyond
            ``max_kv_len``, or a token without a block in the cache.
        TypeError: a dtype outside of those above.
    """
    for name, tensor, rank in (
        ("q_nope", q_nope, 3),
        ("q_pe", q_pe, 3),
        ("kv_b_weight", kv_b_weight, 2),
    ):
        require_rank(name, tensor, rank)
        require_floating(name, tensor)
    require_size("q_pe", q_pe, 0, q_nope.shape[0], "the tokens of q_nope")
    require_size("q_pe", q_pe, 1, q_nope.shape[1], "the heads of q_nope")
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    if kv_b_weight.shape[0] % heads or kv_b_weight.shape[0] // heads <= nope:
        raise ValueError(
            f"kv_b_weight must have {heads} * ({nope} + v_head_dim) rows, got"
            f" {kv_b_weight.shape[0]}"
        )
    require_paged_rows(cache, block_table, row_request, lens, q_nope.shape[0])
    require_mla_cache(cache, layout, kv_b_weight.shape[1], q_pe.shape[2], cache_scale)
    if indices is not None:
        check_selection(indices, q_nope)
    require_same_device(q_nope=q_nope, q_pe=q_pe, cache=cache, kv_b_weight=kv_b_weight)
    return _op(
        q_nope,
        q_pe,
        cache,
        kv_b_weight,
        indices,
        block_table,
        row_request,
        lens,
        max_kv_len,
        max_query_len,
        topk,
        scale,
        spec,
        layout,
        cache_scale,
        own_selection,
        captured,
        capture_bound,
        return_lse,
    )


class _Call(NamedTuple):
    """The arguments in schema order."""

    q_nope: Tensor
    q_pe: Tensor
    cache: Tensor
    kv_b_weight: Tensor
    indices: Tensor | None
    block_table: Tensor
    row_request: Tensor
    lens: Tensor
    max_kv_len: int
    max_query_len: int
    topk: int
    scale: float
    spec: str
    layout: str
    cache_scale: Tensor | None = None
    own_selection: bool = True
    captured: bool = False
    capture_bound: int | None = None
    return_lse: bool = False

    def packed(self) -> Operands:
        """The packed op's arguments without keys: all that its questions to ``decide()`` need."""
        no_keys = self.q_pe[:0, 0]
        return Operands(
            self.q_nope,
            self.q_pe,
            self.kv_b_weight[:0],
            no_keys,
            self.kv_b_weight,
            self.indices,
            self.lens,
            self.lens,
            self.max_kv_len,
            self.max_query_len,
            self.topk,
            self.scale,
            self.spec,
            self.own_selection,
            False,
            self.captured,
            self.capture_bound,
            self.return_lse,
        )


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*args)
    require_scale_value(call.cache_scale)
    packed = call.packed()
    spec = packed.route_spec(providers.kernel_capabilities(call.q_nope.device.type))
    decision = routing.decide(spec, packed.batch_facts())
    if call.indices is None and decision.route is not routing.Route.DENSE_MHA:
        raise ValueError(f"indices must be given where the route reads them, got None: {decision}")
    seen = visible_lens(call.block_table, call.row_request, call.lens, call.max_kv_len)
    if decision.route is routing.Route.SPARSE_MQA:
        return _absorbed(call, seen, spec.config.batch_invariant)
    expanded = _by_bounds if _leaves_values(call.cache.device.type) else _by_request
    return expanded(call, seen, decision.route)


def _leaves_values(device_type: str) -> bool:
    """Whether calls on ``device_type`` may leave values on the device, so as to be captured."""
    return providers.dispatch(device_type).graph_safe


def _absorbed(call: _Call, seen: Tensor, batch_invariant: bool) -> tuple[Tensor, Tensor]:
    assert call.indices is not None
    dtype = promoted_dtype(call.q_nope, call.q_pe)
    heads, nope = call.q_nope.shape[1:]
    by_head = call.kv_b_weight.to(dtype).unflatten(0, (heads, -1))
    absorbed = torch.bmm(call.q_nope.to(dtype).transpose(0, 1), by_head[:, :nope]).transpose(0, 1)
    latent, lse = sparse_mqa_paged(
        torch.cat([absorbed, call.q_pe.to(dtype)], dim=-1),
        call.cache,
        call.indices,
        call.block_table,
        call.row_request,
        seen,
        call.scale,
        call.kv_b_weight.shape[1],
        call.layout,
        call.cache_scale,
        call.return_lse,
        batch_invariant,
    )
    out = torch.bmm(latent.transpose(0, 1), by_head[:, nope:].transpose(1, 2))
    return out.transpose(0, 1).contiguous(), lse


def _by_bounds(call: _Call, seen: Tensor, route: routing.Route) -> tuple[Tensor, Tensor]:
    """Dense or masked attention without a value of the device on the host (contract C6).

    There is room for ``max_kv_len`` keys of every request that can have a row, in groups of
    requests whose expanded keys fit the workspace. The keys of a group lie packed, and zeros behind
    them; a row of another group sees none.
    """
    out, lse = _no_keys(call)
    tokens, requests = seen.shape[0], call.block_table.shape[0]
    if 0 in (tokens, requests, call.max_kv_len):
        return out, lse
    longest = call.max_kv_len
    seen = seen.clamp(max=longest)
    request = call.row_request.clamp(0, requests - 1)
    lengths = seen.new_zeros(requests).scatter_reduce_(0, request.long(), seen, "amax")
    latent, key = call.kv_b_weight.shape[1], call.kv_b_weight.shape[0] + call.q_pe.shape[2]
    for group in row_blocks(requests, longest * out.element_size() * (latent + key)):
        inside = (request >= group.start) & (request < group.stop)
        count = group.stop - group.start
        bounds = lengths.new_zeros(count + 1)
        bounds[1:] = lengths[group].cumsum(dim=0)
        kv_c, k_pe = mla_cache_gather(
            call.cache,
            call.block_table[group],
            bounds,
            min(count, tokens) * longest,
            call.layout,
            call.cache_scale,
            latent,
            out.dtype,
        )
        ks = bounds[(request - group.start).clamp(0, count - 1)]
        part_out, part_lse = attend(
            route,
            call.q_nope,
            call.q_pe,
            kv_c,
            k_pe,
            call.kv_b_weight,
            call.indices,
            ks,
            torch.where(inside, ks + seen, ks),
            longest,
            call.scale,
            return_lse=call.return_lse,
        )
        # A row of another group adds 0, and -inf to the maximum.
        out += part_out
        torch.maximum(lse, part_lse, out=lse)
    return out, lse


def _by_request(call: _Call, seen: Tensor, route: routing.Route) -> tuple[Tensor, Tensor]:
    """Dense or masked attention, one request after another, so that one's keys are held at once."""
    out, lse = _no_keys(call)
    every = torch.ones_like(seen, dtype=torch.bool)
    for part in by_request(call.cache, call.block_table, call.row_request, seen, every):
        kv_c, k_pe = load_latents(
            call.cache,
            part.slots,
            call.layout,
            call.cache_scale,
            call.kv_b_weight.shape[1],
            out.dtype,
        )
        part_out, part_lse = attend(
            route,
            call.q_nope[part.rows],
            call.q_pe[part.rows],
            kv_c,
            k_pe,
            call.kv_b_weight,
            None if call.indices is None else call.indices[part.rows],
            torch.zeros_like(part.lens),
            part.lens,
            part.longest,
            call.scale,
            return_lse=call.return_lse,
        )
        out[part.rows] = part_out
        if call.return_lse:
            lse[part.rows] = part_lse
    return out, lse


def _no_keys(call: _Call) -> tuple[Tensor, Tensor]:
    """What rows without keys give."""
    out, lse = _fake(*call)
    return out.zero_(), lse.fill_(float("-inf"))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*args)
    tokens, heads, nope = call.q_nope.shape
    dtype = promoted_dtype(call.q_nope, call.q_pe)
    out = call.q_nope.new_empty(
        (tokens, heads, call.kv_b_weight.shape[0] // heads - nope), dtype=dtype
    )
    return out, out.new_empty((tokens, heads) if call.return_lse else (0,), dtype=wide_dtype(out))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    return None


_op = define_op(
    "mla_attention_paged(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor kv_b_weight,"
    " Tensor? indices, Tensor block_table, Tensor row_request, Tensor lens, SymInt max_kv_len,"
    " SymInt max_query_len, SymInt topk, float scale, str spec, str layout,"
    " Tensor? cache_scale=None, bool own_selection=True, bool captured=False,"
    " SymInt? capture_bound=None, bool return_lse=False) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=no_gradient,
    setup_context=_setup_context,
)
