"""Encoders and models of two towers behind the interface of `transformers`: its own BERT, BART and ViT with the same
weights are the oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import glassformer as gf
from glassformer.conversion import transformers as wrapped
from glassformer.generation.beams import beams
from glassformer.model import Model
from tests.refused import refused

from .test_transformers import ROWS, TINY, TOKENS, close, loud, padded

SOURCE = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(6))
REAL = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
TWO = TINY.replace("layers=2", "layers=1")


def theirs(mine: Model, place: Path, auto: Any) -> Any:
    """Returns the published model with the same weights."""
    assert gf.save(mine, None, place).model_type != "glassformer"
    return auto.from_pretrained(place).eval()


@pytest.fixture
def masked(tmp_path: Path) -> tuple[Model, Any]:
    mine = loud("bert@1m")
    return mine, theirs(mine, tmp_path, transformers.AutoModelForMaskedLM)


@pytest.fixture
def towers(tmp_path: Path) -> tuple[Model, Any]:
    mine = loud("bart@1m")
    return mine, theirs(mine, tmp_path, transformers.AutoModelForSeq2SeqLM)


def test_masked_logits_and_losses_are_those_of_the_oracle(masked: Any):
    mine, bert = masked
    ours = wrapped.GlassformerForMaskedLM.of(mine)
    tokens, mask = padded(ROWS)
    tokens, mask = tokens.flip(1), mask.flip(1)
    labels, segments = tokens.masked_fill(mask == 0, -100), (torch.arange(11) > 4).long().expand(3, -1)
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": segments, "labels": labels}
    a, b = ours(**given, output_hidden_states=True), bert(**given, output_hidden_states=True)
    close(a.logits * mask[..., None], b.logits * mask[..., None])
    close(a.loss, b.loss)
    close(ours(**given, num_items_in_batch=7).loss, bert(**given).loss * (labels != -100).sum() / 7)
    assert len(a.hidden_states) == len(b.hidden_states)
    hidden = wrapped.GlassformerModel.of(mine)(tokens, attention_mask=mask, token_type_ids=segments)
    close(hidden.last_hidden_state * mask[..., None], b.hidden_states[-1] * mask[..., None])
    assert hidden.pooler_output is None


def test_classes_and_vectors_are_those_of_the_oracle(tmp_path: Path):
    for change, auto, cls in (
        ("+classes:3", transformers.AutoModelForSequenceClassification, wrapped.GlassformerForSequenceClassification),
        ("", transformers.AutoModel, wrapped.GlassformerModel),
    ):
        config = gf.preset(f"bert-base@1m+{TINY}")
        head = config.head.replace(vector=False, classes=3, bias=True) if change else config.head
        mine = config.replace(head=head).build(1)
        bert, ours = theirs(mine, tmp_path / f"bert{change}", auto), cls.of(mine)
        a, b = (one(SOURCE, attention_mask=REAL) for one in (ours.eval(), bert))
        if change:
            close(a.logits, b.logits)
            labels = torch.tensor([2, 0, 1])
            close(ours(SOURCE, labels=labels).loss, bert(SOURCE, labels=labels).loss)
        else:
            close(a.pooler_output, b.pooler_output)


def test_two_towers_are_those_of_the_oracle(towers: Any):
    mine, bart = towers
    ours = wrapped.GlassformerForSeq2SeqLM.of(mine)
    ours.generation_config = bart.generation_config
    bart.config.decoder_start_token_id = bart.generation_config.decoder_start_token_id = 2
    bart.config.pad_token_id = 1
    given = {"input_ids": SOURCE, "attention_mask": REAL}
    a, b = (one(**given, decoder_input_ids=TOKENS) for one in (ours, bart))
    close(a.logits, b.logits)
    close(a.encoder_last_hidden_state * REAL[..., None], b.encoder_last_hidden_state * REAL[..., None])
    close(ours(**given, labels=TOKENS).loss, bart(**given, labels=TOKENS).loss)
    for how in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        for cached in (True, False):
            options = {**given, **how, "use_cache": cached, "max_new_tokens": 9, "forced_eos_token_id": None}
            found, expected = ours.generate(**options), bart.generate(**options)
            assert torch.equal(found, expected) and len(found.unique()) > 4


COMPOSED = {
    "gpt2@1m+bidirectional+rope": ("AutoModelForMaskedLM", "GlassformerForMaskedLM"),
    "bert@1m+swiglu+rope": ("AutoModelForMaskedLM", "GlassformerForMaskedLM"),
    "bert@1m+rmsnorm+classes:3": ("AutoModelForSequenceClassification", "GlassformerForSequenceClassification"),
    "llama@1m+bidirectional+pooled:mean": ("AutoModel", "GlassformerModel"),
    "transformer@1m+rope+swiglu": ("AutoModelForSeq2SeqLM", "GlassformerForSeq2SeqLM"),
}
"""Compositions that no published class holds."""


@pytest.mark.parametrize("expression", COMPOSED)
def test_composed_model_is_loaded_by_the_auto_class_of_its_kind(expression: str, tmp_path: Path):
    auto, cls = COMPOSED[expression]
    mine = loud(expression)
    start = {"decoder_start_token_id": 0} if mine.encoder is not None else None
    assert gf.save(mine, None, tmp_path / "a", generation=start).model_type == "glassformer"
    ours = getattr(transformers, auto).from_pretrained(tmp_path / "a").eval()
    assert type(ours).__name__ == cls and auto in (tmp_path / "a" / "README.md").read_text()
    if mine.encoder is not None:
        assert torch.equal(ours(SOURCE, decoder_input_ids=TOKENS).logits, mine(TOKENS, source=SOURCE))
        texts = ours.generate(SOURCE, max_new_tokens=6, do_sample=False)
        begin = torch.zeros(3, 1, dtype=torch.long)
        assert torch.equal(texts, gf.generate(mine, begin, source=SOURCE, max_new_tokens=6, temperature=0))
    else:
        out = ours(TOKENS)
        assert torch.equal(out.pooler_output if cls == "GlassformerModel" else out.logits, mine(TOKENS))
    ours.save_pretrained(tmp_path / "b")
    back = gf.load(tmp_path / "b").model
    assert back.config == mine.config
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), back.parameters(), strict=True))
    hidden = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert type(hidden).__name__ == "GlassformerModel"


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_prefix_decoder_reads_its_prompt_as_the_prefix(ways: dict[str, Any], tmp_path: Path):
    mine = loud("llama@1m+prefix:4")
    gf.save(mine, None, tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(ours).__name__ == "GlassformerForCausalLM"
    assert torch.equal(ours(TOKENS).logits, mine(TOKENS))
    texts = ours.generate(TOKENS, max_new_tokens=6, do_sample=False, **ways)
    if ways:
        rows = [beams(mine, row[None], 3, 6)[0].tokens for row in TOKENS]
        assert texts[:, TOKENS.shape[1] :].tolist() == rows
        return
    assert torch.equal(texts, gf.generate(mine, TOKENS, max_new_tokens=6, temperature=0))
    assert not torch.equal(texts, gf.generate(loud("llama@1m"), TOKENS, max_new_tokens=6, temperature=0))
    short = wrapped.GlassformerCache(max_len=TOKENS.shape[1] + 2, prompted=True)  # too short: it restarts on the way
    again = [ours(TOKENS, past_key_values=short).logits[:, -1].argmax(-1)]
    for _ in range(5):
        again.append(ours(again[-1][:, None], past_key_values=short).logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(again, 1), texts[:, TOKENS.shape[1] :])
    with refused(code="conflict", field="use_cache"):
        ours.generate(TOKENS, max_new_tokens=6, use_cache=False)


def test_images_of_a_composition(tmp_path: Path):
    mine = gf.preset("vit-base@1m+layers=1+d_model=16+heads=2+swiglu+embedding.patches.size=32+context=5").build()
    gf.save(mine, None, tmp_path)
    ours = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(pixel_values=images).logits, mine(images))
    labels = torch.tensor([3, 5])
    close(ours(pixel_values=images, labels=labels).loss, mine.loss(images, labels))


@pytest.mark.parametrize(
    ("expression", "cls", "right"),
    [
        ("gpt2@1m", "MaskedLM", "AutoModelForCausalLM"),
        ("bert@1m+classes:2", "MaskedLM", "AutoModel"),
        ("gpt2@1m", "Seq2SeqLM", "AutoModelForCausalLM"),
        ("t5@1m", "CausalLM", "AutoModelForSeq2SeqLM"),
        ("bert@1m", "SequenceClassification", "AutoModel"),
    ],
)
def test_another_kind_is_refused_with_the_right_class(expression: str, cls: str, right: str):
    with refused(code="conflict", field="head"):
        getattr(wrapped, f"GlassformerFor{cls}").of(gf.preset(f"{expression}+{TWO}").build())
