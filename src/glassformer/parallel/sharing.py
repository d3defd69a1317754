"""Operations of a training step that involve all ranks, here for a single process; `parallel/apply.py` has those for
several."""

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
    """Returns {name: `row_squares` of the gradient} of the parameters of this process."""
    named = model.named_parameters()
    return {name: row_squares(local(one.grad)) for name, one in named if one.grad is not None}


class Sharing:
    """The work of a single process, which has the whole model and computes the whole step."""

    def build(
        self,
        config: ModelConfig,
        seed: int,
        device: str,
        autocast: torch.dtype | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Model:
        """Returns this rank's part of the model, with the weights of `config.build(seed)`, or with `given`, whole
        tensors by name. `autocast`: dtype of matmuls, None for fp32."""
        model = config.build(seed=seed)
        if given is not None:
            model.load_state_dict(dict(given))
        return model.to(device)

    def add_up(self, model: Model) -> None:
        """Sums the gradients of this rank's microbatches with those of other ranks to the gradients of the step, in
        place."""

    def squares(self, model: Model) -> Sequence[Tensor]:
        """Returns vectors of fp64, in any order, that together are `row_squares` of all gradients of the model."""
        return list(squares_here(model).values())

    def counted(self) -> AbstractContextManager[Any]:
        """Returns a context in which sums over a step's tokens, such as expert loads, are taken over all ranks
        (`parts/core/reduce.py`)."""
        return nullcontext()

    def passing(self) -> AbstractContextManager[Any]:
        """Returns a context in which sums over a pass's tokens are taken over the ranks that share its sequences."""
        return nullcontext()

    def settle(self, model: nn.Module) -> None:
        """Prepares the model for a change of its weights after passes without a backward."""
