"""A compiled step is the model's own step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.expression import preset
from glassformer.generate import CompiledStep, stream
from glassformer.generate.engine import Engine
from glassformer.model import Model

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


MODELS = ["llama", "gpt2", "bloom", "mistral+window:7", "qwen3+gqa:2", "gpt2+nope+softcap:5"]


def tiny(expression: str) -> Model:
    name, _, changes = expression.partition("+")
    small = "layers=2+d_model=32+heads=4+vocab_size=61+context=48+init=gpt2+init.std=0.2"
    return preset(f"{name}@1m+{small}{'+' + changes if changes else ''}").build(seed=0).eval()


@pytest.mark.parametrize("expression", MODELS)
def test_it_is_the_models_own_step(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    model = tiny(expression)
    step = CompiledStep(model, 2, 40)
    assert not step.ready and step.load().ready
    tokens, state = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0)), step.init_state()
    with torch.no_grad():
        full = model(tokens)
        scale = float(full.abs().max())
        model(tokens[:, :5], state)  # a prompt, read as ever
        for i in range(5, 40):
            error = float((step(tokens[:, i : i + 1], state) - full[:, i]).abs().max())
            assert error <= 1e-5 * scale, i
    assert state.rows is not None and state.rows.tolist() == [40, 40] and state.length == 40


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
    with pytest.raises(RequestError, match="16"):
        CompiledStep(tiny("llama"), 1, 15)
