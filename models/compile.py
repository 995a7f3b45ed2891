"""Enable a transformers model and compile it in place."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel

from .transformers import enable, enabled

_Model = TypeVar("_Model", bound=PreTrainedModel)


def compile(model: _Model, **kwargs: Any) -> _Model:
    """``enable`` plus ``model.compile(backend="dsafx")``, in place: ``generate`` runs compiled.

    ``generate`` then compiles nothing by itself: its own choice of what and how to compile would
    trace into this one and take another backend. After ``disable`` the model is still compiled, as
    the model that it was before. Dynamo counts the recompiles of all transformers models in a
    process together, since they share their outermost function; past its limit
    (``torch._dynamo.config.recompile_limit``) a call runs eager, with the same result.

    Args:
        model: what ``enable`` accepts; one that is enabled already keeps its mode.
        kwargs: of ``torch.compile``, such as ``dynamic``, ``fullgraph`` or ``options``.

    Returns:
        ``model``, changed in place.

    Raises:
        TypeError: ``backend`` is given, or ``model`` is not a transformers model.
        ValueError, NotImplementedError: what ``enable`` raises.
    """
    if "backend" in kwargs:
        raise TypeError(
            f'the backend is "dsafx", got {kwargs["backend"]!r}: for another, call torch.compile on'
            " an enabled model"
        )
    if not enabled(model):
        enable(model)
    model.compile(backend="dsafx", **kwargs)
    if model.can_generate():
        model.generation_config.disable_compile = True
    return model
