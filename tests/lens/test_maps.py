"""Attention maps and rollout against transformers, nnsight and closed forms; what is shown says what it is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.lens import AttentionMaps, Reading, attention_map, attention_maps, attention_rollout, side_by_side
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.quantized import quantize
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=97+context=64"
GEMMA = "llama@1m+sandwich+geglu+tied+norm.unit_offset=true+embedding.scale=5.66+head.softcap=3+softcap:5"
EXPRESSIONS = [
    "gpt2@1m",
    "gpt2@1m+residual.scale=0.3+embedding.scale=2+head.scale=0.5+head.bias=true",
    "llama@1m+gqa:2",
    "llama@1m+window:4",
    "llama@1m+ffn=none",
    "bloom@1m",
    "falcon@1m",
    "falcon@1m+parallel2",
    "mpt@1m",
    GEMMA,
    "gpt2@1m+sandwich+residual.scale=0.7",
    "llama@1m+respost+qknorm:full",
    "gpt2@1m+respost",
    "gpt2@1m+post+residual.scale=0.7",
    "llama@1m+post",
    "gpt2@1m+bidirectional",
]
"""Every wiring, with both norms, and what the published families add to it."""
TOKENS = torch.tensor([[5, 96, 0, 17, 5, 33, 64, 2, 81, 17, 40]])
LENGTH = TOKENS.shape[1]


def tiny(expression: str) -> Model:
    """Returns a small model whose parameters all differ from their initial values: no bias is zero, no gain one."""
    name, plus, changes = expression.partition("+")
    model = preset(f"{name}+{SIZE}{plus}{changes}").build(seed=0).eval()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.15)
    return model


def in_transformers(model: Model, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    gf.save(model, None, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("expression", ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "mistral@1m+window:4"])
def test_maps_are_those_of_transformers(expression: str, tmp_path: Path):
    model = tiny(expression)
    with torch.no_grad():
        theirs = in_transformers(model, tmp_path)(TOKENS, output_attentions=True).attentions
    every = attention_maps(model, TOKENS)
    assert every.layers == [0, 1] and every.tile == 1
    for layer, pattern in enumerate(theirs):
        torch.testing.assert_close(every.weights[layer], pattern[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(attention_maps(model, TOKENS, layer).weights[0], pattern[0], rtol=0, atol=1e-6)
        for head in range(4):
            one = attention_map(model, TOKENS, layer, head)
            assert (one.layer, one.head) == (layer, head)
            torch.testing.assert_close(one.weights, pattern[0, head], rtol=0, atol=1e-6)
    half = torch.stack([pattern[0].mean(0) for pattern in theirs]) / 2 + torch.eye(LENGTH) / 2
    torch.testing.assert_close(attention_rollout(model, TOKENS).flow[1], half[1] @ half[0], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'")
@pytest.mark.parametrize("expression", [GEMMA, "mpt@1m"])
def test_a_map_is_that_of_an_nnsight_trace(expression: str):
    nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")
    model = tiny(expression)
    found = attention_map(model, TOKENS, -1, -2)
    hook = model.layers[1].mixer.pattern.register_forward_hook(lambda *_: None)  # called only if observed
    opened = nnsight.NNsight(model)
    with opened.trace(TOKENS):
        pattern = opened.layers[1].mixer.pattern.output.save()
    hook.remove()
    assert (found.layer, found.head) == (1, 2)
    torch.testing.assert_close(found.weights, pattern[0, 2].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_row_of_a_map_and_of_a_rollout_sums_to_one(expression: str):
    model = tiny(expression)
    for maps in attention_maps(model, TOKENS).weights:
        assert maps.shape == (4, LENGTH, LENGTH)
        torch.testing.assert_close(maps.sum(-1), torch.ones(4, LENGTH))
        assert bool((maps.triu(1) > 0).any()) == ("bidirectional" in expression)
        if "window" in expression:
            assert not maps.tril(-4).any() and maps.tril(-3).any()
    torch.testing.assert_close(attention_rollout(model, TOKENS).flow.sum(-1), torch.ones(2, LENGTH))


# Rollout, in closed form


def without_queries(expression: str) -> Model:
    """Queries of zero: every key that is seen gets the same weight."""
    model = tiny(f"{expression}+layers=3")
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.qkv.weight[:32] = 0
    return model


def test_rollout_of_uniform_attention():
    """J = ones / s is its own square: R_l = I / 2^(l+1) + (1 - 1 / 2^(l+1)) J."""
    flow = attention_rollout(without_queries("llama@1m+bidirectional"), TOKENS).flow
    for layer in range(3):
        left = 0.5 ** (layer + 1)
        expected = left * torch.eye(LENGTH) + (1 - left) / LENGTH
        torch.testing.assert_close(flow[layer], expected, rtol=0, atol=1e-6)


def test_rollout_of_uniform_causal_attention():
    found = attention_rollout(without_queries("llama@1m"), TOKENS)
    flow, seen = found.flow, torch.ones(LENGTH, LENGTH).tril()
    one = seen / seen.sum(-1, keepdim=True) / 2 + torch.eye(LENGTH) / 2
    for layer in range(3):
        torch.testing.assert_close(flow[layer], torch.linalg.matrix_power(one, layer + 1), rtol=0, atol=1e-6)
    assert torch.equal(found.last, flow[:, -1])


def test_rollout_of_attention_to_oneself_is_the_identity():
    flow = attention_rollout(tiny("llama@1m+window:1"), TOKENS).flow
    assert torch.equal(flow, torch.eye(LENGTH).expand(2, -1, -1))


def test_maps_and_rollout_do_not_depend_on_the_blocks_they_come_in(monkeypatch: pytest.MonkeyPatch):
    model = tiny("gpt2@1m")
    maps, rollout = attention_maps(model, TOKENS), attention_rollout(model, TOKENS)
    monkeypatch.setattr("glassformer.parts.kernel.naive.VALUES_PER_BLOCK", 4 * LENGTH * 3)
    torch.testing.assert_close(attention_maps(model, TOKENS).weights, maps.weights)
    torch.testing.assert_close(attention_rollout(model, TOKENS).flow, rollout.flow)


# Pooled maps


def of_tiles(weights: Tensor, tile: int) -> Tensor:
    """The largest of every tile, one by one."""
    s = weights.shape[-1]
    starts = range(0, s, tile)
    return torch.tensor([[weights[i : i + tile, j : j + tile].max() for j in starts] for i in starts])


def test_maps_of_a_long_text_are_pooled_and_note_it():
    model, tokens = tiny("llama@1m"), torch.randint(97, (1, 50), generator=torch.Generator().manual_seed(2))
    whole = attention_map(model, tokens, 1, 3)
    small = attention_map(model, tokens, 1, 3, pool=16)
    assert whole.tile == 1 and small.tile == 4
    torch.testing.assert_close(small.weights, of_tiles(whole.weights, 4))
    grid = attention_maps(model, tokens, 1, pool=16)
    torch.testing.assert_close(grid.weights[0][3], small.weights)
    rollout = attention_rollout(model, tokens, pool=16)
    torch.testing.assert_close(rollout.flow[1], of_tiles(attention_rollout(model, tokens).flow[1], 4))
    assert rollout.last.shape == (2, 50)
    both = side_by_side(model, tokens, 1, 3, pool=16)
    for reading in (small, grid, rollout, both, attention_maps(model, tokens, pool=16)):
        assert "pooled: a cell is the largest of 4 x 4 tokens" in str(reading)
        assert "pooled: a cell is the largest of 4 x 4 tokens" in written(reading)
    assert "pooled" not in str(whole) + written(whole)
    assert "tokens 48 to 49" in str(small)


def test_all_layers_are_pooled_further_than_one():
    model, tokens = tiny("llama@1m"), torch.zeros(1, 300, dtype=torch.long)
    assert attention_maps(model, tokens).weights[0].shape == (4, 60, 60)
    assert attention_maps(model, tokens, 0).weights[0].shape == (4, 150, 150)


# Causal against bidirectional


@pytest.mark.parametrize("expression", ["llama@1m+gqa:2", "llama@1m+window:4+kernel=banded", "bloom@1m+bidirectional"])
def test_side_by_side_changes_only_the_visibility(expression: str):
    model = tiny(expression)
    with torch.no_grad():
        before = model(TOKENS)
    both = side_by_side(model, TOKENS, 1, 2)
    for name, map_of in (("causal", both.causal), ("bidirectional", both.bidirectional)):
        other = preset(f"{expression.replace('+kernel=banded', '')}+{name}+{SIZE}").build(seed=5).eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(map_of, attention_map(other, TOKENS, 1, 2).weights)
    assert not both.causal.triu(1).any() and both.bidirectional.triu(1).any()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), before)
    assert "goes to later tokens" in str(both)


def test_side_by_side_needs_a_config_and_plain_weights():
    model = tiny("gpt2@1m")
    model.config = None
    with refused(code="missing", field="config"):
        side_by_side(model, TOKENS, 0, 0)
    with refused(code="unsupported", field="quantize"):
        side_by_side(quantize(tiny("gpt2@1m"), "int8"), TOKENS, 0, 0)


# Words, pictures, and the rest


def written(reading: Reading) -> str:
    """Returns all text on the reading's figure."""
    from matplotlib.text import Text

    return " ".join(text.get_text() for text in reading.figure().findobj(Text))


class Letters:
    """A tokenizer of single letters; token 0 has no text."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x20 + i) if i else "" for i in ids)


def test_words_come_from_the_caller_the_tokenizer_or_the_ids():
    model = tiny("gpt2@1m")
    assert attention_map(model, TOKENS, 0, 0).words[:3] == ["5", "96", "0"]
    assert attention_map(model, TOKENS, 0, 0, Letters()).words[:4] == ["%", "\x80", "<0>", "1"]
    given = list("abcdefghijk")
    assert attention_map(model, TOKENS, 0, 0, Letters(), words=given).words == given
    with refused(code="conflict", field="words"):
        attention_map(model, TOKENS, 0, 0, words=["a", "b"])


def test_every_reading_draws_itself(tmp_path: Path):
    model, words = tiny("llama@1m+gqa:2"), ["$x$", " a b", "\n", "", "é", "_{", "x" * 40, "\t", "{", "\\", "^"]
    readings: list[Reading] = [
        attention_map(model, TOKENS, 0, 0, words=words),
        attention_maps(model, TOKENS, 1, words=words),
        attention_maps(model, TOKENS, words=words),
        side_by_side(model, TOKENS, 0, 1, words=words),
        attention_rollout(model, TOKENS, words=words),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, reading in enumerate(readings):
            reading.save(tmp_path / f"{i}.png")
            assert (tmp_path / f"{i}.png").stat().st_size > 5000
            assert reading.title and str(reading)
            json.dumps(reading.to_dict(), allow_nan=False)
        assert readings[0]._repr_html_().startswith("<img")


def test_one_token_and_one_head_are_enough():
    model = tiny("gpt2@1m+heads=1")
    one = torch.tensor([7])  # a bare row will do
    assert attention_map(model, one, 0, 0).weights.tolist() == [[1.0]]
    for reading in (attention_maps(model, one, 0), attention_maps(model, one), attention_rollout(model, one)):
        assert reading.figure() is not None


def test_layers_of_different_heads_share_one_figure():
    maps = AttentionMaps([0, 1], [torch.eye(3).expand(2, 3, 3), torch.eye(3).expand(5, 3, 3)], ["a", "b", "c"])
    assert maps.figure() is not None and "7 heads" in str(maps)


def test_a_reading_is_of_the_model_at_rest():
    model = tiny("gpt2@1m+dropout:0.5")
    still = attention_map(model, TOKENS, 1, 0).weights
    model.train()
    model.layers[0].ffn.eval()
    assert torch.equal(attention_map(model, TOKENS, 1, 0).weights, still)
    assert model.training and model.layers[1].training and not model.layers[0].ffn.training


def test_a_compiled_model_is_read_as_it_is():
    model = tiny("gpt2@1m")
    with pytest.warns(UserWarning, match="runs eagerly"):
        found = attention_map(torch.compile(model, backend="eager"), TOKENS, 1, 0)
    assert torch.equal(found.weights, attention_map(model, TOKENS, 1, 0).weights)


@pytest.mark.parametrize(
    ("wrong", "code", "field", "value"),
    [
        ({"layer": 2}, "range", "layer", 2),
        ({"layer": -3}, "range", "layer", -3),
        ({"head": 4}, "range", "head", 4),
        ({"tokens": torch.tensor([[97]])}, "range", "tokens", 97),
        ({"tokens": torch.tensor([[3, -1]])}, "range", "tokens", -1),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "range", "tokens", 2),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "range", "tokens", (1, 0)),
        ({"tokens": torch.zeros(1, 1, 1, dtype=torch.long)}, "range", "tokens", (1, 1, 1)),
        ({"tokens": torch.zeros(1, 3)}, "type", "tokens", "torch.float32"),
        ({"tokens": torch.zeros(1, 65, dtype=torch.long)}, "range", "tokens", 65),
        ({"pool": 0}, "range", "pool", 0),
    ],
)
def test_a_wrong_request_is_one_sentence(wrong: dict[str, Any], code: str, field: str, value: object):
    given: dict[str, Any] = {"tokens": TOKENS, "layer": 0, "head": 0} | wrong
    model = tiny("gpt2@1m")
    with refused(code=code, field=field) as error:
        attention_map(model, **given)
    assert error.value.value == value and "\n" not in str(error.value)
    given.pop("head")
    if "head" not in wrong:
        with refused(code=code, field=field):
            attention_maps(model, **given)
    if not {"head", "layer"} & set(wrong):
        given.pop("layer")
        with refused(code=code, field=field):
            attention_rollout(model, **given)


def test_a_layer_without_attention_has_no_map():
    model = tiny("gpt2@1m")
    del model.layers[1].mixer.pattern
    for ask in (lambda: attention_map(model, TOKENS, 1, 0), lambda: attention_rollout(model, TOKENS)):
        with refused(code="unsupported", field="layer"):
            ask()
    del model.layers[0].mixer.pattern
    with refused(code="unsupported", field="model"):
        attention_maps(model, TOKENS)
