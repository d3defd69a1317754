"""Changes of a run's folder between the check of a request and the run."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.training import Callback
from glassformer.training.loop import run_request
from glassformer.training.request import prepare_run
from tests.refused import failed, refused

TINY = "llama@1m+layers=1+d_model=16+heads=2"
RECIPE = {"steps": 2, "batch_size": 2, "context": 16, "evaluation_tokens": 32, "compile": False, "device": "cpu"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a b c d e f g h. " * 300, encoding="utf-8")
    return path


def test_checkpoint_saved_between_check_and_run_is_kept(text: Path, tmp_path: Path):
    config, out = gf.preset(TINY), tmp_path / "run"
    with pytest.warns(UserWarning, match="holds no run yet"):
        first, second = (prepare_run(config, text, RECIPE, out, resume=True) for _ in range(2))
    run_request(first)
    written = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(RequestError) as caught:
        run_request(second)
    assert (caught.value.code, caught.value.field) == ("conflict", "out")
    assert (out / "metrics.jsonl").read_bytes() == written


def test_started_folder_refuses_another_model(text: Path, tmp_path: Path):
    config, out = gf.preset(TINY), tmp_path / "run"
    run = gf.train(config, text, RECIPE, out=out)
    assert run.status == "ok"
    (out / "latest").unlink()
    with pytest.warns(UserWarning, match="holds no checkpoint yet"), refused(code="changed", field="d_model"):
        gf.train(gf.preset(TINY + "+d_model=32"), text, RECIPE, out=out, resume=True)


class Large(Callback):
    def state(self) -> dict[str, object]:
        return {"numbers": [0.123456789] * 100_000}


def test_a_state_that_could_not_be_read_back_is_not_written(text: Path, tmp_path: Path):
    with failed(code="range"):
        gf.train(gf.preset(TINY), text, RECIPE, out=tmp_path / "run", callbacks=[Large()])


def test_function_as_callback_is_refused(text: Path):
    with pytest.raises(RequestError) as caught:
        gf.train(gf.preset(TINY), text, RECIPE, callbacks=[print])  # type: ignore[list-item]
    assert (caught.value.code, caught.value.field) == ("type", "callbacks")
