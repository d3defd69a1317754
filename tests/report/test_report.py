"""The report: complete, self-contained, honest about what it does not know, safe against its input."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from glassformer.comparison.terminal import comparison_lines
from glassformer.report import page as page_module
from glassformer.report import write_report
from glassformer.report.curves import MARKERS, at, extremes, few, mean_curve
from glassformer.report.finding import sentence
from glassformer.runs.arms import arms_of
from glassformer.runs.diff import differences, group_of
from glassformer.runs.results import Results, Verdict

from .sample import (
    GLU,
    HOSTILE,
    LAYERNORM,
    LEARNED,
    MLP,
    RMSNORM,
    ROTARY,
    attention,
    bare,
    config,
    hostile,
    judged,
    rendered,
    results,
)

VOID = {"meta", "input", "br", "wbr", "hr", "img", "link"}


class Page(HTMLParser):
    """A page taken apart: its tags in balance or not, its attributes, its words, its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{name}> is never closed" for name in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> inside {self.open[-3:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    @property
    def embedded(self) -> Any:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "results"))


CASES = {
    "one seed": lambda: results(1), "three seeds": lambda: results(3), "hostile": hostile, "empty": bare,
    "one arm": lambda: bare(results(1, diverge=False)["runs"][:1]),
    "partial": lambda: results(1) | {"asked": [[run["name"], run["seed"]] for run in results(2)["runs"]]},
    "nothing finished": lambda: bare(results(2)["runs"][-2:]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_tag_is_closed_and_every_id_is_unique(case: str) -> None:
    page = Page(rendered(CASES[case]()))
    assert page.faults == []
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    named = {value for _, key, value in page.attributes if key == "aria-labelledby"}
    links = {value[1:] for _, key, value in page.attributes if key == "href"}
    assert named | links <= set(ids)


@pytest.mark.parametrize("case", CASES)
def test_the_page_fetches_nothing(case: str) -> None:
    text = rendered(CASES[case]())
    page = Page(text)
    pointing = {"src", "href", "xlink:href", "action", "srcset", "data", "poster", "formaction"}
    assert all(v.startswith("#") for _, key, v in page.attributes if key in pointing)
    assert not re.search(r"url\(|@import|https?://", text)
    assert not any(name in ("link", "iframe", "object", "embed", "base") for name, _, _ in page.attributes)


def test_the_policy_admits_our_script_and_no_other() -> None:
    page = Page(rendered(hostile()))
    policy = next(v for tag, key, v in page.attributes if tag == "meta" and key == "content" and "script-src" in v)
    running = [text for attrs, text in page.scripts if attrs.get("type") != "application/json"]
    assert len(running) == 1
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_hostile_text_is_escaped() -> None:
    text = rendered(hostile())
    page = Page(text)
    assert "<script>alert" not in text and text.count("</script>") == 2
    assert len(page.scripts) == 2
    assert not any(key.startswith("on") for _, key, _ in page.attributes)
    assert page.text.count(HOSTILE) >= 10  # it is shown, as words
    text.encode("utf-8")
    assert "\x00" not in text


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_embedded_results_are_the_input(seeds: int) -> None:
    given_ = results(seeds, diverge=False)
    assert Page(rendered(given_)).embedded == given_


def test_embedded_results_are_strict_json_and_hostile_words_survive_in_them() -> None:
    tree = hostile()
    tree["runs"][0]["config"]["init"] = {"std": float("nan")}  # results.json does not check the configs that it holds
    made = Page(rendered(tree)).embedded
    assert made["command"] == hostile()["command"]
    assert made["runs"][0]["generation"]["sample"] == hostile()["runs"][0]["generation"]["sample"]
    assert made["runs"][0]["config"]["init"] == {"std": None}  # NaN is not JSON


def test_one_seed_has_a_warning_and_three_have_none() -> None:
    alone, several = Page(rendered(results(1))).text, Page(rendered(results(3))).text
    assert "One seed proves nothing" in alone and "--tokens 1M --seeds 3" in alone
    assert "of this single trial" in alone and "± " not in alone
    assert "One seed proves nothing" not in several and "± " in several
    assert "95 % interval" in several


def test_the_notice_asks_for_three_seeds_with_the_command_that_the_results_name() -> None:
    made = results(1) | {"again": {"seeds": "glassformer run 'my  folder/design.yaml' --seeds 3"}}
    copied = [value for _, key, value in Page(rendered(made)).attributes if key == "data-copy"]
    assert copied[0] == "glassformer run 'my  folder/design.yaml' --seeds 3"
    del made["again"]
    copied = [value for _, key, value in Page(rendered(made)).attributes if key == "data-copy"]
    assert copied[0] == "--seeds 3"


def test_unequal_budgets_are_not_called_matched() -> None:
    made = results(1)
    assert "Matched1M tokens per arm" in Page(rendered(made)).text
    made["budget"]["spent"] = {"a": 1.0e6, "b": 1.01e6}
    assert "Matched1M tokens per arm" in Page(rendered(made)).text
    made["budget"]["spent"] = {"a": 1.0e6, "b": 1.41e6}
    assert "Roughly matched1M to 1.41M tokens per arm" in Page(rendered(made)).text


def test_arms_are_sorted_by_validation_loss_and_the_unfinished_stay_visible() -> None:
    text = rendered(results(3))
    table = text[text.index("<tbody>") : text.index("</tbody>")]
    order = re.findall(r'<th scope="row" data-sort="([^"]+)"', table)
    assert order == ["llama@10m", "gpt2@10m+rope", "gpt2@10m+alibi+parallel", "gpt2@10m", "gpt2@10m+post"]
    words = Page(text).text
    assert "diverged" in words and "The loss was not a number at step 81" in words and "at 328k tokens" in words


def test_the_mean_and_the_spread_over_seeds_are_in_the_table() -> None:
    made = results(3)
    arm = next(arm for arm in arms_of(Results.of(made).runs) if arm.name == "llama@10m")
    losses = [run.validation.loss for run in arm.runs]
    mean = sum(losses) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in losses) / 2)
    text = Page(rendered(made)).text
    assert f"{mean:.3f}" in text and f"± {spread:.3f}" in text


def test_figures_of_an_arm_that_lost_a_seed_are_means_of_the_others() -> None:
    made = results(3, diverge=False)
    next(run for run in made["runs"] if run["name"] == "llama@10m").update(status="diverged", validation=None)
    text = rendered(made)
    row = re.search(r'<tr[^>]*><th scope="row" data-sort="llama@10m".*?</tr>', text, re.S)
    assert row and "1 of 3 seeds" in Page(row.group()).text
    assert "means of the seeds that did" in Page(text).text


def test_losses_during_training_and_of_the_trained_model_are_distinguished() -> None:
    """The sample measures 16,384 held-out tokens while it trains and 96,000 at the end."""
    made = results(1)
    text = Page(rendered(made)).text
    assert "Markers are losses on 16,384 held-out tokens while training, and the summary's loss is that of" in text
    assert "Validation is the loss of the trained model on 96,000 held-out tokens." in text
    console = Console(width=120, record=True, file=io.StringIO())
    for line in comparison_lines(Results.of(made)):
        console.print(line)
    lines = console.export_text()
    assert "96,000 held-out tokens" in lines
    assert lines.count("gpt2@10m: cannot: learned positions end at 256") == 1
    for run in made["runs"]:
        run["train"]["validation_tokens"] = 96_000
    assert "Markers are validation losses." in Page(rendered(made)).text


def test_budget_of_one_minute_is_singular_and_switches_that_are_off_are_left_out() -> None:
    made = results(1)
    made["budget"] |= {"match": "minutes", "tokens": None, "minutes": 1}
    text = Page(rendered(made)).text
    assert "1 minute per arm" in text and "1 minutes" not in text
    norms = [{"kind": "layernorm", "eps": 1e-5, "bias": True}, {"kind": "rmsnorm", "eps": 1e-5, "unit_offset": False}]
    assert [one.values for one in differences([{"norm": norm} for norm in norms])] == [
        ("layernorm(bias=true)", "rmsnorm")
    ]
    norms[1]["unit_offset"] = True
    assert differences([{"norm": norm} for norm in norms])[0].values[1] == "rmsnorm(unit_offset=true)"


def test_missing_context_is_not_supported_for_a_reason() -> None:
    page = Page(rendered(results(1)))
    assert "cannot go to 2×" in page.text
    assert page.text.count("not supportedlearned positions end at 256") == 1
    assert ("td", "colspan", "3") in page.attributes
    assert ("not supported", "learned positions end at 256") not in page.attributes


def test_quality_without_bits_per_byte_is_the_loss() -> None:
    made = results(1)
    assert "Bits per byte against training speed" in rendered(made)
    for run in made["runs"]:
        if run.get("validation"):
            run["validation"]["bits_per_byte"] = None
    page = rendered(made)
    assert "Nats per token against training speed" in page and "Bits per byte against" not in page


def test_missing_numbers_have_reasons() -> None:
    text = Page(rendered(results(1))).text
    assert "–diverged" in text
    assert "nan" not in re.findall(r"\w+", text.lower())
    assert "–not measured" in Page(rendered(bare([{"name": "a", "status": "ok"}]))).text


# --- What the finding claims ---


def _finding(made: dict) -> str:
    read = Results.of(made)
    return Page(sentence(read, arms_of(read.runs))).text


def test_the_finding_claims_a_lead_only_where_the_verdict_does() -> None:
    made = results(3, diverge=False)
    assert "more than chance explains" in _finding(made)
    for verdict in made["verdicts"]:
        verdict |= {"verdict": "no difference shown", "low": -0.3, "high": 0.2}
    assert "not larger than chance allows" in _finding(made)
    made["verdicts"] = [one for one in made["verdicts"] if "llama@10m" not in (one["a"], one["b"])]
    assert "no verdict compares the two." in _finding(made)
    told = _finding(judged(made))  # all against gpt2, which is neither the first nor the second
    assert "no verdict compares the two; it does beat gpt2@10m." in told


def test_seeds_are_counted_as_they_are_there() -> None:
    """Five runs of six: one arm has three seeds, the pair two."""
    made = results(3, diverge=False)
    ahead, behind = "llama@10m", "gpt2@10m+rope"
    made["runs"] = [r for r in made["runs"] if r["name"] == ahead or (r["name"] == behind and r["seed"] < 2)]
    made["verdicts"] = [v for v in made["verdicts"] if {v["a"], v["b"]} == {ahead, behind}]
    made["verdicts"][0]["seeds"] = 2
    assert "over 3 seeds" in _finding(made) and "on the 2 seeds that both finished, more than chance" in _finding(made)
    made["verdicts"][0]["seeds"] = 3
    assert "both finished" not in _finding(made)


def test_missing_runs_are_listed() -> None:
    made = results(2, diverge=False)
    made["asked"] = [[run["name"], run["seed"]] for run in made["runs"]]
    assert "so far" not in Page(rendered(made)).text
    made["runs"] = [run for run in made["runs"] if run["seed"] == 0]
    text = Page(rendered(made)).text
    assert "4 of 8 runs so far. " in text and "Still to come: gpt2@10m seed 1, gpt2@10m+rope seed 1, " in text
    assert "run three seeds" not in text  # more are on their way
    made["runs"] = []
    text = Page(rendered(made)).text
    assert "0 of 8 runs so far. " in text and " and 2 more." in text and "4 language models compared" in text


def test_the_finding_of_special_cases() -> None:
    assert _finding(bare()).startswith("This file holds no runs")
    assert _finding(bare(results(1)["runs"][-1:])) == "No arm finished: gpt2@10m+post diverged after 328k tokens."
    made = results(1)
    made["runs"] = [made["runs"][0], made["runs"][-1]]
    assert "is the only arm that finished" in _finding(made)
    assert "gpt2@10m reached a validation loss of" in _finding(bare(made["runs"][:1]))


# --- Curves ---

curves = st.lists(
    st.tuples(st.floats(0.5, 1e9), st.floats(-20, 20)), min_size=1, max_size=400, unique_by=lambda p: p[0]
).map(sorted)


@given(st.lists(curves, min_size=1, max_size=3), st.sampled_from(["linear", "log"]))
@settings(max_examples=40, deadline=None)
def test_mean_curve_is_within_its_curves_and_their_common_range(made: list, kind: Any) -> None:
    mean = mean_curve(made, kind)
    values = [p[1] for curve in made for p in curve]
    assert all(min(values) - 1e-9 <= y <= max(values) + 1e-9 for _, y in mean)
    assert [x for x, _ in mean] == sorted(x for x, _ in mean) and len(mean) <= 91
    assert all(x <= min(curve[-1][0] for curve in made) * (1 + 1e-9) for x, _ in mean)


@given(curves)
@settings(max_examples=40, deadline=None)
def test_thinning_keeps_the_ends_of_the_range_of_a_curve(curve: list) -> None:
    thin = extremes(curve, "linear", count=20)
    assert len(thin) <= 40 and set(thin) <= set(curve)
    assert {min(p[1] for p in thin), max(p[1] for p in thin)} == {
        min(p[1] for p in curve),
        max(p[1] for p in curve),
    }


def test_the_mean_of_short_curves_is_exact() -> None:
    assert mean_curve([[(1, 4.0), (2, 2.0)], [(1, 2.0), (2, 1.0), (3, 9.0)]], "linear") == [
        (1, 3.0),
        (2, 1.5),
    ]
    assert at([(0, 0.0), (10, 5.0)], 4) == 2.0 and at([(0, 0.0)], 1) is None
    assert few([(i, 0.0) for i in range(50)])[-1] == (49, 0.0) and len(few([(i, 0.0) for i in range(50)])) <= MARKERS


# --- Configs ---


def test_diff_lists_only_differences() -> None:
    a = config(attention(), MLP, LAYERNORM, position=LEARNED)
    b = config(attention(ROTARY), GLU, RMSNORM)
    found = {one.path: one for one in differences([a, b])}
    block = "stack.0.blocks.0"
    assert set(found) == {
        "embedding.position",
        f"{block}.mixer.position",
        f"{block}.ffn",
        f"{block}.norm",
        "final_norm",
    }
    assert found[f"{block}.mixer.position"].values == ("none", "rotary(base=10000)")
    assert found["final_norm"].values == (
        "layernorm(bias=true)",
        "rmsnorm",
    )  # eps is the same, so it is not said
    groups = [one.group for one in differences([a, b])]
    assert groups == ["position", "position", "norm", "norm", "ffn"]
    assert differences([a, copy.deepcopy(a)]) == []
    mamba = {"kind": "mamba", "state_dim": 16}
    (other,) = [d for d in differences([a, config(mamba, MLP, LAYERNORM, position=LEARNED), a]) if d.group == "mixer"]
    assert other.values == ("attention", "mamba(state_dim=16)", "attention")


def test_a_leaf_that_differs_is_named_by_its_own_path() -> None:
    a = config(attention(), MLP, LAYERNORM)
    b = copy.deepcopy(a)
    b["stack"][0]["repeat"] = 8
    b["stack"][0]["blocks"][0]["mixer"]["n_kv_heads"] = 2
    b["stack"].append({"repeat": 1, "blocks": []})
    found = [(one.group, one.path, one.values) for one in differences([a, b])]
    assert found == [
        ("mixer", "stack.0.blocks.0.mixer.n_kv_heads", ("6", "2")),
        ("size", "stack.0.repeat", ("6", "8")),
        ("size", "stack.1", (None, "(repeat=1, blocks=[])")),
    ]


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("stack.0.blocks.0.mixer.position.base", "position"),
        ("stack.0.blocks.0.mixer.qk_norm", "norm"),
        ("final_norm.eps", "norm"),
        ("head.tied", "head"),
        ("d_model", "size"),
        ("init.std", "other"),
        ("stack.0.blocks.1.residual", "residual"),
    ],
)
def test_a_path_belongs_to_its_innermost_part(path: str, group: str) -> None:
    assert group_of(path.split(".")) == group


def test_each_arm_has_a_labelled_drawing_of_its_wiring() -> None:
    page = Page(rendered(results(1)))
    drawings = [v for tag, key, v in page.attributes if tag == "svg" and key == "aria-label" and v.startswith("Wiring")]
    assert len(drawings) == 5
    assert "learned position at the embedding; 6 times [pre wiring, layernorm, attention 6 heads" in drawings[0]
    assert "attention 6 heads rotary → q, k" in drawings[2] and "rmsnorm" in drawings[2]
    assert "parallel wiring" in drawings[3] and "post wiring" in drawings[4]


# --- Whatever comes ---


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The path of every key and item of a tree, but only the first items of long lists."""
    pairs = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:3] if isinstance(tree, list) else []
    return [p for key, value in pairs for p in ((*path, key), *_places(value, (*path, key)))]


def _small() -> dict[str, Any]:
    """Two seeds of two arms and one that diverged, with short curves."""
    made = results(2)
    made["runs"] = made["runs"][:4] + made["runs"][-1:]
    made["asked"] = [[run["name"], run["seed"]] for run in made["runs"]] + [["gpt2@10m+post", 2]]
    for run in made["runs"]:
        for key in ("curve", "curve_seconds"):
            run["train"][key] = run["train"][key][::24]
    return made


SMALL = _small()
PLACES = _places(SMALL)
JUNK = [
    None,
    "x",
    -1,
    0,
    0.5,
    1e300,
    1e308,
    10**400,
    float("nan"),
    float("-inf"),
    True,
    [],
    {},
    [[]],
    [None],
    {"kind": 3},
]


def altered(tree: Any, path: tuple, change: Any) -> Any:
    """A copy of the tree with another value at this place, or without the place."""
    made = copy.deepcopy(tree)
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    if change == "delete":
        del parent[path[-1]]
    else:
        parent[path[-1]] = copy.deepcopy(change)
    return made


def accepted(read: Callable[[Any], object], tree: Any, path: tuple, change: Any) -> Any:
    """Returns the altered tree; None if the place does not exist, or its type refuses the value."""
    try:
        made = altered(tree, path, change)
        read(made)
    except (KeyError, IndexError, TypeError, ValidationError):
        return None
    return made


def test_result_types_refuse_undrawable_values() -> None:
    curve = ("runs", 0, "train", "curve", 0, 1)
    for change in ("x", 1e308, 10**400, float("nan"), True, []):
        assert accepted(Results.of, SMALL, curve, change) is None
    verdict = {"a": "a", "b": "b", "metric": "validation.loss", "difference": 0.1, "low": 0.0, "high": 0.2,
               "confidence": 0.95, "seeds": 3, "verdict": "a better"}  # fmt: skip
    assert accepted(Verdict.of, verdict, ("seeds",), 4) == {**verdict, "seeds": 4}
    for field, change in (("metric", "train.tokens_per_second"), ("verdict", "best"), ("low", 1e301),
                          ("diverged", [1]), ("ended", [1, 2, 3])):  # fmt: skip
        with pytest.raises(ValidationError):
            Verdict.of({**verdict, field: change})


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(["delete", *JUNK])), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nonsense_that_the_types_accept_never_breaks_the_page(changes: list) -> None:
    made: Any = SMALL
    for path, change in changes:
        made = accepted(Results.of, made, path, change) or made
    text = rendered(made)
    page = Page(text)
    assert page.faults == []
    drawn = [
        v for tag, key, v in page.attributes if key in ("d", "cx", "cy", "x", "y", "r", "width", "height", "data-frame")
    ]
    assert not any(re.search(r"nan|inf", v, re.I) for v in drawn)
    text.encode("utf-8")


def test_many_arms_keep_their_colours_apart() -> None:
    made = results(1, diverge=False)
    made["runs"] = [copy.deepcopy(made["runs"][i % 4]) | {"name": f"arm {i}"} for i in range(20)]
    assert Page(rendered(made)).faults == []


# --- On disk ---


def test_the_page_is_written_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Results.of(results(1))
    path = write_report(one, tmp_path / "new" / "report.html")
    first = path.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>") and [p.name for p in path.parent.iterdir()] == ["report.html"]

    def fail(results: Results) -> str:
        raise RuntimeError("half way")

    monkeypatch.setattr(page_module, "render", fail)
    with pytest.raises(RuntimeError):
        write_report(one, path)
    assert path.read_text(encoding="utf-8") == first and [p.name for p in path.parent.iterdir()] == ["report.html"]
