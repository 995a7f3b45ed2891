"""The model types of transformers that select keys with an indexer, and what is done with each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model type whose attention runs on our ops.

    Attributes:
        index_rope_style: pairing of the rotated dims of the indexer's queries and keys. It is a
            property of the model type: no config key of a released checkpoint is read by the model
            code that the checkpoint was made for.
        shares_selection: whether its config may let a layer take the selection of an earlier one.
    """

    index_rope_style: str
    shares_selection: bool = False


SUPPORTED: dict[str, Family] = {
    "axk2": Family("half"),
    "deepseek_v32": Family("half"),
    "glm_moe_dsa": Family("interleaved_to_half", shares_selection=True),
}

_COMPRESSED = (
    "its indexer selects compressed entries, each made of several tokens, and not single keys"
)
_WINDOWED = (
    "it mixes selecting layers with sliding-window layers, which select nothing and have head sizes"
    " and RoPE of their own"
)
_SINKS = (
    "its attention adds a learned sink to each head's softmax, and its indexer rotates the last"
    " dims and not the first"
)
_NO_LATENT = (
    "its indexer reads the hidden states and not a query latent, it rescales queries by position,"
    " and some layers have no RoPE or take the keys of another layer"
)
_POOLED = "its indexer pools keys and selects whole pools, between layers of linear attention"
_BLOCKS = "its indexer selects blocks of keys for each group of query heads, and it has no latents"
_QSA = (
    "its indexer selects compressed blocks of keys, between layers of linear attention, and it has"
    " no latents"
)

REFUSED: dict[str, str] = {
    "deepseek_v4": _COMPRESSED,
    "dots3_note": _WINDOWED,
    "dots3_note_text": _WINDOWED,
    "glm5_next": _POOLED,
    "glm5_next_text": _POOLED,
    "hy_v4": _SINKS,
    "hy_v4_vl": _SINKS,
    "hy_v4_vl_text": _SINKS,
    "minimax_m3_vl": _BLOCKS,
    "minimax_m3_vl_text": _BLOCKS,
    "mistral_large4": _NO_LATENT,
    "mistral_large4_text": _NO_LATENT,
    "qwen4_exp": _QSA,
    "qwen4_exp_text": _QSA,
}
"""Model type to the reason why its function is not the one that our ops compute."""


def family(model_type: object) -> Family:
    """The supported family of ``model_type``, the value of that key in a config.

    Raises:
        NotImplementedError: a type that selects keys in another way, with the reason.
        ValueError: any other type.
    """
    accepted = ", ".join(SUPPORTED)
    if isinstance(model_type, str):
        if model_type in SUPPORTED:
            return SUPPORTED[model_type]
        if model_type in REFUSED:
            raise NotImplementedError(
                f"model_type {model_type} is not supported: {REFUSED[model_type]}."
                f" Supported are {accepted}"
            )
    raise ValueError(f"model_type must be one of {accepted}, got {model_type!r}")
