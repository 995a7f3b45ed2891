"""The Dynamo backend ``dsafx``: Inductor with this package's passes behind the user's own.

Nothing heavy is imported here: the passes and Inductor come with the first compile.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import fx


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; ``torch.compile(fn, backend="dsafx")`` calls this.

    Args:
        gm, example_inputs: from Dynamo.
        mode: a ``torch.compile`` mode; options override what it stands for.
        options: ``specialize`` ("auto", "never"), ``fuse`` ("auto", "always", "never"),
            ``recognise`` ("auto", "never"), ``strict`` (bool), and any Inductor option. Passes that
            the user has in the pre-grad and post-grad hooks run before this package's.

    Raises:
        ValueError: an unknown mode or option, or a value that one of ours does not take.
    """
    from torch._inductor.compile_fx import compile_fx

    from .passes import _torch_compat as compat
    from .passes._log import noting_cache_hits

    if mode is not None and mode not in compat.modes():
        raise ValueError(f"unknown mode {mode!r}: {_nearest(mode, compat.modes())}")
    patches = {**compat.mode_options(mode), **inductor_options(**(options or {}))}
    with noting_cache_hits():
        compiled = compile_fx(gm, example_inputs, config_patches=patches)
    return compat.serializable(compiled)


def inductor_options(**options: Any) -> dict[str, Any]:
    """Inductor options that run this package's passes: for ``backend="inductor"`` and AOTInductor.

    Passes that the user has in these hooks, in ``options`` or else in the configuration of
    Inductor as it is now, run before this package's; neither is changed.

    Args:
        options: those of ``backend``; Inductor's own are passed through. What this function gave
            before may be among them and keeps what it chose.

    Raises:
        ValueError: an unknown option, or a value that one of ours does not take.
    """
    from .passes import _torch_compat as compat
    from .passes._report import PassOptions
    from .passes.pipeline import Pipeline, Recogniser

    names = [each.name for each in fields(PassOptions)]
    ours = {key: value for key, value in options.items() if key in names}
    patches = {key.replace("-", "_"): value for key, value in options.items() if key not in names}
    known = compat.inductor_keys()
    for key in patches:
        if key not in known:
            nearest = _nearest(key, [*names, *known], f"{', '.join(names)} and Inductor's own")
            raise ValueError(f"unknown option {key!r}: {nearest}")
    hooks = {
        name: patches.get(name, compat.current_hook(name))
        for name in (compat.PRE_GRAD_HOOK, compat.POST_GRAD_HOOK)
    }
    # A hook that this function made before says what its caller chose.
    earlier = compat.passes_in(hooks[compat.POST_GRAD_HOOK])
    chosen = [each.options for each in earlier if isinstance(each, Pipeline)]
    settings = replace([PassOptions(), *chosen][-1], **ours)
    for name, passes in zip(hooks, (Recogniser(settings), Pipeline(settings)), strict=True):
        others = [each for each in compat.passes_in(hooks[name]) if type(each) is not type(passes)]
        patches[name] = compat.append_pass(others, passes)
    return patches


def _nearest(name: str, accepted: list[str], what: str | None = None) -> str:
    """What an error says about the names that are accepted; ``what`` stands for all of them."""
    near = difflib.get_close_matches(name, accepted, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}accepted are {what or ', '.join(accepted)}"
