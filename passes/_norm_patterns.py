"""The norms and rotations of transformers' DSA models as Dynamo traces them.

Source: transformers 5.24, ``GlmMoeDsaRMSNorm``, ``apply_rotary_pos_emb_interleave`` and
``apply_rotary_pos_emb``.
"""

from __future__ import annotations

import torch

from ._match import Pattern, Var, call

_WIDE = call("to", Var("x"), torch.float32, bind="wide")
RMS_NORM = call(
    "mul",
    Var("weight"),
    call(
        "to",
        call(
            "mul",
            _WIDE,
            call(
                "rsqrt",
                call(
                    "add",
                    call("mean", call("pow", Var("wide"), 2), -1, keepdim=True),
                    Var("eps"),
                ),
            ),
        ),
        Var("dtype"),
    ),
)
LAYER_NORM = call("layer_norm", Var("x"), (Var("size"),), Var("weight"), Var("bias"), Var("eps"))


def _half(angles: str) -> Pattern:
    """The first half of the angles, the second being a copy of it, with a dim for the heads."""
    first = call("getitem", Var(angles), (..., slice(None, Var("half"), None)))
    return call("unsqueeze", first, Var("heads_dim"))


def _every_second(start: int) -> Pattern:
    return call("getitem", Var("x"), (..., slice(start, None, 2)))


_EVEN, _ODD, _COS, _SIN = _every_second(0), _every_second(1), _half("cos"), _half("sin")
INTERLEAVED_TO_HALF = call(
    "cat",
    [
        call("sub", call("mul", _EVEN, _COS), call("mul", _ODD, _SIN)),
        call("add", call("mul", _ODD, _COS), call("mul", _EVEN, _SIN)),
    ],
    dim=-1,
)

_TURNED = call(
    "cat",
    (
        call("neg", call("getitem", Var("x"), (..., slice(Var("half"), None, None)))),
        call("getitem", Var("x"), (..., slice(None, Var("half"), None))),
    ),
    dim=-1,
)


def _doubled(angles: str) -> Pattern:
    """Angles of which both halves are seen to be the same, with a dim for the heads."""
    both = call("cat", (Var("frequencies"), Var("frequencies")), dim=-1)
    scaled = call("mul", call(angles, both), Var("attention_scaling"))
    cast = call("to", scaled, dtype=Var("angle_dtype"), bind=angles)
    return call("unsqueeze", cast, Var("heads_dim"))


HALF_SPLIT = call(
    "add",
    call("mul", Var("x"), _doubled("cos")),
    call("mul", _TURNED, _doubled("sin")),
)
