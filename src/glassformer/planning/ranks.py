"""Weights that each rank of a layout holds: divided as modules declare, by stages, by experts, by ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.errors import RequestError
from glassformer.parallel.layout import Layout
from glassformer.parts.core.shard import shards_of
from glassformer.parts.mixer import MixerConfig
from glassformer.training.optimizers import OptimizerConfig


@dataclass(frozen=True)
class RankWeights:
    """Numbers of elements, on one rank, of one layer's weights or of the weights before or after the layers.

    values    after tensor and expert parallelism
    shards    the rank's share of `values` if ranks share the weights (ZeRO 3): rows are padded to a multiple of the
              ranks
    gathered  the shards of all ranks together: `values` with padding
    state     optimizer state of `values`
    experts   part of `values` that belongs to routed experts
    stepping  temporaries of the optimizer's step for all of `values`
    largest   temporaries of the optimizer's step for the weight that needs most
    """

    values: int = 0
    shards: int = 0
    gathered: int = 0
    state: int = 0
    experts: int = 0
    stepping: int = 0
    largest: int = 0

    @property
    def divided(self) -> float:
        """Fraction `shards` / `values`: about 1 / number of ranks."""
        return self.shards / max(1, self.values)

    def __add__(self, other: RankWeights) -> RankWeights:
        summed = RankWeights(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(summed, largest=max(self.largest, other.largest))


@dataclass(frozen=True)
class Share:
    """Numbers of weights that one rank holds: before the layers, in each layer, and after the layers."""

    first: RankWeights
    """Embedding, and the encoder if there is one."""
    layers: tuple[RankWeights, ...]
    last: RankWeights
    """Final norm and head; with a tied head on another stage than the embedding, also the embedding table."""


def share(config: ModelConfig, layout: Layout, optimizer: OptimizerConfig, device: str = "cpu") -> Share:
    """Returns the numbers of weights, with their optimizer states and temporaries, that the fullest rank would hold if
    no pipeline stages divided the layers. `device`: type of device, on which the temporaries of the optimizer's step
    depend."""
    return _share(config, optimizer, layout.tp, layout.ep, layout.sharing, device)


@lru_cache(maxsize=256)
def _share(config: ModelConfig, optimizer: OptimizerConfig, tp: int, ep: int, sharing: int, device: str) -> Share:
    first, last, layers = RankWeights(), RankWeights(), [RankWeights()] * config.n_layers
    for name, one in weights_of(config, optimizer, tp, ep, sharing, device):
        steps = name.split(".")
        if steps[0] == "layers":
            layers[int(steps[1])] += one
        elif steps[0] in ("head", "final_norm"):
            last += one
        else:
            first += one
    return Share(first, tuple(layers), last)


def weights_of(
    config: ModelConfig, optimizer: OptimizerConfig, tp: int, ep: int, sharing: int, device: str = "cpu"
) -> Iterator[tuple[str, RankWeights]]:
    """Yields (name, numbers of elements on one rank) for each weight of the model, in its order."""
    model = config.outline()
    cuts, state, step = shards_of(model), optimizer.state_values(model), optimizer.step_values(model, device)
    for name, weight in model.named_parameters():
        shape, held, rows = tuple(weight.shape), 0, 0
        expert = any(cut.cut == "expert" for cut in cuts[name])
        for cut in cuts[name]:
            of_map = (cut.rows or (shape[0] if shape else 1), *shape[1:])
            owners = {"replicated": 1, "expert": ep}.get(cut.cut, tp)
            whole = cut.axis >= len(shape)
            held += (
                math.prod(of_map) if whole else math.prod(of_map) // of_map[cut.axis] * -(-of_map[cut.axis] // owners)
            )
            rows += of_map[0] if whole or cut.axis else -(-of_map[0] // owners)  # on this rank, before ZeRO divides
        ranks = max(1, sharing // ep) if expert else sharing
        shard = -(-rows // ranks) * held // max(1, rows)
        part = held / max(1, weight.numel())
        needed = round(step.get(name, 0) * part)
        yield name, RankWeights(held, shard, shard * ranks, round(state[name] * part), held * expert, needed, needed)


def owned(config: ModelConfig, tp: int) -> ModelConfig:
    """Returns the config of the model that one of `tp` ranks computes: its share of heads, hidden units and vocabulary,
    of full width.

    Raises RequestError if a mixer does not declare its division."""
    if tp == 1:
        return config
    made: dict[BlockConfig, BlockConfig] = {}
    for layer, block in enumerate(config.layers()):
        if block not in made:
            ctx = config.ctx.at(layer)
            mixer = block.mixer.divided(ctx, tp)
            if mixer is None:
                raise RequestError(
                    f"tp={tp}: the mixer of layer {layer}, {block.mixer.kind}, does not say what one of several owners "
                    "computes; tp=1 would do",
                    code="conflict", field="tp", value=tp, expected="1",
                )  # fmt: skip
            made[block] = block.replace(mixer=mixer, ffn=block.ffn.divided(ctx, tp) if block.ffn else None)
    vocabulary = -(-config.vocab_size // tp)
    return config.replace(vocab_size=vocabulary, stack=stack_of([made[block] for block in config.layers()]))


def for_gpu(config: ModelConfig) -> ModelConfig:
    """Returns the config with the attention kernels that a GPU would choose."""

    def with_kernel(mixer: MixerConfig) -> MixerConfig:
        try:
            return mixer.changed("kernel", lambda kernel: kernel.for_gpu()) or mixer
        except RequestError:  # a non-additive bias keeps its kernel
            return mixer

    made = {block: block.replace(mixer=with_kernel(block.mixer)) for block in dict.fromkeys(config.layers())}
    return config.replace(stack=stack_of([made[block] for block in config.layers()]))
