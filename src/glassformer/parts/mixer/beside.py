from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.core.base import WORDS, BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Matrix
from glassformer.parts.mixer.base import Mixer, MixerChange, MixerConfig
from glassformer.parts.state import State, added_up


class States(State):
    """Decode state of parallel mixers: the states of the mixers by number; mixers without a state are left out. Tensors
    are named "number.name"."""

    def __init__(self, states: Mapping[int, State]):
        self.states = dict(states)
        known = [state.rewind for state in self.states.values() if state.rewind is not None]
        self.rewind = min(known) if known else None

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def by_kind(self) -> dict[str, int]:
        return added_up(state.by_kind() for state in self.states.values())

    def _joined(self, part: Callable[[State], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {f"{i}.{name}": tensor for i, one in self.states.items() for name, tensor in part(one).items()}

    def tensors(self) -> dict[str, Tensor]:
        return self._joined(lambda state: state.tensors())

    def upto(self, length: int) -> dict[str, Tensor]:
        return self._joined(lambda state: state.upto(length))

    def over(self, tensors: Mapping[str, Tensor]) -> States:
        other = copy.copy(self)
        parts: dict[int, dict[str, Tensor]] = {i: {} for i in self.states}
        for name, tensor in tensors.items():
            i, _, part = name.partition(".")
            parts[int(i)][part] = tensor
        other.states = {i: state.over(parts[i]) for i, state in self.states.items()}
        return other

    @property
    def furthest(self) -> int:
        return max((state.furthest for state in self.states.values()), default=0)

    def mark(self, length: int) -> None:
        for state in self.states.values():
            state.mark(length)

    def put(self, row: int, other: State, length: int) -> None:
        assert isinstance(other, States)
        for i, mine in self.states.items():
            mine.put(row, other.states[i], length)

    def clear(self, row: int, length: int) -> None:
        for state in self.states.values():
            state.clear(row, length)

    def reserve(self, memory_len: int) -> None:
        for state in self.states.values():
            state.reserve(memory_len)

    def truncate(self, length: int) -> None:
        for state in sorted(self.states.values(), key=lambda one: one.rewind is None):  # may refuse, so first
            state.truncate(length)


class Beside(Mixer):
    """out = sum_i mixer_i(x): parallel mixers of one input, such as attention and a state space model in one layer
    (Hymba, Dong et al. 2024, 2411.13676; Falcon-H1, 2507.22448). x, out (b,s,d).

    Sites: out, and those of each mixer under its number (`mixer.mixers.0.pattern`)."""

    def __init__(self, mixers: Sequence[Mixer]):
        super().__init__()
        if len(mixers) < 2:
            raise RequestError(
                f"mixers={len(mixers)}: give two or more parallel mixers",
                code="range", field="mixer.mixers", value=len(mixers), expected="two or more",
            )  # fmt: skip
        self.mixers = nn.ModuleList(mixers)
        self.out = Site("bsd")

    def _all(self) -> list[Any]:
        return list(self.mixers)

    def forward(
        self, x: Float[Tensor, "b s d"], pass_: Pass | None = None, state: States | None = None
    ) -> Float[Tensor, "b s d"]:
        pass_ = pass_ or Pass.of(x)
        states: Mapping[int, State] = {} if state is None else state.states
        outs = [mixer(x, pass_, states.get(i)) for i, mixer in enumerate(self._all())]
        return self.out(sum(outs[1:], outs[0]))

    @property
    def causal(self) -> bool:
        return all(mixer.causal for mixer in self._all())

    @property
    def takes_prefix(self) -> bool:
        mixers = self._all()
        reads_on = all(mixer.takes_prefix or mixer.causal for mixer in mixers)
        return reads_on and any(mixer.takes_prefix for mixer in mixers)

    @property
    def reach(self) -> int | None:
        return farthest([mixer.reach for mixer in self._all()])

    @property
    def heads(self) -> None:
        return None

    @property
    def takes_globals(self) -> bool:
        return any(mixer.takes_globals for mixer in self._all())

    @property
    def separates_documents(self) -> bool:
        return all(mixer.separates_documents for mixer in self._all())

    def matrices(self) -> dict[str, Matrix]:
        """Returns {name: weight matrix} of all parallel mixers; each name starts with the number of its mixer."""
        return {
            f"mixers.{i}.{name}": matrix
            for i, mixer in enumerate(self._all())
            for name, matrix in mixer.matrices().items()
        }

    def init_state(self, batch: int, max_len: int, dtype: torch.dtype, device: Any = None, rewind: int = 0) -> States:
        made = {i: mixer.init_state(batch, max_len, dtype, device, rewind) for i, mixer in enumerate(self._all())}
        return States({i: state for i, state in made.items() if state is not None})


def farthest(reaches: Sequence[int | None]) -> int | None:
    known = [reach for reach in reaches if reach is not None]
    return max(known) if len(known) == len(reaches) else None


def _read(word: str, text: str) -> dict[str, Any]:
    name, colon, value = text.partition(":")
    found = WORDS.get(name)
    if found is None or found[1].axis != "mixer" or not found[1].kind or found[0].change:
        known = sorted(one for one, (w, part) in WORDS.items() if part.axis == "mixer" and part.kind and not w.change)
        raise RequestError(
            f"{word}:{text}: {name!r} is not a mixer; known: {', '.join(known)}",
            code="unknown", field=word, value=text, expected="a mixer",
        )  # fmt: skip
    return {"of": found[1], "fields": found[0].given(value if colon else None)}


class BesideConfig(MixerConfig, kind="beside", words=Word("beside", _read, "mamba2")):
    """Config of parallel mixers in one layer: out = sum_i mixer_i(x) (2411.13676, 2507.22448).

    It loses to alternating layers (`+stack`) if width is costly: each of the mixers has separate weights in every
    layer."""

    mixers: tuple[MixerConfig, ...] = Field(min_length=2, max_length=16)

    @classmethod
    def replacing(cls, old: Any, **fields: Any) -> Any:
        """Returns a config of `old` in parallel with a mixer of the class fields["of"] with fields["fields"]; if `old`
        is, or has, a mixer of that class, that mixer takes these fields instead. Without "of", sets fields of `old`."""
        if "of" not in fields:
            return old.replace(**fields) if type(old) is cls else cls(**fields)
        of, more = fields["of"], fields["fields"]
        before = old.mixers if type(old) is cls else (old,)
        if any(type(one) is of for one in before):
            after = tuple(of.replacing(one, **more) if type(one) is of else one for one in before)
            return cls(mixers=after) if type(old) is cls else old.replace(**more)
        return cls(mixers=(*before, of.replacing(before[0], **more)))

    def takes_prefix(self, ctx: BuildContext) -> bool:
        takes = [mixer.takes_prefix(ctx) for mixer in self.mixers]
        return any(takes) and all(one or mixer.causal(ctx) for one, mixer in zip(takes, self.mixers, strict=True))

    def causal(self, ctx: BuildContext) -> bool:
        return all(mixer.causal(ctx) for mixer in self.mixers)

    def reach(self, ctx: BuildContext) -> int | None:
        return farthest([mixer.reach(ctx) for mixer in self.mixers])

    def keys_seen(self, ctx: BuildContext, t: int) -> float:
        return max(mixer.keys_seen(ctx, t) for mixer in self.mixers)

    def heads(self, ctx: BuildContext) -> None:
        return None

    def check_training(self, ctx: BuildContext, device: str) -> None:
        for mixer in self.mixers:
            mixer.check_training(ctx, device)

    def resized(self, n_heads: int) -> BesideConfig:
        return self.replace(mixers=tuple(mixer.resized(n_heads) for mixer in self.mixers))

    def changed(self, change: MixerChange, new: Callable[[Any], Any]) -> BesideConfig | None:
        made = [mixer.changed(change, new) for mixer in self.mixers]
        if all(one is None for one in made):
            return None
        return self.replace(mixers=tuple(one or mixer for one, mixer in zip(made, self.mixers, strict=True)))

    def build(self, ctx: BuildContext) -> Beside:
        return Beside([mixer.build(ctx) for mixer in self.mixers])

    def resolved(self, ctx: BuildContext) -> BesideConfig:
        return self.replace(mixers=tuple(mixer.resolved(ctx) for mixer in self.mixers))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the sum of the costs of the parallel mixers; their common input is one tensor."""
        again = (len(self.mixers) - 1) * shape.keeps(ctx.d_model) if shape.inputs == shape.products else 0
        return sum((mixer.costs(ctx, shape) for mixer in self.mixers), Cost(kept=-again))
