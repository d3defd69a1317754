"""Beam search equals that of `transformers`, and finds the best text if it is wide enough for all texts."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassformer.generation.beams import Beam, beams
from glassformer.model import Model
from glassformer.naming import preset
from tests.parity.families import TINY, ours, theirs
from tests.refused import failed, refused

module = import_module("glassformer.generation.beams")
NAMES = ["gpt2", "llama-2-70b", "mistral-7b", "bloom-560m"]
SIZE = TINY[0]


def pair(name: str) -> tuple[Model, nn.Module]:
    """Ours and theirs, with probabilities that differ."""
    other = theirs(name, SIZE, seed=3)
    with torch.no_grad():
        other.get_output_embeddings().weight *= 20 if other.config.tie_word_embeddings else 1
    return ours(name, SIZE, {path: weight.detach() for path, weight in other.named_parameters()}), other


def found_by_theirs(other: Any, tokens: Tensor, asked: dict[str, Any]) -> list[Beam]:
    asked = dict(asked)
    ends = sorted(asked.pop("ends"))
    out = other.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_beams=asked.pop("width"),
        num_return_sequences=asked.pop("n"),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **asked,
    )
    texts = out.sequences[:, tokens.shape[1] :].tolist()
    lengths = [next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in texts]
    scores = out.sequences_scores.tolist()
    return [Beam(text[:n], score) for text, n, score in zip(texts, lengths, scores, strict=True)]


def drawn(seed: int) -> dict[str, Any]:
    """Returns the options of a random request; many end tokens make the end of the search matter."""
    random = torch.Generator().manual_seed(seed)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=random))]

    width = one_of(2, 3, 7)
    return {
        "width": width,
        "max_new_tokens": one_of(1, 5, 12, 12),
        "ends": set(torch.randint(SIZE.vocab, (one_of(0, 4, 12, 80),), generator=random).tolist()),
        "length_penalty": one_of(1.0, 0.0, 2.0, -0.5),
        "n": one_of(1, width, width),
        "early_stopping": one_of(False, True, "never"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_those_of_transformers(name: str) -> None:
    model, other = pair(name)
    cut = set()
    for seed in range(12):
        asked = drawn(seed)
        tokens = torch.randint(SIZE.vocab, (1, 1 + seed % 9), generator=torch.Generator().manual_seed(seed))
        mine, wanted = beams(model, tokens, **asked), found_by_theirs(other, tokens, asked)
        assert [beam.tokens for beam in mine] == [beam.tokens for beam in wanted], asked
        assert [beam.score for beam in mine] == pytest.approx([beam.score for beam in wanted], rel=1e-4, abs=1e-5)
        cut |= {len(beam.tokens) == asked["max_new_tokens"] for beam in mine}
    assert cut == {True, False}


def tiny(expression: str = "llama", vocab: int = 5) -> Model:
    sizes = f"@1m+layers=2+d_model=32+heads=4+vocab_size={vocab}+context=32+init=gpt2+init.std=0.3"
    name, *changes = expression.split("+")
    return preset("+".join([name + sizes, *changes])).build(seed=1).eval()


@torch.no_grad()
def all_texts(model: Model, tokens: Tensor, count: int, ends: set[int]) -> list[Beam]:
    """Returns every text up to `count` tokens, by its log-probability."""
    every = torch.tensor(list(product(range(5), repeat=count)))
    logp = model(torch.cat([tokens.expand(len(every), -1), every], dim=1)).log_softmax(-1)
    each = logp[:, tokens.shape[1] - 1 : -1].gather(2, every[..., None])[..., 0]
    found = {}
    for text, scores in zip(every.tolist(), each, strict=True):
        length = next((i + 1 for i, token in enumerate(text) if token in ends), count)
        found[tuple(text[:length])] = float(scores[:length].sum())
    return [Beam(list(text), score) for text, score in sorted(found.items(), key=lambda pair: -pair[1])]


@pytest.mark.parametrize("expression", ["llama", "llama+window:3", "gpt2", "bloom", "llama+mamba"])
def test_wide_beam_search_finds_the_most_likely_texts(expression: str) -> None:
    """Width 5^3 keeps every text of five tokens open until its last."""
    model, tokens = tiny(expression), torch.tensor([[1, 4, 2, 0, 3, 3, 1]])
    for ends in (set[int](), {2}):
        wanted = all_texts(model, tokens, 4, ends)
        mine = beams(model, tokens, 125, 4, ends, length_penalty=0, n=40, early_stopping="never")
        assert [beam.tokens for beam in mine] == [beam.tokens for beam in wanted[:40]]
        assert [beam.score for beam in mine] == pytest.approx([beam.score for beam in wanted[:40]], rel=1e-4)


def test_one_beam_is_greedy() -> None:
    model, tokens = tiny(vocab=31), torch.tensor([[3, 1, 4]])
    (found,) = beams(model, tokens, 1, 20)
    text = tokens
    with torch.no_grad():
        for _ in range(20):
            text = torch.cat([text, model(text)[:, -1].argmax(-1)[:, None]], dim=1)
    assert found.tokens == text[0, 3:].tolist()


def test_fewer_texts_than_were_asked_for() -> None:
    model, tokens = tiny(), torch.tensor([[1]])
    found = beams(model, tokens, 8, 1, n=8)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in all_texts(model, tokens, 1, set())]
    every_one = beams(model, tokens, 8, 3, ends=range(5), n=8)
    assert sorted(beam.tokens for beam in every_one) == [[0], [1], [2], [3], [4]]


def test_a_model_in_training_is_as_it_was() -> None:
    model = tiny()
    model.train()
    beams(model, torch.tensor([[1]]), 2, 3)
    assert model.training


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "range", "tokens"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "range", "tokens"),
        ({"tokens": torch.tensor([[5]])}, "range", "tokens"),
        ({"width": 0}, "range", "width"),
        ({"max_new_tokens": 0}, "range", "max_new_tokens"),
        ({"n": 0}, "range", "n"),
        ({"n": 3}, "range", "n"),
        ({"length_penalty": math.nan}, "range", "length_penalty"),
        ({"early_stopping": "soon"}, "unknown", "early_stopping"),
        ({"tokens": torch.tensor([[True]])}, "type", "tokens"),
        ({"max_new_tokens": 2.5}, "type", "max_new_tokens"),
        ({"model": tiny("llama+bidirectional")}, "causal", "model"),
        ({"model": tiny("gpt2"), "max_new_tokens": 32}, "range", "max_len"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_in_a_sentence(fields: dict[str, Any], code: str, field: str) -> None:
    given: dict[str, Any] = {"model": tiny(), "tokens": torch.tensor([[1, 2]]), "width": 2, **fields}
    with refused(code=code, field=field) as caught:
        beams(**given)
    assert "\n" not in str(caught.value)


def test_beam_search_fails_on_nan_logits() -> None:
    model = tiny()
    with torch.no_grad():
        model.embedding.weight[3] = math.nan
    with failed(code="diverged"):
        beams(model, torch.tensor([[1, 3]]), 2, 4)
    with failed(code="diverged"):
        beams(model, torch.tensor([[1, 2]]), 5, 4)


@pytest.mark.parametrize("reason", [KeyboardInterrupt, MemoryError])
def test_a_search_that_ends_early_has_its_beams(reason: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """After three tokens the open beams are the texts that a search for three tokens finds, and no text has ended."""
    model, tokens, steps = tiny(), torch.tensor([[1, 2]]), [0]
    expected = beams(model, tokens, 4, 3, ends=[], n=3)
    decode = module.decode

    def stopping(*given: Any) -> Tensor:
        steps[0] += 1
        if steps[0] == 3:
            raise reason
        return decode(*given)

    monkeypatch.setattr(module, "decode", stopping)
    with pytest.raises(reason) as caught:
        beams(model, tokens, 4, 9, ends=[], n=3)
    found = caught.value.so_far
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected])


def test_a_text_that_ended_is_kept_with_the_open_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of up to two tokens of a tiny vocabulary, against all of them by exhaustion."""
    model, tokens, steps = tiny(), torch.tensor([[1, 2]]), [0]
    decode = module.decode
    expected = all_texts(model, tokens, 2, {0})

    def stopping(*given: Any) -> Tensor:
        steps[0] += 1
        if steps[0] == 2:
            raise KeyboardInterrupt
        return decode(*given)

    monkeypatch.setattr(module, "decode", stopping)
    with pytest.raises(KeyboardInterrupt) as caught:
        beams(model, tokens, 21, 9, ends={0}, length_penalty=0, n=21)
    found = caught.value.so_far
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected], abs=1e-5)
