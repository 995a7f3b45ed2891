"""The mask interface: visibility of each query token as an interval of its request's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """What transformers' mask factory calls in place of ``sdpa_mask``.

    Causality and padding that is one run of tokens a row are intervals, and no ``S x T`` mask is
    built. Padding given to traced code is not read (contract C13), and packed documents, overlays
    and padding with holes are no intervals: these become the mask that ``sdpa_mask`` builds.

    Returns:
        [batch_size, 1, q_length, 2] int32, start and end of the visible keys, relative to the
        request's first key; or [batch_size, 1, q_length, kv_length] bool, True = visible.
    """
    padding = None
    if attention_mask is not None and not is_tracing(attention_mask):
        padding = _padding_runs(attention_mask, kv_length)
    causal = mask_function is causal_mask_function and kv_offset == 0 and not use_vmap
    if not causal or (attention_mask is not None and padding is None):
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=cast(int, q_offset),
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **{**kwargs, "allow_is_causal_skip": False},
        )
        return cast(Tensor, mask)
    end = (torch.arange(1, q_length + 1, device=device) + q_offset).expand(batch_size, -1)
    start = torch.zeros_like(end)
    if padding is not None:
        first, stop = padding
        start = first[:, None].expand_as(end)
        end = torch.minimum(end, stop[:, None])
    return torch.stack((start, end), dim=-1).to(torch.int32)[:, None]


def _padding_runs(attention_mask: Tensor, kv_length: int) -> tuple[Tensor, Tensor] | None:
    """First token and end of the run of each row, [B] int64, or None if a row has a hole.

    Reads one value from the device.
    """
    mask = attention_mask[:, :kv_length] != 0
    width = mask.shape[1]
    place = torch.arange(width, device=mask.device)
    first = torch.where(mask, place, width).amin(dim=-1)
    stop = torch.where(mask, place + 1, 0).amax(dim=-1)
    empty = stop == 0
    one_run = empty | (stop - first == mask.sum(dim=-1))
    if not bool(one_run.all()):
        return None
    return torch.where(empty, 0, first), stop
