"""The objective seq2seq: pairs become sources and targets, alike for every seed, step and rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.errors import Code
from glassformer.parts.loss import IGNORED
from glassformer.text import ByteTokenizer
from glassformer.text.languages import pairs
from glassformer.training import train
from glassformer.training.objectives.pairs import PairBatches, Pairs, SourceLayout
from tests.refused import refused

BYTES = ByteTokenizer()
END = BYTES.eos_id
TINY = "transformer@1m+layers=2+d_model=96+heads=4"


def stream(*texts: str) -> np.ndarray:
    return np.concatenate([np.append(BYTES.encode(text), END) for text in texts])


def test_a_batch_is_the_pairs():
    batch = Pairs(stream("ab\tc", "d\tefg"), BYTES).batch([0, 1])
    assert batch.beside["source"].tolist() == [[97, 98, END], [100, END, END]]
    assert batch.beside["source_documents"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.inputs.tolist() == [[END, 99, END, END], [END, 101, 102, 103]]
    assert batch.targets.tolist() == [[99, END, IGNORED, IGNORED], [101, 102, 103, END]]


def test_a_model_without_an_encoder_reads_the_source_first():
    """The scored targets are equal; a model with a prefix is given the positions of the prefix."""
    pairs_ = stream("ab\tc", "d\tefg")
    for layout in (SourceLayout(False), SourceLayout(False, prefix=True)):
        batch = Pairs(pairs_, BYTES, layout).batch([0, 1])
        assert batch.inputs.tolist() == [[97, 98, 9, 99, END], [100, 9, 101, 102, 103]]
        x = IGNORED
        assert batch.targets.tolist() == [[x, x, 99, END, x], [x, 101, 102, 103, END]]
        told = {"global_tokens": [[True, True, True, False, False], [True, True, False, False, False]]}
        assert {name: one.tolist() for name, one in batch.beside.items()} == (told if layout.prefix else {})


def test_counted_tokens_equal_those_in_batches():
    found = PairBatches(Pairs(stream(*("\t".join(pair) for pair in pairs("numbers", 30))), BYTES), 4, seed=1)
    sources = targets = 0
    for step in range(20):  # into a third epoch
        assert found.read(step) == {"tokens": sources + targets, "sources": sources, "targets": targets}
        batch = found[step]
        sources += int(batch.beside["source_documents"].sum())
        targets += int((batch.targets != IGNORED).sum())
    assert found.read(3)["tokens"] < found.read(20)["tokens"] == sources + targets
    assert found.read(30)["tokens"] == 30 * found.tokens_per_step == 4 * found.pairs.sizes.sum()


def test_pieces_and_copies_keep_their_sources():
    batch = Pairs(stream("ab\tc", "d\tefg", "h\ti"), BYTES).batch([0, 1, 2]).to("cpu")
    found = list(batch.pieces(2))
    assert [share for _, share in found] == [6 / 8, 2 / 8]
    for name, whole in batch.beside.items():
        assert torch.equal(torch.cat([piece.beside[name] for piece, _ in found]), whole)
    inputs, targets = batch
    assert inputs.shape == targets.shape


def test_an_epoch_has_each_pair_once_and_ranks_divide_it():
    found = Pairs(stream(*("\t".join(pair) for pair in pairs("reversal", 12))), BYTES)
    one = PairBatches(found, 4, seed=3)
    assert sorted(number for step in range(3) for number in one.numbers(step)) == list(range(12))
    halves = [PairBatches(found, 2, 3, rank, 2) for rank in (0, 1)]
    for step in range(5):
        assert one.numbers(step) == halves[0].numbers(step) + halves[1].numbers(step)


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (["a\tb", "c"], "conflict"),
        (["a\tb\tc", "d"], "conflict"),
        (["a\tb", "\tc"], "range"),
        (["a\t", "b\tc"], "range"),
    ],
    ids=str,
)
def test_invalid_pairs_are_refused(texts: list[str], code: Code):
    with refused(code=code, field="data"):
        Pairs(stream(*texts), BYTES)


@pytest.mark.parametrize(
    ("model", "context", "code", "field"),
    [
        ("llama@1m+bidirectional", 32, "causal", "layers.0.mixer"),
        (f"{TINY}+prefix", 32, "causal", "layers.0.mixer"),
        ("transformer@1m", 8, "range", "context"),
        ("llama@1m", 16, "range", "context"),
    ],
)
def test_seq2seq_refuses_unfit_models_and_contexts(model: str, context: int, code: Code, field: str):
    recipe: dict[str, Any] = {"tokens": 64, "batch_size": 2, "context": context, "objective": "seq2seq"}
    with refused(code=code, field=field):
        train(gf.preset(model), "pairs:reversal", recipe)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("encoder.context=16", "encoder.context"),
        (
            "encoder.embedding.position.kind=learned+encoder.embedding.position.length=16",
            "encoder.embedding.position.length",
        ),
        ("encoder.embedding.tied=false+encoder.vocab_size=100", "encoder.vocab_size"),
    ],
)
def test_an_encoder_too_small_for_the_text_is_refused(change: str, field: str):
    recipe: dict[str, Any] = {"steps": 1, "batch_size": 2, "context": 32, "objective": "seq2seq", "device": "cpu"}
    with refused(code="range", field=field) as caught:
        train(gf.preset(f"{TINY}+{change}"), "pairs:reversal", recipe, tokenizer="byte")
    assert str(caught.value).startswith(f"{caught.value.field}=")


def test_budgets_of_one_text_are_refused(tmp_path: Any):
    asked: dict[str, Any] = {"data": "pairs:reversal", "objective": "seq2seq", "out": str(tmp_path / "out")}
    for budget in ({"flops": 1e9}, {"steps": 10}, {"tokens": 100, "match": "flops"}):
        with refused(code="conflict", field="objective"):
            gf.compare(["transformer@1m"], **budget, **asked)
    with refused(code="conflict", field="flops"):
        train(gf.preset("transformer@1m"), "pairs:reversal", {"flops": 1e9, "objective": "seq2seq"})


def test_a_run_is_watched_on_both_sides(tmp_path: Any):
    """The looks inside have the source that the step had."""
    recipe: dict[str, Any] = {"tokens": 150, "batch_size": 4, "context": 16, "objective": "seq2seq", "watch": 1}
    recipe |= {"evaluation_tokens": 64}
    run = train(gf.preset(TINY), "pairs:reversal", {**recipe, "device": "cpu"}, tmp_path / "run")
    assert run.read["sources"] + run.read["targets"] == run.tokens >= 150 and run.steps < 5
    rows = gf.dynamics.read_records(tmp_path / "run" / "dynamics.jsonl")
    known = {what: places.keys() for what, places in rows[0]["statistics"].items()}
    for what in ("gradient_norm", "update_ratio", "spectral_norm", "effective_rank"):
        assert {"encoder.layers.0.mixer.q", "encoder.layers.0.ffn.up", "layers.1.mixer.k"} <= known[what]
    assert {"encoder.layers.0.resid_post", "layers.0.resid_post"} <= known["token_cosine"]


@pytest.mark.slow
def test_kinds_of_models_are_compared_on_the_same_pairs(tmp_path: Any):
    """Encoder and decoder, a decoder with a prefix and a plain one: scored on the same targets."""
    plain = "gpt2@1m+layers=4+d_model=96+heads=4"
    kinds = [TINY, f"{plain}+prefix", plain]
    found = gf.compare(
        kinds, "pairs:reversal", tokens=400, batch_size=4, context=32, objective="seq2seq", allow_unmatched=True,
        evaluation_tokens=256, device="cpu", out=str(tmp_path / "out"),
    ).to_dict()  # fmt: skip
    assert [run["status"] for run in found["runs"]] == ["ok"] * 3
    assert len({run["validation"]["tokens"] for run in found["runs"]}) == 1
    assert len({run["train"]["tokens"] for run in found["runs"]}) == 1
    assert [run["generation"] is None for run in found["runs"]] == [False] * 3
    assert len({run["answers"]["pairs"] for run in found["runs"]}) == 1  # and asked for the same ones
    assert all(run["answers"]["exact"] is not None for run in found["runs"])


def test_a_step_learns_from_both_sides(tmp_path: Any):
    """The encoder too: its weights move."""
    config = gf.preset(TINY)
    recipe: dict[str, Any] = {"steps": 2, "batch_size": 4, "context": 16, "objective": "seq2seq", "seed": 0}
    run = train(config, "pairs:reversal", {**recipe, "learning_rate": 1e-3, "device": "cpu", "evaluation_tokens": 64})
    fitted = run.model.config.build(seed=0)
    for name, weight in fitted.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(weight, run.model.get_parameter(name)), name


@pytest.mark.parametrize("different", [1, 40])
def test_pairs_that_are_alike_cannot_be_held_out_whole(different: int, tmp_path: Any):
    lines = [f"cats {n % different}\tdogs" for n in range(40)]
    (tmp_path / "pairs.txt").write_text("<|endoftext|>".join(lines))
    train_on = {"steps": 1, "batch_size": 2, "context": 32, "objective": "seq2seq", "tokenizer": "byte", "threads": 1}
    if different > 1:
        assert gf.train("marian@0.1m", str(tmp_path / "pairs.txt"), **train_on).status == "ok"
        return
    with refused(code="conflict", field="data") as caught:
        gf.train("marian@0.1m", str(tmp_path / "pairs.txt"), **train_on)
    assert "different" in str(caught.value.expected)
