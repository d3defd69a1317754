"""Worked examples: each step of attention, softmax, rotary positions, ALiBi, LayerNorm and a block's FLOPs, computed by
the library's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.introspection import capture
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Attention
from glassformer.parts.norm import LayerNorm
from glassformer.parts.position import Rotary
from glassformer.parts.position.alibi import alibi_slopes
from glassformer.parts.visibility import Bidirectional, Causal

SEED = 42
"""Seed of the three-token example."""
TOKENS = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
"""Vectors of the three tokens."""
PRINTED = (0.4084, 0.2869, 0.3047)
"""First row of the weights as the guide prints it; its own code gives another one."""


@dataclass(frozen=True)
class WorkedStep:
    """One step of a worked example, with its computed values.

    Attributes
    ----------
    name : str
        What is computed.
    values : tuple of tuple of float
        The result, by rows.
    item : str
        Item of the guides whose value is corrected, such as "000-12"; empty without one.
    """

    name: str
    values: tuple[tuple[float, ...], ...]
    item: str = ""


def _step(name: str, values: Tensor, item: str = "") -> WorkedStep:
    rows = (values.detach().double() + 0.0).reshape(-1, values.shape[-1]).tolist()
    return WorkedStep(name, tuple(tuple(row) for row in rows), item)


def three_tokens(masked: bool) -> tuple[Attention, Tensor]:
    """Returns an attention mixer with the matrices of the guide's example, and the example's three tokens x (1, 3,
    4)."""
    generator = torch.Generator().manual_seed(SEED)
    maps = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    part = Attention(4, 1, visibility=Causal() if masked else Bidirectional())
    with torch.no_grad():
        part.get_parameter("qkv.weight").copy_(torch.cat([one.T for one in maps]))
    return part, torch.tensor([TOKENS])


def attention() -> Iterator[WorkedStep]:
    """Yields the worked example of attention: three tokens of four features, without and with a causal mask."""
    for masked in (False, True):
        part, x = three_tokens(masked)
        if not masked:
            yield _step("x, three tokens", x)
        seen = capture(part, x, "*")
        if not masked:
            for name in "qkv":
                yield _step(f"{name} = x W_{name.upper()}", seen[name])
        after = ", causal" if masked else ""
        yield _step(f"scores = q k^T / sqrt(4){after}", seen["scores"])
        yield _step(f"weights = softmax(scores){after}", seen["pattern"], "000-12")
        if not masked:
            yield _step("z = weights v", seen["pattern"][0, 0] @ seen["v"][0, :, 0])


def softmax() -> Iterator[WorkedStep]:
    """Yields the worked example of softmax: at three temperatures, of large scores, and of four scores."""
    scores = torch.tensor([2.0, 1.0, 0.1])
    for temperature, item in ((1.0, ""), (0.5, "002-23"), (2.0, "")):
        yield _step(f"softmax([2, 1, .1] / {temperature:g})", torch.softmax(scores / temperature, 0), item)
    large = torch.tensor([1000.0, 1000.1, 1000.2], dtype=torch.float64)
    yield _step("1000, 1000.1, 1000.2 minus the largest", large - large.max())
    yield _step("softmax([1000, 1000.1, 1000.2])", torch.softmax(large, 0), "002-24")
    four = torch.tensor([2.1, -0.5, 1.3, 0.8])
    yield _step("softmax([2.1, -.5, 1.3, .8])", torch.softmax(four, 0), "002-25")


def rope() -> Iterator[WorkedStep]:
    """Yields the worked example of rotary positions: one pair of features, rotated; scores of pairs at equal distances
    are equal."""
    part = Rotary(2)
    yield _step("frequency of the pair, radians per token", part.frequencies(4))
    x = torch.tensor([1.0, 0.0]).expand(1, 4, 1, 2)
    turned = part(x, x, Pass(0, 4))[0][0, :, 0]
    yield _step("(1, 0) at positions 0, 1, 2, 3", turned)
    yield _step("q_1 k_0, q_2 k_1, q_3 k_2", torch.stack([turned[i + 1] @ turned[i] for i in range(3)]))


def alibi() -> Iterator[WorkedStep]:
    """Yields the worked example of ALiBi: slopes of 8 and 12 heads, and the bias of the first head for four tokens."""
    yield _step("slopes of 8 heads", torch.tensor(alibi_slopes(8)))
    yield _step("slopes of 12 heads", torch.tensor(alibi_slopes(12)), "003-7")
    at = torch.arange(4.0)
    bias = -alibi_slopes(8)[0] * (at[:, None] - at[None]).clamp(min=0)
    yield _step("bias of the first of 8 heads, query by key", bias, "003-6")


def layernorm() -> Iterator[WorkedStep]:
    """Yields the worked example of LayerNorm: four features, normalised to the mean 0 and the deviation 1."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = LayerNorm(4)(x)
    yield _step("x", x)
    yield _step("mean, standard deviation", torch.stack([x.mean(), x.std(correction=0)]))
    yield _step("LayerNorm(x)", y)


def flops() -> Iterator[WorkedStep]:
    """Yields the worked example of FLOPs: those of a block for 512 tokens of width 768, 8 heads, hidden size 4 d, part
    by part."""
    config = preset("gpt2+layers=1+heads=8+context=512")
    cost = config.costs(Shape(s=512, t=512, phase="prefill"))["layers.0"]
    n, d = 512, 768
    for name, value in (
        ("maps of attention, 8 n d^2", 8 * n * d * d),
        ("scores and their values, 4 n^2 d", 4 * n * n * d),
        ("feed-forward network, 16 n d^2", 16 * n * d * d),
        ("block, counted by its parts", cost.flops),
    ):
        yield _step(name, torch.tensor([float(value)], dtype=torch.float64))


EXAMPLES: dict[str, Callable[[], Iterator[WorkedStep]]] = {
    "attention": attention, "mha": attention, "softmax": softmax, "rope": rope, "alibi": alibi,
    "layernorm": layernorm, "flops": flops, "block": flops,
}  # fmt: skip
"""Word -> function that yields its worked example."""
