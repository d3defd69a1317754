"""From logits to the next token: what a row asks for, the warpers that serve it, and the draw.

The order is that in which `transformers` composes its processors in `generate()`: logit bias, penalties, temperature,
top-k, top-p, min-p, typical. A function of the caller follows the penalties.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.machine.threads import at_most
from glassformer.options import Bounds, LogitsProcessor, SamplingOptions
from glassformer.parts.core.base import Value
from glassformer.parts.precision import exact_device

__all__ = ["Sampled", "Sampling", "choose", "row_generator", "warp"]

LARGEST_BIAS = 10_000  # entries
COLDEST = 1e-6  # a temperature below it draws what it draws, and divides logits beyond what fp32 can hold
FIRST_LOOK = 256  # tokens sorted at first: the likely ones are few, and sorting a vocabulary takes longer than a model

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
        """Text that is equal for rules that choose alike."""
        return f"{self.model_dump_json(exclude={'logits_processor'})} {id(self.logits_processor)}"

    @cached_property
    def penalizes(self) -> bool:
        """Whether the tokens so far matter."""
        if self.logits_processor is not None:
            return True
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @cached_property
    def plain(self) -> bool:
        """Whether the largest logit, as the model has it, is chosen."""
        return self.temperature == 0 and not self.penalizes and not self.logit_bias


# Warpers: (b, v) float32 -> (b, v), never in place


def add_bias(logits: Float[Tensor, "b v"], bias: Mapping[int, float]) -> Float[Tensor, "b v"]:
    """x_i + bias_i, as `logit_bias` of OpenAI's API."""
    tokens = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(1, tokens, logits.new_tensor(list(bias.values())).expand(len(logits), -1))


def penalize_repetition(
    logits: Float[Tensor, "b v"], penalty: float, history: Sequence[Int[Tensor, "_"]]
) -> Float[Tensor, "b v"]:
    """x_i / penalty where x_i > 0, else x_i * penalty, for each token i in a row's history: Keskar et al. 2019,
    1909.05858, with the care for the sign that `transformers` takes."""
    logits = logits.clone()
    for row, tokens in zip(logits, history, strict=True):
        seen = row[tokens]
        row[tokens] = torch.where(seen < 0, seen * penalty, seen / penalty)
    return logits


def penalize_frequency(
    logits: Float[Tensor, "b v"], frequency: float, presence: float, generated: Sequence[Int[Tensor, "_"]]
) -> Float[Tensor, "b v"]:
    """x_i - frequency * c_i - presence * [c_i > 0], c_i how often a row has generated the token i: OpenAI's API
    reference. vLLM counts the same; llama.cpp counts among the last n tokens."""
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
    """x / temperature."""
    return logits / max(temperature, COLDEST)


def keep_top_k(logits: Float[Tensor, "b v"], k: int) -> Float[Tensor, "b v"]:
    """The k largest, and what equals the least of them: Fan et al. 2018, 1805.04833."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """The fewest most likely tokens whose probabilities reach p, and what equals the least of them (of equals,
    `transformers` keeps some, by their ids): Holtzman et al. 2019, 1904.09751."""
    return logits.masked_fill(logits < _least_of(logits, logits.softmax(-1), p), -math.inf)


def keep_min_p(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """Tokens at least p times as likely as the most likely one: Nguyen et al. 2024, 2407.01082."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def keep_typical(logits: Float[Tensor, "b v"], p: float) -> Float[Tensor, "b v"]:
    """The fewest tokens whose probabilities reach p, those first whose -log q_i is nearest to the entropy
    -sum_j q_j log q_j: Meister et al. 2022, 2202.00666."""
    surprise = -logits.log_softmax(-1)
    q = (-surprise).exp()
    nearness = -(surprise - (q * surprise).nansum(-1, keepdim=True)).abs()  # 0 * inf: a token kept out before
    return logits.masked_fill(nearness < _least_of(nearness, q, p), -math.inf)


def _least_of(rank: Float[Tensor, "b v"], probabilities: Float[Tensor, "b v"], mass: float) -> Float[Tensor, "b 1"]:
    """The rank of the last of the fewest best-ranked tokens whose probabilities reach the mass."""
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
    """The logits, in fp32, that rows of one Sampling are drawn from; at least one in each row is finite if the model's
    are. At temperature 0 nothing is kept out.

    `history` has the tokens of each row so far, those of the answer from `generated_from` on; both are read only
    where `sampling.penalizes`."""
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

    Log-probabilities are of the model's own distribution, log_softmax of its logits before any warper, as OpenAI and
    vLLM report them; None where they were not asked for. A row is `bad` where the model's logits are NaN, hold +inf or
    are all -inf: its token means nothing, those of other rows are unharmed.
    """

    tokens: Int[Tensor, "b"]
    bad: Bool[Tensor, "b"]
    logprobs: Float[Tensor, "b"] | None = None
    top_ids: Int[Tensor, "b k"] | None = None
    top_logprobs: Float[Tensor, "b k"] | None = None

    def clone(self) -> Sampled:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return Sampled(**{name: tensor.clone() for name, tensor in given.items() if tensor is not None})


@at_most(1)
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
    """The next token of each row by its own Sampling and generator, so that it does not depend on its neighbours.

    Rows that share a Sampling object are warped together. `histories` and `generated_from` are read where a row
    penalizes, `generators` where it has a temperature (None: torch's own). With `top`, the log-probabilities of the
    k most likely tokens too. `masks` has the allowed tokens of each row, None for all; log-probabilities are those of
    the model without a mask. By one thread: a row of logits is too little for several to meet over."""
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
    """One token of each row from softmax(logits), by one number from its generator: the first whose cumulative
    probability reaches u, 0 < u <= 1, so that one of probability 0 is never drawn."""
    reached = logits.softmax(-1).to(exact_device(logits.device)).cumsum(-1, dtype=torch.float64)
    below_1 = reached.new_empty(len(logits), 1)
    for number, generator in zip(below_1, generators, strict=True):
        number.uniform_(generator=generator)
    drawn = torch.searchsorted(reached, (1 - below_1) * reached[:, -1:])
    return drawn[:, 0].clamp_(max=logits.shape[-1] - 1).to(logits.device)  # NaN lies beyond the last


def row_generator(seed: int | None, row: int, device: torch.device | str) -> torch.Generator:
    """A generator for a row of a batch that depends on (seed, row) alone; without a seed, on torch's own generator. It
    is on the device where numbers of fp64 are drawn for `device`."""
    generator = torch.Generator(exact_device(device))
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(digest, "little"))
