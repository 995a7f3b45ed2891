"""What a route is decided from besides the batch: configuration, dimensions, text form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

from ._capabilities import KernelCapabilities, LayerCapabilities, flags

MODES = ("auto", "sparse", "masked", "dense")


@dataclass(frozen=True)
class RouteConfig:
    """The user's choices.

    mode: "auto" takes the cheapest legal route; "sparse" is top-k MQA only; "masked" and "dense"
        take that route where it is legal and raise elsewhere.
    dense_threshold: most keys a row may see for dense MHA; None is ``index_topk``, 0 turns dense
        MHA off. Above ``index_topk`` it changes the function and needs ``allow_approximate``.
    allow_approximate: full attention may stand in for the selection above ``index_topk``.
    batch_invariant: pins top-k MQA, so that a row's result does not depend on its batch (C11).
    prefill_context_parallel: ranks that share a prefill's queries; above 1 a selection is always
        produced (C5).
    decode_context_parallel: ranks that share the keys; above 1 dense and masked MHA need a kernel
        that returns the LSE, and lengths are global (C16).

    Raises:
        ValueError: an unknown mode, a negative threshold, a size below 1, or ``batch_invariant``
            together with a forced dense or masked mode.
    """

    mode: str = "auto"
    dense_threshold: int | None = None
    allow_approximate: bool = False
    batch_invariant: bool = False
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.dense_threshold is not None and self.dense_threshold < 0:
            raise ValueError(f"dense_threshold must be at least 0, got {self.dense_threshold}")
        _require_positive(self, "prefill_context_parallel", "decode_context_parallel")
        if self.batch_invariant and self.mode in ("masked", "dense"):
            raise ValueError(
                f"batch_invariant=True accepts mode='auto' or mode='sparse', got {self.mode!r}"
            )


@dataclass(frozen=True)
class RouteSpec:
    """All that is fixed for one layer on one device.

    Args:
        layer: what the layer's class declares.
        kernels: what the device's kernels offer.
        config: the user's choices.
        topk: K, the width of a selection.
        num_heads: query heads of this rank. All costs are per head, so it weighs nothing.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank: P, R, V, L; R may be 0.

    Raises:
        ValueError: a size below 1 (R: below 0), or ``dense_threshold`` above ``topk`` without
            ``allow_approximate``.
    """

    layer: LayerCapabilities
    kernels: KernelCapabilities
    config: RouteConfig
    topk: int
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int

    def __post_init__(self) -> None:
        _require_positive(
            self, "topk", "num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"
        )
        if self.qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim must be at least 0, got {self.qk_rope_head_dim}")
        threshold = self.config.dense_threshold
        if threshold is not None and threshold > self.topk and not self.config.allow_approximate:
            raise ValueError(
                f"dense_threshold must be at most index_topk={self.topk}, got {threshold}: above "
                "it dense MHA is another function than sparse attention, which only "
                "allow_approximate=True permits"
            )


def encode_spec(layer: LayerCapabilities, config: RouteConfig) -> str:
    """The layer's flags and the configuration as one line, for the ``spec`` operand of an op.

    Kernel capabilities are left out: they come from the dispatch at call time, so that moving a
    model to another device cannot make them stale. ``decode_spec`` is the inverse.
    """
    declared = ",".join(flags(layer)) or "none"
    settings = " ".join(f"{name}={value}" for name, value in vars(config).items())
    return f"{declared} {settings}"


@lru_cache(maxsize=1024)
def decode_spec(text: str) -> tuple[LayerCapabilities, RouteConfig]:
    """Read what ``encode_spec`` wrote.

    Raises:
        ValueError: an unknown, repeated or missing field, or a value that is not accepted.
    """
    declared, *settings = text.split(" ")
    names = [] if declared == "none" else declared.split(",")
    _require_names("layer flag", names, [field.name for field in fields(LayerCapabilities)])
    pairs = [setting.partition("=")[::2] for setting in settings]
    given = [name for name, _ in pairs]
    _require_names("field", given, list(_READERS))
    missing = [name for name in _READERS if name not in given]
    if missing:
        raise ValueError(f"spec lacks {', '.join(missing)}: {text!r}")
    layer = LayerCapabilities(**dict.fromkeys(names, True))
    values = {name: _read(name, value) for name, value in pairs}
    return layer, RouteConfig(**values)  # type: ignore[arg-type]


def _boolean(value: str) -> bool:
    return {"True": True, "False": False}[value]


def _optional_integer(value: str) -> int | None:
    return None if value == "None" else int(value)


_READERS: dict[str, Callable[[str], object]] = {
    "mode": str,
    "dense_threshold": _optional_integer,
    "allow_approximate": _boolean,
    "batch_invariant": _boolean,
    "prefill_context_parallel": int,
    "decode_context_parallel": int,
}


def _read(name: str, value: str) -> object:
    try:
        return _READERS[name](value)
    except (KeyError, ValueError):
        raise ValueError(f"spec field {name} has a value that is not accepted: {value!r}") from None


def _require_names(what: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"spec accepts the {what}s {', '.join(known)}, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"spec repeats the {what} {name}")


def _require_positive(obj: object, *names: str) -> None:
    for name in names:
        value = vars(obj)[name]
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
