"""Which layers share a selection."""

from __future__ import annotations

import pytest

from dsafx import routing


def full_layers(schedule: tuple[str, ...]) -> list[int]:
    return [layer for layer, kind in enumerate(schedule) if kind == "full"]


def test_the_schedule_of_glm_5_2_has_twenty_one_full_layers():
    schedule = routing.index_schedule(78, index_topk_freq=4, index_skip_topk_offset=3)
    assert full_layers(schedule) == [0, 1, 2, *range(6, 78, 4)]
    assert len(full_layers(schedule)) == 21
    assert full_layers(routing.index_schedule(78, index_topk_freq=4)) == [0, *range(1, 78, 4)]


@pytest.mark.parametrize("freq", [None, 0, 1])
def test_without_a_frequency_every_layer_is_full(freq: int | None):
    assert routing.index_schedule(3, index_topk_freq=freq) == ("full", "full", "full")


def test_indexer_types_win_over_the_pattern_and_that_over_the_frequency():
    types = ["full", "shared", "shared"]
    assert routing.index_schedule(3, types, "FFF", 1) == ("full", "shared", "shared")
    assert routing.index_schedule(3, None, "FFS", 1) == ("full", "full", "shared")
    assert routing.index_schedule(3, None, ["F", "S", "F"]) == ("full", "shared", "full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "SFFS"}, "pattern must make layer 0 full.*got 'SFFS'"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "indexer_types must make layer 0 full"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "offset must make layer 0 full"),
        ({"pattern": "FS"}, "pattern must have one entry for each of 4 layers, got 2"),
        ({"indexer_types": ["full"] * 5}, "indexer_types must have one entry .* 4 layers, got 5"),
        ({"pattern": "FSXF"}, "pattern accepts 'F' and 'S', got 'X' for layer 2"),
        ({"indexer_types": ["full", "F", "full", "full"]}, "got 'F' for layer 1"),
        ({"index_topk_freq": -4}, "index_topk_freq must be at least 0, got -4"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        routing.index_schedule(4, **arguments)


def test_a_model_has_layers():
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        routing.index_schedule(0)


def test_a_shared_layer_is_led_by_the_nearest_full_one_before_it():
    assert routing.leaders(("full", "full", "shared", "shared", "full")) == (0, 1, 1, 1, 4)
    with pytest.raises(ValueError, match="schedule must make layer 0 full"):
        routing.leaders(("shared", "full"))
