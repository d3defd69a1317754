"""Ladders: the changes between two models are found, and effects that were planted come out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison import summary
from glassformer.comparison.arms import DesignArm
from glassformer.comparison.design import to_yaml
from glassformer.config import read_tree
from glassformer.errors import Code
from glassformer.laboratory.ladder import LadderDesign, ablate
from glassformer.laboratory.ladder import _rungs as rungs_of
from glassformer.laboratory.rungs import pairs_of
from glassformer.laboratory.steps import Point, as_steps, between
from glassformer.runs import slurm
from glassformer.runs.effects import combined, effects
from glassformer.runs.executor import with_workers
from tests.refused import failed, refused
from tests.runs.stand_in import Instead, trained_at_once

BASE = "gpt2@1m+layers=1+d_model=32+heads=2"
STEPS = ["rope", "rmsnorm", "nobias"]
PLAN: dict[str, Any] = {"tokens": 12 * 4 * 32, "batch_size": 4, "context": 32, "threads": 1, "dtype": "float32"}


class Planted:
    """In place of the process that trains: loss = 3 + effects of the seed, the changes and pairs of them + noise."""

    def __init__(
        self, of: dict[str, float], noise: float = 0.0003, together: dict[tuple[str, str], float] | None = None
    ):
        self.of, self.noise, self.together, self.runs = of, noise, together or {}, 0

    def __call__(self, place: Path, notify: Any) -> tuple[str | None, int]:
        trained_at_once(place, notify)
        result = json.loads((place / "result.json").read_text())
        has = set(result["name"].split("+recipe.learning_rate=")[0].split("+"))
        chance = random.Random(f"{result['name']} {result['seed']}").gauss(0, self.noise)
        loss = 3 + 0.1 * result["seed"] + chance + sum(d for step, d in self.of.items() if step in has)
        loss += sum(d for pair, d in self.together.items() if has >= set(pair))
        result["train"] |= {"curve": [[128, 5.0]], "learning_rate": result["recipe"]["learning_rate"]}
        result["validation"] |= {"loss": loss, "perplexity": math.exp(loss)}
        (place / "result.json").write_text(json.dumps(result))
        self.runs += 1
        return None, 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(summary, "write_report", lambda results, path: path)
    yield


# Steps


def arm(expression: str) -> DesignArm:
    return DesignArm.of(None, expression)


def test_the_way_from_gpt2_to_llama_is_found() -> None:
    """Five changes of the literature; what they leave is the eps that LLaMA publishes."""
    start, goal = arm("gpt2@1m"), arm("llama@1m")
    steps = between(start, goal)
    assert steps == ["rope", "nobias", "rmsnorm+norm.eps=1e-06", "swiglu", "untied"]
    end, llama = (one.config.replace(vocab_size=1, context=1).resolved() for one in (start.changed(steps), goal))
    assert end == llama


@pytest.mark.parametrize(
    ("target", "steps"),
    [(f"{BASE}+gqa:1", ["mqa"]), (f"{BASE}+alibi+recipe.warmup=0.2", ["alibi", "recipe.warmup=0.2"]),
     (f"{BASE}+rope+position.base=500", ["rope+position.base=500.0"]), (f"{BASE}+norm.eps=0.001", ["norm.eps=0.001"])],
)  # fmt: skip
def test_values_and_recipes_are_steps(target: str, steps: list[str]) -> None:
    found = between(arm(BASE), arm(target))
    assert Point.of(arm(BASE).changed(found)) == Point.of(arm(target)) and len(found) == len(steps)
    assert [one.partition("+")[0].partition(":")[0].partition("=")[0] for one in found] == [
        one.partition("+")[0].partition("=")[0] for one in steps
    ]


def test_given_steps_keep_their_order_and_take_the_numbers_of_the_target() -> None:
    steps = between(arm("gpt2@1m"), arm("llama@1m"), as_steps("untied,swiglu,rmsnorm,rope,nobias"))
    assert steps == ["untied", "swiglu", "rmsnorm+norm.eps=1e-06", "rope", "nobias"]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"to": BASE}, "conflict", "to"),
        ({"to": f"{BASE}+learned"}, "conflict", "to"),
        ({"changes": "rope,rope"}, "conflict", "changes"),
        ({"changes": "rope,rmsnorn"}, "unknown", "change"),
        ({"changes": "rope,layernorm"}, "conflict", "changes"),
        ({"changes": "alibi,rope"}, "conflict", "changes"),
        ({"changes": "500"}, "type", "changes"),
        ({"changes": "rope,,rmsnorm"}, "missing", "changes"),
        (
            {"to": f"{BASE}+rope+rmsnorm", "changes": "rope"},
            "conflict",
            "changes",
        ),
        ({}, "missing", "to"),
        ({"changes": "rope", "seeds": 1}, "range", "seeds"),
        ({"changes": "rope", "tokens": 9 * 4 * 32}, "range", "tokens"),
        ({"changes": "rope", "within": 5}, "conflict", "within"),
        ({"changes": "rope", "design": "factorial"}, "range", "design"),
        ({"changes": "rope,hidden=512"}, "conflict", "allow_unmatched"),
    ],
)
def test_wrong_ladders_are_refused_before_anything_is_trained(
    fields: dict[str, Any], code: Code, field: str, source: Path, tmp_path: Path
) -> None:
    planted = Planted({})
    with refused(code=code, field=field):
        ablate(BASE, source, out=tmp_path / "out", executor=Instead(planted), **{**PLAN, **fields})
    assert planted.runs == 0 and not (tmp_path / "out").exists()


# Models without an expression


def named_base(values: Any) -> Any:
    """The values with the base by the name that its expression has."""
    return json.loads(json.dumps(values).replace("mine", BASE))


def test_a_ladder_from_a_config_is_that_of_its_expression_but_for_names(source: Path, tmp_path: Path) -> None:
    """Configs and recipes of all runs, losses, verdicts and page values."""
    found, results = [], []
    for name, base in (("text", BASE), ("value", {"mine": gf.preset(BASE)})):
        out = tmp_path / name
        planted = Instead(Planted({"rope": -0.2, "nobias": 0.05}, noise=0.0))
        ladder = ablate(base, source, changes=STEPS, out=out, executor=planted, **PLAN)
        found.append(ladder.to_dict() | dict.fromkeys(("command", "created")))
        runs = json.loads((out / "results.json").read_text())["runs"]
        results.append([[run[key] for key in ("name", "seed", "config", "recipe")] for run in runs])
    assert found[0] == named_base(found[1]) != found[1]
    assert results[0] == named_base(results[1]) and {name for name, *_ in results[1]} >= {"mine", "mine+rope"}
    page = (tmp_path / "value" / "ladder.html").read_text()
    assert "mine+rope+rmsnorm+nobias" in page and BASE not in page


@pytest.mark.parametrize("changed", ["rope", "recipe.warmup=0.2+rope", "rmsnorm+norm.eps=0.001"])
def test_an_arm_of_a_config_is_changed_as_its_expression_is(changed: str) -> None:
    text, value = (DesignArm.of("mine", one).changed([changed]) for one in (BASE, gf.preset(BASE)))
    assert (text.name, text.config, text.recipe) == (value.name, value.config, value.recipe)


@pytest.mark.parametrize("kind", ["config", "model", "loaded"])
def test_every_model_is_an_end_of_a_ladder(kind: str) -> None:
    """A loaded model with weights takes part as its config."""
    ends = []
    for expression in (BASE, f"{BASE}+rope+nobias"):
        config = gf.preset(expression).replace(vocab_size=50)
        model = config.build(0)
        ends.append({"config": config, "model": model, "loaded": gf.Loaded(model, config, None)}[kind])
    base, to = ends
    ladder = LadderDesign.of(base, "x", to=to, **PLAN)
    assert ladder.steps == LadderDesign.of(BASE, "x", to=f"{BASE}+rope+nobias", **PLAN).steps
    assert [ladder.base.name, ladder.target.name] == ["model", "target"]
    assert [rung.name for rung in ladder.rungs][:2] == ["model", f"model+{ladder.steps[0]}"]
    assert LadderDesign.from_dict(yaml.safe_load(to_yaml(ladder.to_dict()))) == ladder


@pytest.mark.parametrize(
    "base", [BASE, f"{BASE}+recipe.warmup=0.2+alibi", {"mine": f"{BASE}+recipe.warmup=0.2"},
             {"mine": gf.preset(BASE)}, {"mine": {"model": gf.preset(BASE), "recipe": {"warmup": 0.2}}}],
)  # fmt: skip
def test_a_file_of_a_ladder_repeats_it(base: Any) -> None:
    ladder = LadderDesign.of(base, "x", changes="nobias,rmsnorm", **PLAN)
    tree = yaml.safe_load(to_yaml(ladder.to_dict()))
    assert LadderDesign.from_dict(tree) == ladder
    assert tree["base"] == base if isinstance(base, str) else list(tree["base"]) == ["mine"]


@pytest.mark.parametrize(
    ("base", "fields", "field"),
    [(3, {}, "model"), ({"mine": 3}, {}, "model"), (BASE, {"to": 3}, "model"), ({3: BASE}, {}, "models")],
)  # fmt: skip
def test_ladder_refuses_ends_that_are_not_models(base: Any, fields: dict[str, Any], field: str) -> None:
    with refused(code="type", field=field):
        LadderDesign.of(base, "x", **{"changes": "rope"} | fields, **PLAN)


# Ladders


def test_planted_effects_are_found_in_both_directions(source: Path, tmp_path: Path) -> None:
    """rope helps, rmsnorm does nothing, nobias hurts."""
    planted = Planted({"rope": -0.2, "nobias": 0.05})
    out = tmp_path / "out"
    found = ablate(BASE, source, changes=STEPS, out=out, executor=Instead(planted), **PLAN)
    assert planted.runs == 6 * 3 and [arm.has.count(True) for arm in found.arms] == [0, 1, 2, 3, 2, 2]
    verdict = {key: [one.verdict.verdict for one in some] for key, some in found.pairs.items()}
    assert verdict["before"] == ["b better", "equivalent", "a better"] == verdict["last"]
    assert verdict["base"] == ["b better"] * 3
    for pair, planted_is in zip(found.pairs["before"], (-0.2, 0.0, 0.05), strict=True):
        assert pair.verdict.low < planted_is < pair.verdict.high
    first = found.arms[0]
    assert first.loss == pytest.approx(3.1, abs=0.005) and first.low < 3.1 < first.high
    assert first.tokens_per_second == 128 and first.state_bytes_per_token == 1
    assert json.loads((out / "ladder.json").read_text()) == found.to_dict()
    page = (out / "ladder.html").read_text()
    assert "rope: added in its place, it lowers the loss" in page and page.count("<svg") >= 4 + 3 * 4
    assert found.command == f"glassformer run {out / 'design.yaml'}"
    assert LadderDesign.from_dict(read_tree(out / "design.yaml")).steps == tuple(STEPS)

    again = Planted({"rope": -0.2, "nobias": 0.05})
    assert ablate(BASE, source, changes=STEPS, out=out, executor=Instead(again), **PLAN).arms == found.arms
    more = ablate(BASE, source, changes=STEPS, out=out, seeds=4, executor=Instead(again), **PLAN)
    assert again.runs == 6 and more.seeds == 4  # one seed more of each arm


def test_speeds_of_runs_side_by_side_are_measured_in_turn(source: Path, tmp_path: Path) -> None:
    """Speeds are measured by real steps of every arm; the 128 that the planted runs report is not shown."""
    planted = Planted({"rope": -0.2})

    def shared(place: Path, notify: Any) -> tuple[str | None, int]:
        status = planted(place, notify)
        result = json.loads((place / "result.json").read_text())
        (place / "result.json").write_text(json.dumps({**result, "machine": {"shared": True}}))
        return status

    side_by_side = with_workers(Instead(shared), 2)
    found = ablate(BASE, source, changes="rope", out=tmp_path / "out", executor=side_by_side, **PLAN)
    assert all(arm.tokens_per_second > 0 for arm in found.arms)
    assert 128 not in [arm.tokens_per_second for arm in found.arms]
    assert any("side by side" in note for note in found.notes)


def test_a_change_that_another_one_undoes_shows_in_the_two_directions(source: Path, tmp_path: Path) -> None:
    planted = Planted({"rope": -0.2}, together={("rope", "nobias"): 0.2})
    found = ablate(BASE, source, changes=["rope", "nobias"], out=tmp_path / "out", executor=Instead(planted), **PLAN)
    before, last = (found.pairs[key][0].verdict.verdict for key in ("before", "last"))
    assert before == "b better" and last == "equivalent"


def test_runs_that_fail_or_diverge(source: Path, tmp_path: Path) -> None:
    """A run that fails ends the work with a page of the others; diverged arms are reported without losses."""
    planted = Planted({"rope": -0.2})

    def fails(place: Path, notify: Any) -> tuple[str | None, int]:
        return ("no room", 1) if "rope" in str(place) else planted(place, notify)

    def diverges(place: Path, notify: Any) -> tuple[str | None, int]:
        status = planted(place, notify)
        result = json.loads((place / "result.json").read_text())
        if "rope" in result["name"]:
            result |= {"status": "diverged", "error": "the loss is not finite", "validation": None}
        (place / "result.json").write_text(json.dumps(result))
        return status

    with failed(code="failed"):
        ablate(BASE, source, changes="rope", out=tmp_path, executor=Instead(fails), **PLAN)
    assert "has too few finished seeds" in (tmp_path / "ladder.html").read_text()
    found = ablate(BASE, source, changes="rope", out=tmp_path, executor=Instead(diverges), **PLAN)
    assert found.arms[1].loss is None and found.arms[1].trouble == "diverged"
    assert "diverged" in (tmp_path / "ladder.html").read_text()


def test_the_same_pair_is_judged_once() -> None:
    _, rungs = rungs_of(arm(BASE), STEPS, "ladder")
    pairs = pairs_of(rungs)
    assert pairs["base"][0] == pairs["before"][0] and pairs["before"][-1] == pairs["last"][-1]
    assert all(sum(rungs[b].has) > sum(rungs[a].has) for some in pairs.values() for a, b in some)


def test_rungs_at_tuned_rates(source: Path, tmp_path: Path) -> None:
    """A basin around 0.003."""

    class Basin(Planted):
        def __call__(self, place: Path, notify: Any) -> tuple[str | None, int]:
            status = super().__call__(place, notify)
            result = json.loads((place / "result.json").read_text())
            power = math.log2(result["recipe"]["learning_rate"] / 0.003)
            result["validation"]["loss"] += 0.05 * power**2
            (place / "result.json").write_text(json.dumps(result))
            return status

    planted = Basin({"rope": -0.2})
    found = ablate(BASE, source, changes="rope", tune=True, seeds=2, out=tmp_path, executor=Instead(planted), **PLAN)
    assert found.tuned and [arm.name for arm in found.arms] == [BASE, f"{BASE}+rope"]
    assert all(arm.learning_rate == pytest.approx(0.003, rel=0.1) for arm in found.arms)
    assert found.pairs["base"][0].verdict.verdict == "b better"
    (tmp_path / "ladder.html").unlink()

    def fails(place: Path, notify: Any) -> tuple[str | None, int]:
        return "no room", 1

    with failed(code="failed"):
        ablate(BASE, source, changes="rope", tune=True, seeds=3, out=tmp_path, executor=Instead(fails), **PLAN)
    assert "rope" in (tmp_path / "ladder.html").read_text()


# Factorial designs


@pytest.mark.parametrize(("changes", "arms"), [(2, 4), (3, 8), (4, 16), (5, 16)])
def test_columns_of_a_design_are_orthogonal(changes: int, arms: int) -> None:
    """So that each effect is clear of every other, as the resolution of 2^(5-1) promises."""
    rows = combined(changes)
    signs = np.array([[1 if one else -1 for one in row] for row in rows])
    pairs = [signs[:, i] * signs[:, j] for i in range(changes) for j in range(i)]
    columns = np.column_stack([np.ones(len(rows)), signs, *pairs])
    assert len(rows) == arms and not any(rows[0])
    assert (columns.T @ columns == arms * np.eye(columns.shape[1])).all()


def test_effects_are_those_of_least_squares() -> None:
    """The effects equal numpy's least squares with a column for each seed."""
    rows = combined(3)
    losses = np.random.default_rng(0).normal(3, 0.1, (3, 8))
    signs = np.array([[1 if one else -1 for one in row] for row in rows]) / 2
    found = effects(losses, rows)
    whole = np.column_stack([signs, *(2 * signs[:, i] * signs[:, j] for i, j in ((0, 1), (0, 2), (1, 2)))])
    x = np.column_stack([np.tile(whole, (3, 1)), np.repeat(np.eye(3), 8, axis=0)])
    expected = np.linalg.lstsq(x, losses.ravel(), rcond=None)[0][:6]
    assert [one.of for one in found] == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
    np.testing.assert_allclose([one.effect for one in found], expected, atol=1e-12)
    # Every combination of changes has a separate column: the residual has 14 degrees of freedom.
    full = np.column_stack([np.tile(np.eye(8), (3, 1)), np.repeat(np.eye(3), 8, axis=0)[:, 1:]])
    left = losses.ravel() - full @ np.linalg.lstsq(full, losses.ravel(), rcond=None)[0]
    assert all(one.error == pytest.approx(np.sqrt(left @ left / 14 * 4 / 24)) and one.df == 14 for one in found)


def test_intervals_of_effects_cover() -> None:
    """500 designs of three changes without noise of other kinds: all main effects inside in 95 % of them."""
    random_, rows, truth = np.random.default_rng(1), combined(3), np.array([-0.1, 0.0, 0.03])
    signs = np.array([[1 if one else -1 for one in row] for row in rows]) / 2
    inside = 0
    for _ in range(500):
        losses = 3 + random_.normal(0, 0.1, (3, 1)) + signs @ truth + random_.normal(0, 0.02, (3, 8))
        mains = effects(losses, rows)[:3]
        inside += all(one.low < t < one.high for one, t in zip(mains, truth, strict=True))
    assert 0.925 < inside / 500 < 0.98


def test_a_half_fraction_finds_planted_effects_and_their_interaction(source: Path, tmp_path: Path) -> None:
    steps = [*STEPS, "untied", "swiglu"]
    planted = Planted({"rope": -0.2, "untied": 0.04}, together={("rope", "rmsnorm"): 0.1})
    out = tmp_path / "out"
    found = ablate(BASE, source, changes=steps, design="factorial", seeds=2, out=out, executor=Instead(planted), **PLAN)
    assert planted.runs == 32
    by = {one.of: one for one in found.effects}
    assert len(by) == 5 + 10
    assert by[0,].effect == pytest.approx(-0.2 + 0.05, abs=0.002)  # on average over arms with and without rmsnorm
    assert by[1,].effect == pytest.approx(0.05, abs=0.002) and by[3,].effect == pytest.approx(0.04, abs=0.002)
    assert by[0, 1].effect == pytest.approx(0.05, abs=0.002) and by[0, 1].noticed
    assert by[0,].high < 0 < by[3,].low and abs(by[4,].effect) < 0.002
    page = (out / "ladder.html").read_text()
    assert "rope x rmsnorm" in page and "beyond 2 standard errors" in page


# The command


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(slurm, "Local", lambda workers: Instead(Planted({"rope": -0.2})))
    call = ["ablate", BASE, "--to", f"{BASE}+rope", "--data", str(source), "--tokens", "1536", "--batch-size", "4"]
    call += ["--context", "32", "--threads", "1", "--dtype", "float32", "--seeds", "2", "--out", str(tmp_path / "out")]
    assert main(call) == 0
    told = capsys.readouterr().out
    assert "rope: added in its place or as the last change, it lowers the loss" in told and "ladder.html" in told
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == ["rope"]
    for wrong in (["--to", BASE], ["--changes", "nonsense"], ["--seeds", "1"]):
        assert main([*call, *wrong]) == 2
        assert capsys.readouterr().err.startswith("glassformer: ")


@pytest.mark.slow  # it trains for real, eight short runs
def test_a_real_ladder(source: Path, tmp_path: Path) -> None:
    found = ablate(BASE, source, to=f"{BASE}+rope+rmsnorm", seeds=2, out=tmp_path / "out", **PLAN)
    assert found.changes == ("rope", "rmsnorm") and len(found.arms) == 4
    assert all(len(arm.losses) == 2 and arm.parameters > 0 for arm in found.arms)
    assert (tmp_path / "out" / "ladder.html").is_file()
