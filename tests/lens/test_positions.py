"""Pictures of positions against the formulas of the papers."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.lens.positions import NONE, PositionPicture, position_picture, spans
from glassformer.parts.position import Plot
from tests.refused import refused


def only(picture: PositionPicture) -> dict[str, Plot]:
    (plots,) = picture.plots.values()
    return plots


def close(a: Tensor, b: Any, atol: float = 1e-4) -> None:
    torch.testing.assert_close(a.double(), torch.as_tensor(b, dtype=torch.float64), atol=atol, rtol=1e-4)


def test_sinusoidal_by_dimension_and_distance():
    picture = position_picture(gf.preset("gpt2@1m+sinusoidal"), 100)
    assert list(picture.where.values()) == [[]]
    plots, d = only(picture), 128
    values = plots["encoding by dimension"].values
    assert values.shape == (d, 100)
    for i, p in [(0, 0), (1, 0), (0, 7), (13, 99), (126, 50), (127, 50)]:
        turned = p / 10000 ** (2 * (i // 2) / d)
        assert values[i, p] == pytest.approx(math.cos(turned) if i % 2 else math.sin(turned), abs=1e-4)
    first = plots["first dimensions"]
    assert first.lines == tuple("01234567") and torch.equal(first.values, values[:8, :32])
    dots = plots["dot product by distance"].values[0]
    close(dots, [sum(math.cos(k / 10000 ** (2 * i / d)) for i in range(d // 2)) for k in range(100)])
    assert dots[0] == d / 2
    close(dots[7], float(values[:, 31] @ values[:, 38]))  # whatever the position


def test_learned_is_the_table():
    model = gf.preset("gpt2@1m").build(seed=0)
    with torch.no_grad():  # rows that turn by a right angle in three steps
        angle = torch.arange(len(model.embedding.position.weight)) * (math.pi / 6)
        model.embedding.position.weight.zero_()
        model.embedding.position.weight[:, 0], model.embedding.position.weight[:, 1] = 3 * angle.cos(), 3 * angle.sin()
    plots = only(position_picture(model, 12))
    assert plots["cosine of positions"].values.shape == (12, 12)
    close(plots["cosine of positions"].values[2], [math.cos((2 - p) * math.pi / 6) for p in range(12)])
    close(plots["mean cosine by distance"].values[0], [math.cos(k * math.pi / 6) for k in range(12)])
    close(plots["norm by position"].values[0], [3.0] * 12)


def test_a_learned_table_ends_and_is_thinned():
    config = gf.preset("gpt2@1m").replace(context=3000)
    plot = only(position_picture(config))["cosine of positions"]
    assert plot.values.shape == (1000, 1000) and plot.at[1] == 3 and plot.at[-1] < 3000
    assert plot.values.diagonal().allclose(torch.ones(1000))
    with refused(code="range", field="length"):
        position_picture(config, 3001)


def test_a_table_shorter_than_the_context_is_drawn_as_long_as_it_is():
    tree = gf.preset("gpt2@1m").to_dict()
    tree["embedding"]["position"]["length"] = 40
    assert position_picture(gf.ModelConfig.from_dict(tree)).length == 40


def test_rotary_wavelengths_and_decay():
    plots = only(position_picture(gf.preset("llama@1m"), 200))
    r = 32
    theta = [10000 ** (-2 * i / r) for i in range(r // 2)]
    waves = plots["wavelength by pair"]
    assert waves.lines == ("plain", "this text")
    close(waves.values[0], [2 * math.pi * 10000 ** (2 * i / r) for i in range(r // 2)])
    assert (waves.values[1] == 200).all()
    turned = plots["cosine of the rotation"].values
    close(turned[3], [math.cos(theta[3] * k) for k in range(200)])
    close(
        plots["mean cosine by distance"].values[0],
        [sum(math.cos(a * k) for a in theta) / len(theta) for k in range(200)],
    )


def scaled(**scaling: Any) -> gf.ModelConfig:
    tree = gf.preset("llama@1m").to_dict()
    tree["stack"][0]["blocks"][0]["mixer"]["position"]["scaling"] = scaling
    return gf.ModelConfig.from_dict(tree)


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic_ntk", "yarn", "llama3"])
def test_scaled_rotary_shows_before_and_after_as_transformers_computes_them(kind: str):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = 4096
    config = scaled(kind=kind, factor=4.0, original_context=1024)
    plots = only(position_picture(config, length))
    waves = plots["wavelength by pair"]
    assert waves.lines == ("plain", "scaled", "this text")
    plain = 2 * math.pi * 10000 ** (torch.arange(0, 32, 2) / 32)
    close(waves.values[0], plain)
    if kind == "ntk":  # theirs has no such kind: the closed form
        inverse, factor = (10000 * 4 ** (32 / 30)) ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        rope = {"rope_type": {"dynamic_ntk": "dynamic"}.get(kind, kind), "rope_theta": 10000.0, "factor": 4.0}
        rope |= {"original_max_position_embeddings": 1024, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 1024}
        theirs = transformers.LlamaConfig(**sizes, rope_parameters=rope)
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu", seq_len=length)
    close(waves.values[1], 2 * math.pi / inverse)
    means = plots["mean cosine by distance"]
    assert means.lines == ("plain", "scaled")
    at = means.at.double()
    close(means.values[1], factor**2 * (inverse.double()[:, None] * at).cos().mean(0), atol=2e-3)
    assert at[0] == 1 and at[-1] == length - 1 and len(at) <= 1024 and (at.diff() > 0).all()


@pytest.mark.parametrize("n", [1, 4, 8])
def test_alibi_slopes_and_bias(n: int):
    plots = only(position_picture(alibi(n), 64))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    close(plots["slope by head"].values[0], slopes)
    bias = plots["bias by distance"]
    assert bias.lines == tuple(f"head {i}" for i in range(n))
    close(bias.values, [[-m * k for k in bias.at.tolist()] for m in slopes])
    close(plots["weight left by distance"].values[-1], [math.exp(-slopes[-1] * k) for k in range(64)])


def alibi(n: int) -> gf.ModelConfig:
    tree = gf.preset("bloom@1m").to_dict()
    tree["stack"][0]["blocks"][0]["mixer"] |= {"n_heads": n, "n_kv_heads": None}
    return gf.ModelConfig.from_dict(tree)


def hybrid() -> gf.ModelConfig:
    tree = gf.preset("llama@1m").to_dict()
    rotary = tree["stack"][0]["blocks"][0]
    local, none = copy.deepcopy(rotary), copy.deepcopy(rotary)
    local["mixer"]["position"]["base"] = 1000.0
    none["mixer"]["position"] = None
    tree["stack"] = [{"repeat": 2, "blocks": [local, rotary, none]}]
    return gf.ModelConfig.from_dict(tree)


def test_layers_of_different_positions_have_separate_plots():
    picture = position_picture(hybrid(), 50)
    assert sorted(picture.where.values()) == [[0, 3], [1, 4], [2, 5]]
    assert picture.where["none"] == [2, 5] and set(picture.plots) == set(picture.where) - {"none"}
    assert f"{NONE}: layers 2, 5" in str(picture)
    shortest = sorted(float(plots["wavelength by pair"].values[0, -1]) for plots in picture.plots.values())
    assert shortest == pytest.approx([2 * math.pi * base ** (30 / 32) for base in (1000, 10000)], rel=1e-4)


def test_a_model_and_its_config_show_the_same():
    config = hybrid()
    a, b = position_picture(config), position_picture(config.build(seed=0))
    assert a.to_dict() == b.to_dict()
    assert json.loads(json.dumps(a.to_dict(), allow_nan=False))["length"] == config.context
    assert position_picture(torch.compile(config.build(seed=0))).where == b.where


def test_a_table_of_a_config_is_drawn_by_its_own_rule_and_a_large_one_is_refused():
    config = gf.preset("gpt2@1m")
    norms = only(position_picture(config))["norm by position"].values
    table = config.build(seed=0).embedding.position.weight.detach()
    assert float(norms.mean()) == pytest.approx(float(table.norm(dim=-1).mean()), rel=0.05)
    with refused(code="range", field="position"):
        position_picture(config.replace(context=1 << 25))


def test_refusals():
    with refused(code="missing", field="position"):
        position_picture(gf.preset("llama@1m+nope"))
    with refused(code="range", field="length"):
        position_picture(gf.preset("llama@1m"), 1)


@pytest.mark.slow
def test_every_position_has_a_picture_that_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    configs = ["gpt2@1m", "gpt2@1m+sinusoidal", "llama@1m", "bloom@1m"]
    for config in [*map(gf.preset, configs), hybrid(), alibi(16), scaled(kind="yarn", factor=8.0)]:
        picture = position_picture(config, 128)
        assert all(plot.values.isfinite().all() for plots in picture.plots.values() for plot in plots.values())
        figure = picture.figure()
        drawn = [ax for ax in figure.axes if ax.has_data() and ax.get_visible() and ax.get_title(loc="left")]
        assert len(drawn) == sum(len(plots) for plots in picture.plots.values())
        assert picture._repr_html_().startswith('<img alt="Position encodings"')


def test_a_model_without_a_config_needs_a_length():
    model = gf.preset("llama@1m+layers=1+vocab_size=31").build()
    model.config = None
    with refused(code="missing", field="length"):
        position_picture(model)
    assert position_picture(model, 8).length == 8


def test_spans():
    assert spans([0]) == "0" and spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
