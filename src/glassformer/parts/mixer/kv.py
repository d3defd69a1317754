"""Decode states of attention: the KV cache, with the keys and values of the tokens that have been read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.forward_pass import Pass
from glassformer.parts.memory import unused
from glassformer.parts.state import BoundedState, State
from glassformer.parts.visibility import Visibility

SCALE = torch.bfloat16
"""Dtype of the scale of a vector that is stored as int8."""


def vector_bytes(width: int, dtype: torch.dtype) -> int:
    """Returns the bytes that one vector of `width` elements takes in a cache (`Cells`) of this dtype, scale
    included."""
    return width * dtype.itemsize + (SCALE.itemsize if dtype == torch.int8 else 0)


class Cells:
    """Cache of vectors by sequence, head and slot, (b, g, slots, h), stored as `dtype`; a slot holds the vectors of one
    token.

    With int8 each vector is stored as integers and a scale, the vector's largest absolute value / 127, rounded to
    bfloat16.
    """

    def __init__(self, batch: int, slots: int, heads: int, width: int, dtype: torch.dtype, device: Any = None):
        self.values = unused((batch, heads, slots, width), dtype, device)
        self.scales = None
        if dtype == torch.int8:
            self.scales = unused((batch, heads, slots, 1), SCALE, device)

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def over(self, tensors: list[Tensor]) -> Cells:
        other = copy.copy(self)
        other.values, other.scales = tensors[0], tensors[1] if self.scales is not None else None
        return other

    def __setitem__(self, slots: slice | Tensor, x: Tensor) -> None:
        """Stores the vectors x (b, s, g, h) at `slots`: a slice or indices (s,), equal for all rows, or (b, s)."""
        x = x.detach()  # a state is memory, not a path for gradients
        if self.scales is not None:
            scales = (x.abs().amax(-1, keepdim=True).float() / 127).to(self.scales.dtype)
            _put(self.scales, slots, scales)
            x = (x / scales.clamp(min=1e-30)).round().clamp(-127, 127)
        _put(self.values, slots, x)

    def upto(self, end: int, dtype: torch.dtype) -> Tensor:
        """Returns the vectors of the slots before `end`, (b, end, g, h), in `dtype`."""
        x = self.values[:, :, :end].to(dtype)
        if self.scales is not None:
            x = x * self.scales[:, :, :end].to(dtype)
        return x.transpose(1, 2)

    def read(self, end: int, slots: slice | Tensor, x: Tensor) -> Tensor:
        """Returns the vectors of the slots before `end`, (b, end, g, h), in the dtype of x, after x (b, s, g, h) was
        stored at `slots`.

        While gradients are recorded, the gradients of the new vectors reach x as if storing had not rounded it, and the
        result is a copy, which later writes to the cache do not change."""
        if not torch.is_grad_enabled():
            finer = x.dtype != self.values.dtype == torch.promote_types(x.dtype, self.values.dtype)
            whole = isinstance(slots, slice) and x.shape[1] == end
            return x if finer and whole else self.upto(end, x.dtype)  # of x as it is, no copy
        stored = self.upto(end, x.dtype)
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=x.device)
        through = self.at(slots, x.dtype) + (x - x.detach())
        if slots.dim() == 1:
            return stored.index_copy(1, slots, through)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        return stored.index_put((row, slots), through)

    def at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the vectors (b, s, g, h) stored at `slots`, (s,) or (b, s), in `dtype`."""
        x = _at(self.values, slots).to(dtype)
        return x if self.scales is None else x * _at(self.scales, slots).to(dtype)


def _at(cells: Tensor, slots: Tensor) -> Tensor:
    if slots.dim() == 2:
        return cells[torch.arange(len(slots), device=slots.device)[:, None], :, slots]
    return cells[:, :, slots].transpose(1, 2)


def _put(cells: Tensor, slots: slice | Tensor, x: Tensor) -> None:
    if isinstance(slots, slice):
        cells[:, :, slots] = x.transpose(1, 2)
        return
    x = x.to(cells.dtype)
    if slots.dim() == 2:
        row = torch.arange(len(slots), device=slots.device)[:, None]
        cells[row, :, slots] = x
    else:
        cells[:, :, slots] = x.transpose(1, 2)


class KVState(State):
    """Decode state of attention: keys and values (b, g, slots, h) of every token read. The arguments `k` and `v` are
    (heads, width) of a key and of a value."""

    kind = "cache"

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

    @property
    def ring(self) -> tuple[Cells, Cells] | None:
        return self.k, self.v

    def tensors(self) -> dict[str, Tensor]:
        named = (("k", self.k), ("v", self.v))
        return {f"{name}{i or ''}": tensor for name, cells in named for i, tensor in enumerate(cells.tensors())}

    def upto(self, length: int) -> dict[str, Tensor]:
        return {name: tensor[:, :, :length] for name, tensor in self.tensors().items()}

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores k, v (b, s, g, h) of the new tokens; returns (k, v, k_idx): all keys and values that a query may
        attend to, (b, t, g, h), and the index of each one's token, (t,) or (b, t), None if these are the last t tokens.

        Gradients reach the new tokens' k and v, not those of earlier calls."""
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
        """Does nothing, whatever `length` is: slots beyond the model's length are never read before they are written
        again."""


class WindowState(KVState, BoundedState):
    """Decode state of attention with a window: keys and values of the last tokens, in a ring, with token i in slot i
    mod its size.

    `rewind` slots more than the window let `truncate` go back by that number of tokens from the furthest ever read.
    With `absolute`, `append` always returns the token indices of the keys, except while the ring holds all tokens. With
    a `stride`, a single query gets only the keys at multiples of `stride` tokens back, once the ring is full."""

    kind = "window"

    def __init__(
        self,
        batch: int,
        window: int,
        k: tuple[int, int],
        v: tuple[int, int],
        dtype: torch.dtype,
        device: Any = None,
        rewind: int = 0,
        absolute: bool = False,
        stride: int = 1,
    ):
        super().__init__(batch, window + rewind, k, v, dtype, device)
        self.rewind, self.absolute, self.stride = rewind, absolute, stride

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        size, start, end, s = self.slots, pass_.start, pass_.end, k.shape[1]
        self.mark(end)
        tokens = pass_.slots
        if pass_.rows is None:
            if end <= size:  # not full yet: slot i holds token i
                return super().append(k, v, pass_)
            if s > 1:
                named = self.absolute or pass_.documents is not None or pass_.given is not None
                k, v, past = self._append_many(k, v, tokens, start)
                named = named and start >= size  # otherwise the keys are all tokens so far
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
        if self.stride > 1 and not torch.is_grad_enabled():
            held = pass_.once(("ring", size, self.stride), lambda: self._apart(tokens))
            slots = pass_.once(("slots", size, self.stride), lambda: held % size)
            return self.k.at(slots, k.dtype), self.v.at(slots, v.dtype), held
        held = pass_.once(("ring", size), lambda: self._held(tokens, tokens + 1))
        return self.k.read(size, slots, k), self.v.read(size, slots, v), held

    def _held(self, last: Tensor, nothing: Tensor) -> Tensor:
        """Returns the index of the token that each slot of the ring holds when token `last` (..., 1) is the newest;
        `nothing` for empty slots."""
        held = last - (last - torch.arange(self.slots, device=last.device)) % self.slots
        return torch.where(held < 0, nothing, held)

    def _apart(self, last: Tensor) -> Tensor:
        """Returns the token indices of the keys for a query with a stride: every stride-th token back from token `last`
        (..., 1), newest first; `last` + 1, a future token, in place of indices below 0."""
        held = last - torch.arange(0, self.slots - self.rewind, self.stride, device=last.device)
        return torch.where(held < 0, last + 1, held)

    def _held_before(self, tokens: Tensor) -> Tensor:
        """Returns the index of the token that each slot of the ring holds before `tokens` (b, s) are stored, followed
        by `tokens`: (b, slots + s)."""
        return torch.cat((self._held(tokens[:, :1] - 1, tokens[:, -1:] + 1), tokens), dim=1)

    def _append_many(self, k: Tensor, v: Tensor, tokens: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Stores k and v of several new tokens, the first with index `start`. Returns (k, v, indices): keys and values
        of the earlier visible tokens, oldest first, and of the new tokens, and the indices of the earlier tokens."""
        past = torch.arange(max(start - self.slots + 1, 0), start, device=k.device)
        slots, size = past % self.slots, self.slots
        kept_k = torch.cat((self.k.at(slots, k.dtype), k), dim=1) if start else k
        kept_v = torch.cat((self.v.at(slots, v.dtype), v), dim=1) if start else v
        self.k[tokens[-size:] % size] = k[:, -size:]
        self.v[tokens[-size:] % size] = v[:, -size:]
        return kept_k, kept_v, past

    def truncate(self, length: int) -> None:
        if length == 0 or self.read > self.slots:  # until the ring is full, it holds all tokens
            self.go_back(length, f"a window of {self.slots - self.rewind} is full")


class PinnedState(WindowState):
    """Decode state of attention with a window that also keeps the first `pinned` tokens of each row's document, in
    slots after the ring."""

    def __init__(
        self,
        batch: int,
        window: int,
        pinned: int,
        k: tuple[int, int],
        v: tuple[int, int],
        dtype: torch.dtype,
        device: Any = None,
        rewind: int = 0,
    ):
        super().__init__(batch, window, k, v, dtype, device, rewind, absolute=True)
        self.pinned = pinned
        self.k, self.v = (Cells(batch, self.slots + pinned, *shape, dtype, device) for shape in (k, v))
        self.begun: Tensor | None = None
        """Largest index, so far, of the first token of a document; tokens pinned for earlier documents are gone. None
        until a call has documents."""

    @property
    def ring(self) -> None:
        return None

    def append(self, k: Tensor, v: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores k, v (b, s, g, h) of the new tokens; returns (k, v, k_idx) as `KVState.append`. For a pinned token
        that is still in the ring, the ring's copy has its index, and the pinned copy the index of a future token, which
        is invisible."""
        size, start, s = self.slots, pass_.start, k.shape[1]
        if pass_.rows is None and start < size:  # the ring holds all tokens so far
            found = super().append(k, v, pass_)
            self._pin(k, v, pass_)
            return found
        if s == 1:
            self._pin(k, v, pass_)
            _, _, held = super().append(k, v, pass_)
            slots = pass_.slots % size
            k, v = self.k.read(size + self.pinned, slots, k), self.v.read(size + self.pinned, slots, v)
        else:
            pins = torch.arange(size, size + self.pinned, device=k.device)
            first_k, first_v = self.k.at(pins, k.dtype), self.v.at(pins, v.dtype)
            self._pin(k, v, pass_)
            k, v, held = super().append(k, v, pass_)
            k, v = torch.cat((k, first_k), dim=1), torch.cat((v, first_v), dim=1)
        assert held is not None
        ring: Tensor = held
        return k, v, pass_.once(("pinned", size, self.pinned, s), lambda: self._with_pinned(ring, pass_))

    def _with_pinned(self, ring: Tensor, pass_: Pass) -> Tensor:
        """Returns the index of the token in each slot: `ring`, the indices of the tokens in the ring and of the call,
        followed by those of the pinned tokens."""
        new = pass_.slots.view(-1, pass_.tokens)
        one = pass_.tokens == 1
        oldest = new[:, :1] - self.slots + 1 if one or pass_.rows is None else new[:, :1] - self.slots
        tokens = self._begin(pass_, pass_.end if one else pass_.start) + torch.arange(self.pinned, device=new.device)
        tokens = torch.where(tokens < oldest, tokens, new[:, -1:] + 1)
        if ring.dim() == 2 or len(tokens) > 1:
            rows = max(len(tokens), len(ring) if ring.dim() == 2 else 1)
            return torch.cat((ring.expand(rows, -1), tokens.expand(rows, -1)), dim=1)
        return torch.cat((ring, tokens[0]))

    def _begin(self, pass_: Pass, end: int) -> Tensor:
        """Returns the index of the first token of the document that token end - 1 is in, (b, 1) or (1, 1)."""
        if pass_.documents is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=self.k.values.device)
        return pass_.borders.begins[:, end - 1 : end]

    def _pin(self, k: Tensor, v: Tensor, pass_: Pass) -> None:
        """Stores, in the pinned slots, the keys and values of new tokens that are among the first of their row's last
        document."""
        if pass_.rows is None and pass_.documents is None:
            if pass_.start < self.pinned:
                end = min(pass_.end, self.pinned)
                for cells, x in ((self.k, k), (self.v, v)):
                    cells[slice(self.slots + pass_.start, self.slots + end)] = x[:, : end - pass_.start]
            return
        begin = self._begin(pass_, pass_.end)
        if pass_.documents is not None:
            self.begun = begin.max() if self.begun is None else torch.maximum(self.begun, begin.max())
        at = begin + torch.arange(self.pinned, device=k.device) - pass_.slots.view(-1, pass_.tokens)[:, :1]
        is_new = ((at >= 0) & (at < k.shape[1]))[:, None, :, None]
        row = torch.arange(len(k), device=k.device)[:, None]
        for cells, x in ((self.k, k), (self.v, v)):
            taken = x[row, at.clamp(0, k.shape[1] - 1)]
            heads, width = x.shape[2:]
            made = Cells(len(x), self.pinned, heads, width, cells.values.dtype, x.device)
            made[slice(0, self.pinned)] = taken
            for old, new in zip(cells.tensors(), made.tensors(), strict=True):
                pins = old[:, :, self.slots :]
                pins.copy_(torch.where(is_new, new, pins))

    def upto(self, length: int) -> dict[str, Tensor]:
        return self.tensors()

    def over(self, tensors: Mapping[str, Tensor]) -> KVState:
        other = super().over(tensors)
        other.slots -= self.pinned
        return other

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length == 0:
            self.begun = None
        elif self.begun is not None and self.read > self.slots and length <= int(self.begun):
            raise RequestError(
                f"the first tokens of a document that starts at {int(self.begun)} are pinned, and those before it "
                f"forgotten; it cannot go back to {length}",
                code="unsupported", field="length", value=length,
            )  # fmt: skip


def state_of(
    visibility: Visibility,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    batch: int,
    max_len: int,
    dtype: torch.dtype,
    device: Any = None,
    rewind: int = 0,
) -> KVState:
    """Returns an empty decode state that keeps the tokens that later queries may attend to under `visibility`; `shapes`
    are (heads, width) of k and of v."""
    first, last = visibility.needed
    if last is None or first + last + rewind >= max_len:
        return KVState(batch, max_len, *shapes, dtype, device)
    if first:
        return PinnedState(batch, last, first, *shapes, dtype, device, rewind)
    return WindowState(batch, last, *shapes, dtype, device, rewind, visibility.absolute, visibility.stride)
