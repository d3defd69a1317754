"""Small published models on a GPU: equal to the CPU in fp32, close to fp32 in bf16, and unchanged by compilation."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.architectures import PRESETS
from glassformer.errors import RequestError
from glassformer.generation import CompiledStep, stream
from glassformer.generation.engine import Engine
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.ffn import Experts
from glassformer.parts.quantized import quantize
from glassformer.parts.region import compiled_regions
from tests import gpu as gpu
from tests.test_generic import (
    DECODERS,
    ENCODERS,
    EVERY,
    LENGTH,
    RECURRENT,
    Case,
    built,
    choosing_as_in_full,
    draw,
    smooth,
)

VOCAB, LONG = 61, 160


@cache
def small(name: str) -> Model:
    """Returns a model with noise on its weights, and heads of 16 or more, which FlexAttention requires."""
    name, _, change = name.partition("+")
    sizes = f"d_model=64+vocab_size={VOCAB}+context=256{change and '+'}{change}"
    for more in ("+layers=2+heads=4", "+heads=4", "+layers=2", ""):
        try:
            config = preset(f"{name}@1m+{sizes}{more}")
            break
        except RequestError:
            continue
    model = config.build(seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def read(model: Model, packed: bool) -> tuple[Tensor, dict[str, Any]]:
    """Returns input for a model of this kind, on the device of the model."""
    patches = model.config.embedding.patches
    if patches is not None:
        pixels = torch.randn(2, 3, patches.size, patches.size, generator=torch.Generator().manual_seed(0))
        return pixels.to(model.device), {}
    tokens, given = draw(2, LONG), {}
    documents = (torch.arange(LONG) > torch.tensor([[60], [100]])).long() + 1
    if model.encoder is not None:
        given["source"] = draw(2, 90, 1).to(model.device)
    elif packed:
        given["documents"] = documents.to(model.device)
    return tokens.to(model.device), given


def learnt(model: Model, packed: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    """Returns the output for that input, and all gradients of weights."""
    tokens, given = read(model, packed)
    model.zero_grad(set_to_none=True)
    with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
        made = model(tokens, **given)
    upstream = torch.randn(made.shape, generator=torch.Generator().manual_seed(2)).to(made.device)
    (made.float() * upstream).mean().backward()
    return made.detach().cpu().float(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def known(*names: str, fails: dict[str, str]) -> list[Any]:
    """Parameters of these names; what is known to fail says why."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=fails[name], strict=True)) if name in fails else name
        for name in names
    ]


BIGBIRD = {"bigbird-base": "FlexAttention cannot compile the draw of random blocks once two layers differ in it"}
SCANS = dict.fromkeys(("mamba-130m", "jamba-v0.1"), "Triton 3.6 cannot compile the unrolled steps of a scan")


def error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-12))


def separates(name: str) -> bool:
    try:
        small(name)._check_documents()
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("name", known(*PRESETS, fails=BIGBIRD))
def test_a_published_model_is_itself(name: str, packed: bool):
    """Sums in another order: outputs within 1e-4, and each weight's gradient, of its largest or of all."""
    if packed and not separates(name):
        return
    torch._dynamo.reset()
    made, grads = learnt(small(name), packed)
    there, others = learnt(deepcopy(small(name)).cuda(), packed)
    assert error(there, made) < 1e-4
    whole = torch.cat([g.flatten() for g in grads]).norm() / len(grads) ** 0.5
    for mine, theirs in zip(others, grads, strict=True):
        assert mine.isfinite().all()
        assert (mine - theirs).norm() < 1e-3 * max(theirs.norm(), 0.1 * whole)


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_writes_the_same(name: str):
    model = small(name)
    if not model.writes:
        return
    given = {"source": draw(2, 20, 3)} if model.encoder is not None else {}
    here = gf.generate(model, draw(2, 9), 24, stop_at_eos=False, **given)
    there = gf.generate(deepcopy(model).cuda(), draw(2, 9).cuda(), 24, stop_at_eos=False, **{
        key: value.cuda() for key, value in given.items()
    })  # fmt: skip
    assert here.tolist() == there.tolist()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_half_precision_is_near_full(case: Case):
    """By autocast, whose lists of operations differ from the CPU's."""
    model, tokens = smooth(case.config()).build().cuda(), draw(4, LENGTH).cuda()
    targets, parameters = tokens.roll(-1, 1), list(model.parameters())
    full = model.loss(tokens, targets)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(full, parameters, materialize_grads=True)])
    with choosing_as_in_full(model, tokens), torch.autocast("cuda", torch.bfloat16):
        half = model.loss(tokens, targets)
    found = torch.cat([g.flatten() for g in torch.autograd.grad(half, parameters, materialize_grads=True)])
    assert half.dtype == torch.float32 and found.dtype == torch.float32
    assert abs(half.item() - full.item()) < 0.01 * full.item()
    assert (found - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_weights_of_16_bits_read(case: Case):
    """A whole text, and in pieces, where rounding chooses no other expert."""
    model, tokens = deepcopy(built(case)).cuda(), draw(2, LENGTH).cuda()
    with torch.no_grad():
        full, half = model(tokens), deepcopy(model).bfloat16()
        whole = half(tokens)
        assert whole.isfinite().all()
        if any(isinstance(module, Experts) for module in model.modules()):
            return
        assert error(whole.float(), full) < 0.1
        if case not in ENCODERS:
            state = half.init_state(2, LENGTH)
            pieces = [half(part, state) for part in tokens.split([7, 1, LENGTH - 8], 1)]
            assert error(torch.cat(pieces, 1).float(), full) < 0.1


COMPILED = [
    "gpt2", "llama-3.2-1b", "gemma-2-2b", "bloom-560m", "falcon-7b", "mpt-7b", "gpt-neox-20b", "qwen3-0.6b",
    "olmo-2-1b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "jamba-v0.1", "mamba-130m", "mamba2-130m",
    "qwen3-next-80b", "modernbert-base", "t5-small", "bert-base-mlm",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", known(*COMPILED, fails=SCANS))
def test_compiled_regions_are_the_eager_ones(name: str, dtype: torch.dtype | None):
    torch._dynamo.reset()
    model = deepcopy(small(name)).cuda()
    if dtype is not None and any("router" in path for path, _ in model.named_modules()):
        pytest.skip("rounding moves tokens to other experts")
    made, grads = learnt(model, False, dtype)
    with compiled_regions():
        there, others = learnt(model, False, dtype)
    bound = 1e-4 if dtype is None else 0.03
    assert error(there, made) < bound
    assert error(torch.cat([g.flatten() for g in others]), torch.cat([g.flatten() for g in grads])) < 2 * bound


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "gpt2", "bloom-560m", "gemma-2-2b", "gpt-oss-20b", "mistral-7b+window:7", "mamba-130m",
             "mixtral-8x7b"],
)  # fmt: skip
def test_a_compiled_step_is_the_models_own(name: str, rows: int = 2):
    """Recorded as a CUDA graph."""
    torch._dynamo.reset()
    model = deepcopy(small(name)).cuda()
    step = CompiledStep(model, rows, 40).load()
    tokens, state = draw(rows, 40).cuda(), step.init_state()
    with torch.no_grad():
        full = model(tokens)
        scale = float(full.abs().max())
        model(tokens[:, :5], state)
        for i in range(5, 40):
            made = step(tokens[:, i : i + 1], state)
            assert float((made - full[:, i]).abs().max()) <= 1e-4 * scale, i
    assert state.rows is not None and state.rows.tolist() == [40] * rows and state.length == 40


def test_compiled_stream_and_engine_generate_as_the_model():
    model = deepcopy(small("llama-3.2-1b")).cuda()
    prompts = [draw(1, n, n)[0].tolist() for n in (3, 9, 5, 4, 7)]
    plain = [gf.generate(model, torch.tensor([ids]).cuda(), 12)[0, len(ids) :].tolist() for ids in prompts]
    step = CompiledStep(model, 1, 64).load()
    for ids, wanted in zip(prompts, plain, strict=True):
        told = [int(piece[0]) for piece in stream(model, torch.tensor([ids]).cuda(), 12, compiled=step)]
        assert told == wanted
    for compiled in (False, True):
        engine = Engine(model, slots=3, context=64, compiled=compiled)
        asked = [engine.submit(ids, 12) for ids in prompts]
        for _ in engine:
            pass
        assert [one.tokens for one in asked] == plain


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", ["d_model=64", "d_model=96+heads=6", "d_model=256"])
def test_packed_weights(kind: str, size: str):
    """Weights packed on a GPU compute the same as weights packed on the CPU, for a prompt and token by token."""
    config = preset(f"llama@1m+layers=2+heads=4+vocab_size=61+context=256+{size}")
    packed = quantize(config.build(seed=0).cuda(), kind)
    here = quantize(config.build(seed=0), kind)
    tokens = draw(2, 100)
    with torch.no_grad():
        expected = here(tokens)
        assert error(packed(tokens.cuda()).cpu().float(), expected) < 0.03
        state = packed.init_state(2, 100)
        pieces = [packed(part, state) for part in tokens.cuda().split([96, 1, 3], 1)]
        assert error(torch.cat(pieces, 1).cpu().float(), expected) < 0.03
    assert gf.generate(packed, tokens[:, :9].cuda(), 12).shape == (2, 21)


def test_packed_weights_of_16_bits_are_refused():
    with pytest.raises(RequestError) as caught:
        quantize(preset("llama@1m").build(seed=0).cuda(), "bf16")
    assert (caught.value.code, caught.value.field) == ("unsupported", "quantize")


@pytest.mark.parametrize("case", DECODERS[::40], ids=str)
def test_a_step_of_an_exported_graph(case: Case):
    """`torch.compile` of the whole model, in Triton."""
    model, tokens = deepcopy(built(case)).cuda(), draw(2, LENGTH).cuda()
    if case in RECURRENT:
        return
    torch._dynamo.reset()
    with torch.no_grad():
        assert error(torch.compile(model)(tokens), model(tokens)) < 1e-4
