"""Put attention modules, decoders and models that generate on our ops, and take them off again."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ._inputs import generation_masks, mask_hook, prepare_inputs
from ._interface import InterfaceConfig, is_connected, is_whole, original_config, register
from ._layers import dsa_layers, is_decoder
from ._seams import AttentionSeams, check_attention, indexer_forward, latents
from ._weights import has_own_forward


def check_layer(layer: Any) -> None:
    """Refuse an attention module whose function our ops would not reproduce.

    Raises:
        NotImplementedError: what ``check_attention`` raises, or somebody else has replaced one of
            the two methods that we would.
    """
    check_attention(layer)
    if is_connected(layer):
        return
    if "expand_kv" in vars(layer):
        raise NotImplementedError(f"layer {layer.layer_idx} must have the expand_kv of its class")
    if layer.indexer is not None and has_own_forward(layer.indexer):
        raise NotImplementedError(
            f"the indexer of layer {layer.layer_idx} must have the forward of its class"
        )


def connect(layer: Any, seam: AttentionSeams) -> None:
    """Make the attention module ``layer`` run on our ops as ``seam`` says."""
    register()
    indexer = layer.indexer
    if not is_connected(layer):
        layer.config = InterfaceConfig(layer.config)
        layer.expand_kv = latents
        if indexer is not None:
            indexer.dsa_forward = vars(indexer).get("forward")
            indexer.forward = functools.partial(indexer_forward, indexer)
    layer.dsa_layer = seam
    if indexer is not None:
        indexer.dsa_layer = seam


def disconnect(layer: Any) -> None:
    """Undo ``connect``; a module that is not connected stays as it is."""
    if not is_connected(layer):
        return
    layer.config = original_config(layer.config)
    indexer = layer.indexer
    del layer.dsa_layer, layer.expand_kv
    if indexer is not None:
        del indexer.forward, indexer.dsa_layer
        if indexer.dsa_forward is not None:
            indexer.forward = indexer.dsa_forward
        del indexer.dsa_forward


def connect_surroundings(model: nn.Module) -> None:
    """Let what ``model`` holds around its layers say in intervals what they may see.

    Decoders of which some layers are not connected are left alone: these want a mask.
    """
    for decoder in _decoders(model):
        if is_whole(decoder) and "dsa_hook" not in vars(decoder):
            decoder.dsa_hook = decoder.register_forward_pre_hook(
                mask_hook(decoder), with_kwargs=True
            )
    for generator in _generators(model):
        if is_whole(generator.base_model) and "create_masks_for_generate" not in vars(generator):
            generator.create_masks_for_generate = functools.partial(generation_masks, generator)
            # `generate` reads the names of accepted arguments from the original's signature.
            generator.prepare_inputs_for_generation = functools.update_wrapper(
                functools.partial(prepare_inputs, generator),
                generator.prepare_inputs_for_generation,
            )


def disconnect_all(model: nn.Module) -> None:
    """Take all that ``model`` holds off our ops."""
    for layer in dsa_layers(model):
        disconnect(layer)
    for decoder in _decoders(model):
        if "dsa_hook" in vars(decoder):
            decoder.dsa_hook.remove()
            del decoder.dsa_hook
    for generator in _generators(model):
        if "create_masks_for_generate" in vars(generator):
            del generator.create_masks_for_generate, generator.prepare_inputs_for_generation


def _decoders(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_decoder(module)]


def _generators(model: nn.Module) -> list[Any]:
    """The models in ``model`` that generate with a decoder of ours."""
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and module.can_generate()
        and is_decoder(module.base_model)
    ]
