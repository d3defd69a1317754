"""Better and best on a page: each mark and each sentence is held against the verdicts of its results.json."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glassformer.comparison.summary import so_far
from glassformer.comparison.terminal import comparison_lines
from glassformer.report import render
from glassformer.runs import looks
from glassformer.runs.results import Results, RunResult

from .sample import bare, judged, rendered, results
from .test_report import Page

DIVERGED, FAILED = math.inf, -math.inf
Losses = dict[str, list[float]]


@pytest.fixture(scope="module", autouse=True)
def _few_paths() -> Iterator[None]:
    """Levels of looks from one chunk of simulated comparisons: the marks follow the verdicts whatever the level is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looks, "PATHS", looks.CHUNK)
        looks._p_values.cache_clear()
        yield
    looks._p_values.cache_clear()


def run(name: str, seed: int, loss: float, frequencies: float | None = None) -> dict[str, Any]:
    status = "diverged" if loss == DIVERGED else "failed" if loss == FAILED else "ok"
    measured = {"loss": loss, "perplexity": math.exp(min(loss, 9)), "bits_per_byte": 0.4 * loss, "tokens": 9,
                "frequency_loss": frequencies}  # fmt: skip
    measured_if_ended = measured if status == "ok" else None
    return {"name": name, "seed": seed, "status": status, "recipe": {"tokens": 1}, "validation": measured_if_ended}


def compared(losses: Losses, planned: Sequence[int] = (), frequencies: float | None = None) -> Results:
    """The results that a comparison with these losses leaves, with the verdicts that it gives itself."""
    seeds = max(map(len, losses.values()))
    runs = [
        RunResult.of(run(name, seed, loss, frequencies))
        for name, of_arm in losses.items()
        for seed, loss in enumerate(of_arm)
    ]
    begun = Results.of(bare() | {
        "asked": [run.key for run in runs], "budget": {"seeds": seeds, "match": "tokens", "tokens": 1000},
        "planned_looks": list(planned),
    })  # fmt: skip
    return so_far(begun, {run.key: run for run in runs})


def won(tree: dict[str, Any]) -> set[tuple[str, str]]:
    """(winner, loser) of each verdict in the file, read as the file spells it."""
    pairs = {"a better": ("a", "b"), "b better": ("b", "a")}
    return {tuple(one[key] for key in pairs[one["verdict"]]) for one in tree["verdicts"] if one["verdict"] in pairs}


def marked(text: str) -> list[str]:
    """The arms whose row is marked, of all tables of the page."""
    rows = re.findall(r"<tr.*?</tr>", text, re.S)
    return [html.unescape(re.findall(r'data-sort="([^"]+)"', row)[0]) for row in rows if "best-mark" in row]


def check(text: str, tree: dict[str, Any]) -> None:
    """Every mark and every word of the page about which arm is better follows from the verdicts of the file."""
    names = list(dict.fromkeys(run["name"] for run in tree["runs"]))
    beaten = won(tree)
    best = [one for one in names if len(names) > 1 and all((one, other) in beaten for other in names if other != one)]
    body = text[text.index("<main") : text.index("</main>")]
    assert marked(body) == best and body.count("best-mark") == len(best) <= 1
    words = Page(text).text
    assert ("No arm has a verdict of better" in words) == (len(names) > 1 and not best)
    cells = re.findall(r'<td class="(decided|undecided)">(.*?)</td>', body, re.S)
    assert len(cells) == len(tree["verdicts"])
    for (kind, cell), one in zip(cells, tree["verdicts"], strict=True):
        winner = {"a better": one["a"], "b better": one["b"]}.get(one["verdict"])
        assert (kind == "decided") == (winner is not None)
        assert (f"{winner} better" in Page(cell).text) if winner else "better" not in Page(cell).text
    said = set(re.findall(r"([A-F]) better\b", words))
    assert said <= {winner for winner, _ in beaten}
    finding = Page(text[text.index('class="finding"') : text.index("</p>", text.index('class="finding"'))]).text
    first = re.search(r"(\w+) reached the lowest", finding)
    for claim in ("more than chance explains", "which decides between them", "it does beat"):
        assert claim not in finding or (first and beaten)
    if first and "more than chance explains" in finding:
        second = re.search(r" below (\w+)", finding)
        assert second and (first[1], second[1]) in beaten


losses = st.one_of(
    st.sampled_from([2.0, 2.01, 2.5, 3.0, DIVERGED, FAILED]),  # ties
    st.floats(1.9, 3.1).map(lambda loss: round(loss, 4)),
)
spread = st.tuples(st.sampled_from([2.0, 2.01, 2.1, 2.5]), st.sampled_from([0.0, 1e-3, 0.05]))


@st.composite
def comparisons(draw: st.DrawFn) -> Losses:
    """One to eight seeds of two to six arms: arms that are far apart, close, tied, or lost."""
    seeds = draw(st.integers(1, 8))
    found: Losses = {}
    for name in "ABCDEF"[: draw(st.integers(2, 6))]:
        if draw(st.booleans()):
            found[name] = draw(st.lists(losses, min_size=seeds, max_size=seeds))
        else:
            level, noise = draw(spread)
            found[name] = [level + noise * draw(st.floats(-1, 1)) for _ in range(seeds)]
        if draw(st.integers(0, 9)) == 0:
            found[name][draw(st.integers(0, seeds - 1))] = draw(st.sampled_from([DIVERGED, FAILED]))
    return found


@given(comparisons(), st.sampled_from([(), (), (2, 4), (3, 5, 8)]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_mark_follows_from_the_verdicts(found: Losses, planned: tuple[int, ...]) -> None:
    made = compared(found, planned)
    check(render(made), made.to_dict())


@given(comparisons(), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_marks_follow_verdicts_of_any_pairs(found: Losses, data: st.DataObject) -> None:
    """A file may hold verdicts of other pairs than those that a comparison gives, in either order and twice."""
    names = list(found)
    pairs = data.draw(st.lists(st.tuples(*[st.sampled_from(names)] * 2), max_size=12, unique_by=frozenset))
    words = st.sampled_from(["a better", "b better", "equivalent", "no difference shown"])
    tree = compared(found).to_dict() | {"verdicts": [
        {"a": a, "b": b, "metric": "validation.loss", "difference": 0.1, "low": 0.05, "high": 0.2, "confidence": 0.95,
         "seeds": 3, "verdict": data.draw(words)}
        for a, b in pairs if a != b
    ]}  # fmt: skip
    check(rendered(tree), tree)


def test_no_arm_is_best_where_looks_leave_the_pair_undecided() -> None:
    """p = 0.024 decides a pair that is seen once, and not one of three looks, whose level is 2 %."""
    found = {"a": [4.0, 4.2, 3.9], "b": [3.982, 4.17, 3.879]}
    once, planned = compared(found), compared(found, (3, 5, 8))
    assert [one.verdict for one in once.verdicts] == ["b better"] and marked(render(once)) == ["b"]
    assert [one.verdict for one in planned.verdicts] == ["no difference shown"] and marked(render(planned)) == []
    assert "not larger than chance allows" in Page(render(planned)).text


def test_no_arm_is_best_after_one_seed() -> None:
    made = rendered(results(1))
    assert "One seed proves nothing" in Page(made).text and marked(made) == []
    assert "better" not in Page(made).text.replace("No arm has a verdict of better against every other arm", "")


def test_the_best_of_several_arms_beats_each_of_them() -> None:
    tree = results(3, diverge=False)  # its verdicts are of all pairs
    assert marked(rendered(tree)) == ["llama@10m"]
    against_first = judged(tree)
    assert Results.of(against_first).best is None and marked(rendered(against_first)) == []
    first = {**tree, "runs": sorted(tree["runs"], key=lambda run: run["name"] != "llama@10m"), "verdicts": []}
    assert Results.of(judged(first)).best == "llama@10m"


def test_an_arm_that_diverges_less_often_is_best_with_a_higher_loss() -> None:
    made = compared({"a": [2.5] * 8, "b": [2.0, 2.0, *[DIVERGED] * 6]})
    (one,) = made.verdicts
    assert (one.decided_by, one.winner) == ("divergence", "a") and marked(render(made)) == ["a"]
    assert "a diverged less often than b, which decides between them" in Page(render(made)).text


def test_a_single_arm_is_not_best() -> None:
    assert Results.of(bare(results(3, diverge=False)["runs"][:3])).best is None


@pytest.mark.parametrize(("least", "barely"), [(2.0, True), (4.0, False)])
def test_models_that_barely_learned_are_named_in_text_page_and_file(least: float, barely: bool) -> None:
    """Losses near 3 nats: within a tenth of frequencies that cost 2, and far below 4."""
    results = compared({"a": [3.00, 3.02, 3.01], "b": [3.01, 3.00, 3.02]}, frequencies=least)
    tree, page = results.to_dict(), render(results)
    text = " ".join(one for one in comparison_lines(results) if isinstance(one, str))
    assert len(tree["verdicts"]) == 1
    notes = [note for note in tree["budget"]["notes"] if note.startswith("Barely trained")]
    assert [bool(notes), "Barely trained" in page, "Barely trained" in text] == [barely] * 3
    assert tree["verdicts"][0]["terms"].endswith("barely trained") is barely
