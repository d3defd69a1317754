"""Base of the configs of optimizers."""

from __future__ import annotations

from inspect import unwrap
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch.optim import Optimizer

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.core.base import PartConfig
from glassformer.parts.mup import parameter_groups

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moving average."""
Groups = list[dict[str, Any]]
"""`param_groups` of torch.optim: `params`, `lr`, `weight_decay`, and `scale`, the group's multiple of the rate."""


class Eager(Optimizer):
    """Optimizer that is never compiled. Those of torch guard their methods against its compiler, and the first call of
    a guard imports the compiler, which takes a second."""

    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    zero_grad = unwrap(Optimizer.zero_grad)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(__package__):
            cls.step = torch.no_grad()(unwrap(cls.step))  # type: ignore[method-assign]


class OptimizerConfig(PartConfig, axis="optimizer"):
    """Optimizer that updates the weights from gradients.

    Learning rates and weight decay are given for AdamW. Each kind declares its own: `rate` times AdamW's default
    learning rate, and `decay` times the recipe's weight decay, chosen so that learning rate times decay, the share that
    a weight loses in a step, is the same for every kind.
    """

    rate: ClassVar[float] = 1.0
    """Default learning rate, as a multiple of AdamW's."""
    mup: ClassVar[bool] = True
    """True if the learning rates of muP, which are derived for Adam, hold."""
    by_value: ClassVar[bool] = True
    """True if a rank that has a shard of a weight can step only that shard."""

    @property
    def decay(self) -> float:
        """Factor on the recipe's weight decay."""
        return 1 / self.rate

    def check(self, config: ModelConfig) -> None:
        """Raises RequestError for a model that this optimizer cannot train as declared."""
        if config.mup is not None and not self.mup:
            raise RequestError(
                f"optimizer={self.kind} with mup: the learning rates of muP are derived for Adam; use adamw, muon or "
                f"lion, or leave out mup",
                code="conflict", field="optimizer", value=self.kind, expected="adamw, muon or lion",
            )  # fmt: skip

    def create(self, model: Model, learning_rate: float, weight_decay: float) -> Optimizer:
        """Returns the optimizer over all parameters of the model, with the peak learning rate and the weight decay.
        Modules declare the weights that decay, and roles, so that muP can scale their learning rates."""
        groups = parameter_groups(model, learning_rate, weight_decay * self.decay, model.config.rates)
        return self.over_groups(unmixed(groups), model)

    def state_values(self, model: Model) -> dict[str, int]:
        """Returns {parameter name: number of elements of its optimizer state} after a step, without step counters; the
        elements have the dtype of the weight."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it keeps")

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns {parameter name: fp32 elements} that a step on this type of device allocates beyond weights,
        gradients and state; empty if fused. Weights are stepped one after another, so the peak is the maximum, unless
        `steps_at_once`."""
        return {}

    def steps_at_once(self, device: str) -> bool:
        """Returns True if a step on this type of device updates all weights together instead of one after another."""
        return False

    def over_groups(self, groups: Groups, model: Model) -> Optimizer:
        """Returns the optimizer over these parameter groups of the model. Each group is a dict with `params`, `lr` (the
        learning rate at its peak; the schedule changes it in place before every step), `weight_decay` and `scale`."""
        raise NotImplementedError(f"{type(self).__name__} creates no optimizer")


def unmixed(groups: Groups) -> Groups:
    """Returns the parameter groups; a group that has both sharded and unsharded weights is split in two, because a
    fused step takes only one kind."""
    found = []
    for group in groups:
        kinds: dict[type, list[Any]] = {}
        for weight in group["params"]:
            kinds.setdefault(type(weight), []).append(weight)
        found += [{**group, "params": some} for some in kinds.values()]
    return found
