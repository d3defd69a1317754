"""In 16 bits, where a sum in another order parts two texts within a few words, a row has the same bits in company."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.generation import generate, stream
from glassformer.generation.engine import STEP, Engine, GenerationRequest
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.linear import Linear
from glassformer.parts.precision import as_among_others, onednn_in_bf16
from glassformer.parts.quantized import quantize

torch.set_num_threads(1)
VOCAB = 64
LENGTHS = (1, 5, 64, 70)
"""Short ones, and on both sides of a block of keys."""
KINDS = ["llama", "gpt2", "bloom", "mistral+window:20", "llama+nope+softcap:5", "llama+mamba", "llama+moe:4:2"]


@cache
def built(expression: str, bits: str = "") -> Model:
    """Returns a model with a matmul over more elements than oneDNN adds up at once."""
    name, *changes = expression.split("+")
    wide = "" if "mamba" in expression else "+hidden=1152"
    small = f"layers=2+d_model=128+heads=4+vocab_size={VOCAB}+context=512+init=gpt2+init.std=0.1{wide}"
    model = preset("+".join([f"{name}@1m", small, *changes])).build(seed=1).eval().bfloat16()
    return quantize(model, bits) if bits else model


@cache
def rows_round_alike() -> bool:
    """Returns True if torch's matmuls give a row the same bits in a batch, at the shapes of these models."""
    draw = torch.Generator().manual_seed(0)
    for o, i in {tuple(m.weight.shape) for name in KINDS for m in built(name).modules() if isinstance(m, Linear)}:
        weight, x = (torch.randn(shape, generator=draw).bfloat16() for shape in ((o, i), (8, i)))

        def product(x: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.nn.functional.linear(x, weight)

        if not torch.equal(torch.cat([as_among_others(product, row) for row in x[:, None]]), product(x)):
            return False
    return True


def require(bits: str) -> None:
    """Skips where the promise is not made (docs/decisions.md). For int8 and int4 it is made on every CPU."""
    if bits == "bf16" and not onednn_in_bf16():
        pytest.skip("this processor has no matmuls in bf16 to prepack weights for")
    if bits in ("", "bf16") and not rows_round_alike():
        pytest.skip("torch's matmuls in bf16 round a row differently in a batch on this processor")


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def written(model: Model, asked: list[list[int]], **more: Any) -> list[GenerationRequest]:
    engine = Engine(model, slots=len(LENGTHS), context=512)
    requests = [engine.submit(ids, 12, seed=4, logprobs=True, **more) for ids in asked]
    for _ in engine:
        pass
    return requests


@pytest.mark.parametrize(
    ("expression", "bits"),
    [
        *(pytest.param(name, "", marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(KINDS)),
        *((name, bits) for name in ("llama", "gpt2") for bits in ("bf16", "int8", "int4")),
    ],
)
def test_engine_generates_the_same_in_a_batch_as_for_one(expression: str, bits: str):
    require(bits)
    model = built(expression, bits)
    together = written(model, prompts(), temperature=1.0)
    for ids, request in zip(prompts(), together, strict=True):
        (alone,) = written(model, [ids], temperature=1.0)
        assert request.tokens == alone.tokens and request.logprobs == alone.logprobs


@pytest.mark.parametrize("expression", KINDS)
def test_rows_are_continued_as_one_is(expression: str):
    """`stream` and `generate`, with rows of one length and of several."""
    require("")
    model = built(expression)
    together = [step.logprobs for step in stream(model, prompts(), 6, logprobs=0)]
    for i, ids in enumerate(prompts()):
        alone = [step.logprobs for step in stream(model, torch.tensor([ids]), 6, logprobs=0)]
        assert [float(step[i]) for step in together] == [float(step[0]) for step in alone]
    equal = torch.tensor([ids[-5:] for ids in prompts()[1:]])
    for row, ids in zip(generate(model, equal, 8), equal, strict=True):
        assert torch.equal(row, generate(model, ids[None], 8)[0])


@pytest.mark.parametrize("length", [STEP + 1, STEP + 40, 2 * STEP + 33])
def test_prefix_read_for_another_prompt_changes_no_bit(length: int, read: list[int]):
    require("")
    model, draw = built("llama"), torch.Generator().manual_seed(5)
    known = torch.randint(VOCAB, (300,), generator=draw).tolist()
    asked = [*known[: length - 8], *torch.randint(VOCAB, (8,), generator=draw).tolist()]
    (alone,) = written(model, [asked])
    read.clear()
    _, after = written(model, [known, asked])
    assert after.tokens == alone.tokens and after.logprobs == alone.logprobs
    assert sum(n for n in read if n > 1) == 300 + length - (length - 32) // STEP * STEP
