"""Direct logit attribution: it sums to the logit, and every part is what autograd, plain products and TransformerLens
say it is."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.lens import LogitAttribution, attention_maps, logit_attribution
from glassformer.model import Model
from glassformer.parts.norm import LayerNorm, Norm
from glassformer.parts.quantized import quantize
from glassformer.parts.residual import Pre
from glassformer.text import BPETokenizer
from tests.lens.test_maps import EXPRESSIONS, LENGTH, TOKENS, tiny, written
from tests.refused import refused

SIGMA = "llama@1m+untied+sigmareparam:2"


def summed(found: LogitAttribution) -> float:
    return found.embed + float(found.heads.sum() + found.ffn.sum() + found.biases.sum()) + found.bias


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("position", [0, 4, -1])
def test_contributions_sum_to_the_logit(expression: str, position: int):
    model = tiny(expression)
    with torch.no_grad():
        logits = model(TOKENS)[0, position].double()
    cap = model.head.softcap
    for token, against in ((None, None), (3, None), (17, 96)):
        found = logit_attribution(model, TOKENS, token, against, position)
        assert found.token == (int(logits.argmax()) if token is None else token)
        expected = float(logits[found.token]) - (0.0 if against is None else float(logits[against]))
        assert math.isclose(found.logit, expected, abs_tol=1e-4)
        assert math.isclose(summed(found), found.total, abs_tol=1e-9)
        if cap is None:
            assert math.isclose(found.total, expected, abs_tol=1e-4)
        elif against is None:  # the sum is the logit before the soft cap
            assert math.isclose(cap * math.tanh(found.total / cap), expected, abs_tol=1e-4)
            assert abs(found.total - expected) > 1e-3


# Another way to the same numbers: the gradient of the logit of a model whose norms are constants times their input


@contextmanager
def norms_held(model: Model) -> Iterator[None]:
    """Makes every norm divide by a constant: its scale is detached, so that gradients pass only the division."""
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    for norm in norms:
        centred = isinstance(norm, LayerNorm)

        def forward(x: Tensor, norm: Any = norm, centred: bool = centred) -> Tensor:
            x = x - x.mean(-1, keepdim=True) if centred else x
            gain = norm.weight + 1 if getattr(norm, "unit_offset", False) else norm.weight
            scale = (x.square().mean(-1, keepdim=True) + norm.eps).sqrt().detach()
            return x / scale * gain + (0 if getattr(norm, "bias", None) is None else norm.bias)

        norm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def by_gradient(model: Model, token: int, position: int) -> dict[str, Tensor]:
    """Site -> value times gradient of the logit before the soft cap, at the position; branches are held constant."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str) -> Any:
        def cut(x: Tensor) -> Tensor:
            leaves[name] = x.detach().requires_grad_()
            return leaves[name]

        return cut

    names = ["embed", *(f"layers.{i}.mixer.z" for i in range(2)), *(f"layers.{i}.ffn.out" for i in range(2))]
    names = [name for name in names if name in gf.capture(model, TOKENS, "*")]
    cap, model.head.softcap = model.head.softcap, None
    with norms_held(model), gf.edit(model, {name: leaf(name) for name in names}):
        model(TOKENS)[0, position, token].backward()
    model.head.softcap = cap
    return {name: (x * x.grad)[0, position].sum(-1).detach() for name, x in leaves.items()}


@pytest.mark.parametrize("expression", [*EXPRESSIONS, SIGMA])
def test_every_part_is_its_gradient_times_itself(expression: str):
    model = tiny(expression)
    found, expected = logit_attribution(model, TOKENS, 3, position=6), by_gradient(model, 3, 6)
    close = torch.testing.assert_close
    close(torch.tensor(found.embed), expected["embed"], rtol=0, atol=1e-5, check_dtype=False)
    for layer in range(2):
        close(found.heads[layer], expected[f"layers.{layer}.mixer.z"], rtol=0, atol=1e-5, check_dtype=False)
        ffn = expected.get(f"layers.{layer}.ffn.out", torch.zeros(()))
        close(found.ffn[layer], ffn, rtol=0, atol=1e-5, check_dtype=False)
    assert float(found.heads.abs().max()) > 1e-2


def test_every_part_of_gpt2_by_plain_products():
    """out W_O^T, centred, over the actual deviation, times gain, along the token's row: head by head."""
    model = tiny("gpt2@1m")
    seen = gf.capture(model, TOKENS, "*")
    last, gain = seen["layers.1.resid_post"][0, 5], model.final_norm.weight
    row = model.embedding.weight[40]

    def logit_of(part: Tensor) -> float:
        return float(((part - part.mean()) / (last.var(unbiased=False) + 1e-5).sqrt() * gain) @ row)

    with torch.no_grad():
        found = logit_attribution(model, TOKENS, 40, position=5)
        assert math.isclose(found.embed, logit_of(seen["embed"][0, 5]), abs_tol=1e-5)
        for layer in range(2):
            output = model.layers[layer].mixer.output
            for head in range(4):
                rows = slice(8 * head, 8 * head + 8)
                part = output.weight[:, rows] @ seen[f"layers.{layer}.mixer.z"][0, 5, head]
                assert math.isclose(float(found.heads[layer, head]), logit_of(part), abs_tol=1e-5)
            ffn = seen[f"layers.{layer}.ffn.out"][0, 5]
            assert math.isclose(float(found.ffn[layer]), logit_of(ffn), abs_tol=1e-5)
            assert math.isclose(float(found.biases[layer]), logit_of(output.bias), abs_tol=1e-5)
        assert math.isclose(found.bias, float(model.final_norm.bias @ row), abs_tol=1e-5)


def test_a_difference_is_the_difference_of_two():
    model = tiny("llama@1m+gqa:2")
    one, other = (logit_attribution(model, TOKENS, token) for token in (17, 96))
    lead = logit_attribution(model, TOKENS, 17, 96)
    torch.testing.assert_close(lead.heads, one.heads - other.heads)
    torch.testing.assert_close(lead.ffn, one.ffn - other.ffn)
    assert math.isclose(lead.total, one.total - other.total, abs_tol=1e-9)


def test_silencing_a_last_layer_head_removes_its_contribution():
    """With the norm held, nothing reads the last layer's heads but the head of the model."""
    model = tiny("falcon@1m")
    found = logit_attribution(model, TOKENS, 3)

    def silence(z: Tensor) -> Tensor:
        z[:, :, 2] = 0
        return z

    scale = gf.capture(model, TOKENS, "layers.1.resid_post")["layers.1.resid_post"][0, -1].std(correction=0)
    with gf.edit(model, {"layers.1.mixer.z": silence}):
        without = logit_attribution(model, TOKENS, 3)
        now = gf.capture(model, TOKENS, "layers.1.resid_post")["layers.1.resid_post"][0, -1].std(correction=0)
    assert without.heads[1, 2] == 0
    left = (without.total - without.bias) * float(now / scale)
    assert math.isclose(found.total - found.bias - left, float(found.heads[1, 2]), rel_tol=1e-3)


def test_packed_and_half_precision_weights_are_read_too():
    for model in (quantize(tiny("llama@1m+head.bias=true"), "int8"), tiny("gpt2@1m").bfloat16()):
        found = logit_attribution(model, TOKENS, 3)
        assert math.isclose(found.total, found.logit, abs_tol=0.05)


def test_a_reading_is_of_the_model_at_rest():
    model = tiny("gpt2@1m+dropout:0.5")
    still = logit_attribution(model, TOKENS)
    assert logit_attribution(model.train(), TOKENS).total == still.total and model.training


# TransformerLens


@pytest.mark.parametrize("expression", ["gpt2@1m", "llama@1m+gqa:2"])
def test_transformer_lens_attributes_the_same(expression: str, tmp_path: Path):
    pytest.importorskip("transformer_lens", reason="transformer-lens is not installed")
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = BPETokenizer.train(["the cat sat on the mat. " * 9], 270)
    model = tiny(f"{expression}+vocab_size={tokenizer.vocab_size}")
    gf.save(model, tokenizer, tmp_path)
    theirs = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    # Its `logit_attrs` wants the final norm's gain in the head; logits and what each head adds must stay as they are.
    theirs.enable_compatibility_mode(disable_warnings=True, center_unembed=False, fold_value_biases=False)
    _, cache = theirs.run_with_cache(TOKENS)
    for layer, maps in enumerate(attention_maps(model, TOKENS).weights):
        torch.testing.assert_close(maps, cache[f"blocks.{layer}.attn.hook_pattern"][0], rtol=0, atol=1e-6)
    for token, against, position in ((3, None, 0), (17, 96, 5), (96, 3, -1)):
        found = logit_attribution(model, TOKENS, token, against, position)

        def theirs_of(parts: Tensor, asked: tuple[int, int | None, int] = (token, against, position)) -> Tensor:
            return cache.logit_attrs(parts, asked[0], asked[1], pos_slice=asked[2])[:, 0].detach().double()

        heads = cache.stack_head_results(layer=-1, pos_slice=position)
        torch.testing.assert_close(found.heads.flatten(), theirs_of(heads), rtol=0, atol=1e-5)
        ffn = torch.stack([cache[f"blocks.{layer}.hook_mlp_out"][:, position] for layer in range(2)])
        torch.testing.assert_close(found.ffn, theirs_of(ffn), rtol=0, atol=1e-5)


# Words, pictures, and the rest


class Letters:
    def decode(self, ids: list[int]) -> str:
        return f" ${ids[0]}$"


def test_attribution_has_summary_and_figure(tmp_path: Path):
    found = logit_attribution(tiny("gpt2@1m"), TOKENS, 17, 96, tokenizer=Letters())
    names, values = list(found.parts()), list(found.parts().values())
    assert len(names) == 2 * 4 + 2 + 2 and math.isclose(sum(values), found.total)
    assert values == sorted(values, key=abs, reverse=True)
    said = str(found)
    assert said.startswith("logit of ' $17$' over ' $96$' after ' $40$' (position 10): ")
    assert f"{names[0]} {values[0]:+.2f}" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.save(tmp_path / "attribution.png")
    assert (tmp_path / "attribution.png").stat().st_size > 5000
    assert names[0] in written(found) and r"' \$17\$' over" in written(found)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["heads"] == found.heads.tolist()


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"token": 97}, "range", "token"),
        ({"token": 3, "against": -1}, "range", "against"),
        ({"token": 3, "against": 3}, "conflict", "against"),
        ({"position": LENGTH}, "range", "position"),
        ({"tokens": torch.tensor([[97]])}, "range", "tokens"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "range", "tokens"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "range", "tokens"),
        ({"words": ["a"]}, "conflict", "words"),
    ],
)
def test_a_wrong_request_is_one_sentence(wrong: dict[str, Any], code: str, field: str):
    with refused(code=code, field=field) as error:
        logit_attribution(tiny("gpt2@1m"), **({"tokens": TOKENS} | wrong))
    assert "\n" not in str(error.value)


def test_attribution_refuses_unknown_norms_and_wirings():
    class Other(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return x.sign()

    class Gated(Pre):
        norms_stream = None

    model = tiny("gpt2@1m")
    model.final_norm = Other()
    with refused(code="unsupported", field="norm"):
        logit_attribution(model, TOKENS)
    model = tiny("gpt2@1m")
    model.layers[1].residual.__class__ = Gated
    with refused(code="unsupported", field="residual"):
        logit_attribution(model, TOKENS)
