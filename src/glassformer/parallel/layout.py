"""Layouts: how ranks share a training step by data, tensor, pipeline, expert and context parallelism, ZeRO,
microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from pydantic import Field

from glassformer.config import ModelConfig
from glassformer.errors import RequestError, check_whole, did_you_mean
from glassformer.parts.core.base import Value
from glassformer.parts.core.cost import RECOMPUTE
from glassformer.parts.core.shard import shards_of

RANKS = 1 << 24
"""Largest number of ranks of a layout."""
POLICIES = (*RECOMPUTE[:2], "alternate", RECOMPUTE[2])
WORDS = "fsdp, replicate, dp, tp, pp, ep, cp, zero, micro, interleave, sp, recompute"


class Layout(Value):
    """Division of a step among `ranks` = dp cp tp pp processes.

    dp          copies of the model, each with its share of the batch
    cp          slices of a sequence, for every copy
    tp          owners of each matrix, divided as modules declare (`parts/core/shard.py`; Shoeybi et al. 2019,
                1909.08053)
    pp          stages of layers, by the schedule 1F1B (Narayanan et al. 2021, 2104.04473)
    ep          owners of the experts, among the dp copies, which exchange tokens
    zero        ZeRO stage, sharded over the dp cp ranks: 1 optimizer state, 2 also gradients, 3 also weights
                (Rajbhandari et al. 2020, 1910.02054); stage 3 is FSDP
    replicate   number of groups of dp / replicate ranks, each with a copy of the weights, sharded within the group
                (hybrid sharding, 2304.11277)
    micro       sequences of a microbatch, accumulated by a rank; if None, all of a rank's at once
    interleave  chunks of layers on each stage
    sp          tp divides the residual stream by tokens too (Korthikanti et al. 2022, 2205.05198)
    recompute   part of a layer that the backward pass recomputes: none; selective, all but matmuls and fused
                attention; alternate, every second matmul too, as torchtitan does; full
    """

    dp: int = Field(1, ge=1, le=RANKS)
    tp: int = Field(1, ge=1, le=RANKS)
    pp: int = Field(1, ge=1, le=RANKS)
    ep: int = Field(1, ge=1, le=RANKS)
    cp: int = Field(1, ge=1, le=RANKS)
    zero: int = Field(0, ge=0, le=3)
    replicate: int = Field(1, ge=1, le=RANKS)
    micro: int | None = Field(None, ge=1)
    interleave: int = Field(1, ge=1, le=RANKS)
    sp: bool = False
    recompute: Literal["none", "selective", "alternate", "full"] = "none"

    @classmethod
    def of(cls, text: str) -> Layout:
        """Parses a layout: dp=8,tp=4,zero=3,recompute=full; fsdp=8 means dp=8,zero=3 and fsdp=4,replicate=2 means
        dp=8,zero=3,replicate=2.

        Raises RequestError for an unknown key or value."""
        given: dict[str, str] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, _, value = word.partition("=")
            _check_word(name, value, word)
            _give_once(given, name, value, word)
        fsdp, replicate = given.pop("fsdp", None), given.get("replicate")
        if fsdp or (replicate and "dp" not in given):
            ranks = str(int(fsdp or 1) * int(replicate or 1))
            _check_word("dp", ranks, text)
            _give_once(given, "dp", ranks, text)
            _give_once(given, "zero", "3", text)
        return cls(**{name: value == "1" if name == "sp" else value for name, value in given.items()})

    def recomputing(self, recompute: str) -> Layout:
        """Returns the layout with the recomputation policy `recompute`. Raises RequestError for an unknown policy, or
        if the layout already has another one."""
        _check_word("recompute", recompute, recompute)
        if self.recompute not in ("none", recompute):
            expected = f"that of the layout, {self.recompute}"
            raise RequestError(code="conflict", field="recompute", value=recompute, expected=expected)
        return self.replace(recompute=recompute)

    def in_microbatches(self, micro: int | None) -> Layout:
        """Returns the layout with microbatches of `micro` sequences; unchanged for None. Raises RequestError if the
        layout already has another size."""
        if micro is None:
            return self
        check_whole("micro_batch", micro)
        if self.micro not in (None, micro):
            expected = f"that of the layout, {self.micro}"
            raise RequestError(code="conflict", field="micro_batch", value=micro, expected=expected)
        return self.replace(micro=micro)

    def __str__(self) -> str:
        """Returns the text that `of` parses."""
        told = self.model_dump(exclude_defaults=True)
        return ",".join(f"{name}={int(value) if name == 'sp' else value}" for name, value in told.items()) or "dp=1"

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def sharing(self) -> int:
        """Number of ranks among which ZeRO shards optimizer state, gradients or weights: those of dp and cp in one
        replica."""
        return self.dp * self.cp // self.replicate

    @property
    def fsdp(self) -> int:
        """Number of ranks over which weights are sharded; 1 below ZeRO stage 3."""
        return self.dp // self.replicate if self.zero == 3 else 1

    @property
    def trains(self) -> bool:
        """True if `train` supports this combination; other layouts can only be planned."""
        apart = self.fsdp == self.tp == self.cp == self.ep == 1 if self.pp > 1 else True
        of_experts = self.tp == self.cp == 1 and self.fsdp % self.ep == 0 if self.ep > 1 else True
        return self.zero not in (1, 2) and apart and of_experts

    def microbatch(self, batch: int) -> int:
        """Returns the number of sequences of a microbatch, for a `batch` of sequences over all ranks."""
        return self.micro or batch // self.dp

    def microbatches(self, batch: int) -> int:
        """Returns the number of microbatches that each rank computes in a step, for a `batch` of sequences over all
        ranks."""
        return batch // self.dp // self.microbatch(batch)

    def layers_of(self, stage: int, layers: int) -> list[int]:
        """Returns the indices of the layers that pipeline rank `stage` computes, of `layers` in all; with interleave >
        1 they are several chunks, pp chunks apart."""
        every = stage_layers(layers, self.pp * self.interleave)
        return [layer for chunk in every[stage :: self.pp] for layer in chunk]

    def check(self, config: ModelConfig, batch: int, context: int) -> None:
        """Raises RequestError, with the nearest valid number, if the layout does not divide batch (sequences), context
        (tokens), layers, heads or experts of the model."""
        self._divides_batch("dp", batch, batch)
        self._divides("replicate", self.dp, f"dp={self.dp}, the ranks that share the batch")
        if self.micro is not None:
            self._divides_batch("micro", batch // self.dp, batch)
        self._divides("cp", context, f"the context of {context} tokens")
        self._divides("ep", self.dp, f"dp={self.dp}, among whose ranks the experts are spread")
        stage = config.n_layers // self.pp
        if not stage:
            raise _no("pp", self.pp, f"more stages than the {config.n_layers} layers make", config.n_layers)
        chunks = stage if self.pp > 1 else 1
        if self.interleave > chunks:
            raise _no("interleave", self.interleave, f"more chunks than a stage of pp={self.pp} can have", chunks)
        if self.sp and self.tp == 1:
            raise RequestError("sp=1 divides what tp divides; give tp=2 or more", code="conflict", field="sp", value=1)
        if self.tp > 1 or self.ep > 1:
            self._check_units(config)

    def _check_units(self, config: ModelConfig) -> None:
        """Raises RequestError unless tp divides the heads, rows and columns of every matrix, and ep the experts."""
        units = _units(config)
        if self.ep > 1 and not units["ep"]:
            raise _no("ep", self.ep, "for models with experts", 1)
        for field, counted in units.items():
            for number, what in counted:
                self._divides(field, number, what, [other for other, _ in counted])

    def _divides_batch(self, field: str, sequences: int, batch: int) -> None:
        """Raises RequestError unless the value of `field` divides `sequences`: the whole `batch`, or a rank's part of
        it."""
        value = getattr(self, field)
        if sequences % value:
            near, more = _nearest(value, lambda n: sequences % n == 0, sequences), batch // sequences * value
            more *= -(-sequences // value)
            of_rank = "" if sequences == batch else f", {sequences} for a rank"
            raise RequestError(
                f"{field}={value} does not divide batch={batch}{of_rank}; give batch={more} (--batch {more}), or "
                f"{field}={near}",
                code="conflict", field=field, value=value, expected=f"{near}, or batch={more}",
            )  # fmt: skip

    def _divides(self, field: str, number: int, what: str, besides: Sequence[int] = ()) -> None:
        """Raises RequestError unless the value of `field` divides `number`, described by `what`; the suggested nearest
        value also divides the other numbers given."""
        value, all_of = getattr(self, field), [number, *besides]
        if number % value:
            near = _nearest(value, lambda n: not any(one % n for one in all_of), number)
            raise _no(field, value, f"no divisor of {what}", near)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Returns the indices of the layers of each stage, consecutive; if `stages` does not divide them, middle stages
    have one layer more, because embedding and head are work too."""
    least, more = divmod(layers, stages)
    middle = sorted(range(stages), key=lambda i: min(i, stages - 1 - i), reverse=True)[:more]
    ends = list(accumulate((least + (i in middle) for i in range(stages)), initial=0))
    return [range(first, end) for first, end in pairwise(ends)]


def tensor_parallel(config: ModelConfig, most: int) -> list[int]:
    """Returns the numbers of ranks up to `most`, ascending, among which tensor parallelism can divide a model of
    `config`."""
    counted = [number for number, _ in _units(config)["tp"]]
    return [ranks for ranks in range(1, most + 1) if not any(number % ranks for number in counted)]


@lru_cache(maxsize=64)
def _units(config: ModelConfig) -> dict[str, list[tuple[int, str]]]:
    """Returns {"tp": ..., "ep": ...}: (number that it must divide, description), sorted, from the matrices of a
    model."""
    model = config.outline()
    found: dict[str, set[tuple[int, str]]] = {"tp": set(), "ep": set()}
    parameters = dict(model.named_parameters())
    for name, cuts in shards_of(model).items():
        for cut in cuts:
            field = "ep" if cut.cut == "expert" else "tp" if cut.cut in ("column", "row") else ""
            if field and cut.axis < parameters[name].dim():
                units = cut.units or (parameters[name].shape[cut.axis] if cut.rows is None else cut.rows)
                kind = "experts" if field == "ep" else "heads or groups" if cut.units else "rows or columns"
                found[field].add((units, f"the {units} {kind} of {name}"))
    return {field: sorted(counted) for field, counted in found.items()}


def _nearest(value: int, serves: Callable[[int], bool], most: int) -> int:
    """Returns the number from 1 to `most` nearest to `value` for which `serves` is True, the smaller of two; 1 if no
    number serves."""
    for away in range(max(value, most)):
        for n in (value - away, value + away):
            if 1 <= n <= most and serves(n):
                return n
    return 1


def _no(field: str, value: int, why: str, near: int) -> RequestError:
    return RequestError(
        f"{field}={value} is {why}; {field}={near} would do",
        code="conflict", field=field, value=value, expected=f"{near}",
    )  # fmt: skip


def _give_once(given: dict[str, str], field: str, value: str, word: str) -> None:
    if given.setdefault(field, value) != value:
        raise RequestError(code="conflict", field=field, value=word, expected=f"given once, not {given[field]!r}")


def _check_word(field: str, value: str, word: str) -> None:
    if field not in (known := [*Layout.model_fields, "fsdp"]):
        near = did_you_mean(field, known)
        raise RequestError(
            f"layout: unknown word {word!r}{near or f'; known: {WORDS}'}",
            code="unknown", field="layout", value=word, expected=f"words such as dp=8,zero=3; known: {WORDS}",
        )  # fmt: skip
    most = {"zero": 3, "sp": 1}.get(field, RANKS)
    least = 0 if field in ("zero", "sp") else 1
    if field == "recompute":
        if value not in POLICIES:
            raise RequestError(code="unknown", field="recompute", value=value, expected=f"one of {', '.join(POLICIES)}")
    elif not (value.isascii() and value.isdecimal() and len(value) < 9 and least <= int(value) <= most):
        raise RequestError(code="range", field=field, value=value, expected=f"a whole number from {least} to {most:,}")
