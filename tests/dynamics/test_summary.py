"""The summary of a watched run: exact for short runs, bounded for long ones, complete for any record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from glassformer.comparison.single import telling
from glassformer.dynamics.records import NAME, read_records
from glassformer.dynamics.summary import BANDS, EVENTS, WINDOWS, event_words, summarise
from glassformer.naming import preset
from glassformer.runs.events import Begin, Watched
from glassformer.runs.live import ComparisonView
from glassformer.runs.measure import describe
from glassformer.text import prepare
from glassformer.training import Report, train


def row(step: int, **statistics: Any) -> dict[str, Any]:
    return {"step": step, "statistics": statistics}


def look(step: int, entropy: float = 0.5, layers: int = 2) -> dict[str, Any]:
    return row(step, attention_entropy={f"layers.{layer}.mixer": [entropy, entropy] for layer in range(layers)})


def test_one_look_is_kept_as_it_is() -> None:
    made = summarise([
        row(
            10,
            attention_entropy={"layers.0.mixer": [0.2, 0.6], "layers.1.mixer": [0.9, 0.7]},
            max_attention_logit={"layers.0.mixer": [3.0, 8.0], "layers.1.mixer": [5.0, 4.0]},
            effective_rank={"layers.0.mixer.qk": [3.0, 5.0], "layers.0.mixer.q": [60.0, 60.0], "layers.0.ffn.up": 90.0},
            gradient_norm={"layers.0.mixer.q": [3.0, 4.0], "layers.0.ffn.up": 12.0, "layers.1.ffn.up": 2.0, "head": 9},
            token_cosine={"layers.1.resid_post": 0.4, "layers.0.resid_post": 0.1},
            activation_effective_rank={"layers.0.resid_post": 30.0, "layers.1.resid_post": 20.0},
            update_ratio={"embed": 0.5, "layers.0.ffn.up": 1e-3, "layers.0.mixer.q": [2e-3, 2e-3]},
            log_z={"logits": 8.5},
        ),
    ])  # fmt: skip
    assert made["steps"] == [10] and made["depth"] == 2 and made["events"] == [] and made["events_left_out"] == 0
    assert made["layers"] == {
        "attention_entropy": [[0.4, 0.8]],
        "attention_entropy_worst": [[0.2, 0.7]],
        "max_attention_logit": [[8.0, 5.0]],
        "activation_effective_rank": [[30.0, 20.0]],
        "qk_effective_rank": [[4.0, None]],
        "gradient_norm": [[13.0, 2.0]],  # sqrt(3² + 4² + 12²)
        "token_cosine": [[0.1, 0.4]],
    }
    assert made["curves"] == {
        "max_attention_logit": [[10, 8.0]],
        "log_z": [[10, 8.5]],
        "attention_entropy_worst": [[10, 0.2]],
        "update_ratio": [[10, 0.0020]],
        "token_cosine": [[10, 0.4]],  # of the last layer
    }


def test_the_load_of_experts_is_the_mean_of_the_last_quarter() -> None:
    def routed(step: int, *load: float | str) -> dict[str, Any]:
        return row(step, router_load={"layers.1.ffn.router": list(load), "layers.3.ffn.router": [0.5, "nan"]})

    rows = [routed(10, 1.0, 0.0), routed(74, 0.9, 0.1), routed(75, 0.2, 0.8), routed(100, 0.4, 0.6)]
    assert summarise(rows)["experts"] == [{"layer": 1, "load": [0.3, 0.7]}]
    assert summarise([*rows, routed(101, 0.1, 0.1, 0.8)])["experts"] == []  # another number of experts: another model
    assert summarise([row(1, router_load={"layers.0.ffn.router": [0.001] * 1000})])["experts"] == []
    deep = row(1, router_load={f"layers.{layer}.ffn.router": [0.5, 0.5] for layer in range(200)})
    assert len(summarise([deep])["experts"]) == BANDS


def test_windows_take_means_but_the_worst_stays_the_worst() -> None:
    rows = [look(step, 0.9 if step % 100 else 0.1) for step in range(50, 12_001, 50)]  # 240 looks, 4 a window
    made = summarise(rows)
    assert made["steps"] == [200 * (i + 1) for i in range(WINDOWS)]
    assert made["layers"]["attention_entropy"] == [[0.5, 0.5]] * WINDOWS
    assert made["layers"]["attention_entropy_worst"] == [[0.1, 0.1]] * WINDOWS
    assert [value for _, value in made["curves"]["attention_entropy_worst"]] == [0.1] * WINDOWS


@given(st.integers(1, 500), st.integers(1, 400), st.integers(0, 499))
@settings(max_examples=60, deadline=None)
def test_a_run_watched_at_an_interval_leaves_no_window_empty(every: int, looks: int, rest: int) -> None:
    """Holds also if the run ended between two observations, and with gradients of every step in between."""
    assume((every, looks) != (2, 1))  # steps 1 and 2 are also those of a run watched at every step
    last = every * looks + rest % every
    steps = [1, *range(every, last + 1, every)]
    pulses = [row(step, gradient_norm={"layers.0.ffn.up": 1.0}) for step in range(max(1, last - 70), last + 1)]
    made = summarise([look(step) for step in steps] + pulses)
    assert made["steps"][-1] == last and len(made["steps"]) == min(WINDOWS, max(1, last // every))
    assert all(value == [0.5, 0.5] for value in made["layers"]["attention_entropy"])


def test_full_resolution_around_a_spike_does_not_make_the_rest_empty() -> None:
    steps = sorted({*range(50, 1001, 50), *range(410, 426), *range(700, 716)})
    made = summarise([look(step) for step in steps])
    assert made["steps"] == list(range(50, 1001, 50))
    assert all(None not in column for column in made["layers"]["attention_entropy"])


@pytest.mark.parametrize(("word", "value"), [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)])
def test_non_finite_value_remains_in_the_summary(word: str, value: float) -> None:
    """The value may be a word, as in the file, or the parsed number."""
    for one in (word, value):
        rows = [look(step) for step in range(1, 400)]
        rows[200]["statistics"]["attention_entropy"]["layers.1.mixer"][0] = one
        made = summarise(rows)
        for name in ("attention_entropy", "attention_entropy_worst"):
            lost = [value for column in made["layers"][name] for value in column if isinstance(value, str)]
            assert lost == [word]
        json.dumps(made, allow_nan=False)


def test_many_layers_share_rows() -> None:
    made = summarise([row(1, token_cosine={f"layers.{n}.resid_post": float(n) for n in range(96)})])
    assert made["depth"] == 96 and made["layers"]["token_cosine"] == [[2 * i + 0.5 for i in range(BANDS)]]
    assert made["curves"]["token_cosine"] == [[1, 95.0]]


def test_the_first_and_the_last_of_many_events_are_kept_without_their_text() -> None:
    spike = {"event": "spike", "what": "loss", "value": 9.13, "sigmas": math.inf, "batch": ["x" * 1000]}
    made = summarise([{"step": step, **spike} for step in range(1, 1001)])
    assert made["steps"] == [] and made["layers"] == {} and made["events_left_out"] == 1000 - EVENTS
    assert [e["step"] for e in made["events"]] == [*range(1, 31), *range(971, 1001)]
    assert made["events"][0] == {
        "step": 1, "event": "spike", "what": "loss", "site": None, "value": 9.13, "sigmas": "inf",
    }  # fmt: skip
    assert summarise([]) == {}


def test_an_event_in_a_line() -> None:
    spike = {"step": 61, "event": "spike", "what": "loss", "value": 9.1349, "sigmas": 7.21}
    assert event_words(spike) == "step 61: spike of loss, 9.135, 7.2 sigma"
    lost = {"step": 7, "event": "not_finite", "what": "loss", "value": "nan", "site": "layers.2.ffn.hidden"}
    assert event_words(lost) == "step 7: not finite of loss, nan at layers.2.ffn.hidden"
    assert event_words({"step": 9, "event": "rolled_back", "to": 5}) == "step 9: rolled back to step 5"
    assert event_words({"step": 9, "event": "skipped"}) == "step 9: skipped"


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
places = st.sampled_from(
    ["layers.0.mixer", "layers.999999.mixer.q", "layers.1.resid_post", "logits", "embed", "x", "layers.-1."]
)
names = st.sampled_from(["attention_entropy", "gradient_norm", "token_cosine", "log_z", "effective_rank", "?"])
numbers = st.one_of(st.floats(), st.sampled_from(["nan", "inf", 10**400]), junk)
records = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(-2, 2**60), junk)},
    optional={
        "statistics": st.dictionaries(
            names, st.dictionaries(places, st.one_of(numbers, st.lists(numbers, max_size=3)))
        ),
        "event": st.one_of(st.text(max_size=5), junk),
        "value": junk,
        "sigmas": junk,
        "site": junk,
    },
)


@given(st.lists(st.one_of(records, junk), max_size=8))
@example([{"step": 0, "statistics": {}}])
@settings(max_examples=150, deadline=None)
def test_anything_makes_a_bounded_tree_that_json_can_hold(found: list) -> None:
    made = summarise(found)
    json.dumps(made, allow_nan=False)
    if made:
        assert len(made["steps"]) <= WINDOWS and len(made["events"]) <= EVENTS
        for grid in made["layers"].values():
            assert len(grid) == len(made["steps"]) and all(len(column) == min(made["depth"], BANDS) for column in grid)


def test_a_run_that_was_watched_is_in_its_result(tmp_path: Path) -> None:
    """Against the file, read by hand."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and ran under the tree.\n" * 400, encoding="utf-8")
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    recipe = {"tokens": 12 * 64, "batch_size": 2, "context": 32, "compile": False, "threads": 1, "watch": 4}
    run = train(preset("llama@1m+layers=2+d_model=32+heads=2"), text, recipe, tmp_path / "run")
    made = describe("a", run, None).dynamics.to_dict()
    lines = [json.loads(line) for line in (tmp_path / "run" / NAME).read_text(encoding="utf-8").splitlines()]
    looks = {line["step"]: line["statistics"] for line in lines if "attention_entropy" in line.get("statistics", {})}
    assert set(looks) == {1, 4, 8, 12} and made["steps"] == [4, 8, 12] and made["depth"] == 2
    for i, steps in enumerate(((1, 4), (8,), (12,))):
        for layer in range(2):
            heads = [h for s in steps for h in looks[s]["attention_entropy"][f"layers.{layer}.mixer"]]
            assert made["layers"]["attention_entropy"][i][layer] == pytest.approx(sum(heads) / len(heads), rel=1e-4)
            assert made["layers"]["attention_entropy_worst"][i][layer] == pytest.approx(min(heads), rel=1e-4)
            matrices = [
                {k: v for k, v in looks[s]["gradient_norm"].items() if k.startswith(f"layers.{layer}.")} for s in steps
            ]
            norms = [
                math.hypot(*(h for v in one.values() for h in (v if isinstance(v, list) else [v]))) for one in matrices
            ]
            assert made["layers"]["gradient_norm"][i][layer] == pytest.approx(sum(norms) / len(norms), rel=1e-4)
    assert [step for step, _ in made["curves"]["log_z"]] == [4, 8, 12]
    assert summarise(read_records(tmp_path / "run" / NAME)) == made


def test_terminal_prints_an_event_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    spike = {"step": 61, "event": "spike", "what": "loss", "value": 9.1349, "sigmas": 7.21}
    report = Report(60, 100, 600, 1.0, 2.5, 1e-3, 0.7, 600.0, 0.6, events=[spike, {"step": 61, "event": "skipped"}])
    with ComparisonView() as view:
        view.event(Begin(how="", notes=[], runs=[("a", 0)]))
        telling("a", 0, view.event)(report)
    said = capsys.readouterr().err
    assert "step 61: spike of loss, 9.135, 7.2 sigma\n" in said and "step 61: skipped\n" in said
    assert "loss 2.500  lr 1.00e-03  |g| 0.70  600 tokens/s" in said
    with ComparisonView() as compared:
        compared.event(Begin(how="", notes=[], runs=[("a", 0)]))
        compared.event(Watched(name="a", seed=0, words="step 61: skipped"))
    assert "a seed 0: step 61: skipped\n" in capsys.readouterr().err
