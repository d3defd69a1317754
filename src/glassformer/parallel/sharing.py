"""What a step asks of the ranks that share it, answered for one process; `parallel/apply.py` answers for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.parallel.sums import local, row_squares

if TYPE_CHECKING:
    from glassformer.model import Model


def squares_here(model: nn.Module) -> dict[str, Tensor]:
    """Of what lies here, by the parameter's name."""
    named = model.named_parameters()
    return {name: row_squares(local(one.grad)) for name, one in named if one.grad is not None}


class Sharing:
    """One process has all of the model and computes all of a step."""

    def build(
        self,
        config: ModelConfig,
        seed: int,
        device: str,
        autocast: torch.dtype | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Model:
        """This rank's part of the model, with the weights that `config.build(seed)` has, or those `given`, whole and by
        name. `autocast`: what its products run in, where that is not fp32."""
        model = config.build(seed=seed)
        if given is not None:
            model.load_state_dict(dict(given))
        return model.to(device)

    def add_up(self, model: Model) -> None:
        """Gradients of this rank's atoms become those of the step."""

    def squares(self, model: Model) -> Sequence[Tensor]:
        """`row_squares` of the gradients of the whole model, in any order."""
        return list(squares_here(model).values())

    def counted(self) -> AbstractContextManager[Any]:
        """Inside, what parts count of a step is that of all ranks (`parts/core/reduce.py`)."""
        return nullcontext()

    def passing(self) -> AbstractContextManager[Any]:
        """Inside, what parts count of a pass is that of the ranks which share its sequences."""
        return nullcontext()

    def settle(self, model: nn.Module) -> None:
        """To be called before weights move."""
