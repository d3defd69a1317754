"""Readings of an encoder and decoder: attention of each token to the source, and readings of tokens only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.lens.inspection import inspect
from glassformer.model import Model
from tests.refused import refused

TINY = "layers=2+d_model=24+heads=3+vocab_size=257+context=120"
TOKENS, SOURCE = torch.randint(257, (1, 7)), torch.randint(257, (1, 11))


@pytest.fixture(params=["t5", "bart"])
def towers(request: pytest.FixtureRequest) -> Model:
    model = gf.preset(f"{request.param}@1m+{TINY}").build(3).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    return model


def test_the_weights_are_those_of_the_patterns(towers: Model) -> None:
    seen = inspect(towers, TOKENS, source=SOURCE)
    patterns = gf.capture(towers.reading(SOURCE), TOKENS, "layers.*.mixer.pattern")
    assert [one.layer for one in seen.crossings] == [1, 3] and sorted(seen.attention) == [0, 2]
    for one in seen.crossings:
        torch.testing.assert_close(one.maps, patterns[f"layers.{one.layer}.mixer.pattern"][0])
        torch.testing.assert_close(one.maps.sum(-1), torch.ones(3, 7))
    best = seen.crossings[1].mean[4].topk(2)
    assert seen.read_at(seen.crossings[1], 4, 2) == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    logits = towers(TOKENS, source=SOURCE)
    assert seen.top_ids[-1, :, 0].tolist() == logits[0].argmax(-1).tolist()


def test_a_long_source_is_cut(towers: Model) -> None:
    seen = inspect(towers, TOKENS, source=torch.randint(257, (110,)))
    assert seen.crossings[0].maps.shape == (3, 7, 96) and len(seen.source) == 110
    assert "the first 96 of the source" in seen.html()


def test_source_is_required_with_an_encoder_and_refused_without(towers: Model) -> None:
    with refused(code="missing", field="source"):
        inspect(towers, TOKENS)
    with refused(code="conflict", field="source"):
        inspect(gf.preset(f"gpt2@1m+{TINY}").build(), TOKENS, source=SOURCE)
    with refused(code="conflict", field="source"):
        gf.preset(f"gpt2@1m+{TINY}").build().reading(SOURCE)


def test_reading_model_has_a_fixed_source(towers: Model) -> None:
    """It shares all else, another source may still be given, and a state keeps what it read."""
    reading, other = towers.reading(SOURCE), torch.randint(257, (2, 5))
    both = TOKENS.expand(2, -1)
    assert torch.equal(reading(both), towers(both, source=SOURCE.expand(2, -1)))
    assert torch.equal(reading(both, source=other), towers(both, source=other))
    state = reading.init_state(1, 8, memory_len=11)
    reading(TOKENS[:, :3], state)
    torch.testing.assert_close(reading(TOKENS[:, 3:], state), towers(TOKENS, source=SOURCE)[:, 3:])
    assert {id(weight) for weight in reading.parameters()} == {id(weight) for weight in towers.parameters()}


def test_the_page_has_both_texts(towers: Model) -> None:
    page = inspect(towers, TOKENS, source=SOURCE, name="it").html()
    assert "What is read of the source" in page and page.count('<td style="--a:') == 7 * 11
    assert "What is read of the source" not in inspect(gf.preset(f"gpt2@1m+{TINY}").build(), TOKENS).html()


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"transformer@1m+{TINY}"
    given = ["inspect", name, "--source", "one two", "--text", "ab", "--out", str(tmp_path)]
    assert main([*given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["source"][:7] == list("one two") and len(said["source"]) == 8  # and its end
    assert [row["layer"] for row in said["reads"]] == [1, 3]
    assert main(given) == 0
    assert "layer 3 reads of the source" in capsys.readouterr().out
    for wrong, sentence in (
        (["inspect", name, "--text", "ab"], "--source TEXT"),
        (["inspect", f"gpt2@1m+{TINY}", "--text", "ab", "--source", "x"], "leave --source out"),
        (["inspect", name, "--source", "x"], "source is for text"),
        (["inspect", name, "--text", "ab", "--source", ""], "source is empty"),
        (["inspect", name, "--text", "ab", "--source", "x" * 200], "reads 120"),
    ):
        assert main(wrong) == 2
        assert sentence in capsys.readouterr().err
