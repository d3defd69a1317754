"""Base of recurrent mixers, and their decode state: of constant size, with a summary of all tokens and the last inputs
of a convolution."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer.base import Mixer, MixerChange, MixerConfig, keys_before
from glassformer.parts.mixer.kv import Cells, vector_bytes
from glassformer.parts.state import BoundedState

Sizes = Mapping[str, tuple[int, ...]]
"""Mapping from the name of a tensor that a recurrence carries from token to token to its shape in one sequence."""


class RecurrentState(BoundedState):
    """Decode state of a recurrence: for each tensor of `kept` a ring, whose value after n tokens is in slot n mod
    (rewind + 1). With `tail` (width, channels) also a ring of the last inputs that a convolution of `width` needs, with
    token i in slot i mod its size.

    The number of tokens read selects the slots, so that going back by up to `rewind` tokens, or in only one row, needs
    no copy. Inputs are stored as `dtype`, the tensors of `kept` in fp32 at least."""

    kind = "recurrent"

    def __init__(
        self,
        batch: int,
        kept: Sizes,
        dtype: torch.dtype,
        device: Any = None,
        rewind: int = 0,
        tail: tuple[int, int] | None = None,
    ):
        width, channels = tail or (1, 0)
        self.rewind, self.tail = rewind, width - 1
        self.inputs = Cells(batch, self.tail + rewind, 1, channels, dtype, device) if self.tail else None
        precise = torch.promote_types(dtype, torch.float32)
        self.kept = {
            name: torch.zeros(batch, rewind + 1, *shape, dtype=precise, device=device) for name, shape in kept.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        inputs = [] if self.inputs is None else self.inputs.tensors()
        return {**{f"inputs{i or ''}": tensor for i, tensor in enumerate(inputs)}, **self.kept}

    def over(self, tensors: Mapping[str, Tensor]) -> RecurrentState:
        other = copy.copy(self)
        if self.inputs is not None:
            other.inputs = self.inputs.over([tensors[name] for name in ("inputs", "inputs1") if name in tensors])
        other.kept = {name: tensors[name] for name in self.kept}
        return other

    def begin(self, pass_: Pass, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Starts a call by storing its inputs x (b, s, c) of the convolution; returns (earlier inputs, state): the
        inputs before x, (b, width - 1, c), undefined before the first token, and the recurrence's tensors by name, (b,
        ...), zero for a row that has read no token."""
        self.mark(pass_.start + pass_.tokens)
        tail = x[:, :0] if self.inputs is None else self._last_inputs(self.inputs, pass_, x)
        precise = torch.promote_types(x.dtype, torch.float32)
        if pass_.rows is not None:
            empty, slot = pass_.rows == 0, self._slot(pass_.rows)
            found = {name: memory[slot].to(precise) for name, memory in self.kept.items()}
            return tail, {
                name: value.masked_fill(empty.view(-1, *[1] * (value.dim() - 1)), 0.0) for name, value in found.items()
            }
        slot = self._slot(pass_.start)
        found = {name: memory[slot].to(precise, copy=True) for name, memory in self.kept.items()}  # `keep` writes there
        return tail, found if pass_.start else {name: value.zero_() for name, value in found.items()}

    def _last_inputs(self, inputs: Cells, pass_: Pass, x: Tensor) -> Tensor:
        slots, size = pass_.slots, self.tail + self.rewind
        before = slots[..., :1] + torch.arange(-self.tail, 0, device=x.device)
        tail = inputs.at(before % size, x.dtype).squeeze(2)
        inputs[slots[..., -size:] % size] = x[:, -size:, None]
        return tail

    def pieces(self, tokens: int) -> list[int]:
        """Returns the sizes, in tokens, of the slices in which a call of `tokens` tokens is read: the last tokens,
        which `truncate` may take back, are read one by one, because the state after each is kept; all earlier tokens
        at once."""
        alone = min(tokens, self.rewind)
        return [size for size in (tokens - alone, *[1] * alone) if size]

    def keep(self, values: Mapping[str, Tensor], pass_: Pass, tokens: int) -> None:
        """Stores the recurrence's tensors `values` by name, each (b, ...), as the state after the first `tokens` tokens
        of this call."""
        slot = self._slot((pass_.start if pass_.rows is None else pass_.rows) + tokens)
        for name, memory in self.kept.items():
            memory[slot] = values[name].detach().to(memory.dtype)

    def _slot(self, read: int | Tensor) -> Any:
        """Returns an index into the kept tensors that selects the state after `read` tokens: one number for all rows,
        or one for each row."""
        size = self.rewind + 1
        if isinstance(read, int) or size == 1:
            return slice(None), 0 if size == 1 else read % size
        return torch.arange(len(read), device=read.device), read % size

    def truncate(self, length: int) -> None:
        self.go_back(length, f"a recurrence keeps its last {self.rewind + 1} states")


def recurrent_cost(shape: Shape, kept: Sizes, tail: tuple[int, int] | None = None) -> Cost:
    """Returns the cost of a `RecurrentState` with these tensors, whose memory each pass reads and writes completely.
    `kept`: {name: shape}; `tail`: (width, channels) of the convolution, None without one."""
    width, channels = tail or (1, 0)
    precise = torch.promote_types(shape.state, torch.float32)
    values = sum(torch.Size(size).numel() for size in kept.values())
    return Cost.state(shape, (width - 1) * vector_bytes(channels, shape.state) + values * precise.itemsize)


class Recurrence(Mixer):
    """Base of mixers that read tokens one after the other and restart with each document."""

    causal, reach, heads, separates_documents = True, None, None, True


def in_pieces(
    run: Callable[[slice, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]],
    kept: dict[str, Tensor],
    pass_: Pass,
    state: RecurrentState | None,
) -> Tensor:
    """Runs a recurrence over the tokens of a pass and returns the outputs (b, s, ...). run(at, kept) returns the
    outputs of the tokens `at` and the state after them, from the state `kept`; with a decode state it is called for
    each of the state's `pieces`."""
    if state is None:
        return run(slice(0, pass_.tokens), kept)[0]
    ys, end = [], 0
    for size in state.pieces(pass_.tokens):
        at, end = slice(end, end + size), end + size
        y, kept = run(at, kept)
        state.keep(kept, pass_, end)
        ys.append(y)
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=1)


class RecurrenceConfig(MixerConfig):
    """Base of the configs of recurrences, with the methods that are equal for all recurrences."""

    knows_order: ClassVar[bool] = True

    def causal(self, ctx: BuildContext) -> bool:
        return True

    def reach(self, ctx: BuildContext) -> None:
        return None

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return keys_before(t, None)

    def heads(self, ctx: BuildContext) -> None:
        return None

    def check_training(self, ctx: BuildContext, device: str) -> None:
        """Accepts every type of device, because recurrences have a backward pass on all."""

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> MixerConfig | None:
        has = change == "bias" and "bias" in type(self).model_fields
        return self.replace(bias=new(self.bias)) if has else None  # type: ignore[attr-defined]

    def refuse_mup(self, ctx: BuildContext) -> None:
        """Raises RequestError if the model uses muP, which is not defined for this recurrence."""
        if ctx.mup is not None:
            raise RequestError(
                f"mup has no rule for the mixer {self.kind}, whose maps grow otherwise; leave mup out",
                code="conflict", field="mup", value=self.kind,
            )  # fmt: skip
