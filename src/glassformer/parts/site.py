"""A named place inside the model where one can look or reach in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Site(nn.Module):
    """The identity, with a name: `Site()(x) is x`.

    Its path in the module tree is its public name (`layers.3.mixer.pattern`). Capturing and editing are
    forward hooks on it; without one the call returns at once and costs about 0.1 us.
    """

    def __init__(self, name: str | None = None):
        """`name` replaces the last step of the path, where an attribute of that name stands already."""
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def watched(self) -> bool:
        """Whether somebody looks: a part may then compute what it would otherwise not hand out."""
        return bool(self._forward_hooks)

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) if self._forward_hooks else x
