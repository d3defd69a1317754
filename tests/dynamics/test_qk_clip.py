"""QK-clip: largest logits against plain products, and heads that are clipped to the threshold and no further."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import glassformer.dynamics.qk_clip as module
from glassformer.dynamics.qk_clip import QKClip, clip_heads, largest_logits, largest_possible
from glassformer.introspection import capture
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.mixer import Attention
from glassformer.text import TextData, prepare
from glassformer.training import Interrupted, Report, Reporter, checkpoint, train
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"
TOKENS = torch.randint(0, 61, (3, 12), generator=torch.Generator().manual_seed(0))


def loud(change: str = "", family: str = "llama") -> Model:
    """Scores of a dozen or so, other ones in every head."""
    model = preset(f"{family}@1m+{TINY}{change}").build(seed=0)
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.qkv.weight[:48].mul_(torch.linspace(10, 40, 48)[:, None])
            if layer.mixer.qkv.bias is not None:
                layer.mixer.qkv.bias.normal_()
    return model


def peaks_of(model: Model, layer: int = 0) -> Tensor:
    """Returns the largest captured score of each head (n,)."""
    return capture(model, TOKENS, f"layers.{layer}.mixer.scores")[f"layers.{layer}.mixer.scores"].amax((0, 2, 3))


def mixer_of(model: Model, layer: int = 0) -> Attention:
    return model.layers[layer].mixer


@pytest.mark.parametrize("change", ["", "+gqa:2", "+window:3", "+nope", "+bidirectional"])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_largest_logits_are_those_of_the_scores(monkeypatch: pytest.MonkeyPatch, change: str, block: int):
    monkeypatch.setattr(module, "VALUES_PER_BLOCK", block)
    model = loud(change)
    seen = capture(model, TOKENS, ["layers.0.mixer.q", "layers.0.mixer.k"])
    given = seen["layers.0.mixer.q"], seen["layers.0.mixer.k"]
    found = largest_logits(mixer_of(model).dot_product, *given)
    torch.testing.assert_close(found, peaks_of(model))
    assert (largest_possible(mixer_of(model).dot_product, *given) >= found).all()


def test_bias_and_soft_cap_come_after():
    """Clipped logits are q k scale, without ALiBi and soft cap: computed by hand."""
    model = loud("+alibi+softcap:5")
    seen = capture(model, TOKENS, ["layers.0.mixer.q", "layers.0.mixer.k"])
    q, k = seen["layers.0.mixer.q"], seen["layers.0.mixer.k"]
    products = torch.stack([(q[:, :, i] @ k[:, :, i].transpose(1, 2)) / 8**0.5 for i in range(4)], 1)
    products = products.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(largest_logits(mixer_of(model).dot_product, q, k), products.amax((0, 2, 3)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("heads", ["", "+gqa:2", "+mqa"])
def test_a_head_is_clipped_to_the_threshold_and_no_further(family: str, heads: str):
    """Afterwards, on the same batch, heads above the threshold are at it, heads below are unchanged."""
    model = loud(heads, family)
    before = peaks_of(model)
    threshold = before.median().item()
    others = [mixer_of(model).qkv.weight[start:].clone() for start in (32 + 32 * mixer_of(model).n_kv_heads // 4,)]
    factors = clip_heads(mixer_of(model).dot_product, before, threshold)
    torch.testing.assert_close(peaks_of(model), before.clamp(max=threshold), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(factors, (threshold / before).clamp(max=1))
    assert (factors < 1).any() and (factors == 1).any()
    assert torch.equal(mixer_of(model).qkv.weight[-len(others[0]) :], others[0])  # W_V


def test_unshared_query_and_key_are_scaled_by_the_root():
    model = loud()
    mixer, before = mixer_of(model), peaks_of(model)
    weight = mixer.qkv.weight.detach().clone()
    clip_heads(mixer.dot_product, before, 2.0)
    for head in range(4):
        root = min(1.0, 2.0 / before[head].item()) ** 0.5
        for first in (0, 32):
            rows = slice(first + 8 * head, first + 8 * head + 8)
            torch.testing.assert_close(mixer.qkv.weight[rows], root * weight[rows])


def test_shared_key_is_scaled_by_its_mildest_head():
    """A key that two heads share is not scaled if one of them is below the threshold; otherwise the query that is
    furthest above is scaled more."""
    model = loud("+gqa:2")
    mixer = mixer_of(model)
    weight = mixer.qkv.weight.detach().clone()
    clip_heads(mixer.dot_product, torch.tensor([400.0, 50.0, 400.0, 1600.0]), 100.0)

    def scale(first: int) -> float:
        return (mixer.qkv.weight[first : first + 8] / weight[first : first + 8]).mean().item()

    assert [scale(8 * i) for i in range(4)] == pytest.approx([0.25, 1.0, 0.5, 0.125])
    assert [scale(32 + 8 * i) for i in range(2)] == pytest.approx([1.0, 0.5])


def test_only_passes_inside_looking_count():
    model = loud()
    sites = [site for layer in model.layers for site in (layer.mixer.q, layer.mixer.k)]
    clip = QKClip(model, 1.0)
    model(TOKENS)
    assert not clip.peaks
    with clip.looking():
        model(TOKENS[:1])
        model(TOKENS[1:])
    for layer in range(2):
        torch.testing.assert_close(clip.peaks[layer], peaks_of(model, layer))
    assert all(site.looks == () for site in sites)
    before = [peaks_of(model, 0), mixer_of(model, 1).qkv.weight.clone()]
    clip.after_update()
    torch.testing.assert_close(peaks_of(model, 0), before[0].clamp(max=1.0), rtol=1e-4, atol=1e-4)
    assert not torch.equal(mixer_of(model, 1).qkv.weight, before[1]) and not clip.peaks


def test_below_the_bound_no_logit_is_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "largest_logits", lambda *given: pytest.fail("computed"))
    model = preset(f"llama@1m+{TINY}").build(seed=0)
    clip = QKClip(model, 100.0)
    weights = [p.clone() for p in model.parameters()]
    with clip.looking():
        model.loss(TOKENS, TOKENS).backward()
    clip.after_update()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_without_a_threshold_nothing_looks():
    model = loud()
    clip = QKClip(model, None)
    with clip.looking():
        assert all(layer.mixer.q.looks == () for layer in model.layers)


@pytest.mark.parametrize(
    ("change", "field"), [("+qknorm", "mixer.qk_norm"), ("+sigmareparam", "reparam"), ("+mixer.clip=3", "mixer.clip")]
)
def test_qk_clip_refuses_settings_that_undo_it(change: str, field: str):
    with refused(code="conflict", field=field):
        QKClip(preset(f"llama@1m+{TINY}{change}").build(), 100.0)
    assert QKClip(preset(f"llama@1m+{TINY}{change}").build(), None).threshold is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("the cat sat on the mat and ran under a tree. " * 300)
    return prepare(folder / "text.txt", "char", cache_dir=folder / "cache")


RECIPE = {"tokens": 12 * 4 * 32, "batch_size": 4, "context": 32, "threads": 1, "learning_rate": 0.1, "dtype": "float32"}


def test_a_run_stays_near_the_threshold(text: TextData):
    """At a large learning rate logits run away; clipped, one step of it is all that they can gain."""
    config = preset("llama@1m+layers=2+d_model=32+heads=2")
    batch = torch.arange(64).view(2, 32) % text.tokenizer.vocab_size
    largest = {}
    for clip in (None, 5.0):
        run = train(config, text, {**RECIPE, "qk_clip": clip})
        scores = capture(run.model.eval(), batch, "layers.*.mixer.scores")
        largest[clip] = max(float(x.amax()) for x in scores.values())
    assert largest[None] > 5 * largest[5.0] and largest[5.0] < 15


def interrupt(report: Report) -> None:
    if report.step == 5 and report.validation is None:
        os.kill(os.getpid(), signal.SIGINT)


def test_resuming_is_bit_for_bit(text: TextData, tmp_path: Path):
    config = preset("llama@1m+layers=2+d_model=32+heads=2")
    straight = train(config, text, {**RECIPE, "qk_clip": 2.0, "micro_batch": 2}, tmp_path / "straight")

    with pytest.raises(Interrupted):
        train(
            config,
            text,
            {**RECIPE, "qk_clip": 2.0, "micro_batch": 2},
            tmp_path / "broken",
            callbacks=[Reporter(interrupt)],
        )
    train(config, text, {**RECIPE, "qk_clip": 2.0, "micro_batch": 2}, tmp_path / "broken", resume=True)
    folders = [checkpoint.latest(tmp_path / run) for run in ("straight", "broken")]
    one, other = ((folder / "model.safetensors").read_bytes() for folder in folders if folder)
    assert one == other and straight.steps == 12


def test_a_run_refuses_before_the_text_is_read():
    with refused(code="conflict", field="mixer.qk_norm"):
        train(preset("qwen3@1m"), "no such file", {"tokens": 100, "qk_clip": 100.0})
