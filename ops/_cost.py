"""The cost model of the routes, evaluated once per spec into integers (contract C1).

Multiply-adds per head of one request with ``q`` query tokens and ``kv`` visible keys, with P, R, V
and L the nope, rope, value and latent widths, E = P + V, and K = ``index_topk``::

    dense  = kv * L * E  +  q * kv * (P + R + V)              expand all latents, then MHA
    masked = kv * L * E  +  q * kv * (P + R + V)              the same; it also needs the selection
    sparse =  q * L * E  +  q * min(kv, K) * (2 * L + R)      absorb the query, then top-k MQA

Causality halves the products of all routes alike and is left out. A provider may weigh the five
terms, in the order expand, dense, masked, absorb, sparse; for ``reference`` all weights are 1.

**Dense, for kv <= K.** With unit weights, dense <= sparse iff::

    kv * L * E  <=  q * (L * E + kv * (2 * L - E))

A fresh prefill has kv <= q, so its left side is at most ``q * L * E``: dense is cheaper at every
length when E < 2 * L (``fresh_pays``). Otherwise the query must have at least
``kv * L * E / (L * E + kv * (2 * L - E))`` tokens. That grows with kv, so its value at the longest
dense length, rounded up, is safe for all shorter ones (``dense_min_query``). A decode row (q = 1)
stays below it. Where the denominator is not positive, dense is never cheaper.
Above K dense is another function that only the user can ask for (``allow_approximate``), and the
threshold taken at K then merely keeps decode rows out.

**Masked, for scored rows.** A fresh prefill again pays ``kv * L * E <= q * L * E``, so masked is
cheaper if ``kv * (P + R + V) <= K * (2 * L + R)`` (``masked_max_kv``). With E >= 2 * L it is never
cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._route_spec import RouteSpec


@dataclass(frozen=True)
class CostConstants:
    """Integer weights of the cost terms for one provider's kernels.

    Raise ``version`` with any change, so that a compiled artefact made under the old weights is
    told from one made under the new.
    """

    version: int = 1
    expand: int = 1
    dense: int = 1
    masked: int = 1
    absorb: int = 1
    sparse: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


REFERENCE_COSTS = CostConstants()


@dataclass(frozen=True)
class Thresholds:
    """What ``decide`` compares lengths with.

    dense_limit: most keys a row may see for dense MHA; None is no limit.
    fresh_pays: dense and masked MHA are cheaper for a fresh prefill (no cached prefix).
    dense_min_query: query tokens from which dense MHA is cheaper at any legal length; None: never.
    masked_max_kv: keys up to which masked MHA is cheaper for a fresh prefill.
    """

    dense_limit: int | None
    fresh_pays: bool
    dense_min_query: int | None
    masked_max_kv: int


@lru_cache(maxsize=1024)
def thresholds(spec: RouteSpec) -> Thresholds:
    """The integers of ``spec``; the module's docstring derives them."""
    costs = spec.kernels.costs
    latent = spec.kv_lora_rank
    expanded = spec.qk_nope_head_dim + spec.v_head_dim
    expand = costs.expand * latent * expanded
    absorb = costs.absorb * latent * expanded
    per_key_dense = costs.dense * (expanded + spec.qk_rope_head_dim)
    per_key_masked = costs.masked * (expanded + spec.qk_rope_head_dim)
    per_key_sparse = costs.sparse * (2 * latent + spec.qk_rope_head_dim)

    limit = dense_limit(spec)
    longest = spec.topk if limit is None else min(limit, spec.topk)
    gain = absorb + longest * (per_key_sparse - per_key_dense)
    masked_max_kv = 0
    if expand <= absorb and per_key_masked < per_key_sparse:
        masked_max_kv = spec.topk * per_key_sparse // per_key_masked
    return Thresholds(
        dense_limit=limit,
        fresh_pays=expand <= absorb and per_key_dense < per_key_sparse,
        dense_min_query=-(-longest * expand // gain) if gain > 0 else None,
        masked_max_kv=masked_max_kv,
    )


def dense_limit(spec: RouteSpec) -> int | None:
    """Most keys a row may see for dense MHA (contract C3 and C4); None is no limit.

    ``min(dense_threshold, K)``; under ``allow_approximate`` the threshold itself, and with
    ``mode="dense"`` but no threshold there is none.
    """
    config = spec.config
    if config.dense_threshold is not None:
        return config.dense_threshold
    if config.mode == "dense" and config.allow_approximate:
        return None
    return spec.topk
