"""Layouts that fit: they do, the fastest first; what does not is said, and on how many it would."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import RequestError
from glassformer.planning.layout import Layout
from glassformer.planning.machines import cluster
from glassformer.planning.search import FOUND, find
from glassformer.training.optimizers import AdamWConfig

CONFIG = gf.preset("llama@1m+vocab_size=512+layers=2")


def among(memory: float, batch: int = 8):
    """In a node of 4 with so much memory each."""
    on = cluster("h100:4")
    on = replace(on, machine=on.machine.vary(memory=memory))
    return find(CONFIG, batch, 64, torch.bfloat16, AdamWConfig(), on)


def test_what_is_found_fits_and_the_fastest_is_first():
    plenty, little = among(80e9), among(3.5e6)
    for found in (plenty, little):
        assert 0 < len(found.fitting) <= FOUND
        assert all(plan.memory["reserved"] <= found.on.machine.memory for plan in found.fitting)
        assert [plan.layout.ranks for plan in found.fitting] == [4] * len(found.fitting)
        seconds = [plan.time.seconds for plan in found.fitting if plan.time]
        assert seconds == sorted(seconds)
    assert not plenty.too_large and little.too_large
    assert all(one.reserved > 3.5e6 / 1.06 and one.reason for one in little.too_large)
    assert seconds[0] >= min(plan.time.seconds for plan in plenty.fitting if plan.time)


def test_where_nothing_fits_the_fewest_that_would_are_named():
    found = among(2e6)
    assert not found.fitting and found.smallest is not None
    ranks, layout = found.smallest
    assert ranks > 4 and layout.ranks == ranks
    assert among(1e4).smallest is None


def test_a_batch_that_no_layout_divides_is_refused():
    with pytest.raises(RequestError, match="accelerators would do"):
        find(CONFIG, 3, 64, torch.bfloat16, AdamWConfig(), cluster("h100:64"))


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
