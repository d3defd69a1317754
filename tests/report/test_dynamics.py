"""The section on dynamics: one scale for all arms, no alarm without two witnesses, whole whatever comes."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glassformer.figures.heat import LEVELS
from glassformer.report.dynamics import CELLS, MAPS, dynamics_section
from glassformer.report.page import render_run, write_run
from glassformer.runs.arms import arms_of, watched
from glassformer.runs.results import RunResult

from .sample import HOSTILE, rendered, results
from .test_report import JUNK, Page, accepted

STEPS, LAYERS = [float(50 * (i + 1)) for i in range(40)], 6


def short_form(windows: int = 40, layers: int = LAYERS, **changes: Any) -> dict[str, Any]:
    """Returns the dynamics of a healthy run; W_Q W_K^T is measured in every fourth window."""

    def grid(value: float) -> list[list[Any]]:
        return [[value - 0.01 * layer for layer in range(layers)] for _ in range(windows)]

    steps = STEPS[:windows]
    return {
        "steps": steps,
        "depth": layers,
        "layers": {
            "attention_entropy": grid(0.8),
            "attention_entropy_worst": grid(0.6),
            "max_attention_logit": grid(12.0),
            "activation_effective_rank": grid(120.0),
            "qk_effective_rank": [c if i % 4 == 3 else [None] * layers for i, c in enumerate(grid(40.0))],
            "gradient_norm": grid(0.9),
            "token_cosine": grid(0.2),
            "max_violation": grid(0.3),
            "router_dropped": grid(0.05),
            "router_entropy": grid(1.2),
        },
        "curves": {name: [[step, value] for step in steps] for name, value in (
            ("max_attention_logit", 12.0), ("log_z", 8.4), ("attention_entropy_worst", 0.55), ("update_ratio", 1e-3),
            ("token_cosine", 0.2))},
        "events": [],
        "events_left_out": 0,
        **changes,
    }  # fmt: skip


SPIKE = {"step": 731, "event": "spike", "what": "loss", "value": 6.91, "sigmas": 7.2, "site": None}
LOST = {
    "step": 669,
    "event": "not_finite",
    "what": "loss",
    "value": "nan",
    "sigmas": None,
    "site": "layers.2.ffn.hidden",
}


def collapsed(made: dict[str, Any], window: int = 9, layer: int = 2) -> dict[str, Any]:
    """Returns dynamics with both signs of entropy collapse in one layer from one window on."""
    for i in range(window, len(made["steps"])):
        made["layers"]["max_attention_logit"][i][layer] = 6404.0
        made["layers"]["attention_entropy_worst"][i][layer] = 0.004
    return made


def watched_results(seeds: int = 1, diverge: bool = True) -> dict[str, Any]:
    """Four arms that were watched, and one that diverged at a third of its way."""
    made = results(seeds, diverge)
    for run in made["runs"]:
        lost = run["status"] != "ok"
        run["train"]["steps"], run["train"]["tokens"] = (668, 334_000) if lost else (2000, 1_000_000)
        run["config"]["context"] = 256
        run["dynamics"] = short_form(13, events=[LOST]) if lost else short_form()
    return made


def section(made: dict[str, Any]) -> str:
    found = dynamics_section(arms_of([RunResult.of(run) for run in made["runs"]]))
    assert isinstance(found, str)
    return found


def maps(text: str) -> dict[str, list[str]]:
    """statistic -> the SVG of each arm."""
    panels = re.split(r'class="panel panel-', text)[1:]
    return {panel[: panel.index('"')]: re.findall(r'<svg class="gf-chart gf-heat".*?</svg>', panel) for panel in panels}


def cells(svg: str) -> list[tuple[str, str]]:
    """(class, title) of every cell."""
    found = re.findall(r'<path d="[^"]*" class="(gf-h[0-9xn]+)"><title>([^<]*)</title>', svg)
    return found or re.findall(r'class="(gf-h[0-9xn]+)">.*?<title>([^<]*)</title>', svg)


# --- What is drawn ---


def test_unwatched_runs_have_a_hint_to_watch() -> None:
    text = Page(rendered(results(1))).text
    assert "Dynamics: entropy, rank and gradients of the layers were not recorded." in text and "1M --watch" in text
    made = results(1)
    made["runs"][0]["dynamics"] = {"steps": [], "layers": {}, "curves": {}, "events": [SPIKE], "events_left_out": 0}
    text = Page(section(made)).text
    assert "Only spikes were looked for." in text and "gpt2@10m: 1 spike" in text and "What happened" in text


def test_every_statistic_has_a_map_for_every_arm_and_a_switch() -> None:
    text = section(watched_results())
    drawn = maps(text)
    assert set(drawn) == {one.name for one in MAPS} and all(len(svgs) == 5 for svgs in drawn.values())
    assert all(f'id="heat-{one.name}"' in text for one in MAPS)
    assert re.findall(r'id="heat-(\w+)" checked', text) == ["attention_entropy"]
    style = rendered(watched_results())
    assert all(f".heats:has(#heat-{one.name}:checked) .panel-{one.name}" in style for one in MAPS)


def test_the_load_of_experts_is_drawn_by_expert_and_by_rank() -> None:
    made = watched_results(diverge=False)
    for run, load in zip(made["runs"], ([0.25] * 4, [0.5, 0.25, 0.25, 0.0], [0.6, 0.2, 0.2]), strict=False):
        run["dynamics"]["experts"] = [{"layer": 2, "load": load}]
    text = section(made)
    drawn = maps(text)
    said = {key: [[title for _, title in cells(svg)] for svg in drawn[f"load-{key}"]] for key in (1, 2, 4)}
    assert said[1][0] == [f"Layer 2, expert {i}: 1" for i in range(4)]
    assert said[1][1] == [f"Layer 2, expert {i}: {load}" for i, load in enumerate((2, 1, 1, 0))]
    assert said[2] == [[f"Layer 2, rank {i}: 1" for i in range(2)], ["Layer 2, rank 0: 1.5", "Layer 2, rank 1: 0.5"]]
    assert said[4][1] == [one.replace("expert", "rank") for one in said[1][1]]
    assert "load-8" not in drawn and len(said[1]) == 3  # three experts are drawn, and no 2, 4 or 8 ranks share them
    table = text[text.index("Busiest rank") :]
    assert "1.500 (layer 2)" in table and "2.000 (layer 2)" in table and "75.0 %" in table
    style = rendered(made)
    assert all(f".heats:has(#load-{key}:checked) .panel-load-{key}" in style for key in (1, 2, 4, 8))


def test_invalid_expert_loads_are_not_drawn() -> None:
    made = watched_results(diverge=False)
    for run, load in zip(made["runs"], ([0.0, 0.0], ["nan", 1.0], [-1.0, 2.0], [0.1] * 1000), strict=False):
        run["dynamics"]["experts"] = [{"layer": 0, "load": load}]
    assert "Load of the experts" not in section(made)


def test_a_value_has_the_same_colour_in_every_arm() -> None:
    made = watched_results(diverge=False)
    for i, run in enumerate(made["runs"]):
        run["dynamics"]["layers"]["gradient_norm"] = [[10.0**i, 1.0]] * 40
    drawn = maps(section(made))["gradient_norm"]
    levels = [[int(kind[4:]) for kind, _ in cells(svg)[:2]] for svg in drawn]
    assert [high for high, _ in levels] == [0, LEVELS // 3, 2 * LEVELS // 3, LEVELS - 1]  # four decades, evenly
    assert {low for _, low in levels} == {0}


def test_an_arm_that_ran_away_does_not_take_the_colours_from_the_others() -> None:
    """The scale follows that arm for one power of ten, and notes that its values exceed it."""
    made = watched_results()
    for run in made["runs"]:
        run["dynamics"]["layers"]["gradient_norm"] = [[1.0, 10.0]] * len(run["dynamics"]["steps"])
    made["runs"][-1]["dynamics"]["layers"]["gradient_norm"][-1] = [1e12, 50.0]
    text = section(made)
    levels = [[int(kind[4:]) for kind, _ in cells(svg)] for svg in maps(text)["gradient_norm"]]
    assert levels[0][:2] == [0, LEVELS // 2] and max(levels[0]) == LEVELS // 2
    assert levels[-1][-2:] == [LEVELS - 1, int(LEVELS * math.log10(50) / 2)]
    assert "≥ 100" in text and ": 1T" in text  # the value itself is under the pointer


def test_sparse_measurement_covers_the_steps_since_the_last() -> None:
    made = watched_results(diverge=False)
    svg = maps(section(made))["qk_effective_rank"][0]
    found = cells(svg)
    assert len(found) == 10 * LAYERS and not any(kind == "gf-hn" for kind, _ in found)
    assert found[0][1].startswith("Layer 0, steps 1–200: 40") and found[-1][1].startswith("Layer 5, steps 1801–2000")
    del made["runs"][0]["dynamics"]["layers"]["qk_effective_rank"][20:]
    found = cells(maps(section(made))["qk_effective_rank"][0])
    assert [kind for kind, _ in found[-LAYERS:]] == ["gf-hn"] * LAYERS
    assert found[-1][1] == "Layer 5, steps 1001–2000: not recorded"


def test_non_finite_cells_are_marked() -> None:
    made = watched_results()
    made["runs"][0]["dynamics"]["layers"]["attention_entropy"][7][3] = "nan"
    text = section(made)
    assert ("gf-hx", "Layer 3, steps 351–400: nan, not finite") in cells(maps(text)["attention_entropy"][0])
    assert "not finite" in re.sub("<title>.*?</title>", "", text[text.index("panel-attention_entropy") :])


def test_events_are_marked_above_the_maps_on_the_curves_and_in_a_table() -> None:
    made = watched_results()
    made["runs"][2]["dynamics"]["events"] = [
        SPIKE,
        {**SPIKE, "event": "skipped", "what": None, "value": None, "sigmas": None},
    ]
    text = section(made)
    assert text.count("spike of loss at step 731, 6.91, 7.2 sigma") == len(MAPS)
    assert text.count("not finite of loss at step 669, nan") == len(MAPS)
    words = Page(text).text
    assert "llama@10m: 1 spike, 1 step skipped; gpt2@10m+post: 1 number that is not finite." in words
    assert "Above them: ▼ spike, ◆ step skipped, ✚ number that is not finite." in words
    table = re.search(r"<table.*?</table>", text, re.S)
    assert table and [Page(row).text for row in re.findall("<tr>.*?</tr>", table.group())][1:] == [
        "llama@10m731spikeloss6.917.2–",
        "llama@10m731skipped––––",
        "gpt2@10m+post669not finitelossnan–layers.2.ffn.hidden",
    ]


def test_loss_is_drawn_on_the_steps_of_the_statistics() -> None:
    made = watched_results(diverge=False)
    made["runs"] = made["runs"][:1]
    run = made["runs"][0]
    run["train"]["curve"] = [[250_000, 5.0], [1_000_000, 4.0]]  # steps 500 and 2000
    text = section(made)
    charts = re.findall(r'<svg class="gf-chart" .*?</svg>', text, re.S)
    assert len(charts) == 6 and "Training loss" in charts[0]
    places = [float(x) for x in re.findall(r'<path d="M([\d.]+),[\d.]+L', charts[0])][:1]
    start, end = 52.0, 340 - 24.0
    assert places and math.isclose(places[0], start + (end - start) / 4, abs_tol=0.02)
    run["train"] = None
    assert "Training loss" not in section(made)


def test_of_several_seeds_the_one_that_failed_is_drawn() -> None:
    made = watched_results(3)
    made["runs"][1].update(status="diverged", validation=None)  # seed 1 of the first arm
    text = section(made)
    captions = [Page(one).text for one in re.findall("<figcaption>.*?</figcaption>", text)][:5]
    assert captions[0] == "gpt2@10mseed 1, diverged" and captions[1] == "gpt2@10m+ropeseed 0"
    assert "Of several seeds one is drawn" in Page(text).text and "Markers show" not in Page(text).text


def test_the_cells_of_all_maps_are_bounded() -> None:
    made = {"runs": [{"name": str(i), "status": "ok", "dynamics": short_form(40, 48)} for i in range(12)]}
    for run in made["runs"]:
        run["dynamics"]["layers"]["attention_entropy_worst"][20][5] = 0.01
        run["dynamics"]["layers"]["gradient_norm"][20][5] = "inf"
    text = section(made)
    drawn = maps(text)
    assert sum(len(cells(svg)) for svgs in drawn.values() for svg in svgs) <= CELLS
    assert any(title.endswith(": 0.01") for _, title in cells(drawn["attention_entropy_worst"][0]))  # the worst stays
    assert "gf-hx" in dict(cells(drawn["gradient_norm"][0]))


def test_rows_are_named_by_their_layers() -> None:
    made = {"runs": [{"name": "deep", "status": "ok", "dynamics": {**short_form(2, 4), "depth": 10}}]}
    titles = [title for _, title in cells(maps(section(made))["attention_entropy"][0])]
    assert [t.split(",")[0] for t in titles[:4]] == ["Layer 0–2", "Layer 3–4", "Layer 5–7", "Layer 8–9"]


# --- Sentences ---


def test_a_healthy_comparison_names_the_extremes_and_no_collapse() -> None:
    made = watched_results(diverge=False)
    made["runs"][1]["dynamics"]["layers"]["max_attention_logit"][4][1] = 17.3
    words = Page(section(made)).text
    assert "No layer shows two signs of collapse at once: the largest attention logit is 17.3 (gpt2@10m+rope, layer 1, "
    assert "the largest attention logit is 17.3 (gpt2@10m+rope, layer 1, step 250)" in words
    assert "the lowest entropy of a head is 0.550 (gpt2@10m, layer 5, step 50)" in words
    assert "No spike and no number that is not finite was seen." in words and "collapsed" not in words


def test_collapse_needs_both_signs_in_one_layer_at_one_time() -> None:
    made = watched_results(diverge=False)
    collapsed(made["runs"][0]["dynamics"])
    words = Page(section(made)).text
    assert "In gpt2@10m attention entropy collapsed by step 500, first in layer 2: logits reach 6.4k while a " in words
    assert "while a head's entropy falls to 0.004." in words
    assert "No layer shows" not in words
    for name, other in (("max_attention_logit", 900.0), ("attention_entropy_worst", 0.06)):
        alone = watched_results(diverge=False)
        layers = collapsed(alone["runs"][0]["dynamics"])["layers"]
        layers[name] = [[other] * LAYERS] * 40
        assert "collapsed" not in Page(section(alone)).text
    apart = watched_results(diverge=False)
    layers = collapsed(apart["runs"][0]["dynamics"])["layers"]
    layers["attention_entropy_worst"] = [column[::-1] for column in layers["attention_entropy_worst"]]  # another layer
    assert "collapsed" not in Page(section(apart)).text


def test_alike_tokens_are_reported_by_both_cosine_and_rank() -> None:
    made = watched_results(diverge=False)
    layers = made["runs"][0]["dynamics"]["layers"]
    layers["token_cosine"][20][5] = 0.99
    assert "became alike" not in Page(section(made)).text
    layers["activation_effective_rank"][20][5] = 2.5  # of at most min(256, 384): below 5 %
    words = Page(section(made)).text
    assert "In gpt2@10m the tokens became alike by step 1050, first in layer 5, but not to the end: their mean" in words
    assert "their mean cosine reaches 0.990 and their effective rank 2.5 of at most 256." in words
    layers["token_cosine"][39][5], layers["activation_effective_rank"][39][5] = 0.99, 2.5
    assert "became alike by step 1050, first in layer 5: their mean" in Page(section(made)).text


def test_seeds_are_counted_and_arms_that_were_not_watched_named() -> None:
    made = watched_results(3, diverge=False)
    for run in made["runs"][:2]:
        collapsed(run["dynamics"])
    made["runs"][0]["dynamics"]["events"] = made["runs"][2]["dynamics"]["events"] = [SPIKE]
    for run in made["runs"][3:6]:
        run["dynamics"] = {}
    words = Page(section(made)).text
    assert "gpt2@10m attention entropy collapsed in 2 of 3 seeds by step 500" in words
    assert "gpt2@10m: 2 spikes." in words and "Not watched: gpt2@10m+rope." in words


# --- A page, and whatever comes ---


def test_the_page_holds_the_section_and_its_data(tmp_path: Any) -> None:
    made = watched_results(diverge=False)
    page = Page(rendered(made))
    assert page.faults == [] and page.embedded == made and 'href="#dynamics"' in rendered(made)
    alone = Page(write_run(RunResult.of(made["runs"][0]), tmp_path / "report.html").read_text(encoding="utf-8"))
    assert alone.faults == [] and alone.embedded == {"runs": made["runs"][:1]}
    assert "Glassformer run" in alone.text and "Layer by step" in alone.text and "Summary" not in alone.text
    assert Page(render_run(RunResult.of({"name": "a", "status": "ok"}))).faults == []


def test_hostile_text_of_events_is_escaped() -> None:
    made = watched_results()
    made["runs"][0]["dynamics"]["events"] = [
        {"step": 3, "event": HOSTILE, "what": HOSTILE, "site": HOSTILE, "value": HOSTILE}
    ]
    made["runs"][0]["dynamics"]["layers"][HOSTILE] = made["runs"][0]["dynamics"]["curves"][HOSTILE] = [
        [HOSTILE, HOSTILE]
    ]
    text = rendered(made)
    assert "<script>alert" not in text and Page(text).faults == [] and HOSTILE.replace("_", " ") in Page(text).text


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
    pairs = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:2] if isinstance(tree, list) else []
    return [p for key, value in pairs for p in ((*path, key), *_places(value, (*path, key)))]


def _small() -> list[dict[str, Any]]:
    form = collapsed(short_form(5, 2, events=[SPIKE, LOST]), 2, 1)
    return [{"name": "a", "status": "ok", "dynamics": form, "config": {"d_model": 8, "context": 8},
             "train": {"steps": 9, "tokens": 90, "seconds": 1.0, "tokens_per_second": 90.0, "peak_memory_bytes": None,
                       "learning_rate": 1e-3, "curve": [[10, 4.0], [90, 3.0]], "curve_seconds": [],
                       "validation_curve": []}},
            {"name": "b", "status": "diverged", "dynamics": copy.deepcopy(form)}]  # fmt: skip


SMALL = _small()
NONSENSE = [*JUNK, "nan", "inf", [1, 1], [[1, 2], [0, 3]], 1e15, 1e18, {"layers": [[1]]}]


@given(
    st.lists(st.tuples(st.sampled_from(_places(SMALL)), st.sampled_from(["delete", *NONSENSE])), min_size=1, max_size=8)
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nonsense_that_the_types_accept_never_breaks_the_section(changes: list) -> None:
    made: Any = SMALL
    for path, change in changes:
        made = accepted(lambda runs: list(map(RunResult.of, runs)), made, path, change) or made
    text = section({"runs": made})
    page = Page(text)
    assert page.faults == []
    keys = ("d", "cx", "cy", "x", "y", "r", "width", "height", "data-frame", "viewbox")
    assert not any(re.search(r"nan|inf", v, re.I) for _, key, v in page.attributes if key in keys)
    text.encode("utf-8")


@pytest.mark.parametrize("raw", [{}, {"steps": [5, 4, 3]}, {"steps": [-1]}, {"layers": {"a": [[]]}}])
def test_unreadable_dynamics_count_as_not_watched(raw: Any) -> None:
    assert watched(RunResult.of({"name": "a", "status": "ok", "dynamics": raw})) is None
