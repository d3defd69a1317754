"""Everything works on another device as on the CPU: no tensor stays behind, and nothing requires fp64.

The device is tests/elsewhere.py's, which computes on the CPU: it finds tensors on the wrong device, but does not test
kernels of CUDA or MPS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer import dynamics, lens, machine
from glassformer.errors import RequestError
from glassformer.generation import Sampling, generate, prefill
from glassformer.generation.beams import beams
from glassformer.generation.engine import Engine
from glassformer.generation.speculate import Draft, PromptLookup, speculate
from glassformer.introspection import capture, edit
from glassformer.laboratory.proof import check
from glassformer.lens.registry import READINGS, ReadingInputs
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.quantized import quantize
from glassformer.runs.measure import describe, measured
from glassformer.text import ByteTokenizer, TextData
from glassformer.training import Interrupted, checkpoint, train
from tests import elsewhere
from tests.refused import refused
from tests.test_generate import prompt, tiny
from tests.test_generic import DECODERS, EVERY, LENGTH, Case, built, draw, global_tokens
from tests.training.conftest import text as text  # the fixture
from tests.training.test_loop import BATCH, CONTEXT, TEN, interrupt_at
from tests.training.test_loop import model as config_of

CUDA_LIKE = pytest.param(True, marks=pytest.mark.slow, id="fp64")
MPS_LIKE = pytest.param(False, id="no fp64")


@pytest.fixture(params=[MPS_LIKE, CUDA_LIKE])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with elsewhere.device(double=request.param) as name:
        yield name


def alike(here: object, there: object, tolerance: float = 1e-5) -> None:
    """Asserts that two values are equal, tensors and floats up to rounding, on any devices."""
    if isinstance(here, Tensor):
        assert isinstance(there, Tensor)
        here, there = here.detach().cpu(), there.detach().cpu()
        assert here.dtype == there.dtype and here.shape == there.shape
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(here, float):
        assert there == pytest.approx(here, rel=tolerance, abs=tolerance, nan_ok=True)
    elif isinstance(here, dict):
        assert isinstance(there, dict) and here.keys() == there.keys()
        for key in here:
            alike(here[key], there[key], tolerance)
    elif isinstance(here, (list, tuple)):
        assert isinstance(there, (list, tuple)) and len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            alike(one, other, tolerance)
    else:
        assert here == there


# The device itself: tests on it are only as strong as its refusals


def test_stand_in_device_refuses_mixed_devices_and_fp64():
    here = torch.ones(3)
    with elsewhere.device(double=False) as name:
        there = here.to(name)
        assert there.device.type == name and (there + 1.0).tolist() == [2.0] * 3
        assert there[torch.tensor([0, 2])].shape == (2,) and (there * torch.tensor(2.0)).cpu().sum() == 6
        for wrong in (
            lambda: there + here,
            lambda: here + there,
            lambda: torch.cat([there, here]),
            lambda: torch.nn.functional.embedding(torch.tensor([0]), there[:, None]),
            lambda: there[here.to(name) > 0].add_(here),
            lambda: torch.rand(2, device=name, generator=torch.Generator()),
            lambda: there.numpy(),
            lambda: there.double(),
            lambda: torch.zeros(2, dtype=torch.float64, device=name),
        ):
            with pytest.raises((RuntimeError, TypeError), match=r"with tensors on|generator of another|numpy|no torch"):
                wrong()
    with elsewhere.device() as name:
        assert torch.ones(2, dtype=torch.float64, device=name).sum().item() == 2


def test_it_is_there_only_while_a_test_asks_for_it():
    before = machine.settings().device
    with elsewhere.device() as name:
        assert machine.settings().device == machine.settings(f"{name}:0").device.split(":")[0] == name
        with refused(code="unsupported", field="device"):
            machine.settings(f"{name}:1")
    assert machine.settings().device == before
    with refused(code="unsupported", field="device"):
        machine.settings(name)


# Models


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_models_and_gradients(case: Case, device: str):
    model, tokens = built(case), draw(2, LENGTH)
    other = deepcopy(model).to(device)
    alike(model(tokens), other(tokens.to(device)))
    for one, where in ((model, tokens), (other, tokens.to(device))):
        one.zero_grad(set_to_none=True)
        one.loss(where, where.roll(-1, 1), **global_tokens(one, where)).backward()
    for (name, a), b in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert b[1].grad is not None and b[1].grad.device.type == device, name
        alike(a.grad, b[1].grad)


@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_states_and_rows_of_unequal_length(case: Case, device: str):
    model, tokens = built(case), draw(2, LENGTH)
    documents = torch.ones_like(tokens)
    documents[1, :3] = 0

    def read(model: Model, where: str) -> list[Tensor]:
        state = model.init_state(2, LENGTH, rewind=LENGTH)
        sizes = [5, 1, LENGTH - 6]
        parts = zip(tokens.to(where).split(sizes, 1), documents.to(where).split(sizes, 1), strict=True)
        with torch.no_grad():
            logits = [model(part, state, documents=ids) for part, ids in parts]
            state.truncate(LENGTH - 1)
            state.reorder(torch.tensor([1, 0], device=where))
            return [*logits, model(tokens[:, -1:].to(where), state)]

    alike(read(model, "cpu"), read(deepcopy(model).to(device), device))


# Generation

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias": {"logit_bias": {3: 2.0}},
    "temperature": {"temperature": 1.0, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 3, "seed": 1},
    "top_p": {"temperature": 0.9, "top_p": 0.7, "seed": 1},
    "min_p": {"temperature": 0.9, "min_p": 0.1, "seed": 1},
    "typical_p": {"temperature": 0.9, "typical_p": 0.5, "seed": 1},
}
Written = Callable[[str], object]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("rows", ["tensor", "lists"])
def test_texts(asked: dict[str, Any], rows: str, device: str):
    def written(where: str) -> object:
        tokens = prompt(2, 6).to(where) if rows == "tensor" else [[1, 2, 3], [4, 5, 6, 7]]
        return generate(tiny("llama+gqa:2").to(where), tokens, 8, **asked)

    alike(written("cpu"), written(device))


def _engine(where: str) -> object:
    engine = Engine(tiny().to(where), slots=2, context=24, dtype=torch.int8)
    asked = [engine.submit([1, 2, 3, 4][: n + 1], 6, seed=n, temperature=n / 2, top_logprobs=2) for n in range(4)]
    list(engine)
    return [request.tokens for request in asked]


def _speculated(where: str, model: bool, temperature: float) -> object:
    proposer = Draft(tiny().to(where)) if model else PromptLookup()
    sampling = Sampling(temperature=temperature, repetition_penalty=1.1)
    return list(speculate(tiny("llama+gqa:2").to(where), prompt(1, 9).to(where), proposer, 10, sampling, seed=4))


def _quantized(where: str, kind: str) -> object:
    model = tiny("llama+d_model=64").eval().to(where)
    return generate(quantize(model, kind), prompt(2, 6).to(where), 8)  # type: ignore[arg-type]


def _forked(where: str) -> object:
    model, tokens = tiny("llama+window:4").eval().to(where), prompt(1, 6).to(where)
    state = model.init_state(1, 12)
    with torch.no_grad():
        prefill(model, tokens, state)
        both = model.init_state(2, 12)
        both.put(1, state)
        return [state.nbytes, prefill(model, prompt(1, 3).to(where), both.row(1))]


OTHERS: dict[str, Written] = {
    "beams": lambda where: [beam.tokens for beam in beams(tiny().to(where), prompt(1, 6).to(where), 3, 6, n=3)],
    "engine": _engine,
    "forked": _forked,
    "int8": lambda where: _quantized(where, "int8"),
    "int4": lambda where: _quantized(where, "int4"),
    "prompt lookup": lambda where: _speculated(where, False, 0.0),
    "draft": lambda where: _speculated(where, True, 0.0),
    "prompt lookup, drawn": lambda where: _speculated(where, False, 1.0),
    "draft, drawn": lambda where: _speculated(where, True, 1.0),
}


@pytest.mark.parametrize("written", OTHERS.values(), ids=OTHERS)
def test_other_ways_to_write(written: Written, device: str):
    alike(written("cpu"), written(device))


# Under glass

SEEN = ["llama@1m+gqa:2", "gpt2@1m+window:5", "llama@1m+moe:4:2", "mamba@1m"]
SEEN_SIZE = "+layers=2+d_model=32+vocab_size=256+context=64"


def seen_model(expression: str) -> Model:
    heads = "" if expression.startswith("mamba") else "+heads=4"
    return preset(f"{expression}{SEEN_SIZE}{heads}").build(seed=3).eval()


@pytest.mark.parametrize("expression", SEEN)
def test_capture_and_edits(expression: str, device: str):
    model, tokens = seen_model(expression), draw(2, LENGTH)
    other = deepcopy(model).to(device)
    run, there = capture(model, tokens, "*"), capture(other, tokens.to(device), "*")
    alike(dict(run), dict(there))
    changes: dict[str, Any] = lens.add_direction("layers.1.resid_pre", torch.ones(32)) | lens.ablate_mixer(0)
    with edit(model, changes), edit(other, changes):
        alike(model(tokens), other(tokens.to(device)))


@pytest.mark.parametrize("asked", list(product(SEEN, READINGS)), ids="-".join)
def test_readings(asked: tuple[str, str], device: str):
    expression, reading = asked
    tokens = torch.tensor([list(b"the cat sat, the cat ran")])

    def read(model: Model, where: str) -> object:
        here = tokens.to(where)
        seen = lens.inspect(model, here, ByteTokenizer())
        question = ReadingInputs(model, here, ByteTokenizer(), seen, here.roll(1, 1))
        try:
            return [seen.to_dict(), READINGS[reading](question).to_dict()]
        except RequestError as problem:  # a reading that this model cannot give
            return str(problem)

    model = seen_model(expression)
    alike(read(model, "cpu"), read(deepcopy(model).to(device), device), 1e-4)


# Training, and what watches it


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama@1m", {"watch": 2, "qk_clip": 0.5}),
        slow("gpt2@1m+dropout:0.1+moe:4:2+ffn.balance_rate=0.01", {"micro_batch": 2, "watch": 2}),
        slow("mamba@1m", {"watch": 2, "on_spike": "skip"}),
    ],
)
def test_training_and_resuming(text: TextData, tmp_path: Path, name: str, more: dict[str, Any], device: str) -> None:
    """The run equals that of the CPU step by step, is measured alike, and resumes from its checkpoint bit for bit."""
    config = config_of(name) if "mamba" not in name else preset(f"{name}+layers=2+d_model=32")
    recipe = {**TEN, **more, "dtype": "float32", "tokens": 4 * BATCH * CONTEXT, "evaluation_tokens": 8 * CONTEXT}
    here = train(config, text, {**recipe, "device": "cpu"}, tmp_path / "here")
    there = train(config, text, {**recipe, "device": device}, tmp_path / "there")
    assert there.how.device == device and next(there.model.parameters()).device.type == device
    losses = [[row["loss"] for row in run.metrics if "loss" in row] for run in (here, there)]
    alike(*losses, 1e-4)
    assert here.validation is not None and there.validation is not None
    assert there.validation["loss"] == pytest.approx(here.validation["loss"], rel=1e-4)
    records = [dynamics.read_records(tmp_path / run / "dynamics.jsonl") for run in ("here", "there")]
    assert [row["step"] for row in records[0]] == [row["step"] for row in records[1]] and records[0]
    with pytest.raises(Interrupted, match="--resume"):
        train(config, text, {**recipe, "device": device}, tmp_path / "cut", callbacks=[interrupt_at(2)])
    train(config, text, {**recipe, "device": device}, tmp_path / "cut", resume=True)
    folders = [checkpoint.latest(tmp_path / run) for run in ("there", "cut")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((folder / file).read_bytes() for folder in folders if folder)
        assert one == other, file
    found = [measured(describe("a", run, None), run, text).to_dict() for run in (here, there)]
    for name in ("validation", "extrapolation"):
        alike(*(one[name] for one in found), 1e-4)
    assert found[0]["generation"]["sample"] == found[1]["generation"]["sample"]


@pytest.mark.parametrize("name", ["mamba@1m", "llama@1m+gqa:2", "gpt2@1m+moe:4:2"])
def test_check(name: str, device: str) -> None:
    assert check(seen_model(name).to(device)).passed


def test_weights_are_initialised_on_the_requested_device(device: str) -> None:
    config = preset("llama@1m+layers=1+d_model=32+heads=2+vocab_size=61")
    with torch.device(device):
        there = config.build(seed=0)
    assert {weight.device.type for weight in there.parameters()} == {device}
    alike(dict(config.build(seed=0).state_dict()), dict(there.state_dict()))
