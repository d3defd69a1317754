"""The state of attention: keys and values of the tokens read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.parts.forward_pass import Pass
from glassformer.state import ForgetfulState, State

SCALE = torch.bfloat16
"""What the scale of an int8 vector is kept in."""


def vector_bytes(width: int, dtype: torch.dtype) -> int:
    """What `Cells` take for one vector."""
    return width * dtype.itemsize + (SCALE.itemsize if dtype == torch.int8 else 0)


class Cells:
    """A vector per sequence, head and slot: (b, g, slots, h), kept as `dtype`.

    int8 keeps each vector as whole numbers times the vector's largest value over 127, rounded to `SCALE` first.
    """

    def __init__(self, batch: int, slots: int, heads: int, width: int, dtype: torch.dtype, device: Any = None):
        self.values = torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)
        self.scales = None
        if dtype == torch.int8:
            self.scales = torch.zeros(batch, heads, slots, 1, dtype=SCALE, device=device)

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def over(self, tensors: list[Tensor]) -> Cells:
        other = copy.copy(self)
        other.values, other.scales = tensors[0], tensors[1] if self.scales is not None else None
        return other

    def __setitem__(self, slots: slice | Tensor, x: Tensor) -> None:
        """x (b, s, g, h) goes to `slots`: a slice or (s,), equal for all rows, or (b, s)."""
        x = x.detach()  # a state is memory, not a path for gradients
        if self.scales is not None:
            scales = (x.abs().amax(-1, keepdim=True).float() / 127).to(self.scales.dtype)
            _put(self.scales, slots, scales)
            x = (x / scales.clamp(min=1e-30)).round().clamp(-127, 127)
        _put(self.values, slots, x)

    def upto(self, end: int, dtype: torch.dtype) -> Tensor:
        """(b, end, g, h)"""
        x = self.values[:, :, :end].to(dtype)
        if self.scales is not None:
            x = x * self.scales[:, :, :end].to(dtype)
        return x.transpose(1, 2)

    def read(self, end: int, slots: slice | Tensor, x: Tensor) -> Tensor:
        """(b, end, g, h) as `upto`, in x's dtype, after x (b, s, g, h) was stored at `slots`.

        Where gradients are recorded, those of the new cells reach x as if storing had not rounded it, and the result is
        a copy, which later writes to the state leave alone."""
        stored = self.upto(end, x.dtype)
        if not torch.is_grad_enabled():
            return stored
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=x.device)
        through = self.at(slots, x.dtype) + (x - x.detach())
        if slots.dim() == 1:
            return stored.index_copy(1, slots, through)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        return stored.index_put((row, slots), through)

    def at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, s, g, h) of slots (s,), or (b, s)."""
        x = _at(self.values, slots).to(dtype)
        return x if self.scales is None else x * _at(self.scales, slots).to(dtype)


def _at(cells: Tensor, slots: Tensor) -> Tensor:
    if slots.dim() == 2:
        return cells[torch.arange(len(slots), device=slots.device)[:, None], :, slots]
    return cells[:, :, slots].transpose(1, 2)


def _put(cells: Tensor, slots: slice | Tensor, x: Tensor) -> None:
    if isinstance(slots, Tensor) and slots.dim() == 2:
        row = torch.arange(len(slots), device=slots.device)[:, None]
        cells[row, :, slots] = x.to(cells.dtype)
    else:
        cells[:, :, slots] = x.transpose(1, 2).to(cells.dtype)


class KVState(State):
    """Keys and values (b, g, slots, h) of every token read. `k` and `v` are (heads, width) of each."""

    def __init__(
        self,
        batch: int,
        slots: int,
        k: tuple[int, int],
        v: tuple[int, int],
        dtype: torch.dtype,
        device: Any = None,
    ):
        self.slots = slots
        self.k = Cells(batch, slots, *k, dtype, device)
        self.v = Cells(batch, slots, *v, dtype, device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        named = (("k", self.k), ("v", self.v))
        return {f"{name}{i or ''}": tensor for name, cells in named for i, tensor in enumerate(cells.tensors())}

    def upto(self, length: int) -> dict[str, Tensor]:
        return {name: tensor[:, :, :length] for name, tensor in self.tensors().items()}

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores the new tokens' k, v (b, s, g, h); returns those a query may look at (b, t, g, h), and which tokens
        they are, (t,) or (b, t), or None when they are the last t tokens.

        Gradients reach the new tokens' k and v; those read in earlier calls have none."""
        end, tokens = pass_.end, None
        slots: slice | Tensor = slice(pass_.start, end)
        if pass_.rows is not None:
            slots = pass_.slots
            tokens = pass_.once("keys", lambda: torch.arange(end, device=k.device))
        self.k[slots] = k
        self.v[slots] = v
        return self.k.read(end, slots, k), self.v.read(end, slots, v), tokens

    def over(self, tensors: Mapping[str, Tensor]) -> KVState:
        other = copy.copy(self)
        other.k, other.v = (
            cells.over([tensors[name] for name in names if name in tensors])
            for cells, names in ((self.k, ("k", "k1")), (self.v, ("v", "v1")))
        )
        other.slots = tensors["k"].shape[2]
        return other

    def truncate(self, length: int) -> None:
        """Nothing to do: slots past the model's length are never read before they are written."""


class WindowState(KVState, ForgetfulState):
    """Keys and values of the last tokens that a window needs: a ring, token i in slot i mod its size.

    `rewind` slots more than the window let `truncate` go back by as many tokens from the furthest ever read."""

    def __init__(
        self,
        batch: int,
        window: int,
        k: tuple[int, int],
        v: tuple[int, int],
        dtype: torch.dtype,
        device: Any = None,
        rewind: int = 0,
    ):
        super().__init__(batch, window + rewind, k, v, dtype, device)
        self.rewind = rewind

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        size, start, end, s = self.slots, pass_.start, pass_.end, k.shape[1]
        self.read = max(self.read, end)
        tokens = pass_.slots
        if pass_.rows is None:
            if end <= size:  # not full yet: slot i holds token i
                return super().append(k, v, pass_)
            if s > 1:
                named = pass_.documents is not None or pass_.given is not None
                k, v, past = self._append_many(k, v, tokens, start)
                return k, v, pass_.once(("ring", size), lambda: torch.cat((past, tokens))) if named else None
        elif s > 1:
            keys, values = k, v
            k = torch.cat((self.k.upto(size, k.dtype), k), dim=1)
            v = torch.cat((self.v.upto(size, v.dtype), v), dim=1)
            self.k[tokens[:, -size:] % size] = keys[:, -size:]
            self.v[tokens[:, -size:] % size] = values[:, -size:]
            return k, v, pass_.once(("ring", size), lambda: self._held_before(tokens))
        slots = tokens % size
        self.k[slots] = k
        self.v[slots] = v
        held = pass_.once(("ring", size), lambda: self._held(tokens, tokens + 1))
        return self.k.read(size, slots, k), self.v.read(size, slots, v), held

    def _held(self, last: Tensor, nothing: Tensor) -> Tensor:
        """Which token each slot holds when token `last` (..., 1) is the newest; `nothing` for slots still empty."""
        held = last - (last - torch.arange(self.slots, device=last.device)) % self.slots
        return torch.where(held < 0, nothing, held)

    def _held_before(self, tokens: Tensor) -> Tensor:
        """Which tokens the slots hold before `tokens` (b, s) are stored, and then these."""
        return torch.cat((self._held(tokens[:, :1] - 1, tokens[:, -1:] + 1), tokens), dim=1)

    def _append_many(self, k: Tensor, v: Tensor, tokens: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Stores the new tokens; returns k and v of those before that they may see, oldest first, followed by their
        own, and which tokens those before are."""
        past = torch.arange(max(start - self.slots + 1, 0), start, device=k.device)
        slots, size = past % self.slots, self.slots
        kept_k = torch.cat((self.k.at(slots, k.dtype), k), dim=1) if start else k
        kept_v = torch.cat((self.v.at(slots, v.dtype), v), dim=1) if start else v
        self.k[tokens[-size:] % size] = k[:, -size:]
        self.v[tokens[-size:] % size] = v[:, -size:]
        return kept_k, kept_v, past

    def truncate(self, length: int) -> None:
        if length == 0 or self.read > self.slots:  # until the ring has turned, all is there
            self.go_back(length, f"a window of {self.slots - self.rewind} is full")
