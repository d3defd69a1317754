"""The state of attention: keys and values of the tokens read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glassformer.parts.position import Positions
from glassformer.state import State, index_select_


class KVState(State):
    """Keys and values (b, max_len, g, h) of every token read."""

    def __init__(self, batch: int, slots: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: Any = None):
        self.k = torch.zeros(batch, slots, n_kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def append(self, k: Tensor, v: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores the new tokens' k, v (b, s, g, h); returns those a query may look at (b, t, g, h), and which tokens
        they are (t,), or None when they are tokens 0 .. t-1."""
        start, end = positions.start, positions.end
        self.k[:, start:end] = k.detach()  # a state is memory, not a path for gradients
        self.v[:, start:end] = v.detach()
        return self.k[:, :end].to(k.dtype), self.v[:, :end].to(v.dtype), None

    def reorder(self, index: Tensor) -> None:
        index_select_(self.k, index)
        index_select_(self.v, index)

    def truncate(self, length: int) -> None:
        """Nothing to do: slots past the model's length are never read before they are written."""


class WindowState(KVState):
    """Keys and values of the last `window` tokens: a ring, token i in slot i mod window."""

    def append(self, k: Tensor, v: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor | None]:
        window, start, end = self.k.shape[1], positions.start, positions.end
        self.read = end
        if end <= window:  # not full yet: slot i holds token i
            return super().append(k, v, positions)
        device = k.device
        # What the new queries may see of the past, oldest first, then the new tokens themselves.
        past = torch.arange(max(start - window + 1, 0), start, device=device)
        kept_k = torch.cat((self.k[:, past % window].to(k.dtype), k), dim=1)
        kept_v = torch.cat((self.v[:, past % window].to(v.dtype), v), dim=1)
        new = torch.arange(max(start, end - window), end, device=device)
        self.k[:, new % window] = k[:, new - start].detach().to(self.k.dtype)
        self.v[:, new % window] = v[:, new - start].detach().to(self.v.dtype)
        return kept_k, kept_v, torch.cat((past, torch.arange(start, end, device=device)))

    read = 0

    def truncate(self, length: int) -> None:
        if self.read > self.k.shape[1] and length < self.read:
            raise ValueError(
                f"a window of {self.k.shape[1]} has forgotten what came before token {self.read}; it cannot go back "
                f"to {length}"
            )
        self.read = min(self.read, length)
