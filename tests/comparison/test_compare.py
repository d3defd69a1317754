from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import glassformer as gf
from glassformer.comparison import experiment, summary
from glassformer.comparison.arms import (
    DesignArm,
    arms,
    common_context,
    fairness,
    likeness,
    recipes,
    spending,
    unequal,
)
from glassformer.errors import Code, RequestError
from glassformer.naming import preset
from glassformer.runs.contrasts import mean_interval
from glassformer.runs.events import Begin, End, Event, Kept, ReadingEvent, Start
from glassformer.runs.results import Results, RunResult
from glassformer.runs.simultaneous import student_quantile
from glassformer.runs.verdicts import stand_in, verdicts
from glassformer.runs.workers import WorkerRun
from glassformer.training import Recipe
from glassformer.training.request import fit
from tests.refused import failed, refused
from tests.runs.stand_in import AT_ONCE, Instead, content, trained_at_once

compare = content(gf.compare)

TINY = "+layers=1+d_model=32+heads=2"
PLAN: dict[str, Any] = {
    "tokens": 6 * 4 * 32,
    "batch_size": 4,
    "context": 32,
    "threads": 1,
    "dtype": "float32",
}


def configs_of(named: dict[str, DesignArm]) -> dict[str, Any]:
    return {name: arm.config for name, arm in named.items()}


def planned(named: dict[str, DesignArm], fields: dict[str, Any] = PLAN, match: Any = None) -> dict[str, Recipe]:
    """Returns the recipes of arms on a text of 50 tokens."""
    return recipes(named, configs_of(named), fields, match, 50)


# Fairness


def test_sizes_far_apart_are_refused_with_the_reason() -> None:
    with refused(code="conflict", field="allow_unmatched"):
        fairness(arms(["gpt2@1m", "gpt2@3m"]), allow_unmatched=False)
    assert fairness(arms(["gpt2@1m", "gpt2@3m"]), allow_unmatched=True)
    with pytest.raises(RequestError):
        fairness(arms(["gpt2@1m", "gpt2@3m"]), False, "flops")
    sizes = [f"{preset(name).active_params(embeddings=False):,}" for name in ("gpt2@1m", "gpt2@3m")]
    *_, note = fairness(arms(["gpt2@1m", "gpt2@3m"]), False, "minutes")  # the size costs time, and is reported
    assert note.startswith("Time is equal and size is not") and all(size in note for size in sizes)
    with pytest.raises(RequestError) as caught:  # what it says would do, does
        fairness(arms(["llama@1m", "llama@1m+retention"]), allow_unmatched=False)
    named = str(caught.value).split("; ")[1].split(" has the same size")[0]
    assert named.startswith("llama@1m+retention+hidden=") and not fairness(arms(["llama@1m", named]), False)


def test_an_arm_that_cannot_train_here_is_refused_before_any_is_trained(source: Path, tmp_path: Path) -> None:
    with refused(code="conflict", field="kernel"):
        compare([f"gpt2@1m{TINY}", f"gpt2@1m{TINY}+kernel=flex"], source, out=tmp_path / "out", device="cpu", **PLAN)
    assert not (tmp_path / "out").exists()


def test_fewer_parameters_by_architecture_are_noted_not_refused() -> None:
    (note,) = fairness(arms(["gpt2@1m", "falcon@1m"]), allow_unmatched=False)
    assert "falcon@1m" in note


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    note, *_ = fairness(arms(["llama@1m", "llama@1m+moe:8:2"]), allow_unmatched=False)
    held, met = (
        getattr(preset("llama@1m+moe:8:2"), name)(embeddings=False) for name in ("num_params", "active_params")
    )
    assert f"{held:,} parameters; a token meets {met:,}" in note and held > 2 * met
    with refused(code="conflict", field="allow_unmatched"):
        fairness(arms(["llama@1m", "llama@1m+moe:8:4:352"]), allow_unmatched=False)


def test_every_family_matches_its_size_within_the_bound() -> None:
    names = [f"{family}@10m" for family in ("gpt2", "llama", "bloom", "falcon", "qwen3", "mistral", "gpt-neox", "mpt")]
    fairness(arms(names), allow_unmatched=False)


def test_an_arm_named_twice_is_refused() -> None:
    with refused(code="conflict", field="models"):
        arms(["gpt2@1m", "gpt2@1m"])


def test_matching_by_flops_gives_each_arm_the_first_ones_flops() -> None:
    named = arms(["gpt2@1m", "falcon@1m"])
    configs = {name: fit(arm.config, 50, 32) for name, arm in named.items()}
    plans = recipes(named, configs, {**PLAN, "tokens": 100_000}, "flops", 50)
    spent = [
        3 * config.flops(32) * (plans[name].num_steps(config) or 0) * plans[name].tokens_per_step
        for name, config in configs.items()
    ]
    assert spent[0] == pytest.approx(spent[1], rel=0.01)
    assert plans["falcon@1m"].num_steps(configs["falcon@1m"]) > plans["gpt2@1m"].num_steps(configs["gpt2@1m"])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "match", "code", "field"),
    [
        ({}, None, "conflict", "budget"),
        ({"tokens": 1, "minutes": 1.0}, None, "conflict", "budget"),
        ({"tokens": 1}, "minutes", "conflict", "match"),
        ({"minutes": -1.0}, None, "range", "minutes"),
    ],
)
def test_a_wrong_budget_is_refused(fields: dict[str, Any], match: Any, code: Code, field: str) -> None:
    plan = {name: value for name, value in PLAN.items() if name != "tokens"}
    with refused(code=code, field=field):
        planned(arms(["gpt2@1m"]), {**plan, **fields}, match)


@pytest.mark.parametrize(
    ("names", "plan", "match", "says"),
    [
        (["gpt2@1m", "llama@1m", "falcon@1m"], {"tokens": 1000, "batch_size": 16}, "flops", "more training FLOPs than"),
        (
            ["gpt2@1m+recipe.batch_size=64", "gpt2@1m+recipe.batch_size=4"],
            {"tokens": 3000},
            None,
            "33% more tokens than",
        ),
        (["gpt2@1m", "llama@1m"], {"tokens": 1000}, None, None),
        (["gpt2@1m", "llama@1m"], {"minutes": 1.0, "tokens": None}, None, None),
        (["gpt2@1m", "falcon@1m"], {"tokens": 100_000}, "flops", None),
    ],
)
def test_note_reports_rounding_to_whole_steps(
    names: list[str], plan: dict[str, Any], match: Any, says: str | None
) -> None:
    """The note gives the totals over the steps of the runs."""
    configs = {name: fit(arm.config, 50, 32) for name, arm in arms(names).items()}
    plans = recipes(arms(names), configs, {**PLAN, **plan}, match, 50)
    unit = match or "tokens"
    spent = spending(configs, plans, unit)
    notes = unequal(spent, unit)
    assert len(notes) == bool(says)
    if says:
        assert says in notes[0] and f"{max(spent.values()) / min(spent.values()) - 1:.0%} more" in notes[0]
        assert max(spent, key=spent.__getitem__) in notes[0] and min(spent, key=spent.__getitem__) in notes[0]


# Recipes of single arms


def test_arm_can_have_a_separate_recipe() -> None:
    names = ["gpt2@1m", "gpt2@1m+recipe.warmup=0.3", "gpt2@1m+relu+recipe.adam_eps=1e-6+nobias+recipe.clip=none"]
    named = arms(names)
    assert list(configs_of(named).values()) == [preset("gpt2@1m"), preset("gpt2@1m"), preset("gpt2@1m+relu+nobias")]
    plain, warm, other = planned(named).values()
    assert (plain.schedule.warmup, warm.schedule.warmup) == (0.05, 0.3)
    assert warm.replace(schedule=plain.schedule) == plain  # and nothing else
    assert (other.optimizer.eps, other.clip, other.schedule) == (1e-6, None, plain.schedule)
    assert other.learning_rate == planned(arms(["gpt2@1m+relu+nobias"]))["gpt2@1m+relu+nobias"].learning_rate
    first, second = likeness(named, configs_of(named), planned(named))
    assert first == (
        "gpt2@1m+recipe.warmup=0.3 is trained by its own recipe (warmup=0.3): it is the model of gpt2@1m, so what "
        "differs is the recipe."
    )
    assert second.endswith("by its own recipe (adam_eps=1e-6, clip=none).")
    alike = arms([f"gpt2@1m+{change}+recipe.warmup=0.3" for change in ("rope", "swiglu", "rmsnorm")])
    (note,) = likeness(alike, configs_of(alike), planned(alike))
    assert note.endswith("gpt2@1m+rmsnorm+recipe.warmup=0.3 are trained by their own recipe (warmup=0.3).")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("recipe.tokens=5", "one arm cannot have tokens for itself; give --tokens to all"),
        ("recipe.seed=1", "give --seeds to all"),
        ("recipe.context=8", "give --context to all"),
        ("recipe.warmpu=1", "recipe.warmpu: no field is named 'warmpu'"),
        ("recipe.learning_rat=1", "did you mean 'learning_rate'?"),
        ("recipe.learning_rate=fast", "learning_rate='fast'"),
        ("recipe.clip=-1", "clip=-1"),
        ("recipe.warmup", "use +recipe.FIELD=VALUE"),
        ("recipe.=3", "use +recipe.FIELD=VALUE"),
        ("recipe=3", "about training, not about the model"),
    ],
)
def test_a_wrong_recipe_of_an_arm_is_one_sentence(source: Path, tmp_path: Path, wish: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        compare(["gpt2@1m", f"gpt2@1m+{wish}"], source, out=tmp_path / "out", **PLAN)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert wish in str(caught.value), "the sentence names the arm"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_recipes_of_one_model_are_compared(source: Path, tmp_path: Path) -> None:
    """Same weights, same text: the losses differ by the recipe, the page names it, and both are kept by content."""
    model = f"gpt2@1m{TINY}"
    names, out = [model, f"{model}+recipe.warmup=0.9", f"{model}+recipe.weight_decay=0.1"], tmp_path / "out"
    results = compare(names, source, out=out, **PLAN)
    plain, warm, same = results["runs"]
    assert [one["status"] for one in results["runs"]] == ["ok"] * 3
    assert plain["validation"]["loss"] != warm["validation"]["loss"]
    assert plain["train"]["curve"] == same["train"]["curve"]  # a change to the default value
    assert (plain["recipe"]["schedule"]["warmup"], warm["recipe"]["schedule"]["warmup"]) == (0.05, 0.9)
    assert {**warm["recipe"], "schedule": 0} == {**plain["recipe"], "schedule": 0}
    assert any("so what differs is the recipe" in note for note in results["budget"]["notes"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "The configs are the same; what differs is the recipe." in page
    assert page.replace("<wbr>", "").count(">recipe.schedule.warmup<") == 1

    events: list[Event] = []
    assert compare(names, source, out=out, progress=events.append, **PLAN)["runs"] == results["runs"]
    assert [type(event) for event in events].count(Kept) == 3
    with refused(code="changed", field="weight_decay"):
        compare([names[1]], source, out=out, **{**PLAN, "weight_decay": 0.2})


# Statistics


@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234)],
)
def test_student_t_agrees_with_the_printed_table(df: int, quantile: float) -> None:
    """97.5 % quantiles, as in every textbook's table."""
    assert student_quantile(0.05, df) == pytest.approx(quantile, rel=1e-4)


def test_the_paired_interval_of_a_worked_example() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, t(2) = 4.30265, half-width 4.30265 / sqrt(3)."""
    mean, low, high = mean_interval([1.0, 2.0, 3.0], 0.95)
    assert (mean, high - mean) == pytest.approx((2.0, 4.30265 / math.sqrt(3)), rel=1e-5)
    assert mean - low == pytest.approx(high - mean)


def run(name: str, seed: int, loss: float, status: str = "ok") -> RunResult:
    measured = {"loss": loss, "perplexity": 1.0, "bits_per_byte": None, "tokens": 1}
    ended = measured if status == "ok" else None
    return RunResult.of({"name": name, "seed": seed, "status": status, "validation": ended})


def test_verdicts_name_the_better_arm_and_doubt() -> None:
    losses = {"a": [2.00, 2.01, 1.99], "b": [2.10, 2.12, 2.09], "c": [1.98, 2.02, 2.00]}
    runs = [run(name, seed, values[seed]) for seed in range(3) for name, values in losses.items()]
    found = {(v.a, v.b): v for v in verdicts(runs)}
    assert found["a", "b"].verdict == "a better"
    assert found["a", "b"].low > 0
    assert found["a", "c"].verdict == "no difference shown"
    assert verdicts([run("a", 0, 1.0), run("b", 0, 2.0)]) == []  # one seed proves nothing
    assert found["a", "b"].seeds == 3
    lost = [*runs, run("d", 0, 1.0), run("d", 1, 1.0, "diverged")]
    (unsure,) = [v for v in verdicts(lost) if v.b == "d"]
    assert (unsure.verdict, unsure.difference, unsure.diverged) == ("no verdict", None, [0, 1])
    caught = [*runs, run("d", 0, 1.0), run("d", 1, 1.0, "failed")]
    assert not any(v.b == "d" for v in verdicts(caught))


def test_verdicts_are_against_the_first_arm_that_finished() -> None:
    """A note reports the reference arm; for the first arm, with fewer than two losses, a verdict counts divergences."""
    ends = {"a": ["diverged", "ok", "diverged"], "b": ["ok"] * 3, "c": ["ok"] * 3}
    runs = [run(name, seed, 2.0 + seed / 100, ends[name][seed]) for seed in range(3) for name in ends]
    found = verdicts(runs)
    assert [(v.a, v.b, v.seeds) for v in found] == [("b", "a", 0), ("b", "c", 3)]
    assert found[0].diverged == [0, 2]
    assert stand_in(runs, found) == [
        "a has not finished two seeds: the verdicts are against b, the first arm that has."
    ]
    whole = [run(one.name, one.seed, 2.0) for one in runs]
    assert stand_in(whole, verdicts(whole)) == [] and stand_in(runs, []) == []


# The whole job


class Strict(HTMLParser):
    """Notes everything a page would fetch."""

    fetched: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            value for name, value in attrs if name in ("src", "href") and value and value.startswith(("http", "//"))
        ]


def test_a_comparison_from_end_to_end(source: Path, tmp_path: Path) -> None:
    """Two seeds of two arms; then again, which trains nothing; then one seed more, which trains only that."""
    names = [f"gpt2@1m{TINY}", f"llama@1m{TINY}+window:8"]
    events: list[Event] = []
    results = compare(names, source, seeds=2, out=tmp_path / "out", progress=events.append, **PLAN)
    assert [(r["name"], r["seed"], r["status"]) for r in results["runs"]] == [
        (n, s, "ok") for s in (0, 1) for n in names
    ]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    for one in results["runs"]:
        assert one["train"]["steps"] == 6
        assert one["train"]["tokens"] == PLAN["tokens"]
        assert one["validation"]["bits_per_byte"] > 0
        assert 0 < one["validation"]["frequency_loss"] < one["validation"]["loss"]  # six steps
        assert one["generation"]["seconds_per_token"] > 0
        assert one["generation"]["sample"]["text"]
        assert [row["context"] for row in one["extrapolation"]] == [32, 64, 128, 256]
        assert one["parameters"] == fit(preset(one["name"]), results["data"]["vocab_size"], 32).num_params()
    gpt2, llama = results["runs"][:2]
    assert [row["loss"] is None for row in gpt2["extrapolation"]] == [False, True, True, True]
    assert gpt2["extrapolation"][1]["reason"].startswith("cannot")
    assert all(row["loss"] is not None for row in llama["extrapolation"])
    assert len({row["tokens"] for row in llama["extrapolation"]}) == 1  # every length scores the same tokens
    # fp32 keys and values of 32 values: every token for GPT-2, the last 8 of 32 for the window
    assert gpt2["generation"]["state_bytes_per_token"] == 2 * 32 * 4
    assert llama["generation"]["state_bytes_per_token"] == 2 * 32 * 4 * 8 / 32
    assert len(results["verdicts"]) == 1 and results["verdicts"][0]["terms"].endswith("barely trained")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    parser = Strict()
    parser.fetched = []
    parser.feed(page)
    assert parser.fetched == []
    assert all(name.replace("+", "+") in page for name in names)
    assert results["command"] == f"glassformer run {tmp_path / 'out' / 'design.yaml'}"
    kinds = [type(event) for event in events if not isinstance(event, ReadingEvent)]
    assert kinds[0] is Begin
    assert kinds.count(Start) == kinds.count(End) == 4

    events.clear()
    again = compare(names, source, seeds=2, out=tmp_path / "out", progress=events.append, **PLAN)
    assert again["runs"] == results["runs"]
    assert [type(event) for event in events].count(Kept) == 4
    with refused(code="changed", field="learning_rate"):
        compare(names, source, seeds=2, out=tmp_path / "out", **{**PLAN, "learning_rate": 1e-2})


@pytest.mark.slow
def test_files_named_like_modules_are_not_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("random", "statistics", "torch", "glassformer"):
        Path(f"{name}.py").write_text("raise SystemExit('this is a file of mine')")
    (one,) = compare([f"gpt2@1m{TINY}"], source, **{**PLAN, "tokens": 128})["runs"]
    assert (one["status"], one["error"]) == ("ok", None)


A, B, C = (f"{family}@1m{TINY}" for family in ("gpt2", "llama", "bloom"))


def held_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("names", "other", "fields", "says"),
    [
        ([C], False, {}, "holds a comparison of gpt2@1m"),
        ([A, B], True, {}, "holds a comparison with another text, on text.txt"),
        ([A, B], False, {"tokenizer": "byte"}, "holds a comparison with another tokenizer"),
        ([A, B], False, {"tokens": 640}, "another budget: tokens was 768 and is now 640"),
        ([A, C], False, {"batch_size": 2}, "another budget: batch_size was 4 and is now 2"),
        ([A, B], False, {"weight_decay": 0.2}, "another recipe: weight_decay was 0.1 and is now 0.2"),
        ([A, B], False, {"seed": 5, "schedule": {"kind": "cosine", "warmup": 0.5}}, "recipe: schedule.warmup was 0.05"),
        ([A, B], False, {"learning_rate": 0.5}, "another recipe: learning_rate was"),
    ],
)
@pytest.mark.parametrize("runs", [True, False], ids=["runs", "only results"])
def test_another_comparison_in_the_folder_is_not_written_over(
    source: Path, tmp_path: Path, names: list[str], other: bool,
    fields: dict[str, Any], says: str, runs: bool,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    compare([A, B], source, out=out, executor=AT_ONCE, **PLAN)
    if not runs:
        shutil.rmtree(out / "runs")
    before = held_in(out)
    if other:
        source = tmp_path / "other.txt"
        source.write_text("\n".join(f"line {n} of other text about cats and trees" for n in range(400)))
    with pytest.raises(RequestError) as caught:
        compare(names, source, out=out, **{**PLAN, **fields})
    assert f"--out {out}" in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)
    assert held_in(out) == before


def test_finished_runs_are_in_the_results_at_any_time(source: Path, tmp_path: Path) -> None:
    """A and C are trained, B fails; when B is tried again and stopped, A and C stay in the results."""
    out = tmp_path / "out"

    def told() -> tuple[list[str], str]:
        results = json.loads((out / "results.json").read_text())
        page = (out / "report.html").read_text(encoding="utf-8")
        assert (results["status"] != "complete") == (f">{results['status']}. <" in page)
        return [run["name"] for run in results["runs"]], results["status"]

    def b_fails(place: Path, notify: Any) -> tuple[str | None, int]:
        results = json.loads((out / "results.json").read_text())  # the page may be drawn just now
        assert results["status"] == f"{len(results['runs'])} of 3 runs so far"
        return ("the disk is full", 1) if "llama" in place.name else trained_at_once(place, notify)

    def stopped(place: Path, notify: Any) -> tuple[str | None, int]:
        assert told() == ([A, C], "2 of 3 runs so far")
        raise KeyboardInterrupt

    assert compare([A, B, C], source, out=out, executor=Instead(b_fails), **PLAN)["status"] == "complete"
    assert told() == ([A, B, C], "complete")
    with failed(code="stopped"):
        compare([A, B, C], source, out=out, executor=Instead(stopped), **PLAN)
    assert told() == ([A, C], "2 of 3 runs so far")
    compare([C, B, A], source, out=out, executor=AT_ONCE, **PLAN)
    assert told() == ([C, B, A], "complete")


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, [0, 1, 2, 3]), (0.01, [0, 3])])
def test_results_are_rewritten_as_often_as_takes_a_hundredth_of_the_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[int]
) -> None:
    """Runs that end at once, on a clock that only writing moves; the last time, all of them are in the results."""
    written, now = list[int](), [0.0]

    def write(results: Results, folder: Path) -> None:
        summary.write(results, folder)
        written.append(len(results.runs))
        now[0] += seconds

    monkeypatch.setattr(experiment, "write", write)
    monkeypatch.setattr(experiment, "time", SimpleNamespace(monotonic=lambda: now[0]))
    compare([A, B, C], source, out=tmp_path / "out", executor=AT_ONCE, **PLAN)
    assert written == expected


def test_arms_and_seeds_are_added_to_a_comparison(source: Path, tmp_path: Path) -> None:
    out, events = tmp_path / "out", list[Event]()

    def trained(names: list[str], **fields: Any) -> list[tuple[str, int]]:
        events.clear()
        compare(names, source, out=out, progress=events.append, executor=AT_ONCE, **{**PLAN, **fields})
        return [event.key for event in events if isinstance(event, Start)]

    assert trained([A, B]) == [(A, 0), (B, 0)]
    assert trained([A, B]) == []
    assert trained([C, A, B], seeds=2) == [(C, 0), (C, 1), (A, 1), (B, 1)]
    for fewer in ({}, {"seeds": 1}):
        names = [A, C] if not fewer else [A, B, C]
        with refused(code="missing", field="models"):
            trained(names, **fewer)
    assert [run["name"] for run in json.loads((out / "results.json").read_text())["runs"]] == [C, A, B] * 2
    (out / "results.json").unlink()  # as where a comparison was stopped before there was one
    assert trained([A, B], seeds=2) == []


@pytest.mark.parametrize(
    ("name", "code"), [("results.json", "damaged"), ("report.html", "exists"), ("tokenizer/tokenizer.json", "exists")]
)
def test_folder_without_a_comparison_is_refused(source: Path, tmp_path: Path, name: str, code: Code) -> None:
    """The folder is refused before the text is read, for any other files in it."""
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text('{"mine": 1}')
    with refused(code=code, field="out"):
        compare([A], tmp_path / "nowhere.txt", out=out, **PLAN)
    assert list(held_in(out).values()) == [b'{"mine": 1}']


@pytest.mark.slow
def test_an_arm_that_dies_leaves_the_others(source: Path, tmp_path: Path) -> None:
    names = [f"gpt2@1m{TINY}", f"llama@1m{TINY}"]

    def killed(place: Path, notify: Any) -> tuple[str | None, int]:
        if "gpt2" not in place.name:
            return WorkerRun(place).run(notify)
        (place / "run").mkdir()
        row = {"step": 3, "statistics": {"token_cosine": {"layers.0.resid_post": 0.5}}}
        (place / "run" / "dynamics.jsonl").write_text(json.dumps(row) + "\n")
        return None, -9

    results = compare(names, source, out=tmp_path / "out", executor=Instead(killed), **PLAN)
    assert [one["status"] for one in results["runs"]] == ["failed", "ok"]
    assert "out of memory" in results["runs"][0]["error"]
    assert results["runs"][0]["dynamics"]["layers"]["token_cosine"] == [[0.5]]  # what was seen until then
    results = compare(names, source, out=tmp_path / "out", **PLAN)
    assert [one["status"] for one in results["runs"]] == ["ok", "ok"]


@pytest.mark.slow
def test_diverging_arm_is_marked_and_the_comparison_continues(source: Path, tmp_path: Path) -> None:
    plan = {**PLAN, "tokens": 120 * 4 * 32, "learning_rate": 50.0}
    results = compare([f"gpt2@1m{TINY}", f"llama@1m{TINY}"], source, out=tmp_path / "out", **plan)
    assert [one["status"] for one in results["runs"]] == ["diverged", "diverged"]
    assert [one["validation"] for one in results["runs"]] == [None, None]
    assert results["runs"][0]["train"]["curve"] and results["runs"][0]["train"]["validation_curve"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "No arm finished" in page


@pytest.mark.parametrize(
    ("names", "fields", "says"),
    [
        (["gtp2@1m"], {}, "did you mean"),
        (["gpt2@1m"], {"seeds": 0}, "seeds=0"),
        (["gpt2@1m"], {"seeds": 1001}, "seeds=1001 is more than the 1,000 runs"),
        (["gpt2@1m"], {"seeds": 99999999999999999999}, "seeds=99999999999999999999 is more"),
        (["gpt2@1m"], {"seeds": 1.5}, "seeds=1.5 must be a whole number"),
        (["gpt2@1m"], {"learning_rate": 0.0}, "learning_rate=0.0"),
        (["gpt2@1m"], {"match": "flops", "tokens": 0}, "tokens=0"),
        (["gpt2@1m", "gpt2@1m+bidirectional"], {}, "is not causal"),
        (["gpt2@1m+embedding.position.length=16"], {}, "shorter than context=32"),
        (["gpt2@1m"], {"batch_size": 0}, "batch_size=0"),
        (["gpt2@1m"], {"context": 100_000}, "context=100000"),
        (["gpt2@1m"], {"dtype": "int3"}, "dtype"),
        (["gpt2@1m"], {"bach_size": 3}, "did you mean 'batch_size'"),
        (
            ["gpt2@1m", "mamba@1m+recipe.qk_clip=3"],
            {"allow_unmatched": True},
            "qk_clip=3: qk_clip=3 applies to attention",
        ),
        (["mamba@1m"], {"qk_clip": 3.0}, "mamba@1m: qk_clip=3 applies to attention"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_trained(
    source: Path, tmp_path: Path, names: list[str], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compare(names, source, out=tmp_path / "out", **{**PLAN, **fields})
    assert says in str(caught.value)
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize(
    ("names", "context"),
    [
        (["gpt2@1m+context=16", "llama@1m+context=999"], 32),
        (["gpt2@1m+context=16", "llama@1m+context=999"], None),
        (["gpt2@1m+context=16", "llama@1m"], None),
        (["gpt2@1m", "llama@1m+context=16"], 32),
    ],
)
def test_a_context_of_one_arm_is_refused(source: Path, tmp_path: Path, names: list[str], context: int | None) -> None:
    with refused(code="conflict", field="context"):
        compare(names, source, out=tmp_path / "out", **{**PLAN, "context": context})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "given", "context"),
    [
        (["gpt2@1m+context=64", "llama@1m+context=64"], None, 64),
        (["gpt2@1m+context=64", "llama@1m"], 64, 64),
        (["gpt2@1m+context=256", "llama@1m"], None, 256),
        (["gpt2@1m", "llama@1m"], None, 256),
        (["gpt2@1m", "llama@1m"], 8, 8),
    ],
)
def test_a_context_of_all_arms_is_taken(names: list[str], given: int | None, context: int) -> None:
    assert common_context(arms(names), given) == context


@pytest.mark.slow
def test_a_padded_vocabulary_is_trained_and_written_with(source: Path, tmp_path: Path) -> None:
    """Rows of the vocabulary without a token can be sampled like others."""
    names = [f"gpt2@1m{TINY}", f"gpt2@1m{TINY}+vocab_size=2000"]
    plain, padded = compare(names, source, out=tmp_path / "out", **PLAN)["runs"]
    assert (plain["status"], padded["status"]) == ("ok", "ok"), padded["error"]
    assert plain["config"]["vocab_size"] < 100 and padded["config"]["vocab_size"] == 2000
    with refused(code="range", field="vocab_size"):
        compare(["gpt2@1m+vocab_size=3"], source, out=tmp_path / "other", **PLAN)


def test_flops_are_matched_with_the_padded_vocabulary() -> None:
    name = "gpt2@1m+vocab_size=5000"
    config = preset(name)
    (plan,) = planned(arms([name]), {**PLAN, "tokens": 1000}, "flops").values()
    assert plan.flops == 3.0 * config.replace(context=32).flops(32) * 1000


def test_an_empty_out_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code="missing", field="out"):
        compare(["gpt2@1m"], source, out="", **PLAN)
    assert list(tmp_path.iterdir()) == []


def test_an_out_below_a_file_is_refused_before_the_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with refused(code="exists", field="out"):
        compare(["gpt2@1m"], tmp_path / "nowhere.txt", out=tmp_path / "out" / "x" / "y", **PLAN)


def test_an_out_that_is_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with refused(code="exists", field="out"):
        compare(["gpt2@1m"], source, out=tmp_path / "out", **PLAN)


def test_equal_models_in_two_spellings_are_noted() -> None:
    """Holds also for a change of the recipe to its default, but not for another recipe or another model."""
    names = ["llama@1m", "llama@1m+rope", "llama@1m+recipe.clip=1.0", "llama@1m+recipe.clip=2.0", "gpt2@1m"]
    named = arms(names)
    notes = likeness(named, configs_of(named), planned(named))
    assert [note for note in notes if "same model" in note] == [
        "llama@1m and llama@1m+rope and llama@1m+recipe.clip=1.0 are the same model, trained alike: what differs "
        "between them is chance."
    ]
    others = arms(["llama@1m", "gpt2@1m"])
    assert not likeness(others, configs_of(others), planned(others))


def test_a_second_comparison_in_one_folder_is_refused(source: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out"
    out.mkdir()
    events: list[Event] = []
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused(code="conflict", field="out"):
            compare([f"gpt2@1m{TINY}"], source, out=out, progress=events.append, **PLAN)
    assert (
        all(isinstance(event, ReadingEvent) for event in events)
        and not (out / "runs").exists()
        and not (out / "results.json").exists()
    )


@pytest.mark.slow
def test_a_result_that_the_arm_cannot_have_left_is_made_again(source: Path, tmp_path: Path) -> None:
    """The run is resumed from its last checkpoint, which is its end."""
    names, out = [f"gpt2@1m{TINY}"], tmp_path / "out"
    (whole,) = compare(names, source, out=out, **PLAN)["runs"]
    (place,) = (out / "runs").iterdir()
    (place / "result.json").write_text(json.dumps({**whole, "generation": None}))
    events: list[Event] = []
    (again,) = compare(names, source, out=out, progress=events.append, **PLAN)["runs"]
    assert [type(event) for event in events if isinstance(event, Kept | Start)] == [Start]
    assert (again["validation"], again["train"]["curve"]) == (whole["validation"], whole["train"]["curve"])


def test_where_every_arm_fails_that_is_the_result(source: Path, tmp_path: Path) -> None:
    """In Python nothing is raised, and the report is there; an arm whose result cannot be read has failed too."""
    said: Any = iter([("the disk is full", 1), (None, 0)])
    names, fails = [f"gpt2@1m{TINY}", f"llama@1m{TINY}"], Instead(lambda place, notify: next(said))
    results = compare(names, source, out=tmp_path / "out", executor=fails, **PLAN)
    assert [one["status"] for one in results["runs"]] == ["failed", "failed"]
    assert results["runs"][0]["error"] == "the disk is full"
    assert results["runs"][1]["error"].endswith("result.json is not what a trained arm leaves")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert "the disk is full" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
