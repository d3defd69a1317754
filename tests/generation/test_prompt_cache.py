"""A state that is saved and loaded continues exactly as one in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.generation.prompt_cache import KIND, kept_tokens, load_state, save_state
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.quantized import quantize
from glassformer.parts.state import ModelState
from tests.refused import failed, refused

torch.set_num_threads(1)
SMALL = "layers=2+d_model=32+heads=4+vocab_size=31+context=48+init=gpt2+init.std=0.2"
TOKENS = torch.randint(31, (1, 40), generator=torch.Generator().manual_seed(0))


def tiny(expression: str = "llama", seed: int = 1) -> Model:
    name, _, changes = expression.partition("+")
    return preset(f"{name}@1m+{SMALL}{'+' + changes if changes else ''}").build(seed=seed).eval()


@torch.no_grad()
def read(model: Model, length: int, **options: Any) -> ModelState:
    state = model.init_state(1, 48, **options)
    model(TOKENS[:, :length], state)
    return state


@torch.no_grad()
def rest(model: Model, state: ModelState, length: int) -> Tensor:
    """Logits of what follows: a few tokens one by one, then several at once."""
    steps = [model(TOKENS[:, i : i + 1], state) for i in range(length, length + 4)]
    return torch.cat([*steps, model(TOKENS[:, length + 4 :], state)], dim=1)


CASES = ["llama", "gpt2", "bloom", "mistral+window:6", "qwen3+gqa:2", "llama+alibi+window:6", "llama+mamba"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("length", [6, 3, 17])
@pytest.mark.parametrize("expression", CASES)
def test_loaded_state_continues_bit_for_bit(expression: str, length: int, dtype: torch.dtype | None, tmp_path: Path):
    """Before the window is full, when it just is, and long after."""
    model, path = tiny(expression), tmp_path / "kept"
    state = read(model, length, dtype=dtype)
    save_state(path, state, TOKENS[0, :length].tolist(), model)
    loaded, ids = load_state(path, model, 48)
    assert kept_tokens(path, model) == ids == TOKENS[0, :length].tolist()
    assert loaded.length == length and loaded.nbytes == state.nbytes
    assert torch.equal(rest(model, loaded, length), rest(model, state, length))


@pytest.mark.parametrize("max_len", [24, 40, 300])
def test_room_may_differ(max_len: int, tmp_path: Path):
    """A short state has no ring yet where a long one has."""
    model, path = tiny("mistral+window:30"), tmp_path / "kept"
    state = model.init_state(1, 20)
    with torch.no_grad():
        model(TOKENS[:, :18], state)
        save_state(path, state, TOKENS[0, :18].tolist(), model)
        loaded, _ = load_state(path, model, max_len)
        new = model(TOKENS[:, 18:24], loaded)
        assert torch.allclose(new, model(TOKENS[:, :24])[:, 18:], atol=1e-5)
    assert loaded.max_len == max_len


def test_by_default_there_is_room_for_the_context(tmp_path: Path):
    model = tiny("gpt2")  # learned positions: no more than the context
    save_state(tmp_path / "kept", read(model, 5), TOKENS[0, :5].tolist(), model)
    assert load_state(tmp_path / "kept", model)[0].max_len == 48


def test_loaded_window_state_keeps_its_rewind_limit(tmp_path: Path):
    model, path = tiny("mistral+window:6"), tmp_path / "kept"
    state = read(model, 17, rewind=2)
    save_state(path, state, TOKENS[0, :17].tolist(), model)
    with refused(code="conflict", field="rewind"):
        load_state(path, model, 48)
    loaded, _ = load_state(path, model, 48, rewind=2)
    with refused(code="unsupported", field="length"):
        loaded.truncate(14)
    loaded.truncate(15)
    state.truncate(15)
    assert torch.equal(rest(model, loaded, 15), rest(model, state, 15))


def test_a_window_that_went_back_goes_back_no_further(tmp_path: Path):
    model, path = tiny("mistral+window:6"), tmp_path / "kept"
    state = read(model, 17, rewind=2)
    state.truncate(16)
    save_state(path, state, TOKENS[0, :16].tolist(), model)
    loaded, _ = load_state(path, model, 48, rewind=2)
    with refused(code="unsupported", field="length"):
        loaded.truncate(14)
    loaded.truncate(15)
    state.truncate(15)
    assert torch.equal(rest(model, loaded, 15), rest(model, state, 15))


def test_packed_weights_keep_states_too(tmp_path: Path):
    model, path = tiny(), tmp_path / "kept"
    quantize(model, "int8")
    state = read(model, 9)
    save_state(path, state, TOKENS[0, :9].tolist(), model)
    assert torch.equal(rest(model, load_state(path, model, 48)[0], 9), rest(model, state, 9))
    with refused(code="changed", field="model"):
        load_state(path, tiny())


def kept(tmp_path: Path, expression: str = "llama") -> tuple[Path, Model]:
    model, path = tiny(expression), tmp_path / "kept"
    save_state(path, read(model, 9), TOKENS[0, :9].tolist(), model)
    return path, model


@pytest.mark.parametrize("expression", ["llama+layers=3", "llama+gqa:2", "llama+norm.eps=1e-3", "llama+kernel=naive"])
def test_another_model_is_refused(expression: str, tmp_path: Path):
    path, _ = kept(tmp_path)
    with refused(code="changed", field="model"):
        load_state(path, tiny(expression))


def test_other_weights_are_another_model(tmp_path: Path):
    path, model = kept(tmp_path)
    with refused(code="changed", field="model"):
        load_state(path, tiny(seed=2))
    with torch.no_grad():
        list(model.layers[1].parameters())[-1].mul_(1.5)
    with refused(code="changed", field="model"):
        load_state(path, model)


def test_loading_with_other_settings_is_refused(tmp_path: Path):
    path, model = kept(tmp_path)
    with refused(code="conflict", field="dtype"):
        load_state(path, model, dtype=torch.int8)
    with refused(code="range", field="max_len"):
        load_state(path, model, max_len=8)
    with refused(code="missing", field="nowhere"):
        load_state(tmp_path / "nowhere", model)
    with refused(code="damaged", field=tmp_path.name):
        load_state(tmp_path, model)


def test_only_a_plain_row_is_kept(tmp_path: Path):
    model, state = tiny(), tiny().init_state(2, 8)
    with refused(code="unsupported", field="state"):
        save_state(tmp_path / "kept", state, [], model)
    with refused(code="conflict", field="tokens"):
        save_state(tmp_path / "kept", read(model, 9), list(range(8)), model)
    with failed(code="disk"):
        save_state(tmp_path / "no" / "folder", read(model, 2), TOKENS[0, :2].tolist(), model)
    assert not list(tmp_path.iterdir())


def test_writing_replaces_at_once_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, model = kept(tmp_path)
    before = path.read_bytes()

    def fails(tensors: Any, file: str, told: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("glassformer.generation.prompt_cache.save_file", fails)
    with failed(code="disk"):
        save_state(path, read(model, 5), TOKENS[0, :5].tolist(), model)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def header(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", None),
        ("tokens", torch.arange(9)),
        ("tokens", torch.zeros(0, dtype=torch.int32)),
        ("tokens", torch.zeros(3, 3, dtype=torch.int32)),
        ("tokens", torch.full((9,), 31, dtype=torch.int32)),
        ("tokens", torch.full((9,), -1, dtype=torch.int32)),
        ("tokens", torch.zeros(8, dtype=torch.int32)),
        ("tokens", torch.zeros(1_000_000, dtype=torch.int32)),
        ("0.k", None),
        ("0.k", torch.zeros(1, 4, 9, 8, dtype=torch.bfloat16)),
        ("0.k", torch.zeros(1, 4, 10, 8)),
        ("0.k", torch.zeros(2, 4, 9, 8)),
        ("1.v", torch.zeros(288)),
        ("2.k", torch.zeros(1, 4, 9, 8)),
        ("0.k1", torch.zeros(1)),
        ("nan.k", torch.zeros(1)),
    ],
)
def test_nothing_in_the_file_is_believed(name: str, value: Tensor | None, tmp_path: Path):
    path, model = kept(tmp_path)
    told, tensors = header(path), load_file(path)
    assert tensors.pop(name, None) is not None or value is not None
    if value is not None:
        tensors[name] = value
    save_file(tensors, path, told)
    with pytest.raises(RequestError) as refused:
        load_state(path, model)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["format", "model", "dtype", "furthest"])
@pytest.mark.parametrize("value", [None, "", "int32", "../x", "9" * 64, KIND + "²", KIND + "9" * 5000])
def test_nor_in_its_header(field: str, value: str | None, tmp_path: Path):
    path, model = kept(tmp_path)
    told = {**header(path), field: value or ""}
    if value is None:
        del told[field]
    save_file(load_file(path), path, told)
    wanted = {"code": "changed", "field": "model"} if field == "model" else {"code": "damaged", "field": path.name}
    with refused(**wanted):
        load_state(path, model)


@pytest.mark.slow
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_found_or_does_no_harm(data: st.DataObject, tmp_path: Path):
    """Bytes changed, or the end cut off: a sentence, or a state of the right shape."""
    path, model = kept(tmp_path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for place in data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        state, ids = load_state(path, model)
    except RequestError as refused:
        assert "\n" not in str(refused)
    else:
        assert state.length == len(ids) == 9
        model(torch.tensor([[1]]), state)
