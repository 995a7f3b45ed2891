"""The mask interface: visibility of each query token as an interval of its request's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..ops._requests import visible


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
    built. Padding given to traced code is not read (contract C13), and overlays and padding with
    holes are no intervals: these become the mask that ``sdpa_mask`` builds. So do packed documents
    here, where ``mask_function`` hides them; ``document_intervals`` sees them before.

    Returns:
        [batch_size, 1, q_length, 2] int32, start and end of the visible keys, relative to the
        request's first key; or [batch_size, 1, q_length, kv_length] bool, True = visible.

    Raises:
        ValueError: ``attention_mask`` is not [batch_size, keys].
    """
    if attention_mask is not None and attention_mask.shape[0] != batch_size:
        raise ValueError(
            f"attention_mask must have {batch_size} rows, one for each request, got"
            f" {attention_mask.shape[0]}"
        )
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
            **{
                **kwargs,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            },
        )
        return cast(Tensor, mask)
    end = (torch.arange(1, q_length + 1, device=device) + q_offset).expand(batch_size, -1)
    start = torch.zeros_like(end)
    if padding is not None:
        first, stop = padding
        start = first[:, None].expand_as(end)
        end = torch.minimum(end, stop[:, None])
    return torch.stack((start, end), dim=-1).to(torch.int32)[:, None]


def prepared_mask(mask: Tensor) -> Tensor:
    """``mask`` as bool, True = visible, once it is known to be no more than visibility.

    Args:
        mask: bool, or additive: 0 at visible keys.

    Raises:
        TypeError: ``mask`` is neither bool nor floating point.
        ValueError: an additive one with a value between 0 and half its minimum, or above 0. Traced,
            a ``RuntimeError`` when the graph runs.
    """
    seen = visible(mask)
    if mask.dtype == torch.bool:
        return seen
    rule = (
        "an additive attention_mask must hold 0 at visible keys and its dtype's minimum or -inf"
        " elsewhere: a bias on visible keys is not supported"
    )
    biased = seen & (mask != 0)
    if is_tracing(mask):
        torch._assert_async(~biased.any(), rule)
    elif bool(biased.any()):
        raise ValueError(f"{rule}, got {float(mask[biased][0])}")
    return seen


def document_intervals(position_ids: Tensor, batch_size: int) -> Tensor:
    """What each token of packed documents sees: its own document, up to itself.

    As transformers reads positions, a document begins wherever one does not follow the one before.

    Args:
        position_ids: [batch_size or 1, S] integers.
        batch_size: requests.

    Returns:
        [batch_size, 1, S, 2] int32, start and end of the visible keys.
    """
    place = torch.arange(position_ids.shape[1], device=position_ids.device)
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    start = torch.where(steps != 1, place, 0).cummax(dim=-1).values
    intervals = torch.stack((start, (place + 1).expand_as(start)), dim=-1).to(torch.int32)
    return intervals[:, None].expand(batch_size, -1, -1, -1)


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
