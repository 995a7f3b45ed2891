"""The Dynamo backend ``dsafx``: Inductor with this package's passes behind the user's own.

Nothing heavy is imported here: the passes and Inductor come with the first compile.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import fx

# Indexer classes of transformers whose forward this package replaces when a model is enabled.
_INDEXERS = frozenset({"DeepseekV32Indexer", "GlmMoeDsaIndexer"})


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
        options: ``specialize`` ("auto", "never"), ``fuse`` ("auto", "always", "never"), ``strict``
            (bool), and any Inductor option. Passes that the user has in the post-grad hook run
            before this package's.

    Raises:
        ValueError: an unknown option, or a value that one of ours does not take.
    """
    from torch._inductor.compile_fx import compile_fx

    from .passes import _torch_compat as compat

    patches = {**compat.mode_options(mode), **inductor_options(**(options or {}))}
    _notice_model_that_was_not_enabled(gm)
    return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=patches))


def inductor_options(**options: Any) -> dict[str, Any]:
    """Inductor options that run this package's passes: for ``backend="inductor"`` and AOTInductor.

    Args:
        options: those of ``backend``; Inductor's own are passed through.

    Raises:
        ValueError: an unknown option, or a value that one of ours does not take.
    """
    from .passes import _torch_compat as compat
    from .passes._report import PassOptions
    from .passes.pipeline import Pipeline

    names = [each.name for each in fields(PassOptions)]
    ours = {key: value for key, value in options.items() if key in names}
    patches = {key.replace("-", "_"): value for key, value in options.items() if key not in names}
    known = compat.inductor_keys()
    for key in patches:
        if key not in known:
            raise ValueError(_unknown_option(key, [*names, *known]))
    existing = patches.get(compat.POST_GRAD_HOOK, compat.current_hook())
    patches[compat.POST_GRAD_HOOK] = compat.append_pass(existing, Pipeline(PassOptions(**ours)))
    return patches


def _unknown_option(key: str, accepted: list[str]) -> str:
    near = difflib.get_close_matches(key, accepted, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown option {key!r}: {meant}accepted are specialize, fuse, strict and Inductor's own"
    )


def _notice_model_that_was_not_enabled(gm: fx.GraphModule) -> None:
    """Say once that a DSA model of transformers compiles as under Inductor: nobody enabled it."""
    indexers = _INDEXERS & _module_classes(gm)
    if indexers and not _has_our_ops(gm):
        _warn_once(min(indexers))


def _module_classes(gm: fx.GraphModule) -> set[str]:
    """Names of the module classes in which the graph's nodes were made."""
    names: set[str] = set()
    for node in gm.graph.nodes:
        for _, kind in node.meta.get("nn_module_stack", {}).values():
            names.add(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
    return names


def _has_our_ops(gm: fx.GraphModule) -> bool:
    return any(
        str(node.target).startswith("dsafx.")
        for module in gm.modules()
        if isinstance(module, type(gm))
        for node in module.graph.nodes
    )


@lru_cache(maxsize=1)
def _warn_once(indexer: str) -> None:
    warnings.warn(
        f"the model has {indexer} layers but was not enabled, so it compiles as under Inductor; "
        "call dsafx.enable(model) before torch.compile, or dsafx.compile(model)",
        stacklevel=2,
    )
