"""Peers of ``gpu.py`` that are not plain PyTorch: transformers' own code, and ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _gpu_setting import Peer, Scene
from torch import Tensor

COMPILED = "torch.compile of plain PyTorch"
TRANSFORMERS = "transformers"


def compiled(scene: Scene, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for the shapes of this case."""
    made: Callable[..., Any] = torch.compile(
        function, backend=scene.machine.backend, fullgraph=True, dynamic=False
    )
    return made


def plain(scene: Scene, function: Callable[..., Any], *args: Any, nbytes: int) -> Peer:
    """``function`` compiled, on ``args``. nbytes: its computed peak over them."""
    return Peer(COMPILED, functools.partial(compiled(scene, function), *args), nbytes)


def score_and_select(scene: Scene) -> Peer:
    """The end of transformers' indexer: it holds the scores of all heads, twice."""
    nbytes = 2 * 4 * scene.tokens * scene.keys * scene.dims.index_n_heads
    try:
        import _peers as peers
    except ImportError as error:
        return _missing(error)
    dims = scene.dims
    indexer = SimpleNamespace(softmax_scale=dims.index_head_dim**-0.5, index_topk=dims.index_topk)
    q, k, weights = scene.index_operands
    head_weights = weights * dims.index_head_dim**0.5
    # Made by the first call, outside of what is timed: a model makes it once for all layers.
    mask = functools.cache(lambda: visible(scene)[None])

    def call() -> Tensor:
        found = peers.score_and_select(indexer, q[None], k[None], head_weights[None], mask())
        return found[0]

    return Peer(TRANSFORMERS, call, nbytes)


def attend(scene: Scene, q: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor) -> Peer:
    """transformers from the cached latents on: expands all keys, and masks what is not selected."""
    dims = scene.dims
    wide = scene.tokens * scene.keys
    expanded = 2 * scene.keys * dims.num_attention_heads * (dims.qk_head_dim + dims.v_head_dim)
    # Unlike head widths take a path that may hold all scores, twice; the mask is there as int64.
    alike = dims.qk_head_dim == dims.v_head_dim
    nbytes = 2 * expanded + 10 * wide + (0 if alike else 4 * wide * dims.num_attention_heads)
    if scene.case.heads is not None:
        return Peer(TRANSFORMERS, None, nbytes, "its layer has the heads of the whole model")
    try:
        import _peers as peers

        attention = transformers_attention(scene)
    except ImportError as error:
        return _missing(error)
    attention.kv_b_proj.weight.copy_(weight)
    # Ids alone: a row with fewer keys names its first one again, which is visible.
    indices = scene.indices.clamp(min=0)[None]
    operands = q.transpose(0, 1)[None], kv_c[None, None], k_pe[None, None]
    mask = functools.cache(lambda: visible(scene)[None, None])

    def call() -> Tensor:
        return peers.attend(attention, *operands, indices, mask())

    return Peer(TRANSFORMERS, call, nbytes)


def transformers_attention(scene: Scene) -> Any:
    """The attention module of the family, with random weights on the device.

    Raises:
        ImportError: transformers is missing or does not know the family yet.
    """
    import _families as families

    with scene.machine.device, torch.no_grad():
        layer = families.Layer(scene.case.family, scene.dims, scene.dtype)
    return families.attention_of(layer.plain)


def visible(scene: Scene) -> Tensor:
    """[T, S] bool, what each row of one request sees."""
    ks, ke = scene.interval
    key = torch.arange(scene.keys, device=ks.device)
    return (key >= ks[:, None]) & (key < ke[:, None])


def _missing(error: ImportError) -> Peer:
    return Peer(TRANSFORMERS, None, 0, f"not to be had here: {error}")
