"""Segments, transforms, pooled texts and classes, against BERT's own modules and against what they say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

import glassformer as gf
from glassformer.conversion.transformers import GlassformerModel
from glassformer.lens.inspection import inspect
from glassformer.parts.head import pool
from glassformer.training.objectives import MaskedConfig
from tests.conversion.test_parity import close
from tests.refused import refused

TINY = "bert@1m+layers=2+d_model=24+heads=3+vocab_size=61+context=32"
DOCUMENTS = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))


def loud(expression: str) -> gf.Model:
    model = gf.preset(expression).build(seed=0).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.3)
    return model


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertModel", "BertForSequenceClassification"])
def test_padded_pairs_are_as_the_published_class_has_them(cls: str, tmp_path: object):
    """Two segments and padding, through `gf.load` of what `transformers` saved."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    other = getattr(transformers, cls)(config).eval()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape) * 0.3)
    other.save_pretrained(tmp_path)
    mine = gf.load(str(tmp_path)).model
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 7])
    with torch.no_grad():
        found = mine(TOKENS, documents=DOCUMENTS, segments=segments)
        out = other(TOKENS, attention_mask=DOCUMENTS, token_type_ids=segments)
        plain = mine(TOKENS, documents=DOCUMENTS)
    expected = out.pooler_output if cls == "BertModel" else out.logits
    real = DOCUMENTS.bool() if cls == "BertForMaskedLM" else ...
    close(found[real], expected[real], cls)
    assert not torch.allclose(plain[real], expected[real], atol=1e-3)


@pytest.mark.parametrize("how", ["cls", "mean", "last"])
def test_padded_text_is_pooled_as_without_padding(how: str):
    model = loud(f"{TINY}+pooled:{how}")
    both, alone = model(TOKENS, documents=DOCUMENTS), model(TOKENS[1:, :5])
    assert both.shape == (2, 24)
    torch.testing.assert_close(both[1:], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both.norm(dim=-1), torch.ones(2))
    x = model.hidden_states(TOKENS[1:, :5])
    by_hand = {"cls": x[:, 0], "mean": x.sum(1) / 5, "last": x[:, 4]}[how]
    torch.testing.assert_close(alone, by_hand / by_hand.norm(dim=-1, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["cls", "mean", "last"])
def test_padding_on_the_left_is_not_pooled(how: str):
    """Padding is given by hand, and as the class for `transformers` passes it on."""
    x, documents = torch.arange(16.0).view(2, 4, 2), torch.tensor([[0, 0, 1, 1], [0, 2, 2, 5]])
    expected = {"cls": [[4, 5], [10, 11]], "mean": [[5, 6], [11, 12]], "last": [[6, 7], [12, 13]]}[how]
    assert pool(x, how, documents).tolist() == expected
    model = loud(f"{TINY}+pooled:{how}")
    ours = GlassformerModel.of(model)
    alone = ours(TOKENS[:1, :2]).pooler_output
    found = ours(torch.cat([torch.zeros(1, 2, dtype=torch.long), TOKENS[:1, :2]], 1), torch.tensor([[0, 0, 1, 1]]))
    torch.testing.assert_close(found.pooler_output, alone, rtol=1e-5, atol=1e-6)


def test_pooling_takes_only_the_first_document():
    x = torch.arange(8.0).view(1, 4, 2)
    documents = torch.tensor([[3, 3, 5, 3]])[:, :3]
    assert pool(x[:, :3], "mean", documents).tolist() == [[1.0, 2.0]]
    assert pool(x[:, :3], "last", documents).tolist() == [[2.0, 3.0]]


def test_classes_are_learned_from_a_pooled_text():
    model = loud(f"{TINY}+classes:4").train()
    logits = model(TOKENS, documents=DOCUMENTS)
    assert logits.shape == (2, 4)
    loss = model.loss(TOKENS, torch.tensor([1, 3]), documents=DOCUMENTS)
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([1, 3])))
    loss.backward()
    assert model.head.weight.grad.abs().sum() > 0
    each = model.loss(TOKENS, torch.tensor([1, 3]), documents=DOCUMENTS, reduction="none")
    torch.testing.assert_close(each.mean(), loss)


@pytest.mark.parametrize("change", ["", "+pooled:mean", "+classes:3", "+embedding.segments=5"])
def test_counted_parameters_of_encoder_heads_equal_built_model(change: str):
    config = gf.preset(TINY + change)
    assert config.num_params() == sum(weight.numel() for weight in config.build().parameters())
    assert gf.ModelConfig.from_dict(config.to_dict()) == config


def test_encoder_heads_refuse_conflicting_settings():
    for change, code, field in (
        ("+pooled:most", "unknown", "pooled"),
        ("+head.vector=true", "conflict", "head.vector"),
        ("+head.normalize=true", "conflict", "head.normalize"),
        ("+head.classes=3", "conflict", "head.tied"),
        ("+classes:0", "range", "classes"),
    ):
        with refused(code=code, field=field):
            gf.preset(TINY + change)
    model = gf.preset(TINY + "+pooled:mean").build()
    with refused(code="conflict", field="head.vector"):
        model.loss(TOKENS, TOKENS)
    with refused(code="conflict", field="model"):
        inspect(model, TOKENS[0])
    with refused(code="conflict", field="head"):
        MaskedConfig().check(model.config)
    with refused(code="range", field="segments"):
        gf.preset(TINY).build()(TOKENS, segments=torch.full((2, 9), 2))
    with refused(code="conflict", field="segments"):
        gf.preset(TINY).build()(TOKENS, segments=torch.zeros(2, 8, dtype=torch.long))
    blind = gf.preset(TINY + "+embedding.segments=null").build()
    with refused(code="range", field="segments"):
        blind(TOKENS, segments=torch.ones_like(TOKENS))
    assert torch.equal(blind(TOKENS, segments=torch.zeros_like(TOKENS)), blind(TOKENS))
    with refused(code="causal", field="model"):
        gf.generate(gf.preset(TINY).build(), TOKENS, max_new_tokens=2)
