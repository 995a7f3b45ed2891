"""Which layers own an indexer and which read the selection of a layer before them (C15)."""

from __future__ import annotations

from collections.abc import Sequence

FULL = "full"
SHARED = "shared"

_LETTERS = {"F": FULL, "S": SHARED}


def index_schedule(
    num_layers: int,
    indexer_types: Sequence[str] | None = None,
    pattern: str | Sequence[str] | None = None,
    index_topk_freq: int | None = None,
    index_skip_topk_offset: int = 2,
) -> tuple[str, ...]:
    """The kind of each layer: "full" scores its own selection, "shared" reads the last full one's.

    ``indexer_types`` wins over ``pattern``, which wins over the frequency. By frequency, layer i is
    shared iff ``max(i - index_skip_topk_offset + 1, 0) % index_topk_freq != 0``; a frequency of
    None, 0 or 1 makes every layer full. With frequency 4 and offset 3 (GLM-5.2), layers 0, 1, 2, 6,
    10, 14, ... are full.

    Args:
        num_layers: decoder layers.
        indexer_types: "full" or "shared" for each layer.
        pattern: "F" or "S" for each layer, as one string or a sequence of letters.
        index_topk_freq: layers that one selection serves.
        index_skip_topk_offset: position from which layers are counted.

    Returns:
        ``num_layers`` strings.

    Raises:
        ValueError: ``num_layers`` below 1, a negative frequency, a list of the wrong length, an
            unknown kind, or a first layer that is shared.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    if indexer_types is not None:
        kinds = {FULL: FULL, SHARED: SHARED}
        return _listed("indexer_types", indexer_types, kinds, num_layers)
    if pattern is not None:
        return _listed("pattern", pattern, _LETTERS, num_layers)
    if not index_topk_freq:
        return (FULL,) * num_layers
    if index_topk_freq < 0:
        raise ValueError(f"index_topk_freq must be at least 0, got {index_topk_freq}")
    counted = (max(layer - index_skip_topk_offset + 1, 0) for layer in range(num_layers))
    schedule = tuple(SHARED if count % index_topk_freq else FULL for count in counted)
    _require_leader("index_skip_topk_offset", str(index_skip_topk_offset), schedule)
    return schedule


def leaders(schedule: Sequence[str]) -> tuple[int, ...]:
    """For each layer the layer whose selection it reads: the nearest full one, itself included.

    Raises:
        ValueError: an unknown kind, or a first layer that is shared.
    """
    kinds = _listed("schedule", schedule, {FULL: FULL, SHARED: SHARED}, len(schedule))
    result: list[int] = []
    for layer, kind in enumerate(kinds):
        result.append(layer if kind == FULL else result[-1])
    return tuple(result)


def _listed(
    name: str, values: str | Sequence[str], kinds: dict[str, str], num_layers: int
) -> tuple[str, ...]:
    if len(values) != num_layers:
        raise ValueError(
            f"{name} must have one entry for each of {num_layers} layers, got {len(values)}"
        )
    for layer, value in enumerate(values):
        if value not in kinds:
            raise ValueError(
                f"{name} accepts {' and '.join(map(repr, kinds))}, got {value!r} for layer {layer}"
            )
    schedule = tuple(kinds[value] for value in values)
    _require_leader(name, repr(values), schedule)
    return schedule


def _require_leader(name: str, got: str, schedule: tuple[str, ...]) -> None:
    if schedule and schedule[0] == SHARED:
        raise ValueError(f"{name} must make layer 0 full, for no layer precedes it; got {got}")
