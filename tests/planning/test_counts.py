"""The table of components is the module's parameters, its formulas are arithmetic, and FLOPs add up."""

from __future__ import annotations

import ast
import json
import operator
import re
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.planning.counts import BETWEEN, Counts

STEPS = {ast.Add: operator.add, ast.Mult: operator.mul}


def value(text: str) -> int:
    """A formula of sums and products in numbers."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant):
            return node.value
        assert isinstance(node, ast.BinOp)
        return STEPS[type(node.op)](of(node.left), of(node.right))

    return of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("name", [*gf.presets(), "gpt2@1m", "llama@1m+mqa", "bloom@1m", "llama@1m+moe:4:2"])
def test_components_are_the_parameters_of_the_module(name: str):
    config = gf.preset(name)
    counts = Counts(config)
    assert sum(one.parameters for one in counts.components) == sum(p.numel() for p in config.outline().parameters())
    assert sum(one.share for one in counts.components) == pytest.approx(1)
    letters = counts.symbols
    for one in counts.components:
        assert value(one.numbers) == one.parameters
        words = one.symbols.replace("(", " ").replace(")", " ").split()
        put_in = one.symbols
        for letter in sorted(set(words) & set(letters), key=len, reverse=True):
            put_in = " ".join(
                str(letters[letter]) if w == letter else w for w in put_in.replace("(", "( ").replace(")", " )").split()
            )
        assert value(put_in) == one.parameters, "a letter means one number"


def test_the_guides_figures():
    """By hand: LLaMA-7B is 32 (4 d^2 + 3 d f) and two tables; Qwen3-8B's ffn is two thirds, its head 7.6 %."""
    rows = {one.name: one for one in Counts(gf.preset("llama-7b")).components}
    assert rows["mixer"].symbols == "L * (4 * d * d)" and rows["ffn"].symbols == "L * (3 * f * d)"
    assert rows["mixer"].parameters == 32 * 4 * 4096**2 and rows["head"].parameters == 32_000 * 4096
    shares = {one.name: round(100 * one.share, 1) for one in Counts(gf.preset("qwen3-8b")).components}
    assert shares["ffn"] == 66.4 and shares["head"] == 7.6


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "olmoe-1b-7b"])
def test_flops_differ_from_6n_by_the_stated_terms(name: str):
    config = gf.preset(name)
    flops = Counts(config).flops(2048)
    assert flops.training == 3 * config.flops(2048)
    assert flops.six_n - flops.idle + flops.unlike + flops.scores == pytest.approx(flops.training)
    queries = {"gpt2": 12 * 768, "llama-3-8b": 32 * 4096, "mixtral-8x7b": 32 * 4096, "olmoe-1b-7b": 16 * 2048}[name]
    assert flops.scores == pytest.approx(12 * queries * 2047)  # 12 L q s, less that of a single token
    assert flops.idle == 6 * (config.num_params() - config.active_params())


def test_batch_and_context_that_fit_are_the_largest():
    plan = gf.plan(gf.preset("llama-3-8b"))
    most = plan.batch_that_fits(80e9)
    assert gf.plan(plan.config, batch=most).bytes <= 0.9 * 80e9 < gf.plan(plan.config, batch=most + 1).bytes
    longest = plan.context_that_fits(80e9)
    assert plan.config.state_bytes(longest) <= 0.9 * 80e9 - plan.weight_bytes < plan.config.state_bytes(longest + 1)
    assert plan.context_that_fits(1e9) == plan.batch_that_fits(1e9) == 0
    assert gf.plan(gf.preset("gpt2")).context_that_fits(80e9) == 1024, "its learned positions end there"


def test_explain_shows_the_flops_of_a_block(capsys: pytest.CaptureFixture[str]):
    """24 n d^2 + 4 n^2 d of n = 512 tokens and d = 768."""
    assert main(["plan", "gpt2+layers=1+heads=8+context=512", "--explain"]) == 0
    assert f"{24 * 512 * 768**2 + 4 * 512**2 * 768:,} FLOPs" in capsys.readouterr().out


def test_explain_shows_formula_and_figure(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "qwen3-8b", "--explain", "--machine", "h100"]) == 0
    told = capsys.readouterr().out
    assert "5,435,817,984" in told and "36 * (3 * 12288 * 4096)" in told and "fits on 1 h100" in told


def test_inspect_shows_the_table_of_components_and_then_the_tree(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", "llama@1m", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["components"].values()) == facts["parameters"]
    assert main(["inspect", "llama@1m"]) == 0
    shown = capsys.readouterr().out
    assert 0 < shown.index("L * (3 * f * d)") < shown.index("vocab_size:")


@pytest.mark.parametrize("name", [*gf.presets(), "gpt2@1m", "llama@1m+mamba", "bloom@1m", "llama@1m+moe:4:2"])
def test_a_layer_by_matrix_is_the_module_and_its_flops_are_those_of_the_cost(name: str):
    config = gf.preset(name)
    model, layers = config.outline(), Counts(config).layers(64)
    of = {False: model.layers, True: () if model.encoder is None else model.encoder.layers}
    modules = [one for tower in of.values() for one in tower]
    assert sum(one.times for one in layers) == len(modules)
    for layer in layers:
        tower = of[layer.name.startswith("encoder ")]
        block = tower[int(re.split("[-,]", layer.name.removeprefix("encoder "))[0])]
        assert layer.parameters == sum(p.numel() for p in block.parameters())
        assert all(value(row.numbers) == row.parameters for row in layer.rows if row.parameters)
        assert all(row.flops >= 0 for row in layer.rows), layer
        assert {row.name for row in layer.rows if row.flops == 0 and "norm" not in row.name} <= WITHOUT_PRODUCT


WITHOUT_PRODUCT = {
    "mixer.sinks", "mixer.A_log", "mixer.D", "mixer.conv1d", "mixer.dt_bias", "mixer.global_maps.qkv",
    "mixer.position.table",
}  # fmt: skip
"""Weights of recurrences and lookups, and the maps of global tokens, absent from this pass."""


def test_the_table_of_a_layer_of_qwen3_8b():
    """By hand from the published shapes: d 4096, 32 heads and 8 KV heads of 128, f 12288, context 1."""
    (layer,) = Counts(gf.preset("qwen3-8b")).layers(1)
    d, f, kv = 4096, 12_288, 1024
    hand = {
        "mixer.q": d * d, "mixer.k": kv * d, "mixer.v": kv * d, "mixer.out": d * d,
        "ffn.gate": f * d, "ffn.up": f * d, "ffn.down": d * f,
        "mixer_norm": d, "ffn_norm": d, "mixer.qk_norm.q_norm": 128, "mixer.qk_norm.k_norm": 128, BETWEEN: 0,
    }  # fmt: skip
    assert {row.name: row.parameters for row in layer.rows} == hand and layer.times == 36
    shares = [round(100 * row.share, 1) for row in layer.rows if row.parameters > 128 * 128]
    assert shares == [8.7, 2.2, 2.2, 8.7, 26.1, 26.1, 26.1]
    flops = {row.name: row.flops for row in layer.rows}
    assert flops["mixer.q"] == 33_554_432, "16.8M multiply-adds"
    assert flops[BETWEEN] == 4 * d, "a query against one key, and its value"


def test_explain_shows_a_layer_in_text_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "llama@1m", "--explain", "--out", str(tmp_path / "plan.html")]) == 0
    told, page = capsys.readouterr().out, (tmp_path / "plan.html").read_text()
    assert all(f"ffn.{name}" in told and f"ffn.{name}" in page for name in ("gate", "up", "down"))
    assert main(["plan", "llama@1m", "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)[0]["layers"]
    assert sum(row["parameters"] for row in layer["rows"]) == layer["parameters"] and layer["times"] == 4
