"""Initialisation of weights: a role, declared by the part, that a rule turns into a distribution.

A part declares the role of each of its matrices; the model's init config turns roles into distributions, given the
width and the depth. Nothing is matched by parameter name. Norm weights are initialised to one, biases to zero.

L is half the number of residual additions (`BuildContext.n_branches`): the number of layers if each has a mixer and an
FFN. A layer may be written as several blocks.

role        purpose                                        GPT-2           small-init / Wang
score       W_Q and W_K, whose product makes scores        N(0, 0.02)      N(0, 2/(5d))
hidden      reads the residual stream or a branch          N(0, 0.02)      N(0, 2/(5d))
output      writes a branch's result to the stream         0.02/sqrt(2L)   std 2/(L sqrt(d))
embedding   rows looked up by token or position            N(0, 0.02)      N(0, 2/(5d))
head        the stream to logits                           N(0, 0.02)      N(0, 2/(5d))

The values of a tensor depend only on the seed and the parameter's name, and any of its rows are drawn without the
others (`Numbers`): neither the other parts of the model nor the order of building changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from glassformer.parts.core.base import BuildContext, PartConfig

WEIGHTS_RULE = 2
"""Version of the rule that draws weights from a seed; runs of one seed have equal initial weights only with equal
versions.

1: one generator, over the modules in their order. 2: a stream for each parameter, from (seed, parameter name)."""

BLOCK = 1 << 18
"""Number of elements that one generator draws, rounded up to whole rows; part of the rule."""

Role = Literal["score", "hidden", "output", "embedding", "head"]

Spread = Callable[[Role, float, float], float]
"""Function of (role of a matrix, fan_in, fan_out); returns the standard deviation of its initial weights."""


def xavier(gain: float = 1.0, others: float = 1.0) -> Spread:
    """Returns the rule of standard deviations sqrt(2 / (fan_in + fan_out)), times `gain` for the roles hidden and
    output, times `others` for all other roles."""
    gains = {"hidden": gain, "output": gain}
    return lambda role, fan_in, fan_out: gains.get(role, others) * math.sqrt(2.0 / (fan_in + fan_out))


def by_role(rest: float, output: float) -> Spread:
    """Returns a rule of standard deviations that ignores the shape of a matrix: `output` for the role output, `rest`
    for all other roles."""
    return lambda role, fan_in, fan_out: output if role == "output" else rest


def key_of(*words: object) -> int:
    """Returns a 63-bit seed from the hash of the words; torch's CPU generator uses its lower 32 bits."""
    text = "/".join(map(str, (WEIGHTS_RULE, *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Numbers:
    """Random values of a tensor of `shape`: scale times N(0, 1), or low + scale times U(0, 1) if `low` is given.

    Drawn on the CPU in fp32 whatever the device and dtype of the tensor, in blocks of whole rows with a generator each,
    so that any rows are drawn without the others.
    """

    seed: int
    name: str
    shape: tuple[int, ...]
    scale: float
    low: float | None = None

    @property
    def size(self) -> int:
        """Number of rows in a block, which one generator draws."""
        return max(1, BLOCK // max(1, math.prod(self.shape[1:])))

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yields the values of rows first .. last-1 block by block, as (a, b, the values of rows a .. b-1); `last` None
        for all rows."""
        rows, *rest = self.shape
        last, generator = rows if last is None else last, torch.Generator()
        for begin in range(first - first % self.size, last, self.size):
            values = torch.empty((min(self.size, rows - begin), *rest), dtype=torch.float32, device="cpu")
            self._draw(values, begin, generator)
            a, b = max(begin, first), min(begin + self.size, last)
            yield a, b, values[a - begin : b - begin]

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Writes all values into a weight of `shape`, on any device, in any dtype."""
        weight = weight.view(self.shape) if weight.dim() == 0 else weight
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous():
            size, generator = self.size, torch.Generator()
            for begin in range(0, self.shape[0], size):  # in place, without a copy
                self._draw(weight[begin : begin + size], begin, generator)
            return
        for a, b, values in self.blocks():
            weight[a:b] = values

    def _draw(self, block: Tensor, begin: int, generator: torch.Generator) -> None:
        """Fills the tensor `block`, one block of rows, in place; the index of its first row selects the random
        numbers."""
        generator.manual_seed(key_of(self.seed, self.name, begin // self.size))
        if self.low is None:
            block.normal_(0.0, self.scale, generator=generator)
        else:
            block.uniform_(self.low, self.low + self.scale, generator=generator)


@dataclass
class Init:
    """Initialiser of the weights of a part: `init.fill(self.weight, "hidden")` is all that a part needs to call.

    `std` and `uniform` are the rule of the model's init config. While a model is built, `seed` is its seed, `names` the
    full name of the parameter in each storage, and `path` the module whose `init_weights` is called. Without a seed (a
    single part, in a notebook) torch's global generator chooses one.
    """

    std: Spread = field(default_factory=xavier)
    uniform: bool = False
    seed: int | None = None
    names: Mapping[Any, str] = field(default_factory=dict)
    path: str = ""
    of_towers: Mapping[str, Spread] = field(default_factory=dict)
    """Mapping {path prefix of a stack of layers with another depth, such as an encoder: its rule}."""
    recorded: dict[str, list[tuple[Tensor, Numbers]]] | None = None
    """Name of a parameter on the meta device -> pairs of a view of it and the values that would be drawn into that
    view; None if values are drawn."""
    _unnamed: int = 0

    def at(self, path: str) -> Init:
        """Returns this initialiser with the module at `path` as the one that is filled."""
        own = next((rule for begin, rule in self.of_towers.items() if path.startswith(begin)), self.std)
        return replace(self, path=path, std=own)

    @property
    def generator(self) -> torch.Generator:
        """Torch generator seeded by (seed, path of the module), for special distributions. Prefer the methods below,
        whose values can be drawn in slices."""
        return torch.Generator("cpu").manual_seed(key_of(self._seed(), self.path))

    def fill(self, weight: Tensor, role: Role) -> None:
        """Fills a weight (o, i), or a view of some rows of a parameter, in place, with values of the distribution that
        the rule gives the role."""
        if weight.is_meta and self.recorded is None:
            return
        fan_out, fan_in = map(float, weight.shape)
        std = self.std(role, fan_in, fan_out)
        if self.uniform:
            self.fill_uniform(weight, -math.sqrt(3.0) * std, math.sqrt(3.0) * std)
        else:
            self._fill(weight, self._numbers(weight, std))

    def fill_uniform(self, weight: Tensor, low: float, high: float) -> None:
        """Fills a weight of any shape, in place, with values of U(low, high)."""
        self._fill(weight, self._numbers(weight, high - low, low))

    def uniform_like(self, weight: Tensor, low: float, high: float) -> Tensor:
        """Returns the values that `fill_uniform` would write into this weight, as a new tensor in fp32, for a part that
        transforms them."""
        made = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        if not made.is_meta:
            self._numbers(weight, high - low, low).write(made)
        return made

    def _fill(self, weight: Tensor, numbers: Numbers) -> None:
        if not weight.is_meta:
            numbers.write(weight)
        elif self.recorded is not None:
            self.recorded.setdefault(numbers.name.rpartition("@")[0], []).append((weight, numbers))

    def _numbers(self, weight: Tensor, scale: float, low: float | None = None) -> Numbers:
        """Returns the random values of a weight: scale times N(0, 1), or U(low, low + scale). The stream is named by
        the parameter and the weight's offset in it, so that each layer of a fused matrix has a separate one."""
        name = self.names.get(storage_of(weight))
        if name is None:
            name, self._unnamed = f"{self.path}#{self._unnamed}", self._unnamed + 1
        stream = f"{name}@{weight.storage_offset()}"
        return Numbers(self._seed(), stream, tuple(weight.shape) or (1,), scale, low)

    def _seed(self) -> int:
        return int(torch.randint(1 << 62, (), device="cpu")) if self.seed is None else self.seed


def storage_of(tensor: Tensor) -> Any:
    """Returns a hashable key of a tensor's storage, equal for a tensor and its views, on the meta device too."""
    return tensor.untyped_storage()._cdata


class InitConfig(PartConfig, axis="init"):
    """Config of the initialisation of a model: a rule from roles to distributions."""

    def build(self, ctx: BuildContext) -> Init:
        raise NotImplementedError


class Gpt2InitConfig(InitConfig, kind="gpt2"):
    """GPT-2's initialisation, N(0, std^2); weights that write to the stream are divided by sqrt(2 L), for the 2 L
    additions, so that the stream's variance does not grow with depth. Radford et al. 2019, section 2.3."""

    std: float = Field(0.02, gt=0)
    depth_scaled: bool = True

    def build(self, ctx: BuildContext) -> Init:
        output = self.std / math.sqrt(ctx.n_branches) if self.depth_scaled else self.std
        return Init(by_role(self.std, output))


class XavierInitConfig(InitConfig, kind="xavier"):
    """Xavier initialisation: std = gain sqrt(2 / (fan_in + fan_out)) on every matrix, the tables included. Glorot &
    Bengio 2010.

    `uniform` draws from U(-a, a), a = gain sqrt(6 / (fan_in + fan_out)), which has the same variance.
    """

    gain: float = Field(1.0, gt=0)
    uniform: bool = True

    def build(self, ctx: BuildContext) -> Init:
        return Init(xavier(self.gain, self.gain), self.uniform)


class DeepNormInitConfig(InitConfig, kind="deepnorm"):
    """DeepNorm's initialisation: Xavier, normal, with W_V, W_O and the FFN scaled by beta = (8 L)^(-1/4). Wang et al.
    2022, 2203.00555."""

    beta: float | None = Field(None, gt=0)
    """Scale of W_V, W_O and the FFN; None for (8 L)^(-1/4) of L layers."""

    def build(self, ctx: BuildContext) -> Init:
        return Init(xavier(self.beta or (4 * ctx.n_branches) ** -0.25))


class SmallInitConfig(InitConfig, kind="small"):
    """Small initialisation: std = sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv 1910.05895); weights of the role output
    2 / (L sqrt(d)) (Wang & Komatsuzaki, as in GPT-NeoX-20B, arXiv 2204.06745)."""

    def build(self, ctx: BuildContext) -> Init:
        small = math.sqrt(2.0 / (5.0 * ctx.d_model))
        output = 4.0 / (ctx.n_branches * math.sqrt(ctx.d_model))
        return Init(by_role(small, output))
