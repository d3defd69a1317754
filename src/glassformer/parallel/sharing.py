"""Operations of a step across its ranks, for one process; `parallel/apply.py` implements them for several."""

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
    """Returns `row_squares` of this process's gradients, by the parameter's name."""
    named = model.named_parameters()
    return {name: row_squares(local(one.grad)) for name, one in named if one.grad is not None}


class Sharing:
    """A single process, which has the whole model and computes the whole step."""

    def build(
        self,
        config: ModelConfig,
        seed: int,
        device: str,
        autocast: torch.dtype | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Model:
        """Returns this rank's part of the model, with the weights of `config.build(seed)`, or `given` ones, whole and
        by name. `autocast`: dtype of matmuls, if it is not fp32."""
        model = config.build(seed=seed)
        if given is not None:
            model.load_state_dict(dict(given))
        return model.to(device)

    def add_up(self, model: Model) -> None:
        """Reduces the gradients of this rank's microbatches to those of the step."""

    def squares(self, model: Model) -> Sequence[Tensor]:
        """Returns `row_squares` of the gradients of the whole model, in any order."""
        return list(squares_here(model).values())

    def counted(self) -> AbstractContextManager[Any]:
        """Returns a context in which parts' counts of a step are over all ranks (`parts/core/reduce.py`)."""
        return nullcontext()

    def passing(self) -> AbstractContextManager[Any]:
        """Returns a context in which parts' counts of a pass are over the ranks that share its sequences."""
        return nullcontext()

    def settle(self, model: nn.Module) -> None:
        """Prepares the model for a change of its weights."""
