"""Claims of the report by a number or a place: spikes, differences, one style of numbers."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from glassformer.report.curves import shared_spikes, spikes, top
from glassformer.report.facts import restyled
from glassformer.report.sketch import marked, sketch
from glassformer.runs.arms import arms_of
from glassformer.runs.diff import alike, differences, plain_name
from glassformer.runs.results import Results

from .sample import GLU, LAYERNORM, LEARNED, MLP, RMSNORM, ROTARY, attention, config, rendered, results
from .test_report import Page


def two(seeds: int = 1) -> dict[str, Any]:
    made = results(seeds, diverge=False)
    made["runs"] = [run for run in made["runs"] if run["name"] in ("gpt2@10m", "llama@10m")]
    return made


# --- Spikes ---


def jumping(made: dict[str, Any], who: int, at: int = 120, by: float = 9.0) -> dict[str, Any]:
    for run in [run for run in made["runs"] if run["seed"] == 0][:who]:
        for key in ("curve", "curve_seconds"):
            run["train"][key][at][1] += by
    return made


def test_spike_exceeds_both_sides_and_a_fall_is_not_a_spike() -> None:
    calm = [(float(i), 8.0 * 0.97**i + 0.01 * (i % 3)) for i in range(100)]
    assert spikes(calm) == []
    high = [(x, y + 3.0 * (x == 40.0)) for x, y in calm]
    (found,) = spikes(high)
    assert found.x == 40.0 and found.height == pytest.approx(3.0, abs=0.3)
    assert (top([calm]) is None and 7.9 < (top([high, calm]) or 8.1) < 8.6) or top([high]) is None
    taller = [(x, y + 20.0 * (x == 40.0)) for x, y in calm]
    assert top([taller]) == pytest.approx(8.0, rel=0.1)


def test_spike_of_all_arms_is_blamed_on_the_data_and_clipped() -> None:
    calm, made = rendered(results(1, diverge=False)), jumping(results(1, diverge=False), 4)
    page = rendered(made)
    words = Page(page).text
    assert "Spikes of many arms at once: all 4 arms at 496k tokens, by up to 9" in words
    assert "the text of that batch, not an architecture" in words and "A triangle at the upper edge" in words
    assert "gf-beyond" in page[page.index("<main") :] and "gf-beyond" not in calm[calm.index("<main") :]

    def highest(text: str) -> float:
        frame = re.findall(r'data-frame="([^"]+)"', text)[0].replace("&quot;", '"')
        return json.loads(frame)["y"]["high"]

    assert highest(page) < highest(calm) * 1.1


def test_a_spike_of_one_arm_is_not_blamed_on_the_data() -> None:
    arms = arms_of(Results.of(jumping(results(1, diverge=False), 1)).runs)
    assert shared_spikes(arms) == []
    arms = arms_of(Results.of(jumping(results(3, diverge=False), 3)).runs)
    (found,) = shared_spikes(arms)
    assert (found.seed, found.who, found.reached) == (0, 3, 4)
    made = jumping(results(1, diverge=False), 4)
    for i, run in enumerate(made["runs"]):
        run["recipe"] = {"batch_size": 16 + i, "context": 256}  # other batches: the same place is chance
    assert shared_spikes(arms_of(Results.of(made).runs)) == []


def test_the_loss_of_the_trained_context_may_differ_from_the_summary() -> None:
    """The two losses are measured on different amounts of text, and the page notes it next to the second."""
    made = results(1)
    for run in made["runs"]:
        for row in run["extrapolation"][:1]:
            row["loss"] += 0.01
    said = Page(rendered(made)).text
    assert "At 1× it can differ a little from the loss of the summary" in said
    first = made["runs"][0]
    assert f"{first['validation']['loss']:.3f}" in said and f"{first['extrapolation'][0]['loss']:.3f}" in said


# --- What has nothing to show ---


def test_empty_section_has_one_line_and_a_command() -> None:
    page = Page(rendered(two()))
    assert not any(f'id="{key}"' in rendered(two()) for key in ("verdicts", "dynamics", "cost"))
    copied = [value for _, key, value in page.attributes if key == "data-copy"]
    command = two()["command"]
    absent = [f"{command} {option}" for option in ("--seeds 3", "--tune", "--watch")]
    assert copied == [f"{command} --seeds 3", command, *absent]
    assert "Verdicts: with one seed per arm" in page.text and "drawn from three arms on" in page.text
    links = [value for _, key, value in page.attributes if key == "href" and value != "#results"]
    assert links == ["#content", "#summary", "#curves", "#contexts", "#configs", "#samples", "#setup", "#absent"]


# --- What differs ---


def test_learning_rates_that_print_alike_are_alike() -> None:
    assert alike([0.00134403, 0.00134432]) and not alike([0.00134, 0.00139])
    assert not alike([256, 257]) and not alike([10000.0, 10001.0]) and alike([{"a": [0.1]}, {"a": [0.10001]}])
    assert alike([float("nan"), float("nan")]) and not alike([1e-5, 1e-6])
    a, b = ({"recipe": {"learning_rate": rate}} for rate in (0.00134403, 0.00134432))
    assert differences([a, b]) == []


def test_a_part_is_named_in_words_and_the_odd_ones_are_tinted() -> None:
    assert plain_name("stack.0.blocks.0.mixer.n_kv_heads", alone=True) == "Mixer: key/value heads"
    assert plain_name("stack.1.blocks.0.ffn", alone=False) == "Feed-forward (stage 2, block 1)"
    assert plain_name("embedding.position", alone=True) == "Position, in the embedding"
    assert plain_name("recipe.learning_rate", alone=True) == "Recipe: learning rate"
    assert plain_name("stack.0.blocks.0.norm", alone=True) == "Norm, in the blocks"
    assert plain_name("head.tied", alone=True) == "Output head: shared with the embedding"
    text = Page(rendered(results(1))).text
    assert "Feed-forwardstack.0.blocks.0.ffn" in text and "Position, in the mixer" in text
    page = rendered(results(1))
    table = page[page.index('class="diff"') :]
    table = table[: table.index("</table>")]
    assert table.count('class="changed"') == 7  # llama's norms and network, parallel and post, two learned positions
    pair = rendered(two())
    assert 'class="changed"' not in pair and "same" not in Page(pair[pair.index('class="diff"') :][:3000]).text


def test_drawings_mark_only_differences() -> None:
    one = sketch(config(attention(ROTARY), MLP, LAYERNORM))
    other = sketch(config(attention(ROTARY), GLU, RMSNORM))
    placed = sketch(config(attention(), MLP, LAYERNORM, position=LEARNED))
    assert marked([one, one])[0].differs == frozenset()
    assert marked([one, other])[0].differs == {("final_norm",), (0, 0, "norm"), (0, 0, "ffn")}
    first, second, third = marked([one, one, placed])
    assert first.differs == second.differs == frozenset()
    assert third.differs == {("position",), (0, 0, "mixer")}
    narrow = sketch(config(attention(ROTARY), MLP, LAYERNORM, "parallel"))  # with less room, and the same parts
    first, second, third = marked([one, one, narrow])
    assert first.differs == second.differs == frozenset() and third.differs == {(0, 0, "wiring")}
    few = sketch(config(attention(ROTARY, n_kv_heads=1), MLP, LAYERNORM, "parallel"))
    assert marked([one, one, few])[2].differs == {(0, 0, "wiring"), (0, 0, "mixer")}
    drawing = rendered(two())
    assert drawing.count("gf-badge-sign") > drawing[: drawing.index("<main")].count("gf-badge-sign")
    assert "differs in: " in drawing and "A heavy frame with ≠ marks what differs" in drawing


# --- Numbers ---


def test_counts_have_one_style_on_the_page() -> None:
    made = results(1, diverge=False)
    made["data"] |= {"train_tokens": 820_864, "vocab_size": 49_152}
    made["budget"]["notes"] = ["The layers of a hold 820,864 parameters; each token activates 49,152."]
    for run in made["runs"]:
        run["parameters"], run["train"]["tokens_per_second"] = 820_864, 43_359.2
    text = Page(rendered(made)).text
    assert "820 864" not in text and "820,864" not in text and "820\u202f864" not in text and "49,152" not in text
    assert "821k parameters; each token activates 49.2k." in text and "Vocabulary49.2k" in text
    assert "43.4k" in text and "Parameters821k" in text
    assert restyled("from 1,024 to 2,048,000 tokens, 15% more") == "from 1024 to 2.05M tokens, 15 % more"


def test_time_per_token_has_one_unit() -> None:
    for each in (3e-5, 9e-3, 4.0):
        made = two()
        for run in made["runs"]:
            run["generation"]["seconds_per_token"] = each
        assert "Generationms/token" in Page(rendered(made)).text


def test_a_report_of_eight_arms_and_five_seeds() -> None:
    made = results(5, diverge=False)
    more = [copy.deepcopy(run) | {"name": f"{run['name']}+gqa:2"} for run in made["runs"]]
    made["runs"] += more
    page = Page(rendered(made))
    assert page.faults == [] and "8 language models compared" in page.text and "5 seeds" in page.text
