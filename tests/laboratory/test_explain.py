"""Every word of the grammar and every term of the glossary is explained, and worked examples have their numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.dynamics.diagnosis import HEADINGS
from glassformer.errors import RequestError
from glassformer.laboratory.evidence import known
from glassformer.names.explained import check_explained, terms, texts
from glassformer.names.known import SHORT_NAMES

ROOT = Path(__file__).parents[2]
WORDS = [*SHORT_NAMES, *(name for name in texts() if name not in SHORT_NAMES)]


def steps(word: str) -> dict[str, tuple[tuple[float, ...], ...]]:
    return {step.name: step.values for step in gf.explain(word).steps}


def test_every_word_and_every_term_is_explained():
    for word in WORDS:
        found = gf.explain(word)
        assert len(found.what) > 30 and (found.formula or word not in texts()), word
        assert (ROOT / found.page).is_file() and (not found.source or (ROOT / found.source).is_file()), word
        assert set(found.claims) <= set(known()), word
        assert str(found).startswith(word)
    for term in terms():
        assert gf.explain(term).what, term


def test_texts_are_those_of_words():
    assert {name for name, one in texts().items() if one.get("kind") != "topic"} <= set(SHORT_NAMES)


@pytest.mark.parametrize(
    ("word", "has", "lacks"),
    [
        ("rope", "llama-7b", "gpt2"), ("alibi", "bloom-7b1", "llama-7b"), ("gqa", "llama-3-8b", "falcon-7b"),
        ("mqa", "falcon-7b", "llama-3-8b"), ("moe", "mixtral-8x7b", "mistral-7b"), ("window", "mistral-7b", "gpt2"),
        ("swiglu", "llama-7b", "gpt2"), ("post", "bert-base", "gpt2"),
    ],
)  # fmt: skip
def test_presets_that_have_a_part_are_those_of_the_papers(word: str, has: str, lacks: str):
    used = gf.explain(word).used_by
    assert has in used and lacks not in used


def test_costs_are_those_of_the_change():
    found = gf.explain("gqa").costs
    assert found is not None and found.state_bytes[1] == found.state_bytes[0] / 2
    rms = gf.explain("layernorm").costs
    assert rms is not None and rms.parameters[1] - rms.parameters[0] == 9 * 128, "a shift for each of 9 norms"


def test_three_tokens_have_the_weights_that_the_code_of_the_guide_gives():
    found = steps("attention")
    x = torch.eye(3, 4)
    torch.manual_seed(42)
    maps = [torch.randn(4, 4) for _ in range(3)]
    hand = torch.softmax((x @ maps[0]) @ (x @ maps[1]).T / 2, -1)
    weights = torch.tensor(found["weights = softmax(scores)"])
    assert torch.allclose(weights, hand, atol=1e-5)
    assert [round(one, 4) for one in weights[0].tolist()] == [0.4071, 0.0492, 0.5437]
    masked = found["weights = softmax(scores), causal"]
    assert [round(one, 4) for one in masked[1]] == [0.9310, 0.0690, 0.0]
    assert torch.allclose(torch.tensor(found["z = weights v"]), hand @ (x @ maps[2]), atol=1e-4)


def test_worked_examples_have_the_numbers_of_hand_arithmetic():
    soft = steps("softmax")
    assert [round(one, 3) for one in soft["softmax([2, 1, .1] / 0.5)"][0]] == [0.864, 0.117, 0.019]
    assert [round(one, 3) for one in soft["softmax([1000, 1000.1, 1000.2])"][0]] == [0.301, 0.332, 0.367]
    assert [round(one, 4) for one in steps("alibi")["slopes of 12 heads"][0][8:]] == [0.7071, 0.3536, 0.1768, 0.0884]
    assert steps("alibi")["bias of the first of 8 heads, query by key"][2] == (-1.0, -0.5, 0.0, 0.0)
    flops = [rows[0][0] for rows in steps("flops").values()]
    assert flops[-1] == 8_053_063_680 == sum(flops[:-1])
    assert [round(one, 4) for one in steps("rope")["(1, 0) at positions 0, 1, 2, 3"][1]] == [0.5403, 0.8415]
    assert [round(one, 4) for one in steps("layernorm")["LayerNorm(x)"][0]] == [-1.3416, -0.4472, 0.4472, 1.3416]


def test_explanation_has_numbers_of_the_guide_and_ours(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "attention", "--guide"]) == 0
    told = capsys.readouterr().out
    assert ".4084" in told and "0.4071" in told
    assert main(["explain", "+GQA:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["word"] == "gqa"


def test_an_unknown_word_is_refused_without_torch():
    with pytest.raises(RequestError) as refused:
        gf.explain("ropee")
    assert refused.value.code == "unknown" and refused.value.field == "word" and "rope" in str(refused.value)
    program = (
        "import sys; from glassformer.cli import main; code = main(['explain', 'ropee']); "
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 2


def test_words_of_printed_tables_are_explained():
    inspected = ("layer", "depth", "entropy", "first", "before", "itself", "logit")
    changed = gf.preset("gpt2@0.1m").diff(gf.preset("llama@0.1m"))
    fields = {path.rpartition(".")[2] for path in changed} - {"kind"}
    for word in (*HEADINGS, *inspected, *fields, "nat", "held-out", "attention sinks", "sigma", "half", "arms"):
        assert len(gf.explain(word).what) > 30, word
    assert gf.explain("temperature").what.startswith(terms()["temperature"])
    assert gf.explain("kv cache").formula


def test_words_of_a_comparison_are_explained():
    from glassformer.comparison.terminal import HEADS

    for word in (*HEADS, "equivalent", "no difference shown", "barely trained", "diverged", "interval", "seed"):
        assert check_explained(word) in terms() or check_explained(word) in texts(), word
