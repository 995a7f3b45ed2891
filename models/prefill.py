"""Run a long prompt through a model in chunks, so that memory is bounded by the chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

try:
    from transformers import Cache, DynamicCache, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "transformers 5.24 or later is needed here: pip install 'dsafx[transformers]'"
    ) from error

from .transformers import admit


class Prefilled(NamedTuple):
    """What a prompt leaves behind.

    Attributes:
        logits: [B, vocab], of the token after the prompt.
        cache: holds every token of the prompt.
    """

    logits: Tensor
    cache: Cache


@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: Tensor,
    cache: Cache | None = None,
    *,
    chunk_size: int = 2048,
    attention_mask: Tensor | None = None,
    progress: bool | None = None,
) -> Prefilled:
    """Run ``input_ids`` through ``model`` in chunks and fill ``cache``: the same as one pass.

    ``generate`` goes on from the cache if its ``input_ids`` hold all tokens so far and at least one
    that the cache does not. Given none, transformers runs the whole prompt a second time::

        logits, cache = dsafx.prefill(model, input_ids)
        tokens = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=-1)
        model.generate(tokens, cache=cache)

    or, where ``generate`` is to choose the first new token as well::

        _, cache = dsafx.prefill(model, input_ids[:, :-1])
        model.generate(input_ids, cache=cache)

    Args:
        model: a transformers model that can generate; plain, enabled or compiled.
        input_ids: [B, T] int32 or int64, the tokens that ``cache`` does not hold yet, T at least 1.
        cache: what to fill and go on from; None means a new ``DynamicCache``.
        chunk_size: most tokens of a request in one forward; the last chunk may be shorter.
        attention_mask: [B, cached + T], 0 at padding, which must be on the left; None means that
            there is none.
        progress: whether to draw a bar on stderr, with the library rich. None means: if there is
            more than one chunk, rich is installed and stderr is a terminal.

    Returns:
        The logits after the last token, and the cache.

    Raises:
        TypeError: a model, a cache or a dtype that is not accepted.
        ValueError: a shape, a token id or a chunk size that is not accepted, padding on the right,
            a prompt that ``cache`` has no room for, or a forced mode that is illegal at its length.
        ImportError: ``progress=True`` without rich.

    All of these are raised before ``model`` runs. Token ids and padding are checked on CPU tensors.
    """
    host = _host(model)
    _check_tokens(host, input_ids, chunk_size)
    if cache is None:
        cache = DynamicCache(config=host.config)
    elif not isinstance(cache, Cache):
        raise TypeError(f"cache must be a transformers Cache, got {type(cache).__name__}")
    batch, new = input_ids.shape
    cached = int(cache.get_seq_length())
    mask = _checked_mask(attention_mask, input_ids, cached)
    room = cache.get_max_length() if len(cache.layers) else -1
    if 0 <= room < cached + new:
        raise ValueError(
            f"cache has room for {room} tokens, got {cached} cached and {new} new ones"
        )
    if cache.batch_size not in (-1, batch):
        raise ValueError(f"cache holds {cache.batch_size} requests, got {batch} in input_ids")
    admit(host, max_kv_len=max(room, cached + new), max_query_len=min(chunk_size, new))

    positions = (mask.long().cumsum(dim=-1) - 1).masked_fill(mask == 0, 0)
    with _bar(progress, new, chunks=-(-new // chunk_size)) as advance:
        for start in range(0, new, chunk_size):
            stop = min(start + chunk_size, new)
            # As `generate` does it: an enabled model gets intervals in place of the mask here,
            # outside of what may be compiled.
            inputs = cast(Any, host).prepare_inputs_for_generation(
                input_ids[:, start:stop],
                cache=cache,
                attention_mask=mask[:, : cached + stop],
                position_ids=positions[:, cached + start : cached + stop],
                use_cache=True,
                logits_to_keep=1,
                is_first_iteration=True,
            )
            last = model(**inputs, return_dict=True)
            advance(stop - start)
    return Prefilled(last.logits[:, -1], cache)


def _host(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, which ``torch.compile`` wraps as the child ``_orig_mod``."""
    host = dict(model.named_children()).get("_orig_mod", model)
    if not isinstance(host, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if not host.can_generate() or host.config.is_encoder_decoder:
        raise TypeError(
            f"model must be a decoder with a language model head, got {type(host).__name__}"
        )
    return host


def _check_tokens(host: PreTrainedModel, input_ids: Tensor, chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids must be int32 or int64, got {input_ids.dtype}")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids must be [B, T] with at least one token, got {tuple(input_ids.shape)}"
        )
    if input_ids.device.type == "cpu":
        vocabulary = cast(nn.Embedding, host.get_input_embeddings()).num_embeddings
        low, high = (int(bound) for bound in input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"input_ids must lie in [0, {vocabulary}), got values from {low} to {high}"
            )


def _checked_mask(attention_mask: Tensor | None, input_ids: Tensor, cached: int) -> Tensor:
    batch, new = input_ids.shape
    if attention_mask is None:
        return input_ids.new_ones((batch, cached + new))
    if attention_mask.shape != (batch, cached + new):
        raise ValueError(
            f"attention_mask must be [{batch}, {cached + new}], for {cached} cached and {new} new"
            f" tokens, got {tuple(attention_mask.shape)}"
        )
    if attention_mask.device.type == "cpu" and not bool((attention_mask[:, -1] != 0).all()):
        raise ValueError("attention_mask must be 1 at the last token: padding goes on the left")
    return attention_mask


@contextlib.contextmanager
def _bar(progress: bool | None, tokens: int, chunks: int) -> Iterator[Callable[[int], object]]:
    """What to call with the number of tokens that were run since the last call."""
    if progress is False or (progress is None and chunks == 1):
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError as error:
        if progress is None:
            yield _ignore
            return
        raise ImportError("progress=True needs rich: pip install 'dsafx[cli]'") from error
    console = Console(stderr=True)
    if progress is None and not console.is_terminal:
        yield _ignore
        return
    columns = ("prefill", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("prefill", total=tokens)
        yield lambda done: shown.advance(task, done)


def _ignore(done: int) -> None:
    pass
