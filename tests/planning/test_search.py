"""Layouts that fit: they do, the fastest first; if no layout fits, the smallest number of accelerators is reported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.parallel.layout import Layout
from glassformer.planning import search, training
from glassformer.planning.machines import cluster
from glassformer.planning.search import FOUND, TRIED, find_layouts
from glassformer.training.optimizers import AdamWConfig
from tests.refused import refused

CONFIG = gf.preset("llama@1m+vocab_size=512+layers=2")


def among(memory: float, batch: int = 8, node: int = 4, config: gf.ModelConfig = CONFIG, most: int = TRIED):
    """Finds layouts on 4 accelerators of `memory` bytes each, without a driver's share."""
    on = cluster(f"h100:{node}", nodes=4 // node)
    on = replace(on, machine=on.machine.replace(memory=memory, device="cpu"))
    return find_layouts(config, batch, 64, torch.bfloat16, AdamWConfig(), on, most)


@pytest.fixture(autouse=True)
def _without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of tensors only: a process of Python is larger than the machines of these tests."""
    for module in (search, training):
        monkeypatch.setattr(module, "outside", lambda *_: 0)


def test_found_layouts_fit_and_the_fastest_is_first():
    plenty, little = among(80e9), among(3.5e6)
    for found in (plenty, little):
        assert 0 < len(found.fitting) <= FOUND
        assert all(plan.memory["needed"] <= found.on.machine.memory for plan in found.fitting)
        assert [plan.layout.ranks for plan in found.fitting] == [4] * len(found.fitting)
        seconds = [plan.time.seconds for plan in found.fitting if plan.time]
        assert seconds == sorted(seconds)
    assert not plenty.too_large and little.too_large
    assert all(one.needed > 3.5e6 and one.reason for one in little.too_large)
    assert seconds[0] >= min(plan.time.seconds for plan in plenty.fitting if plan.time)


def test_fewest_accelerators_are_named_if_no_layout_fits():
    found = among(2e6)
    assert not found.fitting and found.smallest is not None
    assert found.exhausted and found.smallest.ranks > 4 and found.smallest.node == 4
    assert found.smallest.layout.ranks == found.smallest.ranks and found.smallest.layout.tp <= 4
    found.smallest.layout.check(CONFIG, found.smallest.batch, 64)
    assert among(1e4).smallest is None


def test_a_large_batch_fits_with_fewer_sequences_at_once():
    """A microbatch has the most of a rank's 64 sequences that fit, since weights are gathered for each microbatch."""
    found = among(10e6, 256, node=1, config=gf.preset("llama@1m+vocab_size=512+layers=1"))
    (best,) = (plan for plan in found.fitting if plan.layout.zero == 3)
    assert best.layout.micro == 8 and 16 in {one.layout.micro for one in found.too_large}


def test_limited_search_tries_the_leanest_and_is_not_exhausted():
    found = among(6e6, 256, most=0)
    assert not found.exhausted and [plan.recompute for plan in found.fitting] == ["full"]
    found = among(2.5e6, 256, most=0)
    assert not found.exhausted and found.smallest and found.smallest.ranks > 4


def test_nodes_stay_as_large_as_they_are():
    """Tensors are divided within a node, and a batch of 8 is not one of 32."""
    same, more = among(2.5e6, node=1).smallest, among(2e6, node=1).smallest
    assert same and more and (same.node, same.layout.tp, same.batch) == (1, 1, 8)
    assert more.batch >= more.layout.dp > 8


def test_a_batch_that_no_layout_divides_is_refused():
    with refused(code="conflict", field="batch"):
        find_layouts(CONFIG, 3, 64, torch.bfloat16, AdamWConfig(), cluster("h100:64"))


def test_layouts_are_written_as_they_are_read():
    for layout in (Layout(), Layout.of("fsdp=8,tp=2,sp=1,recompute=full"), Layout.of("pp=4,interleave=2,micro=1")):
        assert Layout.of(str(layout)) == layout


def test_the_verb_finds(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "llama@1m", "--find", "--batch", "2", "--context", "64", "--machine", "h100:2"]
    assert main([*command, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["fitting"] and facts["ranks"] == 2
    assert main(command) == 0
    assert "tokens a second" in capsys.readouterr().out
    assert main(["plan", "llama@1m", "--find"]) == 2
    assert main([*command, "--loss", "whole"]) == 2
