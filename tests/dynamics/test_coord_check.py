"""The coordinate check: slopes by closed form, measures by a separate loop, verdicts on both parametrisations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from glassformer.cli import main
from glassformer.config import ModelConfig
from glassformer.dynamics import coord_check
from glassformer.dynamics.coord_check import CoordinateCheck, at_width, coordinate_check, slope
from glassformer.naming import preset
from tests.refused import refused

SMALL = "+layers=2+d_model=64+heads=4+vocab_size=61"


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 0.58, 2.0])
def test_the_slope_of_a_power_is_its_exponent(power: float):
    widths = (64, 128, 256, 1024)
    assert slope(widths, [3.0 * width**power for width in widths]) == pytest.approx(power, abs=1e-9)


def test_slope_is_zero_without_movement_and_nan_if_not_finite():
    assert slope((64, 128), [0.0, 0.0]) == 0.0
    assert math.isnan(slope((64, 128), [1.0, math.nan])) and math.isnan(slope((64, 128), [1.0, math.inf]))
    check = CoordinateCheck((64, 128), 1, 0.1, {}, {"a": [[0, 0], [1.0, math.nan]], "b": [[0, 0], [1.0, 2.0]]})
    assert set(check.growing) == {"a", "b"}


def test_only_widths_differ():
    config = preset("gpt2@10m+gqa:2+dropout:0.1+hidden=1000")
    for width in (64, 256):
        made = at_width(config, width)
        mixer, ffn = made.stack[0].blocks[0].mixer, made.stack[0].blocks[0].ffn
        assert (mixer.n_heads, mixer.n_kv_heads, mixer.head_dim) == (4, 1, None)  # type: ignore[attr-defined]
        assert ffn is not None and ffn.hidden == round(1000 * width / 384 / 8) * 8
        assert made.d_model == width and made.n_layers == config.n_layers and made.vocab_size == 256
        assert mixer.dropout == made.embedding.dropout == 0.0  # type: ignore[attr-defined]
        made.check()


def test_the_measures_are_those_of_a_plain_loop():
    """mean |x_t - x_0| of the logits, of the embedding and of the stream behind the first layer."""
    config, steps = preset(f"llama@1m{SMALL}"), 3
    found = coordinate_check(config, (32, 64), steps, learning_rate=1e-2, batch=2, length=9)
    for i, width in enumerate((32, 64)):
        model = at_width(config, width, 9).build(seed=0)
        text = torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        outs: list[list[torch.Tensor]] = [[], []]
        model.layers[0].register_forward_hook(lambda m, a, y, outs=outs: outs[0].append(y.detach()))
        model.layers[1].register_forward_hook(lambda m, a, y, outs=outs: outs[1].append(y.detach()))
        logits, tables = [model(text[:, :-1]).detach()], [model.embedding.weight.detach()[text[:, :-1]]]
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            for kept in outs:
                kept.pop()
            logits.append(model(text[:, :-1]).detach())
            tables.append(model.embedding.weight.detach()[text[:, :-1]])
        for step in range(1, steps + 1):
            change = (logits[step] - logits[0]).abs().mean().item()
            assert found.changes["logits"][step][i] == pytest.approx(change, rel=1e-3)
            change = (tables[step] - tables[0]).abs().mean().item()
            assert found.changes["embed"][step][i] == pytest.approx(change, rel=1e-3)
            both = [(kept[step] - kept[0]).abs().mean().item() for kept in outs]
            assert found.changes["resid_post"][step][i] == pytest.approx(sum(both) / 2, rel=1e-3)
        assert found.sizes["logits"][0][i] == pytest.approx(logits[0].abs().mean().item(), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_mup_is_level_and_the_standard_parametrisation_grows(family: str):
    widths = (32, 64, 128, 256)
    standard = coordinate_check(preset(f"{family}@1m{SMALL}"), widths)
    scaled = coordinate_check(preset(f"{family}@1m{SMALL}+mup:32"), widths)
    assert scaled.growing == [] and all(one < 0.1 for one in scaled.slopes.values())
    assert standard.slopes["resid_post"] > 0.5 and {"resid_post", "logits", "mixer.scores"} <= set(standard.growing)


def test_a_check_is_data_and_a_figure(tmp_path: Path):
    pytest.importorskip("matplotlib")
    check = coordinate_check(preset(f"llama@1m{SMALL}+mup:32"), (32, 64), 2, batch=2, length=8)
    told = json.loads(json.dumps(check.to_dict()))
    assert told["widths"] == [32, 64] and told["slopes"] == check.slopes
    assert len(told["changes"]["resid_post"]) == 3 and told["changes"]["resid_post"][0] == [0.0, 0.0]
    assert {row["site"] for row in check.records()} == set(check.slopes)
    check.save(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"widths": (64,)}, "range", "widths"),
        ({"widths": (64, 64)}, "range", "widths"),
        ({"widths": (64, 130)}, "range", "n_heads"),
        ({"widths": (64, 0)}, "range", "width"),
        ({"steps": 0}, "range", "steps"),
    ],
)
def test_coordinate_check_refuses_unfit_requests(given: dict, code: str, field: str):
    with refused(code=code, field=field):
        coordinate_check(preset(f"llama@1m{SMALL}"), **given)


@pytest.mark.parametrize(("stopped_at", "widths"), [(512, [64, 128, 256]), (128, None)])
def test_widths_before_a_stop_come_out(
    stopped_at: int, widths: list[int] | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """If there are two, which a slope needs."""

    def measured(config: ModelConfig, *_: object) -> object:
        if config.d_model == stopped_at:
            raise KeyboardInterrupt
        step = {"resid_post": float(config.d_model)}
        return [step] * 5, [{"resid_post": 0.0}] + [step] * 4

    monkeypatch.setattr(coord_check, "_measure", measured)
    command = ["inspect", f"llama@1m{SMALL}", "--coord-check"]
    assert main([*command, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["code"] == "stopped" and found.get("widths") == widths
    assert widths is None or found["slopes"] == {"resid_post": pytest.approx(1.0)}
    assert main(command) == 130
    assert ("+1.00" in capsys.readouterr().out) == (widths is not None)
