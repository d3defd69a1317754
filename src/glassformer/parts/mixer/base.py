from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glassformer.parts.base import BuildContext, PartConfig
from glassformer.parts.forward_pass import Pass
from glassformer.state import State


class Mixer(nn.Module):
    """forward(x (b, s, d), pass_, state) -> (b, s, d); without a state the s tokens are the whole sequence."""

    def forward(self, x: Tensor, pass_: Pass | None = None, state: Any = None) -> Tensor:
        raise NotImplementedError

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> State:
        """An empty state for `batch` sequences of at most `max_len` tokens, of which `truncate` takes back `rewind`."""
        raise NotImplementedError


class MixerConfig(PartConfig, axis="mixer"):
    def build(self, ctx: BuildContext) -> Mixer:
        raise NotImplementedError
