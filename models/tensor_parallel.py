"""Share the heads of a model that is in memory among ranks, with DTensor."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ._sharding import heads_mesh, sum_gradients
from .layer import DSAAttention

_Model = TypeVar("_Model", bound=nn.Module)
_Styles = dict[str, type[ColwiseParallel] | type[RowwiseParallel]]

# Children of an attention module, ours or one of transformers: a rank holds a block of the heads.
_ATTENTION: _Styles = {
    "q_b_proj": ColwiseParallel,
    "q_gate_proj": ColwiseParallel,
    "kv_b_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
}
_MLP: _Styles = {
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}


def tensor_parallel(model: _Model, mesh: DeviceMesh) -> _Model:
    """Share the heads of latent attention, and each MLP, among the ranks of ``mesh``, with DTensor.

    For a model that is in memory, and for layers of our own. A checkpoint is better loaded with
    ``from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))``, which shards while
    it reads, by the plan of transformers: routed experts, embeddings and head too. Here these stay
    whole on each rank, as do the indexers, the projections to the latents, and the norms.

    Args:
        model: a model of transformers that ``enable`` accepts and that is not enabled yet, or
            anything that holds ``DSAAttention`` layers. All ranks must hold the same weights.
        mesh: of one dimension; its ranks share the heads.

    Returns:
        ``model``, changed in place.

    Raises:
        ValueError: a mesh of more dimensions, a model without latent attention, one that is enabled
            or sharded already, or heads or the width of an MLP that the ranks cannot share evenly.
        NotImplementedError: a projection that is not a plain ``nn.Linear``. Nothing is changed.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
    found = {name: module for name, module in model.named_modules() if _styles(module)}
    attention = [module for module in found.values() if _styles(module) is _ATTENTION]
    if not attention:
        raise ValueError(f"{type(model).__name__} has no layer of latent attention")
    for name, module in found.items():
        _check(name, module, mesh.size())
    for module in found.values():
        children = dict(module.named_children())
        plan: dict[str, ParallelStyle] = {
            child: style() for child, style in _styles(module).items() if child in children
        }
        parallelize_module(module, mesh, plan)
    for module in attention:
        if isinstance(module, DSAAttention):
            module.share_heads(mesh)
        rotated = cast(Any, module.config).qk_rope_head_dim
        cast(nn.Linear, module.kv_a_proj_with_mqa).register_forward_hook(
            functools.partial(_sum_rotated_gradients, mesh, rotated)
        )
    return model


def _styles(module: nn.Module) -> _Styles:
    """The children of ``module`` that are sharded, and how."""
    children = dict(module.named_children()).keys()
    if children >= {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}:
        return _ATTENTION
    return _MLP if children >= _MLP.keys() else {}


def _check(name: str, module: Any, ranks: int) -> None:
    styles = _styles(module)
    for child, projection in module.named_children():
        if child in styles and type(projection) is not nn.Linear:
            raise NotImplementedError(
                f"{child} of {name} must be a plain nn.Linear, got {type(projection).__name__}"
            )
    if styles is _MLP:
        shared, what = module.down_proj.in_features, "width"
    else:
        if "dsa_layer" in vars(module):
            raise ValueError(f"{name} is enabled: shard a model first, then enable it")
        if heads_mesh(module.kv_b_proj, f"kv_b_proj of {name}") is not None:
            raise ValueError(f"{name} is sharded already")
        shared, what = module.o_proj.in_features // module.config.v_head_dim, "number of heads"
    if shared % ranks:
        raise ValueError(
            f"the {what} of {name} must be a multiple of the {ranks} ranks that share it, got"
            f" {shared}"
        )


def _sum_rotated_gradients(
    mesh: DeviceMesh, rotated: int, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Forward hook of ``kv_a_proj_with_mqa``, for the rotated part of the keys.

    It goes to the heads as it is, through no projection that would sum the ranks' gradients.
    """
    latent, k_pe = torch.split(output, [output.shape[-1] - rotated, rotated], dim=-1)
    return torch.cat((latent, sum_gradients(k_pe, mesh)), dim=-1)
