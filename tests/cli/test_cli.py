from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from glassformer.cli import app, main, program
from glassformer.cli.program import VERBS
from glassformer.comparison import Comparison, Design
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.naming.loading import load
from glassformer.runs.events import Begin, Kept, Step
from glassformer.runs.executor import Local
from glassformer.runs.files import write_results
from glassformer.runs.live import ComparisonView
from glassformer.runs.request import place_of
from glassformer.runs.results import Results
from glassformer.training import MuonConfig, Recipe, request
from tests.refused import refused
from tests.runs.stand_in import Stand
from tests.runs.test_results import finished

TINY = "llama@1m+layers=1+d_model=32+heads=2"
PLAN = ["--tokens", "768", "--batch-size", "4", "--context", "32", "--threads", "1"]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "gtp2"], "no model is named 'gtp2'; did you mean 'gpt2'?"),
        (["inspect", "gpt2+heads=7"], "n_heads=7 does not divide d_model=768"),
        (["compare", "gpt2@1m", "llama@1m", "--data", "nowhere.txt", "--tokens", "1k"], "nowhere.txt"),
        (["compare", "gpt2@1m", "--data", "python-docs"], "compare needs a length"),
        (["compare", "--data", "python-docs", "--tokens", "1k"], "MODELS"),
        (["compare", "gpt2@1m", "--data", "python-docs", "--tokens", "many"], "many"),
        (["compare", "gpt2@1m", "--data", "python-docs", "--tokens", "1e999"], "--tokens: '1e999' is more than"),
        (["train", "gpt2@1m", "--data", "python-docs", "--tokens", "1e30", "--out", "x"], "tokens=1000"),
        (["check", "llama@1m", "--largest", "1e999"], "--largest: '1e999' is more than"),
        (
            ["train", "gpt2@1m", "--data", "python-docs", "--tokens", "1k", "--out", "x", "--lrr", "1"],
            "--lrr",
        ),
        (["generate", "/nowhere/at/all", "--prompt", "x"], "no file or folder is named"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_status_2(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_input_that_is_not_text_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names standard input, or the file."""
    monkeypatch.setattr(import_module("glassformer.cli.conversation"), "loaded_as", lambda *_: None)
    monkeypatch.setattr(import_module("glassformer.cli.conversation"), "Conversation", lambda *_, **__: None)
    for verb in ("generate", "chat"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
        assert main([verb, "smollm2", "--dtype", "float32"]) == 2
        assert capsys.readouterr().err == "glassformer: standard input holds the byte 0xff; it must be utf-8 text\n"
    for name in ("config.yaml", "config.json"):
        (tmp_path / name).write_bytes(b"\xff")
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert str(tmp_path / name) in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_every_option_is_explained(verb: str) -> None:
    found = app[verb].assemble_argument_collection(parse_docstring=True)
    arguments = [argument for argument in found if argument.name != "*"]  # a group of options that are in the list too
    assert len(arguments) > 15
    assert not [argument.name for argument in arguments if not argument.parameter.help]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_listed_by_the_first_line_of_its_docstring(verb: str) -> None:
    """The list is printed without importing the verbs."""
    described = getattr(import_module(f"glassformer.cli.verbs.{VERBS[verb].file}"), verb).__doc__
    assert " ".join(described.split("\n\n")[0].split()) == VERBS[verb].line


def test_help_of_a_command_exceeds_its_line_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    assert "each part whose output differs" in " ".join(capsys.readouterr().out.split())


def test_traceback_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gtp2", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_train_generate_and_inspect_a_run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", TINY, "--data", str(source), "--out", run, *PLAN, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("ok", 6, 768)
    assert main(["generate", run, "--prompt", "line", "--max-new-tokens", "5", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["texts"]
    assert (made["tokens"], len(made["text"])) == (5, 5)
    assert main(["inspect", run, "--diff", TINY, "--json"]) == 0
    difference = json.loads(capsys.readouterr().out)["diff"]
    assert set(difference) == {"vocab_size", "context"}
    assert main(["train", TINY, "--data", str(source), "--out", run, *PLAN]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", TINY, "--data", str(source), "--out", run, *PLAN, "--resume"]) == 0


def test_a_preempted_job_repeats_one_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume starts a run (with another optimizer, for three steps), and then finds it finished."""
    run = tmp_path / "run"
    command = ["train", f"{TINY}+recipe.optimizer.momentum=0.9", "--data", str(source), "--out", str(run), "--resume"]
    command += ["--optimizer", "muon", "--steps", "3", *PLAN[2:]]
    with pytest.warns(UserWarning, match="holds no run yet: one starts"):
        assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    recipe = Recipe.from_file(run / "recipe.yaml")
    assert (recipe.optimizer, recipe.steps) == (MuonConfig(momentum=0.9), 3)
    with pytest.warns(UserWarning, match="run is finished: all 3 steps are done"):
        assert main(command) == 0
    assert main(["train", TINY, "--data", str(source), "--out", str(run), "--steps", "3", "--tokens", "768"]) == 2
    assert "give one of tokens, flops, minutes, steps, epochs; tokens and steps given" in capsys.readouterr().err


def test_our_warnings_are_one_line(tmp_path: Path) -> None:
    with program.warnings_in_one_line():
        ours = warnings.formatwarning("x is finished", UserWarning, program.__file__, 3)
        theirs = warnings.formatwarning("old", UserWarning, str(tmp_path / "other.py"), 3)
    assert ours == "glassformer: x is finished\n" and "other.py:3" in theirs


def test_generate_continues_a_prompt_on_the_terminal(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    main(["train", TINY, "--data", str(source), "--out", run, *PLAN, "--json"])
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "line", "--max-new-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("line")
    assert "tokens/s" in captured.err
    assert main(["generate", run, "--prompt", "日"]) == 2
    assert main(["generate", run, "--prompt", ""]) == 2
    assert "empty" in capsys.readouterr().err


def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for strange in ({"\x1b[31mred": 1}, {"final_norm": "\x1b]0;title\x07"}, {"\ud800": 1}):
        (tmp_path / "model.json").write_text(json.dumps(preset(TINY).to_dict() | strange))
        assert main(["inspect", str(tmp_path / "model.json")]) == 2
        said = capsys.readouterr().err
        assert said.rstrip("\n").isprintable() and "\\" in said
    assert main(["inspect", "no/\x1b[31m.yaml"]) == 2
    assert "no/\\x1b[31m.yaml" in capsys.readouterr().err


def test_presets_and_schema_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["presets"]["gpt2"] == 124_439_808
    assert main(["schema"]) == 0
    plain = capsys.readouterr().out
    assert json.loads(plain)["$defs"]["RMSNormConfig"]["properties"]["kind"] == {"const": "rmsnorm"}
    assert main(["schema", "--json"]) == 0 and capsys.readouterr().out == plain


def test_counts_take_suffixes(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [*PLAN[2:], "--tokens", "0.768k"]
    assert main(["train", TINY, "--data", str(source), "--out", str(tmp_path / "run"), *plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 768


def trained(run: Path) -> bool:
    """A step of the run is recorded."""
    return (run / "metrics.jsonl").is_file() and bool((run / "metrics.jsonl").stat().st_size)


def test_ctrl_c_saves_and_names_the_resume_command(source: Path, tmp_path: Path) -> None:
    """A real process, a real signal."""
    run = tmp_path / "run"
    plan = ["--tokens", "5M", *PLAN[2:]]
    command = [
        sys.executable,
        "-m",
        "glassformer",
        "train",
        TINY,
        "--data",
        str(source),
        "--out",
        str(run),
        *plan,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not trained(run):  # the first step may build loops in C++
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "continue with" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert (run / "latest").exists()


def test_ctrl_c_stops_a_comparison_that_can_resume(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = ["--tokens", "5M", *PLAN[2:]]
    command = [sys.executable, "-m", "glassformer", "compare", TINY, "--data", str(source), "--out", str(out), *plan]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(map(trained, out.glob("runs/*/run"))):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command continues from here" in said
    assert "Traceback" not in said
    assert list(out.glob("runs/*/run/latest")), "the arm saved before it ended"


def test_remedies_of_why_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """+recipe.FIELD=VALUE in an expression changes the recipe; an unknown field is named."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 2000)
    wishes = "+recipe.learning_rate=1e-4+recipe.warmup=0.25+recipe.adam_eps=1e-12"
    run = [
        "train", f"llama@1m+layers=1+d_model=32+heads=2{wishes}",
        "--data", str(text), "--tokens", "512", "--batch-size", "4", "--context", "32", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["glassformer", *run])
    assert main(run) == 0
    kept = (tmp_path / "run" / "command.txt").read_text(encoding="utf-8")
    assert shlex.split(kept) == ["glassformer", *run]
    recipe = Recipe.from_file(tmp_path / "run" / "recipe.yaml")
    assert (recipe.learning_rate, recipe.optimizer.eps, recipe.schedule.warmup) == (1e-4, 1e-12, 0.25)
    run[1] = "llama@1m+recipe.learning_rat=1"
    assert main(run) == 2


@pytest.mark.slow
def test_compare_accepts_recipe_changes_of_train(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    names = [TINY, f"{TINY}+recipe.learning_rate=1e+0+recipe.on_spike=skip"]
    assert main(["compare", *names, "--data", str(source), "--out", str(out), *PLAN, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [run["recipe"]["learning_rate"] for run in results["runs"]][1] == 1.0
    recipe = Recipe.from_file(next(out.glob("runs/*on_spike*/run/recipe.yaml")))
    assert (recipe.learning_rate, recipe.on_spike) == (1.0, "skip")
    assert main(["inspect", names[1]]) == 2
    assert "about training, not about the model; train and compare take it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "seeds", "says"),
    [
        ({("a", 0): "ok", ("b", 0): "diverged"}, "1", ""),
        ({("a", 0): "diverged", ("b", 0): "failed"}, "1", "1 of 2 runs failed: b: the disk is full; the report is at "),
        ({("a", 0): "failed", ("b", 0): "failed"}, "1", "2 of 2 runs failed: a: the disk is full; the report is at "),
        ({("a", 0): "ok", ("a", 1): "failed"}, "2", "1 of 2 runs failed: a seed 1: the disk is full; the report is "),
    ],
)
@pytest.mark.parametrize("json_", [[], ["--json"]], ids=["table", "json"])
def test_a_comparison_in_which_a_run_failed_is_shown_and_ends_with_status_1(
    ends: dict[tuple[str, int], str], seeds: str, says: str, json_: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One that diverged is a result."""
    runs = [
        {**finished(), "name": name, "seed": seed, "status": status, "error": "the disk is full"}
        | ({} if status == "ok" else {"validation": None})
        for (name, seed), status in ends.items()
    ]
    results = {"schema": 1, "data": {"name": "text"}, "budget": {"seeds": int(seeds)}, "runs": runs, "verdicts": []}
    out, design = tmp_path / "out", Design.of(["gpt2@1m"], "x", tokens=1000)
    made = lambda *_, **__: Comparison(Results.of(results), design, out)  # noqa: E731
    monkeypatch.setattr(import_module("glassformer.comparison"), "compare", made)
    arguments = [
        "compare",
        "gpt2@1m",
        "llama@1m",
        "--data",
        "python-docs",
        "--tokens",
        "1k",
        "--seeds",
        seeds,
        "--out",
        str(out),
        *json_,
    ]
    assert main(arguments) == bool(says)
    shown, said = capsys.readouterr()
    assert says in said and len(said.splitlines()) == bool(says)
    if says:
        assert said.endswith(f"report is at {out / 'report.html'}\n")
    assert json.loads(shown) == results if json_ else f"report: {out / 'report.html'}" in shown


def test_comparison_prints_new_notes_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes are printed at the end; those printed before the start are not repeated."""
    results = Results.of({"schema": 1, "data": {}, "budget": {"seeds": 2, "notes": ["known", "found out"]}, "runs": []})
    view = ComparisonView()
    view.event(Begin(how="on cpu", notes=["known"], runs=[]))
    assert "note: known" in capsys.readouterr().err
    found = Comparison(results, Design.of(["gpt2@1m"], "x", tokens=1000), Path("out"))
    assert "note: known" in str(found)
    shown = str(found.without_notes(view.noted))
    assert "note: found out\n" in shown and "known" not in shown


def test_time_left_counts_evaluations_and_not_the_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: the first step ends after 40 s; then a tenth of the run takes 10 s, evaluations too."""
    now = [0.0]
    monkeypatch.setattr("glassformer.runs.live.time.monotonic", lambda: now[0])
    view = ComparisonView()
    view.event(Begin(how="", notes=[], runs=[("a", 0), ("a", 1), ("b", 0)]))
    fields = {"step": 1, "loss": 2.0, "tokens_per_second": 1.0, "seconds_left": 1e6}
    for name, seed, at, done in (("a", 0, 40.0, 0.1), ("a", 0, 70.0, 0.4), ("a", 1, 99.0, 0.2), ("a", 1, 119.0, 0.4)):
        now[0] = at
        view.event(Step(name=name, seed=seed, done=done, **fields))
        if done == 0.4:  # 60 s of this run, and 100 s of each of the two that wait
            view.event(Kept(name=name, seed=seed))
    said = [line.split("tokens/s")[1].strip() for line in capsys.readouterr().err.splitlines() if "tokens/s" in line]
    assert said[0].startswith("–:––") and said[1] == "1:00 of this run and 4:20 of all left"
    assert said[-1] == "1:00 of this run and 2:40 of all left"  # 100 s of b


def test_an_out_below_a_file_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before the text is read."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").write_text("")
    out = tmp_path / "file" / "x"
    assert main(["compare", TINY, "--data", str(tmp_path / "empty"), "--out", str(out), *PLAN]) == 2
    assert capsys.readouterr().err == f"glassformer: --out {out}: {tmp_path / 'file'} is a file; name a folder\n"


def test_a_failed_comparison_leaves_its_report(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Local, "training", lambda self, place: Stand(lambda *_: ("betas are wrong", 1), place))
    out = tmp_path / "out"
    assert main(["compare", TINY, "--data", str(source), "--out", str(out), *PLAN, "--json"]) == 1
    shown, said = capsys.readouterr()
    assert json.loads(shown) == json.loads((out / "results.json").read_text())
    assert "betas are wrong" in (out / "report.html").read_text(encoding="utf-8")
    assert said == f"glassformer: 1 of 1 runs failed: {TINY}: betas are wrong; the report is at {out / 'report.html'}\n"


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("verb", "resume"), [("train", []), ("train", ["--resume"]), ("compare", [])])
def test_ctrl_c_while_the_text_is_read(
    verb: str, resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "read_data", stopped)
    monkeypatch.setattr(import_module("glassformer.comparison.experiment"), "read_data", stopped)
    arguments = [verb, TINY, "--data", "python-source", "--out", str(tmp_path / "out"), *PLAN, *resume]
    monkeypatch.setattr("sys.argv", ["glassformer", *arguments])
    assert main(arguments) == 130
    kept = (
        f"; no step is saved yet; continue with: {shlex.join(['glassformer', *arguments])}" if verb == "train" else ""
    )
    assert capsys.readouterr() == ("", f"stopped{kept}\n")


@pytest.mark.parametrize("module", ["cyclopts", "torch"])
def test_ctrl_c_while_something_is_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "glassformer", "inspect", "llama@1m"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_dash_is_standard_input(
    verb: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes()), encoding="utf-8"))
    assert main([verb, TINY, "--data", "-", "--out", str(tmp_path / "out"), *PLAN, "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "options", "context"),
    [
        ("", [], 256),
        ("+context=64", [], 64),
        ("+recipe.context=64", [], 64),
        ("+context=64+recipe.context=64", ["--context", "64"], 64),
        ("", ["--context", "64"], 64),
        ("+context=64", ["--context", "32"], None),
        ("+recipe.context=64", ["--context", "256"], None),
        ("+context=32+recipe.context=64", [], None),
    ],
)
def test_the_context_of_the_expression_is_that_of_the_run(
    changes: str,
    options: list[str],
    context: int | None,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    plan = ["--tokens", "256", "--batch-size", "1", "--threads", "1", *options]
    status = main(["train", TINY + changes, "--data", str(source), "--out", str(run), *plan])
    if context is None:
        said = capsys.readouterr().err
        assert status == 2 and "are both asked for; give one of them" in said and not run.exists()
    else:
        assert status == 0
        assert (ModelConfig.from_file(run / "config.yaml").context, recipe_of(run).context) == (context, context)


def recipe_of(run: Path) -> Recipe:
    return Recipe.from_file(run / "recipe.yaml")


def test_a_vocabulary_that_the_expression_names_pads_the_tokenizers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--data", str(source), *PLAN, "--json"]
    assert main(["train", TINY, *train, "--out", str(tmp_path / "plain")]) == 0
    tokens = ModelConfig.from_file(tmp_path / "plain" / "config.yaml").vocab_size
    for size, status in ((tokens, 0), (4 * tokens, 0), (tokens - 1, 2)):
        run = tmp_path / f"run{size}"
        capsys.readouterr()
        assert main(["train", f"{TINY}+vocab_size={size}", *train, "--out", str(run)]) == status
        if status:
            assert f"vocab_size={size} is less than the {tokens} tokens" in capsys.readouterr().err
            assert not run.exists()
        else:
            assert ModelConfig.from_file(run / "config.yaml").vocab_size == size
    run = tmp_path / f"run{4 * tokens}"
    assert main(["train", f"{TINY}+vocab_size={4 * tokens}", *train, "--out", str(run), "--resume"]) == 0


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ("", ["--device", "cuda:99"], "device='cuda:99' is not on this machine"),
        ("+bidirectional", [], "is not causal"),
        ("+mamba", ["--qk-clip", "100"], "qk_clip=100 applies to attention"),
        ("+learned+embedding.position.length=8", [], "embedding.position.length=8 is shorter than context=32"),
        ("", ["--out", ""], "--out is empty"),
    ],
)
def test_train_command_refuses_before_reading_text(
    changes: str,
    options: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request, "read_data", lambda *_, **__: pytest.fail("read the text"))
    options = options if "--out" in options else [*options, "--out", "run"]
    assert main(["train", TINY + changes, "--data", "python-docs", *PLAN, *options]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_context_longer_than_the_text_is_refused_before_the_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    plan = ["--tokens", "200k", "--batch-size", "1", "--threads", "1"]
    assert main(["train", f"{TINY}+recipe.context=8000", "--data", str(source), "--out", str(run), *plan]) == 2
    assert "context=8000 needs at least 8001 tokens, and the held-out text" in capsys.readouterr().err
    assert not run.exists()


def test_diverged_arm_and_unreadable_contexts_are_printed_once() -> None:
    reason = "cannot: position=learned ends at 32 tokens and {} were asked for; use at most 32"
    longer = [{"context": n, "loss": None, "reason": reason.format(n)} for n in (64, 128, 256)]
    runs = [{**finished(), "name": name, "extrapolation": longer} for name in ("a", "b")]
    runs.append({**finished(), "name": "c d", "status": "diverged", "validation": None, "error": "the loss rose"})
    results = Results.of({"schema": 1, "data": {"name": "x"}, "budget": {"seeds": 1}, "runs": runs, "verdicts": []})
    told = str(Comparison(results, Design.of(["gpt2@1m"], "x", tokens=1000), Path("out")))
    assert told.count("were asked for") == 0 and told.count("position=learned") == 1
    assert "a, b: cannot: position=learned ends at 32 tokens; use at most 32" in told
    place = place_of(Path("out"), "c d", 0)
    assert told.splitlines()[-1] == f"next: glassformer why {place}"


def test_comparison_is_loaded_and_other_folders_are_refused_by_kind(tmp_path: Path) -> None:
    place = tmp_path / "all"
    runs = [{**finished(), "name": "gpt2@1m", "seed": 0}]
    results = Results.of({"schema": 1, "data": {"name": "x"}, "budget": {"seeds": 1}, "runs": runs, "verdicts": []})
    design = Design.of(["gpt2@1m"], "x", tokens=1000)
    (place / "runs" / "gpt2@1m-seed0" / "run").mkdir(parents=True)
    write_results(results, place)
    design.save(place)
    found = Comparison.load(place)
    assert (found.results, found.design, found.folder) == (results, design, place)
    with refused(code="missing", field="name"):
        load(place)
    run = place / "runs" / "gpt2@1m-seed0" / "run"
    (run / "latest").write_text("step_1")
    with pytest.raises(RequestError) as caught:
        load(place)
    said = str(caught.value)
    assert str(run) in said and "gf.Comparison.load" in said and caught.value.code == "conflict"
    (run / "recipe.yaml").write_text("")
    for folder, code in ((tmp_path / "nowhere", "missing"), (run, "conflict"), (tmp_path, "conflict")):
        with refused(code=code, field="folder"):
            Comparison.load(folder)
    (place / "design.yaml").write_text("verb: ablate\nbase: gpt2\n")
    with refused(code="conflict", field="folder"):
        Comparison.load(place)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_tasks_without_their_harness_are_one_sentence() -> None:
    module = [sys.executable, "-m", "glassformer.laboratory.lm_eval"]
    done = subprocess.run(module, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "glassformer: lm_eval is not installed; pip install lm-eval\n")
