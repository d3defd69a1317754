"""Objectives that spoil a text, or compare two: each against its paper's arithmetic or a published implementation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.errors import Code
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, TextData, prepare
from glassformer.training import ObjectiveConfig, Recipe, train
from glassformer.training.objectives import ContrastiveConfig, InfillConfig, PrefixObjectiveConfig, SpanConfig
from glassformer.training.objectives.infill import Infilling
from glassformer.training.objectives.pairs import SourceLayout
from glassformer.training.objectives.span import Sizes, Spans, divided
from tests.refused import refused

DECODER = "gpt2@1m+layers=2+d_model=32+heads=2"
BOTH = "t5@1m+layers=2+d_model=32+heads=2"


def objective(text: str) -> ObjectiveConfig:
    return Recipe.of(steps=1, objective=text).objective


def test_a_source_of_512_takes_568_tokens_and_a_target_of_114():
    """The lengths of T5's own pretraining (`random_spans_helper` in its repository; 1910.10683, 3.1.4)."""
    sizes = SpanConfig().sizes(512)
    assert (sizes.text, sizes.source, sizes.target) == (568, 512, 114)
    assert Sizes.of(569, 0.15, 3.0).source == 513


def test_spans_and_remaining_text_make_the_text(text: TextData):
    how = SpanConfig()
    text = how.with_tokens(text)
    spans = Spans.of(how, 128, text.tokenizer, SourceLayout())
    tokens = np.asarray(text.train.tokens[: spans.sizes.text], np.int64)
    for key in range(20):
        source, target = spans.row(tokens, key)
        assert (len(source) + 1, len(target) + 1) == (spans.sizes.source, spans.sizes.target)
        marks = np.flatnonzero(np.isin(target, spans.sentinels))
        assert target[marks].tolist() == spans.sentinels[: spans.sizes.spans].tolist()
        taken = {int(target[a]): target[a + 1 : b] for a, b in zip(marks, [*marks[1:], len(target)], strict=True)}
        assert all(len(span) for span in taken.values())
        whole = [taken[token] if token in taken else np.array([token]) for token in source.tolist()]
        assert np.concatenate(whole).tolist() == tokens.tolist()


def test_every_division_is_as_likely():
    """The six of 4 into 3 positive parts and zero more: (1, 1, 2) ... ; chi-squared below its 99.9th percentile."""
    draw = np.random.default_rng(0)
    seen = Counter(tuple(divided(5, 3, draw).tolist()) for _ in range(6000))
    assert len(seen) == 6 and all(sum(parts) == 5 and min(parts) > 0 for parts in seen)
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 20.5
    assert divided(7, 1, draw).tolist() == [7]


def test_sentinels_are_added_once_and_have_no_text(text: TextData):
    one = SpanConfig(sentinels=20)
    made = one.with_tokens(text)
    assert made.tokenizer.vocab_size == text.tokenizer.vocab_size + 21  # and an end
    assert not made.token_bytes[-21:].any() and len(made.token_bytes) == made.tokenizer.vocab_size
    assert one.with_tokens(made) is made
    assert made.tokenizer.decode([made.tokenizer.vocab_size - 1]) == ""


def test_infilled_source_equals_the_text(text: TextData):
    how = InfillConfig(permute=False)
    made = Infilling.of(how, how.with_tokens(text).tokenizer, SourceLayout())
    tokens = np.arange(400) % 15 + 1
    sizes: list[int] = []
    for key in range(200):
        source = made.row(tokens, key)
        masks = source == made.mask_id
        assert len(source) <= len(tokens) and (~masks).sum() == 280  # 30 % is hidden, exactly
        left = iter(tokens)
        assert all(any(token == one for one in left) for token in source[~masks])  # in order
        spans = made.spans(120, np.random.default_rng(key))
        assert sum(spans) == 120
        sizes += spans[:-1]
    # Poisson(3), the distribution of the paper: mean and share of zeros, within four standard deviations
    assert abs(np.mean(sizes) - 3) < 4 * np.sqrt(3 / len(sizes)) + 0.05
    assert abs(np.mean(np.array(sizes) == 0) - np.exp(-3)) < 4 * np.sqrt(0.05 / len(sizes))


def test_sentences_change_places_and_nothing_else(text: TextData):
    how = InfillConfig(p=0.01)
    made = Infilling.of(how, how.with_tokens(text).tokenizer, SourceLayout())
    tokenizer = how.with_tokens(text).tokenizer
    stop, other = (int(tokenizer.encode(one)[0]) for one in ("\n", "a"))
    assert made.ends[stop] and not made.ends[other]
    tokens = np.array([1, 1, stop, 2, 2, 2, stop, 3])
    tokens = np.where(tokens == stop, stop, np.where(made.ends[tokens], other, tokens))
    orders = set()
    for key in range(60):
        source = made.row(tokens, key)
        assert len(source) == len(tokens) and (source == made.mask_id).sum() == 1
        orders.add(tuple(np.flatnonzero(source == stop).tolist()))
    assert len(orders) > 4


def test_prefix_is_bidirectional_and_the_rest_causal(text: TextData):
    """Rows with different prefixes give the result of a model with the fixed visibility of each length, and a
    prediction does not depend on its target, by autograd."""
    how = PrefixObjectiveConfig()
    config = gf.preset(f"{DECODER}+prefix").replace(vocab_size=text.tokenizer.vocab_size, context=32)
    batch = how.batches(text, 6, 32, 0, config)[0]
    model = config.build(seed=0).double().eval()
    logits = model(batch.inputs, **batch.beside)
    lengths = batch.beside["global_tokens"].sum(1).tolist()
    assert len(set(lengths)) > 2
    for row, length in enumerate(lengths):
        fixed = gf.preset(f"{DECODER}+prefix:{length}").replace(vocab_size=config.vocab_size, context=32).build(seed=0)
        torch.testing.assert_close(fixed.double().eval()(batch.inputs[row : row + 1])[0], logits[row])
        scored = np.flatnonzero(batch.targets[row] != IGNORED)
        assert scored.tolist() == list(range(length - 1, 32))
        changed = batch.inputs.clone()
        changed[row, length:] = (changed[row, length:] + 1) % 5
        moved = (model(changed, **batch.beside)[row] - logits[row]).abs().sum(1) > 0
        assert not moved[:length].any()
        if length > 1:
            changed = batch.inputs.clone()
            changed[row, length - 1] = (changed[row, length - 1] + 1) % 5
            assert (model(changed, **batch.beside)[row] - logits[row]).abs().sum(1).ne(0).all()


def test_a_causal_model_is_scored_on_the_same_tokens(text: TextData):
    how, causal = PrefixObjectiveConfig(), gf.preset(DECODER)
    one, other = (how.evaluation(text, 32, 256, 4, config) for config in (causal, gf.preset(f"{DECODER}+prefix")))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.batch.targets, b.batch.targets) and torch.equal(a.bytes, b.bytes)
        assert not a.batch.beside and b.batch.beside
        scored = a.batch.targets != IGNORED
        assert torch.equal(a.bytes[scored], torch.from_numpy(text.token_bytes)[a.batch.targets[scored]])
        assert not a.bytes[~scored].any() and a.bytes.any()


def test_contrastive_loss_equals_clip():
    """The loss of `transformers`' CLIP of the same cosines."""
    metaclip = pytest.importorskip("transformers.models.metaclip_2.modeling_metaclip_2")

    class Given(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            return tokens.float()

    torch.manual_seed(0)
    u, v = torch.randn(5, 8), torch.randn(5, 8)
    batch = gf.text.FedBatch.of(u, torch.arange(5)[:, None], documents=u, other=v, other_documents=v)
    how = ContrastiveConfig(temperature=0.1)
    cosines = torch.nn.functional.cosine_similarity(u[:, None], v[None], dim=-1)
    found: Any = how.loss(Given(), batch)  # type: ignore[arg-type]
    torch.testing.assert_close(found, metaclip.image_text_contrastive_loss(cosines.T / 0.1))
    losses = how.loss(Given(), batch, reduction="none")  # type: ignore[arg-type]
    assert losses.shape == (5, 1) and losses.mean() == pytest.approx(float(found))


KINDS = [("span:0.2:3", BOTH), ("span", DECODER), ("infill", BOTH), ("infill:0.3", f"{DECODER}+prefix"),
         ("prefix", f"{DECODER}+prefix"), ("prefix:5", DECODER)]  # fmt: skip


@pytest.mark.parametrize(("name", "model"), KINDS, ids=str)
def test_batches_are_a_function_of_seed_and_step(name: str, model: str, text: TextData):
    how, config = objective(name), gf.preset(model)
    text = how.with_tokens(text)
    how.check(config)

    def rows(batch: Batch) -> list[Any]:
        return [batch.inputs.tolist(), batch.targets.tolist(), {k: v.tolist() for k, v in batch.beside.items()}]

    one, again, other = (how.batches(text, 3, 48, seed, config) for seed in (5, 5, 6))
    again[2]
    assert rows(one[4]) == rows(again[4]) != rows(other[4])
    assert one[4].inputs.shape[1] <= 48 and all(given.shape[1] <= 48 for given in one[4].beside.values())
    assert one.read(7) == {"tokens": 7 * one.tokens_per_step}
    built = config.replace(vocab_size=text.tokenizer.vocab_size, context=48).build(seed=0)
    loss = how.loss(built, one[0])
    loss.backward()
    assert 0 < float(loss.detach()) < 20
    assert all(p.grad is not None for p in built.parameters())


def test_vectors_learn_which_texts_belong_together():
    """In twenty steps, by pairs of a number in words and in digits: below the loss of a guess."""
    config = gf.preset("bert@1m+layers=1+d_model=32+heads=2+pooled:mean")
    recipe = {"steps": 20, "batch_size": 16, "context": 64, "objective": "contrastive:0.1", "learning_rate": 3e-3,
              "device": "cpu", "evaluation_tokens": 2048}  # fmt: skip
    run = train(config, "pairs:numbers", recipe)
    assert run.validation is not None and run.validation["loss"] < 0.9 * np.log(16)
    assert run.validation["bits_per_byte"] is None


def test_contrastive_batch_refuses_a_repeated_pair(tmp_path: Any):
    """With fewer pairs than rows, a batch would hold one twice."""
    config = gf.preset("bert@1m+layers=1+d_model=32+heads=2+pooled:mean")
    recipe = {"steps": 1, "context": 64, "objective": "contrastive", "device": "cpu"}
    for batch_size in (1, 100_000):
        with refused(code="range", field="batch_size"):
            train(config, "pairs:numbers", {**recipe, "batch_size": batch_size}, tmp_path / "run")
    assert not list(tmp_path.glob("run/*"))
    batches = ContrastiveConfig().batches(prepare("pairs:numbers", "byte"), 9000, 64, seed=1)
    numbers = [batches.numbers(step) for step in range(20)]
    assert len(batches.pairs) % 9000 and all(len({*some}) == 9000 for some in numbers)
    assert len({one for some in numbers for one in some}) == len(batches.pairs)


REFUSED: list[tuple[str, str, int, Code, str]] = [
    ("span", "bert@1m", 64, "causal", "layers.0.mixer"),
    ("span:0.15:3:4", BOTH, 64, "conflict", "objective"),
    ("span:1.5", BOTH, 64, "range", "objective.density"),
    ("span:0.5:1", BOTH, 512, "range", "objective.sentinels"),
    ("span", BOTH, 2, "range", "context"),
    ("infill", "bert@1m", 64, "causal", "layers.0.mixer"),
    ("infill", DECODER, 3, "range", "context"),
    ("prefix", BOTH, 64, "conflict", "objective"),
    ("prefix:100", DECODER, 64, "range", "objective.tokens"),
    ("prefix", f"{DECODER}+bidirectional", 64, "causal", "layers.0.mixer"),
    ("masked", BOTH, 64, "conflict", "objective"),
    ("contrastive", DECODER, 64, "conflict", "head"),
    ("contrastive", "bert@1m+classes:3", 64, "conflict", "head"),
]


@pytest.mark.parametrize(("name", "model", "context", "code", "field"), REFUSED, ids=str)
def test_objectives_refuse_unlearnable_requests(
    name: str, model: str, context: int, code: Code, field: str, text: TextData
):
    with refused(code=code, field=field) as caught:
        train(gf.preset(model), text, {"steps": 1, "batch_size": 2, "context": context, "objective": name})
    assert "\n" not in str(caught.value)


def test_a_comparison_refuses_other_texts(tmp_path: Any, text: TextData):
    with refused(code="conflict", field="objective"):
        gf.compare([BOTH, DECODER], text, tokens=100, objective="span", out=str(tmp_path / "out"),
                   allow_unmatched=True, context=64)  # fmt: skip


def test_the_page_has_every_objective():
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    kinds = [kind for kind, one in ObjectiveConfig.choices().items() if one.__module__.startswith("glassformer.")]
    assert kinds and all(f"| `{kind}" in page for kind in kinds)
