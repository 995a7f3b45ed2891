"""Blocks of rows that keep a kernel inside its workspace budget."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from . import _options


def row_blocks(rows: int, bytes_per_row: int) -> Iterator[slice]:
    """Slices of consecutive rows whose workspace fits the budget; at least one row each."""
    budget = _options.current().workspace_bytes
    step = max(1, budget // max(1, bytes_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def key_span(ks: Tensor, ke: Tensor) -> tuple[int, int]:
    """The smallest range of packed keys that these rows see; reads the device."""
    seen = ks < ke
    if not bool(seen.any()):
        return 0, 0
    return int(ks[seen].min()), int(ke[seen].max())


def checks_values(tensor: Tensor) -> bool:
    """Whether values in ``tensor`` are checked: always on the CPU, elsewhere if asked (C23)."""
    return tensor.device.type == "cpu" or _options.current().check


def check_interval_values(ks: Tensor, ke: Tensor, keys: int, max_kv_len: int | None = None) -> None:
    """Raise ``ValueError`` where an interval leaves the packed keys or exceeds ``max_kv_len``."""
    if ks.shape[0] == 0 or not checks_values(ks):
        return
    first, last = key_span(ks, ke)
    if first < 0 or last > keys:
        raise ValueError(
            f"ks and ke must stay within the {keys} packed keys, got [{first}, {last})"
        )
    if max_kv_len is not None:
        longest = int((ke - ks).max())
        if longest > max_kv_len:
            raise ValueError(
                f"max_kv_len must bound ke - ks of every row, got {max_kv_len} for a row of"
                f" {longest}"
            )
