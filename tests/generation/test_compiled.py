"""A compiled step is the model's own step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from glassformer import machine
from glassformer.generation import CompiledStep, stream
from glassformer.generation.engine import Engine
from glassformer.machine.threads import at_most
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.quantized import quantize
from tests.refused import refused

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.slow,  # a library takes half a minute
    pytest.mark.skipif(not machine.can_compile("cpu"), reason="no compiler here"),
]


@pytest.fixture(autouse=True)
def symbols_pass_for_numbers() -> Iterator[None]:
    """While a step is traced its sizes are symbols, which the checks of annotations refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


MODELS = [
    "llama",
    "gpt2",
    "bloom",
    "mistral+window:7",
    "llama+prefix:5",  # those read at first
    "qwen3+gqa:2",
    "gpt2+nope+softcap:5",
    "llama+moe:4:2",
    "gpt2+moe:2:2",
    "llama+mamba",
]


def tiny(expression: str) -> Model:
    name, _, changes = expression.partition("+")
    small = "layers=2+d_model=32+heads=4+vocab_size=61+context=48+init=gpt2+init.std=0.2"
    return preset(f"{name}@1m+{small}{'+' + changes if changes else ''}").build(seed=0).eval()


@pytest.mark.parametrize("rows", [1, 2])  # a single row has separate loops
@pytest.mark.parametrize("expression", MODELS)
def test_it_is_the_models_own_step(expression: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    model = tiny(expression)
    step = CompiledStep(model, rows, 40)
    assert not step.ready and step.load().ready
    tokens, state = torch.randint(61, (rows, 40), generator=torch.Generator().manual_seed(0)), step.init_state()
    with torch.no_grad():
        full = model(tokens)
        scale = float(full.abs().max())
        model(tokens[:, :5], state)  # a prompt, read as ever
        for i in range(5, 40):
            error = float((step(tokens[:, i : i + 1], state) - full[:, i]).abs().max())
            assert error <= 1e-5 * scale, i
    assert state.rows is not None and state.rows.tolist() == [40] * rows and state.length == 40


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_one_row_of_a_small_dtype(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Within the rounding of bf16, as sums are taken in another order; twice the eager step's own distance from the
    same weights in fp32 is allowed."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    exact, model = (tiny("llama+gqa:2+untied") for _ in range(2))
    model = model.bfloat16()
    model = model if kind == "bf16" else quantize(model, kind)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor):
                exact.get_submodule(name.removesuffix(".packed")).weight.copy_(module.weight.float())
    step = CompiledStep(model, 1, 40, torch.bfloat16).load()
    tokens = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(0))
    mine, theirs = step.init_state(), step.init_state()
    with torch.no_grad():
        full, apart, ours = exact(tokens)[0], [], []
        for i in range(38):
            apart.append(model(tokens[:, i : i + 1], theirs)[0, -1].float() - full[i])
            ours.append(step(tokens[:, i : i + 1], mine)[0] - full[i])
    assert 0 < float(torch.stack(ours).norm()) <= 2 * float(torch.stack(apart).norm())
    assert float(torch.stack(apart).norm()) < 0.1 * float(full.norm())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_one_thread_has_the_bits_of_two(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The library uses torch's number of threads, also on a machine with more cores than it was built for."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    model = preset("llama@1m+layers=2+d_model=256+heads=4+gqa:2+vocab_size=1000+context=64").build(seed=0).eval()
    if kind != "float32":
        model = model.bfloat16()
        model = model if kind == "bfloat16" else quantize(model, kind)
    torch.set_num_threads(2)
    try:
        step = CompiledStep(model, 1, 40).load()
        assert step._same
        found = []
        for count in (1, 2):
            state = step.init_state()
            with at_most(count):
                found.append([step(torch.tensor([[token]]), state) for token in range(30)])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_stay_outside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another model of the same shape takes the same library; another shape does not."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    prompt = torch.tensor([[1, 2, 3]])
    for seed in (0, 1):
        model = tiny("llama")
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.1)
        step = CompiledStep(model, 1, 40).load()
        said = [int(token) for token in stream(model, prompt, 20, compiled=step)]
        assert said == [int(token) for token in stream(model, prompt, 20)]
        engine = Engine(model, slots=1, context=40, compiled=True)
        request = engine.submit([1, 2, 3], 20)
        for _ in engine:
            pass
        assert request.tokens == said
    assert len(list(tmp_path.rglob("*.pt2"))) == 1
    assert CompiledStep(tiny("gpt2"), 1, 40).path != step.path != CompiledStep(model, 2, 40).path


def test_too_little_to_compile_is_refused():
    with refused(code="range", field="max_len"):
        CompiledStep(tiny("llama"), 1, 15)


@pytest.mark.parametrize("expression", MODELS)
def test_recorded_step_is_one_graph_and_equals_the_model(expression: str):
    """Traced whole, on a CPU: another state and a longer text meet the same graph."""
    model, counter = tiny(expression), CompileCounter()
    step = CompiledStep(model, 2, 40)
    run = step._recorded(backend=counter)
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full = model(tokens)
        for _ in range(2):
            state = step.init_state()
            model(tokens[:, :5], state)
            state.spread([5, 5])
            for i in range(5, 12):
                made = run(tokens[:, i : i + 1].contiguous(), state.rows, step._keys, state.tensors())
                state.advance(state.length + 1, 0)
                assert float((made - full[:, i]).abs().max()) <= 1e-5 * float(full.abs().max()), i
            assert state.rows is not None and state.rows.tolist() == [12, 12]
    assert counter.frame_count == 1
