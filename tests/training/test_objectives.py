"""Each objective makes the batches of its paper, refuses models that it cannot train, and resumes bit for bit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.errors import Code
from glassformer.naming import preset
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, Batches, TextData
from glassformer.training import Interrupted, MaskedConfig, NextTokenConfig, Recipe, checkpoint, train
from glassformer.training.objectives.base import prose, whole_words
from glassformer.training.objectives.corrupted import CorruptedBatches
from glassformer.training.objectives.masked import Masking
from glassformer.training.overrides import with_recipe
from glassformer.training.request import prepare_run
from tests.refused import refused
from tests.training.test_loop import TEN, interrupt_at, told

TINY = "gpt2@1m+layers=2+d_model=32+heads=2"
ENCODER = f"{TINY}+bidirectional"


def batches_of(
    text: TextData, how: MaskedConfig, batch: int, context: int, seed: int = 0, **rank: int
) -> CorruptedBatches:
    text = how.with_tokens(text)
    hide = Masking.of(how, text.tokenizer).batch
    return CorruptedBatches(hide, "masked", text.train.tokens, batch, context, seed, **rank)


def test_masks_fall_as_those_of_the_published_collator(text: TextData, tmp_path: Path):
    """`DataCollatorForLanguageModeling`, whose 80/10/10 is BERT's: the same shares, to four standard deviations."""
    transformers = pytest.importorskip("transformers")
    how = MaskedConfig(p=0.15)
    with_mask = how.with_tokens(text)
    with_mask.tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.mask_token_id == with_mask.tokenizer.mask_id == text.tokenizer.vocab_size
    theirs.pad_token = theirs.mask_token  # it wants one; rows of one length need none
    collator = transformers.DataCollatorForLanguageModeling(theirs, mlm_probability=0.15)
    tokens = Batches(text.train, 16, 128)[0].inputs
    n = 40 * tokens.numel()
    torch.manual_seed(0)

    def shares(inputs: torch.Tensor, labels: torch.Tensor, plain: torch.Tensor) -> np.ndarray:
        chosen = labels != IGNORED
        assert torch.equal(labels[chosen], plain[chosen]) and torch.equal(inputs[~chosen], plain[~chosen])
        masked = chosen & (inputs == theirs.mask_token_id)
        return np.array([chosen.sum(), masked.sum(), (chosen & (inputs == plain)).sum()], float)

    found, expected = np.zeros(3), np.zeros(3)
    made = batches_of(text, how, 16, 128)
    for step in range(40):
        plain = Batches(text.train, 16, 128)[step].inputs
        found += shares(*made[step], plain)
        their = collator([{"input_ids": row} for row in plain])
        expected += shares(their["input_ids"], their["labels"], plain)
    scatter = np.sqrt(2 * n * (p := np.array([0.15, 0.12, 0.015])) * (1 - p))
    assert (np.abs(found - expected) < 4 * scatter).all()
    assert (np.abs(found - n * np.array([0.15, 0.15 * (0.8 + 0.1 / 20), 0.15 * (0.1 + 0.1 / 20)])) < 4 * scatter).all()


def test_random_tokens_are_of_the_whole_vocabulary(text: TextData):
    how = MaskedConfig(p=0.5, mask=0.0, random=1.0)
    made = batches_of(text, how, 16, 128)[0]
    assert set(made.inputs[made.targets != IGNORED].tolist()) == set(range(text.tokenizer.vocab_size + 1))


def test_batches_are_a_function_of_seed_step_and_rank(text: TextData):
    how = MaskedConfig()
    one, again = batches_of(text, how, 4, 32, 5), batches_of(text, how, 4, 32, 5)
    again[3]
    for a, b in zip(one[7], again[7], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one[7].inputs, batches_of(text, how, 4, 32, 6)[7].inputs)
    halves = [batches_of(text, how, 2, 32, 5, rank=rank, world=2)[7] for rank in range(2)]
    for whole, parts in zip(one[7], zip(*halves, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
    plain = Batches(text.train, 4, 32, 5)
    epoch = math.ceil(plain.windows / 4)
    same = {tuple(row.tolist()) for row in plain[0].inputs}
    later = {tuple(row.tolist()) for step in range(epoch, epoch + 2) for row in plain[step].inputs}
    assert len(same) == 4 and later  # a window comes back with other masks: the key is its sequence number
    first, later_key = (Masking.of(how, how.with_tokens(text).tokenizer).row(np.arange(12), key) for key in (1, 2))
    assert first[0].tolist() != later_key[0].tolist() or first[1].tolist() != later_key[1].tolist()


def test_special_tokens_are_not_chosen_and_something_always_is(text: TextData):
    masking = Masking.of(how := MaskedConfig(p=0.3), how.with_tokens(text).tokenizer)
    special = int(masking.special[0])
    row = np.array([special, 1, special, 2, special, special])
    for key in range(300):
        _, targets = masking.row(row, key)
        chosen = np.flatnonzero(targets != IGNORED)
        assert len(chosen) and set(chosen) <= {1, 3}
    hidden, targets = masking.row(np.full(5, special), 0)
    assert (targets != IGNORED).any() and hidden.shape == (5,)


def test_spans_take_their_share_in_stretches(text: TextData):
    """The chosen tokens are exactly the share; they form few stretches; each stretch is treated alike."""
    for span, longest in ((1.0, 1.5), (5.0, 9.0)):
        masking = Masking.of(how := MaskedConfig(p=0.15, span=span), how.with_tokens(text).tokenizer)
        chosen, runs = 0, 0
        for key in range(200):
            hidden, targets = masking.row(np.arange(400) % 15 + 1, key)
            there = targets != IGNORED
            chosen, runs = chosen + int(there.sum()), runs + int((np.diff(there.astype(int), prepend=0) == 1).sum())
            if span > 1:
                assert there.sum() == 60
                split = (np.diff((hidden == masking.mask_id).astype(int)) != 0) & there[1:] & there[:-1]
                assert split.sum() <= 8  # only where two stretches touch, or a random token is the mask
        assert 1.0 < chosen / runs < longest and (span == 1 or chosen / runs > 3.0)


def test_microbatches_are_weighted_by_their_targets(text: TextData):
    """Micro-batches have the loss and the gradients of the whole, though masks are not spread evenly."""
    with_mask = MaskedConfig().with_tokens(text)
    built = preset(ENCODER).replace(vocab_size=with_mask.tokenizer.vocab_size, context=16).build(seed=0)
    batch = batches_of(text, MaskedConfig(), 6, 16)[0]
    counts = (batch.targets != IGNORED).sum(1)
    assert counts.unique().numel() > 1
    built.loss(*batch).backward()
    whole = [p.grad.clone() for p in built.parameters() if p.grad is not None]
    built.zero_grad()
    for piece, share in batch.pieces(2):
        (built.loss(*piece) * share).backward()
    torch.testing.assert_close([p.grad for p in built.parameters() if p.grad is not None], whole)
    even = Batch(batch.inputs, batch.inputs)
    assert [share for _, share in even.pieces(2)] == [2 / 6] * 3


def test_a_masked_run_learns_and_resumes_bit_for_bit(text: TextData, tmp_path: Path):
    recipe = {**TEN, "objective": "masked:0.3", "learning_rate": 3e-3}
    whole = train(preset(ENCODER), text, recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(preset(ENCODER), text, recipe, tmp_path / "two", callbacks=[interrupt_at(5)])
    again = train(preset(ENCODER), text, recipe, tmp_path / "two", resume=True)
    assert told(tmp_path / "two") == told(tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert whole.validation == again.validation and whole.validation is not None
    assert whole.validation["bits_per_byte"] is None and whole.validation["tokens"] > 0
    first, *_, last = [row["validation"]["loss"] for row in whole.metrics if "validation" in row]
    assert last < first
    assert whole.config.vocab_size == text.tokenizer.vocab_size + 1 and whole.tokenizer.mask_id is not None
    assert Recipe.from_file(tmp_path / "whole" / "recipe.yaml").objective == MaskedConfig(p=0.3)
    with refused(code="changed", field="objective.p"):
        train(preset(ENCODER), text, {**recipe, "objective": "masked:0.2"}, tmp_path / "two", resume=True)
    assert checkpoint.latest(tmp_path / "two") is not None


def test_held_out_masks_are_the_same_for_every_seed(text: TextData):
    how = MaskedConfig()
    windows = [how.evaluation(how.with_tokens(text), 32, 512, batch) for batch in (4, 16)]
    rows = [torch.cat([torch.stack(part.batch, 1) for part in one]) for one in windows]
    assert torch.equal(*rows) and not any(part.bytes.any() for part in windows[0])


REFUSED: list[tuple[str, dict[str, Any], Code, str]] = [
    (TINY, {"objective": "masked:0.15"}, "causal", "objective"),
    (ENCODER, {}, "causal", "layers.0.mixer"),
    (ENCODER, {"objective": {"kind": "masked", "token": "<hidden>"}}, "unknown", "objective.token"),
    (ENCODER, {"objective": "masked:1.5"}, "range", "objective.p"),
    (ENCODER, {"objective": "masked:half"}, "type", "objective.p"),
    (ENCODER, {"objective": "next_token:2"}, "conflict", "objective"),
    (ENCODER, {"objective": "maskd"}, "unknown", "objective"),
    (ENCODER, {"objective": {"kind": "masked", "mask": 0.95}}, "conflict", "objective"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "code", "field"), REFUSED)
def test_objectives_refuse_unfit_models_and_fields(
    name: str, fields: dict[str, Any], code: Code, field: str, text: TextData
):
    with refused(code=code, field=field) as caught, warnings.catch_warnings():
        prepare_run(preset(name), text, {**TEN, **fields})
    assert "\n" not in str(caught.value)


def test_an_expression_sets_fields_of_the_objective():
    recipe = with_recipe(Recipe.of(steps=1), {"objective": "masked:0.2", "objective.span": "3"})
    assert recipe.objective == MaskedConfig(p=0.2, span=3.0)
    assert with_recipe(recipe, {"objective": "next_token"}).objective == NextTokenConfig()


@pytest.mark.slow
def test_encoders_are_compared_under_the_same_masks(text: TextData, tmp_path: Path):
    """The report has held-out losses in a table, and no generation. A causal arm may take part together with a
    bidirectional one, but not without."""
    asked: dict[str, Any] = {**TEN, "tokens": 256, "objective": "masked:0.3"}
    with refused(code="causal", field="objective"):
        gf.compare([TINY], text, out=tmp_path / "alone", **asked)
    with refused(code="conflict", field="recipe.objective"):
        gf.compare([ENCODER, f"{ENCODER}+recipe.objective=masked:0.5"], text, out=tmp_path, **asked)
    made = gf.compare([ENCODER, f"{ENCODER}+rope"], text, out=tmp_path, **asked)
    found = made.results
    assert found.status == "complete" and [run.status for run in found.runs] == ["ok", "ok"]
    assert {run.validation.tokens for run in found.runs if run.validation} and len(found.runs) == 2
    assert all(run.generation is None and run.complete for run in found.runs)
    summary: Any = next(made.lines())
    assert all(float(str(loss)) > 0 for loss in summary.columns[2].cells)
    ways = gf.compare([ENCODER, TINY], text, out=tmp_path / "ways", **asked).results
    assert [run.status for run in ways.runs] == ["ok", "ok"]
    again = gf.compare([ENCODER, f"{ENCODER}+rope"], text, out=tmp_path, **asked)
    assert [run.train.seconds for run in again.runs if run.train] == [
        run.train.seconds for run in found.runs if run.train
    ]


def test_a_model_of_images_is_refused_before_its_context_is_asked(text: TextData, tmp_path: Path):
    with refused(code="conflict", field="head"):
        train(preset("vit-base@1m"), text, {**TEN, "context": 32}, tmp_path)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("to be or not to be", "to be or not to"),
        ("to be or not ", "to be or not"),
        ("answers to BAPTI", "answers to"),
        ("a " + "x" * 20, "a " + "x" * 20),  # half of it is one word
        ("", ""),
    ],
)
def test_prompt_ends_where_a_word_does(text: str, prompt: str):
    ids = np.frombuffer(text.encode(), dtype=np.uint8)
    kept = whole_words(ids, lambda some: bytes(some).decode())
    assert bytes(kept).decode() == prompt


def test_prompt_starts_with_a_word_of_prose():
    """A table, then half a word, then prose; the table by itself stays as it is."""
    table, length = "+-----+-----+\n| 1 | 2 |\n" * 3, 16
    ids = np.frombuffer(f"{table}ing of the cat that sat on a mat in the sun all day".encode(), dtype=np.uint8)
    found = bytes(prose(ids, length, lambda some: bytes(some).decode())).decode()
    assert len(found) == length and found.split()[0] in ("of", "the", "cat", "that", "sat") and "+" not in found
    rows = np.frombuffer((table * 9).encode(), dtype=np.uint8)
    assert bytes(prose(rows, length, lambda some: bytes(some).decode())).decode() == table[:length]
