"""The state of a recurrence: what it has made of all tokens, in one size, and the last inputs of its convolution."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer.kv import Cells
from glassformer.state import ForgetfulState


class RecurrentState(ForgetfulState):
    """Two rings: the inputs of the last tokens that a convolution of `width` needs (none if it is 1), that of token i
    in slot i mod their number, and h (p, c) after n tokens in slot n mod (rewind + 1).

    Which slots are meant is said by the number of tokens read, as for keys and values: going back by up to `rewind`
    tokens, or in one row alone, takes no copy. Inputs are kept as `dtype`, h in fp32 at least."""

    def __init__(
        self,
        batch: int,
        width: int,
        d_state: int,
        channels: int,
        dtype: torch.dtype,
        device: Any = None,
        rewind: int = 0,
    ):
        self.rewind, self.tail = rewind, width - 1
        self.inputs = Cells(batch, self.tail and self.tail + rewind, 1, channels, dtype, device)
        precise = torch.promote_types(dtype, torch.float32)
        self.h = torch.zeros(batch, rewind + 1, d_state, channels, dtype=precise, device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        inputs = {f"inputs{i or ''}": tensor for i, tensor in enumerate(self.inputs.tensors())}
        return {**inputs, "h": self.h}

    def over(self, tensors: Mapping[str, Tensor]) -> RecurrentState:
        other = copy.copy(self)
        other.inputs = self.inputs.over([tensors[name] for name in ("inputs", "inputs1") if name in tensors])
        other.h = tensors["h"]
        return other

    def begin(self, pass_: Pass, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs before x (b, s, c), (b, width - 1, c), of which those before the first token mean nothing, and h,
        zero for a row that has read nothing. Stores x."""
        self.read = max(self.read, pass_.start + pass_.tokens)
        tail = self._last_inputs(pass_, x) if self.tail else x[:, :0]
        precise = torch.promote_types(x.dtype, torch.float32)
        if pass_.rows is not None:
            h = self.h[self._slot(pass_.rows)].to(precise)
            return tail, h.masked_fill((pass_.rows == 0)[:, None, None], 0.0)
        h = self.h[self._slot(pass_.start)].to(precise, copy=True)  # `keep` may write where it lies
        return tail, h if pass_.start else h.zero_()

    def _last_inputs(self, pass_: Pass, x: Tensor) -> Tensor:
        slots, size = pass_.slots, self.tail + self.rewind
        before = slots[..., :1] + torch.arange(-self.tail, 0, device=x.device)
        tail = self.inputs.at(before % size, x.dtype).squeeze(2)
        self.inputs[slots[..., -size:] % size] = x[:, -size:, None]
        return tail

    def pieces(self, tokens: int) -> list[int]:
        """How many tokens are read at once: those that `truncate` may take back one by one, as the state after each is
        kept."""
        alone = min(tokens, self.rewind)
        return [size for size in (tokens - alone, *[1] * alone) if size]

    def keep(self, h: Tensor, pass_: Pass, tokens: int) -> None:
        """h (b, p, c) after so many tokens of this call."""
        first = pass_.start if pass_.rows is None else pass_.rows
        self.h[self._slot(first + tokens)] = h.detach().to(self.h.dtype)

    def _slot(self, read: int | Tensor) -> Any:
        """Where h lies after so many tokens, in every row or in each."""
        size = self.rewind + 1
        if isinstance(read, int) or size == 1:
            return slice(None), 0 if size == 1 else read % size
        return torch.arange(len(read), device=read.device), read % size

    def truncate(self, length: int) -> None:
        self.go_back(length, f"a recurrence keeps its last {self.rewind + 1} states")
