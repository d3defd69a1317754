"""The table of components is the module's parameters, its formulas are arithmetic, and FLOPs add up."""

from __future__ import annotations

import ast
import json
import operator

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.planning.counts import Counts

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
        assert value(put_in) == one.parameters, "a letter stands for one number"


def test_the_guides_figures():
    """By hand: LLaMA-7B is 32 (4 d^2 + 3 d f) and two tables; Qwen3-8B's ffn is two thirds, its head 7.6 %."""
    rows = {one.name: one for one in Counts(gf.preset("llama-7b")).components}
    assert rows["mixer"].symbols == "L * (4 * d * d)" and rows["ffn"].symbols == "L * (3 * f * d)"
    assert rows["mixer"].parameters == 32 * 4 * 4096**2 and rows["head"].parameters == 32_000 * 4096
    shares = {one.name: round(100 * one.share, 1) for one in Counts(gf.preset("qwen3-8b")).components}
    assert shares["ffn"] == 66.4 and shares["head"] == 7.6


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "olmoe-1b-7b"])
def test_flops_part_from_6n_where_it_is_said(name: str):
    config = gf.preset(name)
    flops = Counts(config).flops(2048)
    assert flops.training == 3 * config.flops(2048)
    assert flops.six_n - flops.idle + flops.unlike + flops.scores == pytest.approx(flops.training)
    queries = {"gpt2": 12 * 768, "llama-3-8b": 32 * 4096, "mixtral-8x7b": 32 * 4096, "olmoe-1b-7b": 16 * 2048}[name]
    assert flops.scores == pytest.approx(12 * queries * 2047)  # 12 L q s, less that of a single token
    assert flops.idle == 6 * (config.num_params() - config.active_params())


def test_what_fits_is_what_fits():
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
