"""From logits to the next token: the options of a row, the warpers that apply them, and the draw.

Warpers run in the order of `transformers`' `generate()`: logit bias, penalties, temperature, top-k, top-p, min-p,
typical. A function of the caller follows the penalties.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.generation.native_step import largest
from glassformer.machine.threads import at_most
from glassformer.options import Bounds, LogitsProcessor, SamplingOptions
from glassformer.parts.core.base import Value
from glassformer.parts.precision import exact_device

__all__ = ["Sampled", "Sampling", "choose", "row_generator", "warp"]

LARGEST_BIAS = 10_000  # entries
COLDEST = 1e-6  # smallest divisor: a lower temperature draws the same tokens, but overflows fp32
FIRST_LOOK = 256  # tokens sorted at first, because sorting a vocabulary takes longer than a small model's step

Added = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]


class Sampling(Value, SamplingOptions):
    """Rule that chooses the next token of a row: `SamplingOptions`, checked when they are made.

    Examples
    --------
    >>> rule = gf.Sampling(temperature=0.7, top_p=0.9)
    >>> rule.plain
    False
    """

    logit_bias: dict[TokenId, Added] = Field({}, max_length=LARGEST_BIAS)
    """Amounts added to the logits of tokens, by token id."""
    logits_processor: LogitsProcessor | None = Field(None, repr=False)
    """Function (logits (v,), tokens so far (n,)) -> logits (v,) of one row, applied before the temperature. The logits
    may be changed in place; at least one must stay finite."""

    if TYPE_CHECKING:  # checkers of types do not see the fields of a dataclass below

        def __init__(self, **fields: Any) -> None: ...

    @field_validator("*")
    @classmethod
    def _refuse_out_of_bounds(cls, value: Any, info: Any) -> Any:
        for one in cls.model_fields[info.field_name].metadata:
            if isinstance(one, Bounds) and value is not None and not one.hold(value):
                raise PydanticCustomError("bounds", "input must be {bounds}", {"bounds": str(one)})
        return value

    @classmethod
    def of(cls, options: SamplingOptions) -> Sampling:
        """Returns the rule of options, which may have further fields.

        Parameters
        ----------
        options
            Options of sampling or generation.

        Returns
        -------
        Sampling
            The rule.

        Raises
        ------
        RequestError
            For a value out of bounds.

        Examples
        --------
        >>> gf.Sampling.of(rule) == rule
        True
        """
        return cls(**{name: getattr(options, name) for name in cls.model_fields})

    def check(self, vocab_size: int) -> None:
        """Checks the ids of `logit_bias` against a vocabulary.

        Parameters
        ----------
        vocab_size
            Size of the model's vocabulary.

        Raises
        ------
        RequestError
            For an id outside the vocabulary.

        Examples
        --------
        >>> gf.Sampling(logit_bias={5: -100.0}).check(vocab_size=100)
        """
        if (last := max(self.logit_bias, default=0)) >= vocab_size:
            raise RequestError(
                f"logit_bias has the token {last}; this vocabulary of {vocab_size} ends before it",
                code="range", field="logit_bias", value=last,
            )  # fmt: skip

    @property
    def key(self) -> str:
        """Text that is equal for two rules if and only if they have the same settings."""
        return f"{self.model_dump_json(exclude={'logits_processor'})} {id(self.logits_processor)}"

    @cached_property
    def penalizes(self) -> bool:
        """True if the choice depends on the tokens so far."""
        if self.logits_processor is not None:
            return True
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @cached_property
    def plain(self) -> bool:
        """True if the token of the model's largest logit is chosen, without any warper."""
        return self.temperature == 0 and not self.penalizes and not self.logit_bias


# Warpers: (b, v) float32 -> (b, v), never in place


def add_bias(logits: Float[Tensor, "b v"], bias: Mapping[int, float]) -> Float[Tensor, "b v"]:
    """Returns x_i + bias_i, as `logit_bias` of OpenAI's API does."""
    tokens = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(1, tokens, logits.new_tensor(list(bias.values())).expand(len(logits), -1))


def penalize_repetition(
    logits: Float[Tensor, "b v"], penalty: float, history: Sequence[Int[Tensor, "_"]]
) -> Float[Tensor, "b v"]:
    """Returns x_i / penalty if x_i > 0, else x_i * penalty, for each token i in a row's history: Keskar et al. 2019,
    1909.05858, with the distinction by sign of `transformers`."""
    logits = logits.clone()
    for row, tokens in zip(logits, history, strict=True):
        seen = row[tokens]
        row[tokens] = torch.where(seen < 0, seen * penalty, seen / penalty)
    return logits


def penalize_frequency(
    logits: Float[Tensor, "b v"], frequency: float, presence: float, generated: Sequence[Int[Tensor, "_"]]
) -> Float[Tensor, "b v"]:
    """Returns x_i - frequency * c_i - presence * [c_i > 0], where c_i counts token i in a row's new tokens: OpenAI's
    API reference. vLLM counts the same tokens; llama.cpp counts the last n."""
    logits = logits.clone()
    for row, tokens in zip(logits, generated, strict=True):
        counts = torch.zeros_like(row).index_add_(0, tokens, row.new_ones(len(tokens)))
        row -= frequency * counts + presence * (counts > 0)
    return logits


def process(
    logits: Float[Tensor, "b v"], processor: LogitsProcessor, history: Sequence[Int[Tensor, "_"]]
) -> Float[Tensor, "b v"]:
    """Returns the processor's logits for each row; a row whose logits are not numbers stays as it is.

    Raises RequestError for a result of another shape, or one that leaves no token possible."""
    rows = []
    for row, tokens in zip(logits, history, strict=True):
        found = processor(row.clone(), tokens) if row.max().isfinite() else row
        if not isinstance(found, Tensor) or found.shape != row.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise RequestError(
                f"logits_processor must return logits of shape {list(row.shape)}, got {shape}",
                code="type", field="logits_processor", value=shape, expected=f"a tensor of shape {list(row.shape)}",
            )  # fmt: skip
        if found is not row and not found.max().isfinite():
            raise RequestError(
                "logits_processor must leave at least one finite logit and none that is NaN or +inf",
                code="range", field="logits_processor", expected="a finite largest logit",
            )  # fmt: skip
        rows.append(found.float())
    return torch.stack(rows)


def scale(logits: Float[Tensor, "b v"], temperature: float) -> Float[Tensor, "b v"]:
    """Returns x / temperature."""
    return logits / max(temperature, COLDEST)


def keep_top_k(logits: Float[Tensor, "b v"], k: int) -> Float[Tensor, "b v"]:
    """Returns the logits with -inf for all but the k largest, and ties with the least of them: Fan et al. 2018,
    1805.04833."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """Returns the logits with -inf for all but the fewest most likely tokens whose probabilities reach p, and ties with
    the least of them (of ties, `transformers` keeps some, by id): Holtzman et al. 2019, 1904.09751."""
    return logits.masked_fill(logits < _least_of(logits, logits.softmax(-1), p), -math.inf)


def keep_min_p(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """Returns the logits with -inf for all but the tokens that are at least p times as likely as the most likely one:
    Nguyen et al. 2024, 2407.01082."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def keep_typical(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """Returns the logits with -inf for all but the fewest tokens whose probabilities reach p, in the order of the
    distance of -log q_i from the entropy -sum_j q_j log q_j: Meister et al. 2022, 2202.00666."""
    surprise = -logits.log_softmax(-1)
    q = (-surprise).exp()
    nearness = -(surprise - (q * surprise).nansum(-1, keepdim=True)).abs()  # NaN, 0 * inf, for a token excluded before
    return logits.masked_fill(nearness < _least_of(nearness, q, p), -math.inf)


def _least_of(rank: Float[Tensor, "b v"], probabilities: Float[Tensor, "b v"], mass: float) -> Float[Tensor, "b 1"]:
    """Returns the rank of the last token among the fewest best-ranked ones whose probabilities reach `mass`."""
    vocab_size = rank.shape[-1]
    probabilities = probabilities.to(exact_device(rank.device))
    enough = probabilities.sum(-1, keepdim=True, dtype=torch.float64) - (1 - mass)
    k = min(FIRST_LOOK, vocab_size)
    while True:
        best = rank.topk(k)
        reached = probabilities.gather(-1, best.indices.to(probabilities.device)).cumsum(-1, dtype=torch.float64)
        if k == vocab_size or bool((reached[:, -1:] >= enough).all()):
            last = (reached < enough).sum(-1, keepdim=True).clamp_(max=k - 1)
            return best.values.gather(-1, last.to(rank.device))
        k = min(16 * k, vocab_size)


def warp(
    logits: Float[Tensor, "b v"],
    sampling: Sampling,
    history: Sequence[Int[Tensor, "_"]] = (),
    generated_from: Sequence[int] = (),
) -> Float[Tensor, "b v"]:
    """Returns the logits, in fp32, of the distribution of rows with one Sampling. At least one in each row is finite if
    the model's are. At temperature 0 no token is excluded.

    `history` has the tokens of each row so far, and `generated_from` the index of the first new token; both are read
    only if `sampling.penalizes`."""
    logits = logits.float()
    if sampling.logit_bias:
        logits = add_bias(logits, sampling.logit_bias)
    if sampling.repetition_penalty != 1:
        logits = penalize_repetition(logits, sampling.repetition_penalty, history)
    if sampling.frequency_penalty or sampling.presence_penalty:
        generated = [tokens[start:] for tokens, start in zip(history, generated_from, strict=True)]
        logits = penalize_frequency(logits, sampling.frequency_penalty, sampling.presence_penalty, generated)
    if sampling.logits_processor is not None:
        logits = process(logits, sampling.logits_processor, history)
    if sampling.temperature == 0:
        return logits
    if sampling.temperature != 1:
        logits = scale(logits, sampling.temperature)
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    if sampling.typical_p is not None and sampling.typical_p < 1:
        logits = keep_typical(logits, sampling.typical_p)
    return logits


# The choice


@dataclass(frozen=True)
class Sampled:
    """The next token of each row.

    Log-probabilities are those of the model, log_softmax of its logits before any warper, as OpenAI and vLLM report
    them; None unless asked for. A row is `bad` if the model's logits contain NaN or +inf, or are all -inf: its token is
    meaningless, and other rows are unaffected.
    """

    tokens: Int[Tensor, "b"]
    bad: Bool[Tensor, "b"]
    logprobs: Float[Tensor, "b"] | None = None
    top_ids: Int[Tensor, "b k"] | None = None
    top_logprobs: Float[Tensor, "b k"] | None = None

    def clone(self) -> Sampled:
        return Sampled(**{name: one.clone() for name, one in vars(self).items() if one is not None})


def choose(
    logits: Float[Tensor, "b v"],
    samplings: Sequence[Sampling],
    histories: Sequence[Int[Tensor, "_"]] = (),
    generated_from: Sequence[int] = (),
    generators: Sequence[torch.Generator | None] = (),
    top: int = 0,
    logprobs: bool = False,
    masks: Sequence[Bool[Tensor, "v"] | None] = (),
) -> Sampled:
    """Returns the next token of each row by its own Sampling and generator, which does not depend on other rows.

    Rows that share a Sampling object are warped together. `histories` and `generated_from` are read if a row penalizes,
    `generators` if it has a temperature (None for torch's generator). `top` is the number of most likely tokens whose
    log-probabilities are returned too. `masks` has the allowed tokens of each row, None for all; log-probabilities are
    those of the model without a mask. One thread computes, because rows are too short to share."""
    more = bool(top) or logprobs or any(mask is not None for mask in masks)
    if not more and all(one.plain for one in samplings) and (found := largest(logits)) is not None:
        return Sampled(*found)
    return _choose(logits, samplings, histories, generated_from, generators, top, logprobs, masks)


@at_most(1)
def _choose(
    logits: Float[Tensor, "b v"],
    samplings: Sequence[Sampling],
    histories: Sequence[Int[Tensor, "_"]],
    generated_from: Sequence[int],
    generators: Sequence[torch.Generator | None],
    top: int,
    logprobs: bool,
    masks: Sequence[Bool[Tensor, "v"] | None],
) -> Sampled:
    """Returns what `choose` does, by torch's operations."""
    free = logits
    if any(mask is not None for mask in masks):
        logits = torch.stack(
            [
                row if mask is None else row.masked_fill(~mask.to(row.device), -math.inf)
                for row, mask in zip(logits, masks, strict=True)
            ]
        )
    best, tokens = logits.max(-1)  # one pass: in bf16 on the CPU, argmax takes four times as long
    bad = ~best.isfinite()  # NaN counts as the largest
    if free is not logits:
        bad |= ~free.amax(-1).isfinite()
    alike: dict[int, list[int]] = {}
    for row, sampling in enumerate(samplings):
        if not sampling.plain:
            alike.setdefault(id(sampling), []).append(row)
    for rows in alike.values():
        sampling = samplings[rows[0]]
        some = logits if len(rows) == len(logits) else logits[rows]
        past = rows if sampling.penalizes else []
        warped = warp(some, sampling, [histories[row] for row in past], [generated_from[row] for row in past])
        if sampling.temperature == 0:
            tokens[rows] = warped.argmax(-1)
        else:
            tokens[rows] = draw(warped, [generators[row] for row in rows])
    if not (logprobs or top):
        return Sampled(tokens, bad)
    logits = free.float()
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - total)[:, 0]
    if not top:
        return Sampled(tokens, bad, chosen)
    first = logits.topk(min(top, logits.shape[-1]))
    return Sampled(tokens, bad, chosen, first.indices, first.values - total)


def draw(logits: Float[Tensor, "b v"], generators: Sequence[torch.Generator | None]) -> Int[Tensor, "b"]:
    """Returns a token of each row drawn from softmax(logits): the first whose cumulative probability reaches u, one
    number of the row's generator. As 0 < u <= 1, a token of probability 0 is never drawn."""
    reached = logits.softmax(-1).to(exact_device(logits.device)).cumsum(-1, dtype=torch.float64)
    below_1 = reached.new_empty(len(logits), 1)
    for number, generator in zip(below_1, generators, strict=True):
        number.uniform_(generator=generator)
    drawn = torch.searchsorted(reached, (1 - below_1) * reached[:, -1:])
    return drawn[:, 0].clamp_(max=logits.shape[-1] - 1).to(logits.device)  # with NaN, the index is past the last token


def row_generator(seed: int | None, row: int, device: torch.device | str) -> torch.Generator:
    """Returns a generator for a row of a batch, seeded by (seed, row), or without a seed by torch's generator. It is on
    the device that draws fp64 numbers for `device`."""
    generator = torch.Generator(exact_device(device))
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(digest, "little"))
