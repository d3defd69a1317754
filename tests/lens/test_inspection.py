"""One pass and all that is seen in it, against `transformers`, hand-written PyTorch and closed forms."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

import glassformer as gf
from glassformer import dynamics
from glassformer.errors import RequestError
from glassformer.introspection import capture, sites
from glassformer.lens import inspection
from glassformer.lens.inspected import LayerMaps
from glassformer.lens.inspection import Inspection, inspect, largest
from glassformer.lens.page.words import spelled_text, speller, visible
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.kernel import naive
from glassformer.parts.mixer import Mixer
from glassformer.text import ByteTokenizer
from tests.refused import refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TINY = "layers=3+d_model=16+heads=4+vocab_size=61+context=64"
TOKENS = torch.randint(61, (19,), generator=torch.Generator().manual_seed(5))
MODELS = [
    "llama@1m+gqa:2",
    "gpt2@1m",
    "llama@1m+post",
    "falcon@1m+parallel2",
    "llama@1m+ffn=none",
    "gpt2@1m+alibi+window:5",
    "llama@1m+sandwich+qknorm+softcap:2",
    "gpt2@1m+bidirectional",
]


def loud(expression: str, seed: int = 3) -> Model:
    """A model whose every weight speaks, so that heads differ and predictions are sharp."""
    name, _, changes = expression.partition("+")
    model = preset(f"{name}+{TINY}{'+' + changes if changes else ''}").build().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 2 / weight.shape[1] ** 0.5)
    return model


def flat(expression: str, tokens: int) -> Inspection:
    """Inspects a model whose queries are zero: every score is 0, and every visible key gets the same weight."""
    model = loud(expression)
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.qkv.weight[:16] = 0  # type: ignore[union-attr,operator]
    return inspect(model, TOKENS[:tokens])


def close(a: Any, b: Any, **how: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), check_dtype=False, **how)


# Against others


@pytest.mark.parametrize("expression", ["llama@1m+gqa:2", "gpt2@1m"])
def test_inspection_equals_transformers(expression: str, tmp_path: Path):
    model = loud(expression)
    gf.save(model, None, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        out = theirs(TOKENS[None], output_attentions=True, output_hidden_states=True)
    body = getattr(theirs, "model", None) or theirs.transformer
    norm = getattr(body, "norm", None) or body.ln_f
    seen = inspect(model, TOKENS)

    for layer, attention in enumerate(out.attentions):
        close(seen.attention[layer].maps, attention[0], atol=1e-5, rtol=1e-4)
    streams = [x[0] for x in out.hidden_states[:-1]]  # theirs ends with the normalised one
    for depth, x in enumerate(streams):
        with torch.no_grad():
            log_p = theirs.lm_head(norm(x)).log_softmax(-1)
        _lens(seen, depth, log_p)
        close(seen.residual_rms[depth], x.square().mean(-1).sqrt(), atol=1e-5, rtol=1e-4)
    _lens(seen, seen.layers, out.logits[0].log_softmax(-1))
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], TOKENS[1:], reduction="none")
    close(seen.loss[1:], loss, atol=1e-4, rtol=1e-4)
    assert math.isnan(seen.loss[0]) and seen.mean_loss == pytest.approx(loss.mean().item(), rel=1e-4)


def _lens(seen: Inspection, depth: int, log_p: Tensor) -> None:
    best = log_p.exp().topk(5)
    close(seen.top_probabilities[depth], best.values, atol=1e-5, rtol=1e-3)
    close(log_p.exp().gather(-1, seen.top_ids[depth]), best.values, atol=1e-5, rtol=1e-3)
    close(seen.depth_loss[depth, :-1], -log_p[:-1].gather(-1, TOKENS[1:, None])[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("expression", MODELS)
def test_heads_by_loops_over_the_captured_maps(expression: str):
    model = loud(expression)
    seen = inspect(model, TOKENS)
    found = capture(model, TOKENS[None], ["layers.*.mixer.pattern", "layers.*.mixer.scores"])
    assert [(head.layer, head.head) for head in seen.heads] == [(layer, n) for layer in range(3) for n in range(4)]
    for head in seen.heads:
        p = found[f"layers.{head.layer}.mixer.pattern"][0, head.head].tolist()
        s = found[f"layers.{head.layer}.mixer.scores"][0, head.head].tolist()
        entropies, t = [], len(p)
        for row, scores in zip(p, s, strict=True):
            keys = sum(score > -math.inf for score in scores)
            if keys > 1:
                entropies.append(-sum(w * math.log(w) for w in row if w) / math.log(keys))
        assert head.attention_entropy == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
        assert head.sink_mass == pytest.approx(sum(row[0] for row in p) / t, abs=1e-5)
        assert head.previous_mass == pytest.approx(sum(p[i][i - 1] for i in range(1, t)) / (t - 1), abs=1e-5)
        assert head.self_mass == pytest.approx(sum(p[i][i] for i in range(t)) / t, abs=1e-5)
        assert head.stripe_mass == pytest.approx(max(sum(row[j] for row in p) / t for j in range(1, t)), abs=1e-5)
        largest_score = max(abs(score) for scores in s for score in scores if score > -math.inf)
        assert head.max_attention_logit == pytest.approx(largest_score, rel=1e-5)


@pytest.mark.parametrize("expression", MODELS)
def test_inspection_statistics_equal_those_of_dynamics(expression: str):
    model = loud(expression)
    seen = inspect(model, TOKENS)
    names = ["embed", *(f"layers.{layer}.resid_post" for layer in range(3))]
    found = capture(model, TOKENS[None], [*names, "layers.0.mixer.pattern", "layers.0.mixer.scores"])
    close(seen.token_cosine, torch.stack([dynamics.token_cosine(found[name][0]) for name in names]))
    pattern, scores = found["layers.0.mixer.pattern"], found["layers.0.mixer.scores"]
    mine = torch.tensor([[h.sink_mass, h.max_attention_logit, h.attention_entropy] for h in seen.heads[:4]])
    visible = (scores > -math.inf).sum(-1)
    entropy = dynamics.attention_entropy(pattern, normalised=True, visible=visible)
    theirs = (dynamics.sink_mass(pattern), dynamics.max_attention_logit(scores), entropy)
    close(mine, torch.stack(theirs, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expression", MODELS)
def test_predictions_at_the_last_depth_are_the_models(expression: str):
    model = loud(expression)
    seen = inspect(model, TOKENS)
    with torch.no_grad():
        p = model(TOKENS[None])[0].softmax(-1)
    close(seen.top_probabilities[-1], p.topk(5).values, atol=1e-6, rtol=1e-4)
    close(p.gather(-1, seen.top_ids[-1]), p.topk(5).values, atol=1e-6, rtol=1e-4)
    if seen.causal:
        close(seen.mean_loss, model.loss(TOKENS[None, :-1], TOKENS[None, 1:]).item(), atol=1e-5, rtol=1e-5)
    else:
        close(seen.loss, -p.gather(-1, TOKENS[:, None])[:, 0].log(), atol=1e-5, rtol=1e-5)


def test_bidirectional_model_predicts_token_in_place():
    seen = inspect(loud("gpt2@1m+bidirectional"), TOKENS)
    assert not seen.causal and seen.loss.isfinite().all()
    assert seen.to_dict()["predicts"] == "token itself"


@pytest.mark.parametrize("length", [5, 400])
def test_prefix_decoder_predicts_only_tokens_after_the_prefix(length: int):
    """The next token, of the last token of the prefix and of those behind it."""
    model = loud(f"gpt2@1m+prefix:{length}")
    seen = inspect(model, TOKENS)
    count = min(length, len(TOKENS))
    assert seen.causal and seen.prefix == count and seen.to_dict()["predicts"] == "next token"
    assert seen.loss[:count].isnan().all() and seen.loss[count:].isfinite().all()
    if length < len(TOKENS):
        with torch.no_grad():
            p = model(TOKENS[None])[0].log_softmax(-1)
        wanted = -p[count - 1 : -1].gather(-1, TOKENS[count:, None])[:, 0]
        close(seen.loss[count:], wanted, atol=1e-5, rtol=1e-5)
    assert f"and the first {count} tokens" in seen.html()


# Closed forms


def test_equal_scores():
    """Query i spreads evenly over i + 1 keys: masses are harmonic numbers H_t."""
    t = 12
    harmonic = sum(1 / i for i in range(1, t + 1))
    for head in flat("llama@1m", t).heads:
        assert head.attention_entropy == pytest.approx(1.0, abs=1e-5)
        assert head.sink_mass == pytest.approx(harmonic / t, abs=1e-5)
        assert head.self_mass == pytest.approx(harmonic / t, abs=1e-5)
        assert head.previous_mass == pytest.approx((harmonic - 1) / (t - 1), abs=1e-5)
        assert head.max_attention_logit == pytest.approx(0.0, abs=1e-6)


def test_equal_scores_in_a_window():
    """Only the keys that a query sees count."""
    seen = flat("llama@1m+window:3", 12)
    close(seen.attention[0].maps[0, 7], [0, 0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0], atol=1e-6, rtol=1e-5)
    for head in seen.heads:
        assert head.attention_entropy == pytest.approx(1.0, abs=1e-5)
        assert head.sink_mass == pytest.approx((1 + 1 / 2 + 1 / 3) / 12, abs=1e-5)


def test_when_predictions_are_settled():
    seen = inspect(loud("llama@1m"), TOKENS)
    depths = []
    for column in seen.top_ids[:, :, 0].T.tolist():
        depth = len(column) - 1
        while depth and column[depth - 1] == column[-1]:
            depth -= 1
        depths.append(depth)
    depths.sort()
    assert seen.settled == depths[len(depths) // 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 70), st.integers(0, 1 << 30))
def test_the_largest_values(length: int, k: int, width: int, seed: int):
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(seed))
    values, at = largest(x, k, width)
    expected = x.topk(min(k, length))
    assert torch.equal(values, expected.values) and torch.equal(at, expected.indices)


# Long texts: pooled, and in blocks


def test_pooled_maps(monkeypatch: pytest.MonkeyPatch):
    model = loud("llama@1m+gqa:2")
    exact = inspect(model, TOKENS)
    monkeypatch.setattr(inspection, "FINE", 8)
    seen = inspect(model, TOKENS)  # 19 tokens in 7 tiles of 3, the last of 1
    for layer, kept in seen.attention.items():
        whole = exact.attention[layer].maps
        assert kept.tile == 3 and kept.maps.shape == (4, 7, 7)
        for i in range(7):
            for j in range(7):
                tile = whole[:, 3 * i : 3 * i + 3, 3 * j : 3 * j + 3].sum(2).mean(1)
                close(kept.maps[:, i, j], tile, atol=1e-6, rtol=1e-5)
        close(kept.maps.sum(-1), torch.ones(4, 7), atol=1e-5, rtol=1e-5)
        strongest_are_exact(kept, whole)
    for mine, theirs in zip(seen.heads, exact.heads, strict=True):
        close(torch.tensor(list(vars(mine).values())), torch.tensor(list(vars(theirs).values())), atol=1e-5, rtol=1e-5)
    pairs = (exact.looked_at(1, 2, 18), seen.looked_at(1, 2, 18))
    assert dict(pairs[0]) == pytest.approx(dict(pairs[1]))


def strongest_are_exact(kept: LayerMaps, maps: Tensor) -> None:
    """The keys by name against the exact maps (n, s, t): of each head, and last of their mean."""
    whole = torch.cat([maps, maps.mean(0, keepdim=True)])
    best = whole.topk(min(8, whole.shape[-1]))
    expected = best.values.where(best.values >= inspection.NEGLIGIBLE, 0)
    close(kept.weights, expected, atol=1e-6, rtol=1e-5)
    close(whole.gather(-1, kept.keys).where(expected > 0, 0), expected, atol=1e-6, rtol=1e-5)
    close(kept.rest, 1 - expected.sum(-1), atol=1e-5, rtol=0)
    close(kept.received, whole.sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expression", MODELS)
def test_strongest_attention_is_exact(expression: str):
    seen = inspect(loud(expression), TOKENS)
    for layer, kept in seen.attention.items():
        strongest_are_exact(kept, kept.maps)
        for head, position in ((0, 18), (3, 7), (-1, 12)):
            weights = kept.maps.mean(0) if head < 0 else kept.maps[head]
            for key, weight in (found := seen.looked_at(layer, head, position, 8)):
                assert weight == pytest.approx(weights[position, key].item(), abs=1e-6)
            told = sum(weight for _, weight in found) + kept.rest[head, position].item()
            assert told == pytest.approx(1.0, abs=1e-5)
            by = seen.looked_at_by(layer, head, position, 19)
            assert [weight for _, weight in by] == sorted((weight for _, weight in by), reverse=True)
            for query, weight in by:
                assert weight == pytest.approx(weights[query, position].item(), abs=1e-6)
            sure = {query for query in range(19) if weights[query, position] > 1 / 9 + 1e-6}
            assert sure <= {query for query, _ in by}


def test_how_many_see_a_key():
    kept = inspect(loud("gpt2@1m+alibi+window:5"), TOKENS).attention[0]
    assert kept.seen_by[2].tolist() == kept.seen_by[-1].tolist() == [5] * 15 + [4, 3, 2, 1]


def test_outlier_tokens_exceed_the_median_stream():
    """Medians by hand, and a token 15 times as large from depth 1 on, most of all at depth 2."""
    seen = inspect(loud("llama@1m"), TOKENS)
    rms = torch.rand(4, 19, generator=torch.Generator().manual_seed(1)) + 1
    rms[1:, 4] = rms[1:].median(1).values * torch.tensor([15.0, 80.0, 30.0])
    other = replace(seen, residual_rms=rms)
    assert other.median_rms.tolist() == pytest.approx([statistics.median(row) for row in rms.tolist()])
    (found,) = other.outliers
    assert (found.position, found.first, found.depth) == (4, 1, 2)
    assert found.rms == rms[2, 4].item() and found.ratio == pytest.approx(80, rel=0.1)
    assert other.to_dict()["outliers"] == [vars(found)]
    assert replace(seen, residual_rms=torch.ones(4, 19)).outliers == ()


def test_memory_for_maps_is_bounded(monkeypatch: pytest.MonkeyPatch):
    model = loud("llama@1m")
    monkeypatch.setattr(inspection, "EXACT_WEIGHTS", 1000)
    monkeypatch.setattr(inspection, "POOLED_WEIGHTS", 12 * 5 * 5)
    monkeypatch.setattr(inspection, "STRONGEST", 100)
    seen = inspect(model, TOKENS)
    assert seen.attention[0].maps.shape == (4, 5, 5) and seen.attention[0].keys.shape == (5, 19, 0)
    assert seen.looked_at(0, 0, 5) == []


@pytest.mark.parametrize("expression", ["llama@1m+gqa:2", "gpt2@1m+alibi+window:5"])
def test_blocks_make_no_difference(expression: str, monkeypatch: pytest.MonkeyPatch):
    model = loud(expression)
    whole = inspect(model, TOKENS)
    monkeypatch.setattr(naive, "VALUES_PER_BLOCK", 4 * 19 * 4)  # 4 rows at a time
    monkeypatch.setattr(inspection, "LOGITS_AT_ONCE", 61 * 3)
    parts = inspect(model, TOKENS)
    close(parts.attention[1].maps, whole.attention[1].maps)
    close(parts.depth_loss, whole.depth_loss, equal_nan=True, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(parts.heads, whole.heads, strict=True):
        close(torch.tensor(list(vars(mine).values())), torch.tensor(list(vars(theirs).values())), atol=1e-5, rtol=1e-5)


# Any model


class Mean(Mixer):
    """Mixer by the running mean, without a map."""

    causal, reach, heads, separates_documents = True, None, None, True

    def matrices(self) -> dict[str, Any]:
        return {}

    def init_state(self, *sizes: Any, **more: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor, pass_: Any = None, state: Any = None) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def test_a_layer_without_maps():
    model = loud("llama@1m")
    model.layers[1].mixer = Mean()
    seen = inspect(model, TOKENS)
    assert sorted(seen.attention) == [0, 2] and {head.layer for head in seen.heads} == {0, 2}
    for layer in model.layers:
        layer.mixer = Mean()
    assert not inspect(model, TOKENS).heads


def test_half_precision():
    seen = inspect(loud("llama@1m+gqa:2").bfloat16(), TOKENS)
    exact = inspect(loud("llama@1m+gqa:2"), TOKENS)
    assert seen.mean_loss == pytest.approx(exact.mean_loss, rel=0.1)
    assert seen.residual_rms.dtype == torch.float32


def test_one_token():
    seen = inspect(loud("llama@1m"), [7])
    assert math.isnan(seen.mean_loss) and seen.attention[0].maps.tolist() == [[[1.0]]] * 4
    json.dumps(seen.to_dict(), allow_nan=False)
    assert "nan" not in repr(seen)


def test_inspection_of_nan_weights_is_valid_json_and_html():
    model = loud("llama@1m")
    with torch.no_grad():
        model.layers[1].mixer.qkv.weight.fill_(math.nan)  # type: ignore[union-attr,operator]
    seen = inspect(model, TOKENS)
    assert json.loads(json.dumps(seen.to_dict(), allow_nan=False))["loss"] is None
    assert seen.html().startswith("<!doctype html>")


def test_the_model_is_left_as_it_was():
    model = loud("llama@1m+dropout:0.5").train()
    first, second = inspect(model, TOKENS), inspect(model, TOKENS)
    assert torch.equal(first.depth_loss[:, :-1], second.depth_loss[:, :-1])
    assert model.training and not any(site.watched for site in sites(model).values())


def test_a_reading_as_json():
    seen = inspect(loud("llama@1m"), TOKENS, name="one")
    found = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert found["name"] == "one" and found["ids"] == TOKENS.tolist() and found["tokens"] == 19
    assert found["loss_per_token"][0] is None and len(found["loss_per_token"]) == 19
    assert found["heads"][5]["layer"] == 1 and found["heads"][5]["head"] == 1
    assert found["heads"][5]["sink_mass"] == seen.heads[5].sink_mass
    assert len(found["depths"]) == len(found["lens"]["predictions"]) == 4
    last = found["lens"]["predictions"][-1][0]
    assert last == {"word": str(last["id"]), "id": int(seen.top_ids[-1, -1, 0]),
                    "probability": pytest.approx(seen.top_probabilities[-1, -1, 0].item())}  # fmt: skip


def test_notable_heads_are_sorted_and_meet_their_mark():
    found = inspect(loud("llama@1m"), TOKENS).notable(4)
    assert all(head.sink_mass > 0.3 for head in found["first token"])
    elsewhere = [head.elsewhere for head in found["elsewhere"]]
    assert elsewhere == sorted(elsewhere, reverse=True) and 1 <= len(elsewhere) <= 4


@pytest.mark.parametrize(
    ("tokens", "code", "field"),
    [
        (torch.tensor([1, 61]), "range", "tokens"),
        (torch.tensor([[1], [2]]), "range", "tokens"),
        (torch.tensor([1.0]), "type", "tokens"),
        (torch.tensor([], dtype=torch.long), "range", "tokens"),
        (torch.zeros(20_000, dtype=torch.long), "range", "tokens"),
    ],
)
def test_wrong_tokens(tokens: Tensor, code: str, field: str):
    with refused(code=code, field=field):
        inspect(loud("llama@1m"), tokens)


# Words


def test_words_of_bytes():
    ids = ByteTokenizer().encode("é 😀\n").tolist()
    assert spelled_text(ids, ByteTokenizer()) == ["", "é", " ", "", "", "", "😀", "\n"]
    assert "".join(spelled_text(ids, ByteTokenizer())) == "é 😀\n"
    spell = speller(ByteTokenizer())
    assert spell(65) == "A" and spell(0xC3) == "\ufffd" and spell(256) == "<256>" and spell(999) == "<999>"


def test_invalid_bytes_keep_their_positions():
    ids = [0xC3, 65, 0xFF, 66]
    assert spelled_text(ids, ByteTokenizer()) == ["\ufffd", "A", "\ufffd", "B"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_words_make_up_the_text(text: str):
    try:
        ids = ByteTokenizer().encode(text).tolist()
    except RequestError:  # a lone surrogate
        return
    assert "".join(spelled_text(ids, ByteTokenizer())) == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_nothing_hidden_is_shown_as_it_is(text: str):
    shown = visible(text)
    assert shown and all(sign.isprintable() or sign == "\u200d" for sign in shown)
    assert not set(shown) & set("\n\r\t\x00\x1b\u202e\u2066\u200b\ufeff\u2028\u00a0\u3000\u2800")
    assert shown.strip() and "  " not in shown and not shown.endswith(" ")


def test_visible():
    assert visible("") == "⋯" and visible("a\n\tb") == "a↵⇥b" and visible("\u202ex") == "⟨U+202E⟩x"
    assert (
        visible(" ") == "␣" and visible("\u00a0") == "⍽" and visible("   x y ") == "␣␣␣x y␣" and visible(" x") == " x"
    )
    assert visible("\n  ") == "↵␣␣" and visible("\u3000") == "⟨U+3000⟩" and visible("\u0301") == "◌\u0301"
    assert visible("x" * 100) == "x" * 60 + "…"
