from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.dynamics.watch import Moment
from glassformer.errors import Code, RequestError
from glassformer.naming import preset
from glassformer.parallel import stored
from glassformer.text import Batch, TextData, prepare
from glassformer.training import Interrupted, Recipe, Report, Reporter, checkpoint, loop, request, train
from glassformer.training.callbacks import Callback
from glassformer.training.callbacks.log import Log
from glassformer.training.optimizers import AdamWConfig
from glassformer.training.progress import read_metrics
from glassformer.training.request import fit, settings
from glassformer.training.state import Training
from tests.refused import failed, refused

SMALL = "+layers=2+d_model=32+heads=2"
BATCH, CONTEXT = 4, 32
TEN = {
    "tokens": 10 * BATCH * CONTEXT,
    "batch_size": BATCH,
    "context": CONTEXT,
    "compile": False,
    "threads": 1,
}


def model(name: str = "llama@1m") -> gf.ModelConfig:
    return preset(name + SMALL)


def interrupt_at(step: int) -> Reporter:
    def tell(report: Report) -> None:
        if report.step == step and report.validation is None:
            os.kill(os.getpid(), signal.SIGINT)

    return Reporter(tell)


def told(folder: Path | None) -> list[float]:
    """The losses in a run's metrics.jsonl."""
    assert folder is not None
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("gpt2@1m+dropout:0.1", {"micro_batch": 2}),
        pytest.param("llama@1m", {}, marks=pytest.mark.slow),
        pytest.param("bloom@1m", {"schedule": "wsd", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("llama@1m+sigmareparam", {"micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param(
            "llama@1m+moe:4:2+ffn.balance_rate=0.01+ffn.n_shared=1", {"micro_batch": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_resuming_is_bit_for_bit(text: TextData, tmp_path: Path, name: str, extra: dict[str, Any]) -> None:
    """10 steps == 5 + resume + 5, in weights, moments and losses, dropout and accumulation included."""
    recipe = {**TEN, **extra}
    straight = train(model(name), text, recipe, tmp_path / "straight")
    with failed(code="stopped"):
        train(model(name), text, recipe, tmp_path / "broken", callbacks=[interrupt_at(5)])
    assert checkpoint.read_state(checkpoint.latest(tmp_path / "broken"))["step"] == 5  # type: ignore[arg-type]
    resumed = train(model(name), text, recipe, tmp_path / "broken", resume=True)
    assert resumed.steps == straight.steps == 10
    folders = [checkpoint.latest(tmp_path / run) for run in ("straight", "broken")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((folder / file).read_bytes() for folder in folders if folder)
        assert one == other, file
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in row]
        for run in ("straight", "broken")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    assert straight.validation == resumed.validation


def test_training_lowers_the_loss_and_the_run_loads(text: TextData, tmp_path: Path) -> None:
    run = train(model(), text, {**TEN, "tokens": 60 * BATCH * CONTEXT, "learning_rate": 3e-3}, tmp_path / "run")
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    assert run.validation is not None
    assert run.validation["perplexity"] == pytest.approx(torch.tensor(run.validation["loss"]).exp().item(), rel=1e-5)
    loaded = gf.load(tmp_path / "run")
    assert loaded.config == run.config
    tokens = torch.arange(20)[None] % run.config.vocab_size
    assert torch.equal(loaded.model(tokens), run.model.eval()(tokens))
    assert preset(str(tmp_path / "run")) == run.config
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "recipe.yaml", "metrics.jsonl", "checkpoints", "latest"} <= left


def test_bits_per_byte_of_characters_is_loss_over_ln_2(text: TextData) -> None:
    """Every character of the text is one byte."""
    run = train(model(), text, TEN)
    assert run.validation is not None
    assert run.validation["bits_per_byte"] == pytest.approx(
        run.validation["loss"] / torch.tensor(2.0).log().item(), rel=1e-6
    )


def test_accumulation_equals_the_whole_batch(text: TextData) -> None:
    whole = train(model(), text, {**TEN, "dtype": "float32"})
    parts = train(model(), text, {**TEN, "dtype": "float32", "micro_batch": 1})
    for (name, one), other in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4, msg=name)
    norms = [[row["grad_norm"] for row in run.metrics if "loss" in row] for run in (whole, parts)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)  # Adam and clipping hide how large gradients are


def test_weight_decay_applies_only_to_matrices() -> None:
    built = model("gpt2@1m").build()
    optimizer = AdamWConfig().create(built, 1e-3, 0.1)
    of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    decays = {name: of[id(parameter)] for name, parameter in built.named_parameters()}
    assert len(of) == len(decays)
    for name, decay in decays.items():
        matrix = name.endswith("weight") and "norm" not in name and "embedding" not in name
        assert decay == (0.1 if matrix else 0.0), name


def test_diverging_run_stops_and_reports_its_losses(text: TextData, tmp_path: Path) -> None:
    run = train(
        model(),
        text,
        {**TEN, "tokens": 400 * BATCH * CONTEXT, "learning_rate": 30.0, "clip": None},
        tmp_path / "run",
    )
    assert run.status == "diverged"
    assert run.error is not None
    assert "step" in run.error
    assert run.steps < 400
    assert run.metrics


def test_a_nan_stops_before_it_reaches_the_weights(text: TextData, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.backward

    def poisoned(run: Training, batch: Batch) -> float:
        return float("nan") if run.step == 4 else real(run, batch)

    monkeypatch.setattr(loop, "backward", poisoned)
    run = train(model(), text, TEN)
    assert (run.status, run.steps) == ("diverged", 4)
    assert run.error is not None
    assert "nan" in run.error
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_minutes_bound_a_run_by_the_clock(text: TextData) -> None:
    run = train(model(), text, {**TEN, "tokens": None, "minutes": 0.02})
    assert 1.2 <= run.seconds < 3.0
    rates = [row["learning_rate"] for row in run.metrics if "loss" in row]
    assert rates[-1] < 0.3 * max(rates)  # the schedule came down with the clock


def test_flops_buy_tokens() -> None:
    config = fit(model(), 50, CONTEXT)
    work = 3 * config.flops(CONTEXT) * 7 * BATCH * CONTEXT
    assert Recipe(flops=work, batch_size=BATCH, context=CONTEXT).num_steps(config) == 7


def test_short_runs_are_not_compiled() -> None:
    assert not settings(fit(model(), 50, CONTEXT), Recipe.of(tokens=1000)).compile


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({}, "give one of tokens, flops, minutes, steps"),
        ({"tokens": 1, "minutes": 1}, "tokens and minutes"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 1, "micro_batch": 3}, "micro_batch=3 does not divide batch_size=16"),
        ({"tokens": 1, "learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"tokens": 1, "schedule": "cosin"}, "cosine"),
        ({"tokens": 1, "learning_rate": float("nan")}, "learning_rate"),
        ({"tokens": 1, "device": "tpu"}, "device='tpu'"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_sentence(text: TextData, recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        train(model(), text, recipe)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_longer_than_the_text_is_refused(text: TextData) -> None:
    with refused(code="range", field="context"):
        train(model(), text, {**TEN, "context": 100000})


def test_folders_are_not_mixed(text: TextData, tmp_path: Path) -> None:
    train(model(), text, TEN, tmp_path / "run")
    with refused(code="exists", field="resume"):
        train(model(), text, TEN, tmp_path / "run")
    with refused(code="changed", field="stack.0.blocks.0.mixer.bias"):
        train(model("gpt2@1m"), text, TEN, tmp_path / "run", resume=True)
    with refused(code="changed", field="seed"):
        train(model(), text, {**TEN, "seed": 1}, tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("x")
    with refused(code="exists", field="out"):
        train(model(), text, TEN, tmp_path / "file")


def test_a_second_writer_is_refused(text: TextData, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused(code="conflict", field="out"):
            train(model(), text, TEN, tmp_path / "run")


def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint(
    text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        train(model(), text, TEN, tmp_path / "run", callbacks=[interrupt_at(5)])

    real = stored.save_file

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    with failed(code="disk"):
        train(model(), text, TEN, tmp_path / "run", resume=True)
    monkeypatch.setattr(stored, "save_file", real)
    assert train(model(), text, TEN, tmp_path / "run", resume=True).steps == 10


@pytest.mark.parametrize("place", ["weights", "weights, in the background", "state.json", "latest", "metrics.jsonl"])
def test_a_disk_that_is_full_in_the_middle_ends_the_run_and_the_same_run_resumes(
    text: TextData, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint after each step. The third is not written, or the row of the third step; that of the second step is
    whole, and the resumed run ends with the bits of one that never stopped."""
    recipe = {**TEN, "checkpoint_seconds": 1e-9, "async_save": "background" in place}
    straight = train(model(), text, recipe, tmp_path / "straight")
    calls = 0

    def filled(home: Any, name: str, touches: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(home, name)

        def full(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += touches(*given)
            if calls >= 3 and touches(*given):
                raise OSError(28, "No space left on device")
            return real(*given, **more)

        monkeypatch.setattr(home, name, full)

    class Full(Callback):
        """Puts a file that takes no byte in the place of metrics.jsonl."""

        def before_update(self, run: Training, moment: Moment) -> None:
            if moment.step == 3:
                log = next(one for one in run.own if isinstance(one, Log))
                assert log.file is not None
                log.file.close()
                log.file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115

    if place == "metrics.jsonl":
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
    elif place.startswith("weights"):  # a checkpoint has two files
        filled(stored, "save_file", lambda _, path, *__: path.name == "model.safetensors")
    elif place == "latest":
        filled(checkpoint, "replace_text")
    else:
        filled(Path, "write_text", lambda path, *_: path.name == "state.json")
    with failed(code="disk") as caught:
        train(model(), text, recipe, tmp_path / "run", callbacks=[Full()] if place == "metrics.jsonl" else [])
    assert str(caught.value).count("the disk is full") == 1 and "\n" not in str(caught.value)
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None and checkpoint.read_state(found)["step"] == 2
    assert not list(found.parent.glob(".*"))
    resumed = train(model(), text, recipe, tmp_path / "run", resume=True)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, straight.model.state_dict()[name]), name
    assert told(tmp_path / "run") == told(tmp_path / "straight") and len(told(tmp_path / "run")) == 10


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no folder with open files")
@pytest.mark.parametrize("way", ["removed", "moved", "replaced"])
@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_a_run_whose_folder_is_gone_ends_and_makes_no_other(
    text: TextData, tmp_path: Path, way: str, seconds: float
) -> None:
    """With a checkpoint after each step, or none before the end."""
    folder = tmp_path / "run"

    class Remover(Callback):
        def after_update(self, run: Training, moment: Moment) -> None:
            if moment.step == 3:
                if way == "moved":
                    folder.rename(tmp_path / "elsewhere")
                else:
                    shutil.rmtree(folder)
                if way == "replaced":
                    folder.mkdir()
                    (folder / ".lock").touch()
            assert moment.step <= 3

    recipe = {**TEN, "checkpoint_seconds": seconds}
    with failed(code="missing"):
        train(model(), text, recipe, folder, callbacks=[Remover()])
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
    assert left == ([".lock"] if way == "replaced" else None)
    if way == "moved" and seconds < 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert train(model(), text, recipe, tmp_path / "elsewhere", resume=True).steps == 10


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no folder with open files")
def test_a_folder_that_is_removed_while_a_checkpoint_is_written_ends_the_run(
    text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stored.save_file

    def save(values: Any, path: Path, metadata: Any) -> None:
        shutil.rmtree(tmp_path / "run")
        real(values, path, metadata)

    monkeypatch.setattr(stored, "save_file", save)
    with failed(code="missing"):
        train(model(), text, TEN, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_metrics_cut_by_a_crash_are_mended(text: TextData, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(model(), text, TEN, tmp_path / "run", callbacks=[interrupt_at(5)])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 1.0}) + '\n{"step": 7, "lo')
    train(model(), text, TEN, tmp_path / "run", resume=True)
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 11))


def test_resume_refuses_changed_text(text: TextData, tmp_path: Path) -> None:
    """Same model, same recipe, same alphabet; other words."""
    with pytest.raises(Interrupted):
        train(model(), text, TEN, tmp_path / "run", callbacks=[interrupt_at(5)])
    backwards = text.train.tokens.tolist()[::-1]
    (tmp_path / "other.txt").write_text(text.tokenizer.decode(backwards))
    other = prepare(tmp_path / "other.txt", text.tokenizer, cache_dir=tmp_path / "cache")
    with refused(code="changed", field="data"):
        train(model(), other, TEN, tmp_path / "run", resume=True)
    assert train(model(), text, TEN, tmp_path / "run", resume=True).steps == 10


def test_one_command_starts_resumes_and_finds_the_run_finished(text: TextData, tmp_path: Path) -> None:
    """A preempted job repeats `--resume`: before there is a folder, before a checkpoint, after some steps, at the end.
    The run is the one that was never stopped."""
    straight = train(model(), text, TEN, tmp_path / "straight")
    folder = tmp_path / "run"
    with pytest.warns(UserWarning, match="run holds no run yet"), pytest.raises(KeyboardInterrupt):
        train(model(), text, TEN, folder, resume=True, callbacks=[Die()])
    with (
        pytest.warns(UserWarning, match="started but holds no checkpoint yet: it starts again"),
        pytest.raises(Interrupted),
    ):
        train(model(), text, TEN, folder, resume=True, callbacks=[interrupt_at(5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model(), text, TEN, folder, resume=True)
    with pytest.warns(UserWarning, match="run is finished: all 10 steps are done"):
        again = train(model(), text, TEN, folder, resume=True, callbacks=[NothingSaved()])
    assert told(folder) == told(straight.folder)
    assert (again.status, again.steps, again.validation) == ("ok", 10, straight.validation)


class NothingSaved(Callback):
    def saved(self, run: Training, folder: Path) -> None:
        raise AssertionError(f"a finished run was saved again, in {folder}")


class Die(Callback):
    def before_update(self, run: Training, moment: Moment) -> None:
        if moment.step == 3:
            raise KeyboardInterrupt


def test_a_model_that_sees_the_answer_is_refused(text: TextData) -> None:
    with refused(code="causal", field="layers.0.mixer"):
        train(model("gpt2@1m+bidirectional"), text, TEN)


def test_a_climb_after_learning_is_divergence(text: TextData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of 4.2, then 1.5, then 4.0 are a divergence, although 4.0 is below the first loss."""
    fake = iter([4.2] + [1.5] * 80 + [4.0] * 200)
    monkeypatch.setattr(loop, "backward", lambda run, batch: next(fake))
    monkeypatch.setattr(loop, "warm_up", lambda run: None)
    monkeypatch.setattr(loop, "gradient_norm", lambda model: 1.0)
    run = train(model(), text, {**TEN, "tokens": 250 * BATCH * CONTEXT})
    assert run.status == "diverged"
    assert 81 < run.steps < 140
    assert any("validation" in row for row in run.metrics) and run.validation is None
    assert run.to_dict()["validation"] is None and not run.loaded.model.training
    with failed(code="diverged"):
        run.check()


@pytest.mark.parametrize(("losses", "status"), [([4.2] + [9.0] * 9, "diverged"), ([4.2, 9.0, 9.0] + [4.0] * 7, "ok")])
def test_a_run_shorter_than_a_window_can_diverge(
    text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], status: str
) -> None:
    fake = iter(losses)
    monkeypatch.setattr(loop, "backward", lambda run, batch: next(fake))
    monkeypatch.setattr(loop, "warm_up", lambda run: None)
    monkeypatch.setattr(loop, "gradient_norm", lambda model: 1.0)
    run = train(model(), text, TEN, tmp_path / "run")
    assert (run.status, run.steps) == (status, 10)
    if status == "diverged":
        assert run.error is not None and "the last 5 steps is 9.000, more than 1 nat above" in run.error
    assert (run.validation is None) == (status == "diverged")


@pytest.mark.parametrize("began", ["bfloat16", "float32"])
def test_resumed_run_keeps_the_dtype_chosen_by_auto(
    text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: str
) -> None:
    """The resumed run keeps its dtype although the machine's measurements now favour another."""
    monkeypatch.setattr(machine.device, "has_fast_bfloat16", lambda device: began == "bfloat16")
    recipe = {name: value for name, value in TEN.items() if name != "dtype"}
    with pytest.raises(Interrupted):
        train(model(), text, recipe, tmp_path / "run", callbacks=[interrupt_at(2)])
    monkeypatch.setattr(machine.device, "has_fast_bfloat16", lambda device: began != "bfloat16")
    assert train(model(), text, recipe, tmp_path / "run", resume=True).how.dtype == began


def test_a_damaged_dtype_of_a_checkpoint_is_one_sentence(text: TextData, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(model(), text, TEN, tmp_path / "run", callbacks=[interrupt_at(2)])
    path = checkpoint.latest(tmp_path / "run") / "state.json"  # type: ignore[operator]
    for wrong in (["a"], {}, 5, "float64"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": wrong}))
        with refused(code="unknown", field="dtype"):
            train(model(), text, TEN, tmp_path / "run", resume=True)


def test_resuming_names_the_field_of_a_schedule_and_writes_a_tokenizer_that_is_gone(
    text: TextData, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(model(), text, TEN, folder, callbacks=[interrupt_at(2)])
    with refused(code="changed", field="schedule.kind"):
        train(model(), text, {**TEN, "schedule": "wsd"}, folder, resume=True)
    files = sorted(path.name for path in folder.iterdir())
    for gone in [*folder.glob("*tokenizer.json")]:
        gone.unlink()
    train(model(), text, TEN, folder, resume=True)
    assert set(files) <= {path.name for path in folder.iterdir()}
    assert gf.load(folder).tokenizer.fingerprint() == text.tokenizer.fingerprint()


def test_a_kernel_without_a_backward_pass_is_refused_before_a_folder_is_written(text: TextData, tmp_path: Path) -> None:
    with refused(code="conflict", field="kernel"):
        train(preset(f"llama@1m{SMALL}+kernel=flex"), text, TEN, tmp_path / "run")
    assert not (tmp_path / "run").exists()


HELD = ("config.yaml", "config.json", "tokenizer.json", "tokenizer_config.json", "metrics.jsonl",
        "model-00001-of-00002.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_folder_without_a_run_is_not_overwritten(text: TextData, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine")
    with refused(code="exists", field="out"):
        train(model(), text, TEN, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [name]
    assert (tmp_path / "mine" / name).read_text() == "mine"


def test_a_folder_of_other_files_is_written_to(text: TextData, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert train(model(), text, TEN, tmp_path / "run").steps == 10
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("crash", ["model", "tokenizer", "loop"])
def test_run_that_ended_before_its_first_checkpoint_starts_again(
    text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    place = {
        "model": (gf.ModelConfig, "save"),
        "tokenizer": (type(text.tokenizer), "save"),
        "loop": (loop, "to_the_end"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*place[crash], die)
        with pytest.raises(KeyboardInterrupt):
            train(model(), text, TEN, tmp_path / "run")
    assert (tmp_path / "run" / "recipe.yaml").exists()
    assert train(model(), text, TEN, tmp_path / "run").steps == 10


def test_a_refused_run_leaves_no_folder(text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "a" / "b"
    for context in (100_000, len(text.validation)):  # the training text is too short, and the held-out one
        with refused(code="range", field="context"):
            train(model(), text, {**TEN, "context": context}, out)
    with refused(code="range", field="vocab_size"):
        train(model(), text, TEN, out, vocab_size=3)
    with refused(code="missing", field="out"):
        train(model(), text, TEN, "")
    assert list(tmp_path.iterdir()) == []


def test_an_out_within_a_file_is_refused(text: TextData, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with refused(code="exists", field="out"):
        train(model(), text, TEN, tmp_path / "file" / "a" / "b")


def test_unfit_request_is_refused_before_reading_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "read_data", lambda *_, **__: pytest.fail("read the text"))
    wrong: tuple[tuple[str, Code, str], ...] = (
        ("+bidirectional", "causal", "layers.0.mixer"),
        ("+learned+embedding.position.length=8", "range", "embedding.position.length"),
    )
    for change, code, field in wrong:
        with refused(code=code, field=field):
            train(preset(f"llama@1m{SMALL}{change}"), "python-docs", TEN)
    with refused(code="unsupported", field="qk_clip"):
        train(preset("mamba@1m"), "python-docs", {**TEN, "qk_clip": 100})


def test_saving_in_the_background_changes_nothing(text: TextData, tmp_path: Path) -> None:
    """A run that is saved at every step, interrupted and resumed, has the files of one that waits for the disk."""
    often = {**TEN, "checkpoint_seconds": 1e-9}
    train(model(), text, often, tmp_path / "waits")
    saved: list[str] = []

    class Listener(Callback):
        def saved(self, run: Training, folder: Path) -> None:
            assert checkpoint.latest(folder.parents[1]) == folder
            saved.append(folder.name)

    with pytest.raises(Interrupted):
        train(
            model(), text, {**often, "async_save": True}, tmp_path / "goes_on", callbacks=[Listener(), interrupt_at(5)]
        )
    assert saved == [f"step_{step:08}" for step in range(1, 6)]
    train(model(), text, {**often, "async_save": True}, tmp_path / "goes_on", resume=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (checkpoint.latest(tmp_path / run) / file for run in ("waits", "goes_on"))  # type: ignore[operator]
        assert one.read_bytes() == other.read_bytes(), file


def test_epochs_are_passes_over_the_text(text: TextData) -> None:
    """Windows of 16 tokens next to each other, in batches of 2: by hand, of the number of tokens."""
    windows = (len(text.train) - 16) // 16
    fields = {name: value for name, value in TEN.items() if name not in ("tokens", "steps")}
    run = train(model(), text, {**fields, "epochs": 0.01, "batch_size": 2, "context": 16})
    assert run.steps == max(1, math.ceil(0.01 * math.ceil(windows / 2)))
    with refused(code="conflict", field="budget"):
        train(model(), text, {**fields, "epochs": 1, "steps": 3})
