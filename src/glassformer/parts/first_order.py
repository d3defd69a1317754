"""Gradients computed by hand, which have no gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from glassformer.parts.precision import traced


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method `backward` of an autograd function so that it raises RuntimeError if its result should have a
    gradient (`create_graph=True`). Torch's `once_differentiable` only raises on some ways back: on others a second
    derivative lacks a term, without an error."""

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not traced():
            name = backward.__qualname__.partition(".")[0].lstrip("_")
            raise RuntimeError(f"create_graph=True: {name} has a first derivative only")
        with torch.no_grad():
            return backward(ctx, *grads)

    return call
