"""The logit lens against transformers, nnsight, torch.distributions and the model's own logits."""

from __future__ import annotations

import json
import math
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from glassformer.lens import LogitLens, logit_lens, unembed
from glassformer.parts.quantized import quantize
from tests.lens.test_maps import EXPRESSIONS, LENGTH, TOKENS, in_transformers, tiny, written
from tests.refused import refused

NEXT = TOKENS[0, 1:]


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """1 for the token that a full sort puts first."""
    order = logits.argsort(-1, descending=True)
    return (order == tokens[:, None]).int().argmax(-1) + 1


def check(found: LogitLens, layer: int, logits: Tensor, last: Tensor) -> None:
    """One layer of a reading against the logits (s, v) it should have made."""
    close = torch.testing.assert_close
    ours, theirs = Categorical(logits=logits.double()), Categorical(logits=last.double())
    probability = ours.probs.float()
    close(found.top_probability[layer], probability.topk(5).values, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.top[layer], logits.topk(5).indices)
    close(found.entropy[layer].double(), ours.entropy(), rtol=1e-4, atol=1e-5)
    close(found.divergence[layer].double(), kl_divergence(theirs, ours), rtol=1e-4, atol=1e-5)
    final, places = last.argmax(-1), torch.arange(len(logits))
    assert torch.equal(found.final, final)
    close(found.final_probability[layer], probability[places, final], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.final_rank[layer], ranks(logits, final))
    close(found.next_probability[layer, :-1], probability[places[:-1], NEXT], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.next_rank[layer, :-1], ranks(logits[:-1], NEXT))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_logit_lens_of_the_last_layer_equals_the_model(expression: str):
    model = tiny(expression)
    with torch.no_grad():
        logits = model(TOKENS)[0]
    found = logit_lens(model, TOKENS)
    check(found, 1, logits, logits)
    assert bool((found.final_rank[1] == 1).all()) and float(found.divergence[1].abs().max()) < 1e-6
    assert float(found.divergence[0].min()) > 1e-3


@pytest.mark.parametrize("expression", ["gpt2@1m", "llama@1m+gqa:2"])
def test_every_layer_is_that_of_transformers(expression: str, tmp_path: Path):
    model = tiny(f"{expression}+layers=3")
    theirs = in_transformers(model, tmp_path)
    norm = theirs.transformer.ln_f if "gpt2" in expression else theirs.model.norm
    with torch.no_grad():
        out = theirs(TOKENS, output_hidden_states=True)
        between = [theirs.lm_head(norm(x))[0] for x in out.hidden_states[1:-1]]  # the last one is normed already
    found = logit_lens(model, TOKENS)
    for layer, logits in enumerate([*between, out.logits[0]]):
        check(found, layer, logits, out.logits[0])


@pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'")
def test_a_layer_of_an_nnsight_trace_read_by_hand():
    nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")
    model = tiny("gpt2@1m+post+head.softcap=3+head.bias=true")  # no final norm
    opened = nnsight.NNsight(model)
    with opened.trace(TOKENS):
        first = opened.layers[0].output.save()
        second = opened.layers[1].output.save()
        last = opened.output.save()
    for layer, x in enumerate((first, second)):
        logits = 3 * torch.tanh(F.linear(x[0], model.embedding.weight, model.head.bias) / 3)
        check(logit_lens(model, TOKENS), layer, logits.detach(), last[0].detach())


def test_logit_lens_of_a_zero_head_is_uniform():
    model = tiny("llama@1m+untied")
    with torch.no_grad():
        model.head.weight.zero_()
    found = logit_lens(model, TOKENS, top=97)
    torch.testing.assert_close(found.entropy, torch.full((2, LENGTH), math.log(97)))
    torch.testing.assert_close(found.top_probability, torch.full((2, LENGTH, 97), 1 / 97))
    assert not found.divergence.any() and bool((found.final_rank == 1).all())


def test_chosen_positions_are_rows_of_the_whole():
    model = tiny("llama@1m+gqa:2")
    whole, some = logit_lens(model, TOKENS), logit_lens(model, TOKENS, positions=[7, 2, -1])
    assert some.positions == [7, 2, LENGTH - 1] and some.words == ["2", "0", "40"]
    for name in ("top", "top_probability", "final_probability", "next_rank", "entropy", "divergence"):
        expected = getattr(whole, name)[:, some.positions]
        torch.testing.assert_close(getattr(some, name), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert logit_lens(model, TOKENS, positions=3).positions == [3]


def test_last_token_has_no_next_probability():
    found = logit_lens(tiny("gpt2@1m"), TOKENS)
    assert found.next.tolist() == [*NEXT.tolist(), -1]
    assert bool(found.next_probability[:, -1].isnan().all()) and found.next_rank[:, -1].tolist() == [0, 0]
    assert not found.next_probability[:, :-1].isnan().any() and bool((found.next_rank[:, :-1] > 0).all())


def test_logits_are_made_of_a_few_places_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model = tiny("llama@1m")
    whole, rows = logit_lens(model, TOKENS), []
    monkeypatch.setattr(import_module("glassformer.lens.logit_lens"), "VALUES_PER_CHUNK", 97 * 3)
    forward = model.head.forward
    monkeypatch.setattr(
        model.head, "forward", lambda x, *more, **how: rows.append(x.shape[1]) or forward(x, *more, **how)
    )
    found = logit_lens(model, TOKENS)
    assert max(rows) == 3
    assert torch.equal(found.top, whole.top)
    torch.testing.assert_close(found.entropy, whole.entropy)
    torch.testing.assert_close(found.divergence, whole.divergence)


def test_the_end_of_a_model_reads_any_stream():
    model = tiny("llama@1m+tied+head.scale=0.5")
    x = torch.randn(2, 3, 32)
    by_hand = x / (x.square().mean(-1, keepdim=True) + model.final_norm.eps).sqrt() * model.final_norm.weight
    torch.testing.assert_close(unembed(model, x), 0.5 * by_hand @ model.embedding.weight.T)


def test_packed_and_half_precision_weights_are_read_too():
    for model in (quantize(tiny("llama@1m"), "int8"), tiny("llama@1m").bfloat16()):
        with torch.no_grad():
            logits = model(TOKENS)[0].float()
        found = logit_lens(model, TOKENS)
        torch.testing.assert_close(found.top_probability[1], logits.softmax(-1).topk(5).values, rtol=0, atol=2e-2)
        assert found.entropy.dtype == torch.float32


# Words and pictures


class Letters:
    def decode(self, ids: list[int]) -> str:
        return f" ${ids[0]}$"


def test_predictions_are_spelled_by_the_tokenizer():
    model = tiny("gpt2@1m")
    found = logit_lens(model, TOKENS, top=2, tokenizer=Letters())
    assert found.top_words[1][4] == [f" ${token}$" for token in found.top[1, 4].tolist()]
    assert logit_lens(model, TOKENS, top=2).top_words[1][4] == [str(token) for token in found.top[1, 4].tolist()]
    assert f"layer  1: {found.top_words[1][-1][0]!r}" in str(found)


@pytest.mark.parametrize("positions", [None, [-1]])
def test_it_draws_itself(positions: list[int] | None, tmp_path: Path):
    found = logit_lens(tiny("gpt2@1m"), TOKENS, positions=positions, tokenizer=Letters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.save(tmp_path / "lens.png")
    assert (tmp_path / "lens.png").stat().st_size > 5000
    shown = written(found)
    assert found.top_words[0][0][0].strip().replace("$", r"\$") in shown
    assert ("the text's next" in shown) == (positions is None)
    assert json.loads(json.dumps(found.to_dict()))["top"] == found.top.tolist()


def test_many_places_are_drawn_without_words():
    found = logit_lens(tiny("llama@1m"), torch.arange(50)[None])
    assert len(written(found)) < 400


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"top": 0}, "range", "top"),
        ({"top": 98}, "range", "top"),
        ({"positions": 11}, "range", "position"),
        ({"positions": [0, -12]}, "range", "position"),
        ({"positions": []}, "missing", "position"),
        ({"tokens": torch.tensor([[97]])}, "range", "tokens"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "range", "tokens"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "range", "tokens"),
        ({"words": ["a"]}, "conflict", "words"),
    ],
)
def test_a_wrong_request_is_one_sentence(wrong: dict[str, Any], code: str, field: str):
    with refused(code=code, field=field) as error:
        logit_lens(tiny("gpt2@1m"), **({"tokens": TOKENS} | wrong))
    assert "\n" not in str(error.value)
