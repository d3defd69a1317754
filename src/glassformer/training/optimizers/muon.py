from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from glassformer.machine.device import bf16_gain
from glassformer.model import Model
from glassformer.parts.mup import GROWING
from glassformer.parts.precision import onednn_in_bf16
from glassformer.training.optimizers.adamw import AdamW
from glassformer.training.optimizers.base import Beta, Eager, Groups, OptimizerConfig


class MuonConfig(OptimizerConfig, kind="muon"):
    """Orthogonalised momentum for the matrices of the layers, AdamW for embeddings, head and vectors. Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon.

    m = momentum m + g;  w -= lr (0.2 sqrt(max(n, m)) O + decay w), O = U V^T of momentum m + g = U S V^T, found by
    `steps` Newton-Schulz iterations.

    The factor 0.2 sqrt(max(n, m)) gives updates the RMS of AdamW's, so that its learning rate and weight decay hold,
    and muP's rates with them (Liu et al. 2025, 2502.16982, section 2.2). Each map of a fused projection, and of stacked
    experts, is a matrix (n, m). AdamW updates the parameters of convolutions, and all others that are not the matrix of
    a linear layer.
    """

    by_value: ClassVar[bool] = False

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    steps: int = Field(5, ge=1, lt=100)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""

    def state_values(self, model: Model) -> dict[str, int]:
        matrices = {id(weight) for weight in layer_matrices(model)}
        return {
            name: weight.numel() * (1 if id(weight) in matrices else 2) for name, weight in model.named_parameters()
        }

    def step_values(self, model: Model, device: str = "cpu") -> dict[str, int]:
        """Returns {parameter name: fp32 elements} that its step allocates at most: for a batch (k, n, m), m <= n, of
        matrices two of the batch, and (k, m, m) twice if the iterations are in fp32."""
        maps, half = layer_matrices(model), iterated_in(device) == torch.bfloat16
        most: dict[int, int] = {}
        for shape, pieces in batches(maps.items()):
            n, m = max(shape), min(shape)
            values = len(pieces) * 2 * (n * m if half else n * m + m * m)
            for weight, _ in pieces:
                most[id(weight)] = max(values, most.get(id(weight), 0))
        return {name: most[id(weight)] for name, weight in model.named_parameters() if id(weight) in most}

    def over_groups(self, groups: Groups, model: Model) -> torch.optim.Optimizer:
        maps = layer_matrices(model)
        matrices = {id(weight) for weight in maps}
        own, others = (
            [
                {**group, "params": some}
                for group in groups
                if (some := [p for p in group["params"] if (id(p) in matrices) is wanted])
            ]
            for wanted in (True, False)
        )
        muon = Muon(own, maps, momentum=self.momentum, nesterov=self.nesterov, steps=self.steps)
        return Joined(muon, AdamW(others, betas=self.betas, eps=self.eps, fused=True))


Maps = Mapping[nn.Parameter, tuple[int, ...]]
"""Weight (o, i) -> number of rows of each linear map that is stacked in the weight."""
MOST = 1 << 20
"""Largest number of elements in a batch of matrices, unless one matrix has more; a step takes a few times this
memory."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- a X + (b G + c G G) X, G = X X^T, which brings singular values to 0.7 .. 1.2 in five steps."""


def layer_matrices(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """Returns {weight: numbers of rows of the linear maps stacked in it} for the linear layers inside the blocks, which
    their modules declare by roles."""
    linear: list[Any] = [module for module in model.modules() if set(getattr(module, "roles", ())) & set(GROWING)]
    matrices = [module for module in linear if isinstance(module.weight, nn.Parameter) and module.weight.ndim == 2]
    return {module.weight: tuple(getattr(module, "outs", (len(module.weight),))) for module in matrices}


def batches(maps: Iterable[tuple[nn.Parameter, tuple[int, ...]]]) -> Iterator[tuple[torch.Size, list[Piece]]]:
    """Yields (shape (n, m), matrices of this shape), at most `MOST` elements together."""
    found: dict[torch.Size, list[Piece]] = {}
    for weight, outs in maps:
        first = 0
        for rows in outs:
            found.setdefault(torch.Size((rows, weight.shape[1])), []).append((weight, slice(first, first + rows)))
            first += rows
    for shape, pieces in found.items():
        count = max(MOST // max(shape.numel(), 1), 1)
        for start in range(0, len(pieces), count):
            yield shape, pieces[start : start + count]


Piece = tuple[nn.Parameter, slice]
"""A weight and the rows of one of its maps."""


def iterated_in(device: str) -> torch.dtype:
    """Returns the dtype in which Newton-Schulz iterations run on this type of device: bf16, which suffices, unless fp32
    is faster."""
    return torch.float32 if device == "cpu" and not (onednn_in_bf16() and bf16_gain() > 1) else torch.bfloat16


def orthogonalized(x: Tensor, steps: int) -> Tensor:
    """Returns approximately U V^T for each matrix x = U S V^T by Newton-Schulz iterations; x (k, n, m)."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Eager):
    """Muon optimizer (orthogonalised momentum), which updates all matrices of one shape at once."""

    def __init__(self, params: Any, maps: Maps, momentum: float = 0.95, nesterov: bool = True, steps: int = 5):
        super().__init__(params, {"momentum": momentum, "nesterov": nesterov, "steps": steps})
        self.maps = maps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            own = [weight for weight in group["params"] if weight.grad is not None]
            for weight in own:
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            for shape, pieces in batches((weight, self.maps[weight]) for weight in own):
                self._update(pieces, group, group["lr"] * 0.2 * max(shape) ** 0.5)

    def _update(self, pieces: list[Piece], group: dict[str, Any], factor: float) -> None:
        """Subtracts `factor` times the Muon update from the weights' matrices of one shape. A separate function, so
        that its temporaries are freed before the matrices of the next shape."""
        dtype = iterated_in(pieces[0][0].device.type)
        made = orthogonalized(
            torch.stack([self._direction(*piece, group) for piece in pieces]).to(dtype), group["steps"]
        )
        for (weight, rows), one in zip(pieces, made, strict=True):
            weight[rows].add_(one, alpha=-factor)

    def _direction(self, weight: nn.Parameter, rows: slice, group: dict[str, Any]) -> Tensor:
        assert weight.grad is not None
        momentum: Tensor = self.state[weight]["momentum_buffer"][rows]
        return weight.grad[rows].lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


class Joined(Eager):
    """Several optimizers over separate parameters as one; all share its parameter groups and state."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()
