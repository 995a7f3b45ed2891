"""A layer whose heads are sharded over ranks: local weights, gradients, and one selection for all.

Tensor parallelism, whether by the plan of transformers or by ``parallelize_module``, leaves the
projections of the heads with DTensor weights, one block of rows a rank, and everything before the
heads, the indexer among it, replicated.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..ops._options import current

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def _sharded(weight: Tensor) -> DTensor | None:
    if type(weight) in (Tensor, nn.Parameter):
        return None
    # Not at the top: that import takes longer than all of this package.
    from torch.distributed.tensor import DTensor

    return weight if isinstance(weight, DTensor) else None


def local_weight(weight: Tensor) -> Tensor:
    """The rows of ``weight`` that this rank holds: all of them unless it is sharded."""
    sharded = _sharded(weight)
    return weight if sharded is None else sharded.to_local()


def is_hooked(projection: nn.Linear) -> bool:
    """Whether calling ``projection`` does more than its weight says, its own sharding aside."""
    wrappers: list[object] = [
        *projection._forward_pre_hooks.values(),
        *projection._forward_hooks.values(),
    ]
    if "forward" in vars(projection):
        wrappers.append(projection.forward)
    if _sharded(projection.weight) is None:
        return bool(wrappers)
    return not all(wrapper.__module__.startswith(_WRAP_SHARDED) for wrapper in wrappers)


# Who wraps the forward of a sharded linear layer, to hand it the local weight or collect outputs.
_WRAP_SHARDED = ("torch.distributed.tensor", "transformers.distributed.")


def heads_mesh(projection: nn.Module, name: str) -> DeviceMesh | None:
    """The ranks that share the heads whose rows ``projection`` holds; None if it is not sharded.

    Args:
        projection: ``kv_b_proj``.
        name: what an error calls it.

    Raises:
        NotImplementedError: it is sharded in another way than by rows over one mesh dimension.
    """
    sharded = _sharded(cast(Tensor, projection.weight))
    if sharded is None:
        return None
    if len(sharded.placements) != 1 or not sharded.placements[0].is_shard(0):
        raise NotImplementedError(
            f"{name} must be sharded by rows over one mesh dimension, or not at all, got the"
            f" placements {sharded.placements}"
        )
    return sharded.device_mesh


def sum_gradients(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """``x``, the same on all ranks of ``mesh``, with the gradients of the ranks summed.

    A column-parallel linear layer does this to its input. Where its weight is used without calling
    it, each rank would keep the gradient through its own heads alone.
    """
    if mesh is None or not torch.is_grad_enabled() or not x.requires_grad:
        return x
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def check_one_selection(indices: Tensor | None, mesh: DeviceMesh | None, layer_idx: int) -> None:
    """Under ``ops.options(check=True)``, compare the selection with the other ranks' (C10).

    A collective call: the option has to be set on all ranks. Does nothing in traced code.

    Args:
        indices: [..., K] int32, what this rank's heads attend to, or None where they read none.
        mesh: the ranks that share the heads, or None.
        layer_idx: for the error.

    Raises:
        RuntimeError: on all ranks alike, if any two selections differ.
    """
    if mesh is None or torch.compiler.is_compiling() or not current().check:
        return
    digest = None
    if indices is not None:
        digest = hashlib.blake2b(indices.numpy(force=True).tobytes()).hexdigest()
    digests: list[str | None] = [None] * mesh.size()
    torch.distributed.all_gather_object(digests, digest, group=mesh.get_group())
    others = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise RuntimeError(
            f"layer {layer_idx}: rank {', '.join(others)} selected other keys than rank 0. Ranks"
            " that share a layer's heads must agree: their indexers' weights and inputs must be"
            " equal bit for bit"
        )
