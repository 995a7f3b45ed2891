"""One way to define an op: schema, fake, reference and gradient side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from . import providers

NAMESPACE = "dsafx"
Body = TypeVar("Body", bound=Callable[..., Any])


def define_op(
    schema: str,
    *,
    reference: Body,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Body:
    """Register ``dsafx::<schema>`` and return its default overload, called as ``reference`` is.

    ``reference`` runs on every device for which no provider steps forward; ``fake`` gives shapes,
    dtypes, strides and devices from symbolic inputs and never looks at data (contract C17).
    Autocast is off inside ``reference``, so that the output dtype follows the schema in eager and
    compiled code alike (C18).
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, schema[len(name) :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd", _dispatched(name, reference))
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return cast(Body, getattr(getattr(torch.ops, NAMESPACE), name).default)


def _dispatched(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def run(*args: Any) -> Any:
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        body = providers.kernel(name, device, args) or reference
        if not torch.is_autocast_enabled(device):
            return body(*args)
        with torch.autocast(device, enabled=False):
            return body(*args)

    return run
