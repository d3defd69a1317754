from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from glassformer.parts.base import BuildContext, PartConfig

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


class FFNConfig(PartConfig, axis="ffn"):
    hidden: int | None = Field(None, gt=0)
    """Width f of the hidden layer; None takes the width that keeps 8 d^2 weights."""

    def width(self, ctx: BuildContext) -> int:
        raise NotImplementedError
