"""Sites: their names are public, and a pattern without a match is refused."""

from __future__ import annotations

import pytest
import torch

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.introspection import capture, edit, sites
from glassformer.lens import ablate_heads
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Attention
from tests.refused import refused

TINY = "d_model=16+heads=2+vocab_size=13+context=16"
TOKENS = torch.arange(6).view(1, 6)

MIXER = [f"mixer.{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "out")]
GLU = [f"ffn.{name}" for name in ("gate", "up", "hidden", "out")]
MLP = [f"ffn.{name}" for name in ("up", "hidden", "out")]
STREAM = ["resid_pre", "resid_mid", "resid_post"]


def tiny(expression: str) -> Model:
    return preset(expression).build().eval()


def of_layers(n: int, names: list[str]) -> set[str]:
    return {f"layers.{layer}.{name}" for layer in range(n) for name in names}


def test_the_names_of_llama_are_those_of_the_manual():
    with torch.device("meta"):
        model = preset("llama@1m").build()
    assert set(sites(model)) == {"embed", "final_norm", "logits"} | of_layers(4, [*STREAM, *MIXER, *GLU])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ("gpt2@1m", [*STREAM, *MIXER, *MLP]),
        ("falcon@1m", ["resid_pre", "resid_post", *MIXER, *MLP]),  # parallel: no place between the branches
        ("gpt2@1m+parallel2+swiglu", ["resid_pre", "resid_post", *MIXER, *GLU]),
        ("llama@1m+sandwich+qknorm+kernel=naive", [*STREAM, *MIXER, *GLU]),
        ("llama@1m+post", [*STREAM, *MIXER, *GLU]),
        ("llama@1m+ffn=none", [*STREAM, *MIXER]),
    ],
)
def test_names_do_not_depend_on_the_wiring(changes: str, names: list[str]):
    model = tiny(f"{changes}+layers=2+{TINY}")
    assert set(sites(model)) == {"embed", "final_norm", "logits"} | of_layers(2, names)
    assert set(capture(model, TOKENS, "*")) == set(sites(model))


def test_sites_hold_the_values_of_their_names():
    """One layer rebuilt from what was seen, line by line."""
    model = tiny(f"llama@1m+layers=1+{TINY}+gqa:1")
    layer, seen = model.layers[0], capture(model, TOKENS, ["*"])
    at = {name.removeprefix("layers.0."): value for name, value in seen.items()}
    norm, ffn, attention = layer.residual, layer.ffn, layer.mixer
    close = torch.testing.assert_close
    close(seen["embed"], model.embedding.weight[TOKENS])
    close(at["resid_pre"], seen["embed"])
    close(at["resid_mid"], at["resid_pre"] + at["mixer.out"])
    close(at["resid_post"], at["resid_mid"] + at["ffn.out"])
    close(at["mixer.out"], attention.output(at["mixer.z"].flatten(-2)))
    assert at["mixer.q"].shape == (1, 6, 2, 8) and at["mixer.k"].shape == at["mixer.v"].shape == (1, 6, 1, 8)
    scores = torch.einsum("bsnh,bth->bnst", at["mixer.q"], at["mixer.k"][:, :, 0]) / 8**0.5
    close(at["mixer.scores"], scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")))
    close(at["mixer.pattern"], at["mixer.scores"].softmax(-1))
    x = norm.ffn_norm(at["resid_mid"])
    close(at["ffn.hidden"], torch.nn.functional.silu(at["ffn.gate"]) * at["ffn.up"])
    close(at["ffn.out"], ffn(x))
    close(seen["final_norm"], model.final_norm(at["resid_post"]))
    close(seen["logits"], seen["final_norm"] @ model.head.weight.T)


def test_patterns_choose():
    model = tiny(f"llama@1m+layers=3+{TINY}")
    assert set(capture(model, TOKENS, "layers.*.mixer.pattern")) == of_layers(3, ["mixer.pattern"])
    assert set(capture(model, TOKENS, ["layers.1.ffn.*", "logits"])) == {f"layers.1.{name}" for name in GLU} | {
        "logits"
    }
    assert set(capture(model, TOKENS, ["layers.[02].resid_???"])) == {
        "layers.0.resid_pre",
        "layers.0.resid_mid",
        "layers.2.resid_pre",
        "layers.2.resid_mid",
    }
    assert not any(value.requires_grad for value in capture(model, TOKENS, "*").values())


def test_capture_accepts_the_models_arguments():
    model, documents = tiny(f"llama@1m+layers=1+{TINY}"), torch.tensor([[1, 1, 1, 2, 2, 2]])
    pattern = capture(model, TOKENS, "*.pattern", documents=documents)["layers.0.mixer.pattern"]
    assert (pattern[:, :, 3:, :3] == 0).all() and (pattern[:, :, 3:, 3:].sum(-1) - 1).abs().max() < 1e-6
    state = model.init_state(1, 8)
    capture(model, TOKENS, "logits", state=state)
    seen = capture(model, TOKENS[:, :1], "*.pattern", state=state)
    assert seen["layers.0.mixer.pattern"].shape == (1, 2, 1, 7) and state.length == 7


def test_a_captured_window_shows_the_keys_it_kept():
    model = tiny(f"llama@1m+layers=1+{TINY}+window:3")
    state = model.init_state(1, 16)
    with torch.no_grad():
        model(TOKENS, state)
    seen = capture(model, TOKENS[:, :1], "*.pattern", state=state)["layers.0.mixer.pattern"]
    assert seen.shape == (1, 2, 1, 3)
    torch.testing.assert_close(seen.sum(-1), torch.ones(1, 2, 1))


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.0.mixer.patern", "'layers.0.mixer.pattern'"),
        ("layers.9.mixer.q", "layers."),
        ("final_nrom", "'final_norm'"),
        ("logit", "'logits'"),
    ],
)
def test_a_wrong_name_is_refused_with_near_ones(pattern: str, near: str):
    model = tiny(f"llama@1m+layers=1+{TINY}")
    with pytest.raises(RequestError) as refused:
        capture(model, TOKENS, ["logits", pattern])
    message = str(refused.value)
    assert repr(pattern) in message and near in message and "\n" not in message
    assert not any(site.watched for site in sites(model).values())


def test_captured_tensors_own_their_memory():
    """q, k and v are views of one product, a block of a reduction may be one of its map: their memory is their own."""
    model = tiny(f"llama@1m+layers=1+{TINY}")
    kept = capture(model, TOKENS, "*") | {"row": capture(model, TOKENS, "*.scores", reduce=lambda x: x[..., :1])}
    row = kept.pop("row")["layers.0.mixer.scores"]
    for name, value in {**kept, "row": row}.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name


@pytest.mark.parametrize(
    ("tokens", "code", "field"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), "range", "tokens"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), "range", "tokens"),
        (torch.zeros(1, 2), "type", "tokens"),
        ([[1, 13]], "range", "tokens"),
        ([[-1, 2]], "range", "tokens"),
        ("To be", "type", "tokens"),
        ([None], "type", "tokens"),
    ],
)
def test_invalid_tokens_are_refused(tokens: object, code: str, field: str):
    with refused(code=code, field=field):
        capture(tiny(f"llama@1m+layers=1+{TINY}"), tokens, "*")


def test_one_text_needs_no_row():
    model = tiny(f"llama@1m+layers=1+{TINY}")
    expected = capture(model, TOKENS, "logits")["logits"]
    for given in (TOKENS[0], TOKENS[0].tolist(), TOKENS.to(torch.uint16), TOKENS[0].to(torch.uint32).numpy()):
        assert torch.equal(capture(model, given, "logits")["logits"], expected)


@pytest.mark.parametrize("layer", [2, 99, -1])
def test_missing_layer_is_refused_with_the_existing_ones(layer: int):
    model = tiny(f"llama@1m+layers=2+{TINY}")
    said = rf"layer {layer} is out of range: the model has layers 0 to 1, and no site is named 'layers.{layer}.mixer.z'"
    with pytest.raises(RequestError, match=said):
        capture(model, TOKENS, f"layers.{layer}.mixer.z")
    edits = {f"layers.{layer}.mixer.z": torch.zeros_like} if layer < 0 else ablate_heads(layer, 0)
    with refused(code="unknown", field="sites"), edit(model, edits):
        pass
    with pytest.raises(RequestError) as caught:
        capture(model, TOKENS, "layers.1.mixer.zz")
    assert "out of range" not in str(caught.value) and "'layers.1.mixer.z'" in str(caught.value)


def test_hooks_go_when_the_pass_fails():
    model = tiny(f"llama@1m+layers=1+{TINY}")
    with pytest.raises(ZeroDivisionError):
        capture(model, TOKENS, "*", reduce=lambda x: 1 / 0)
    assert not any(site.watched for site in sites(model).values())


def test_an_edit_at_a_site_reaches_the_logits():
    """A hook at a site that returns a value replaces the site's value."""
    model = tiny(f"llama@1m+layers=1+{TINY}")
    known = sites(model)
    for name in (
        "embed",
        "layers.0.mixer.z",
        "layers.0.mixer.pattern",
        "layers.0.mixer.q",
        "layers.0.ffn.hidden",
        "layers.0.ffn.gate",
        "layers.0.resid_mid",
        "final_norm",
    ):
        with torch.no_grad():
            plain = model(TOKENS)
            hook = known[name].register_forward_hook(lambda module, args, value: value * 0.25)
            edited = model(TOKENS)
            hook.remove()
            assert not torch.allclose(edited, plain, rtol=1e-4, atol=0), name
            assert torch.equal(model(TOKENS), plain), name


def test_a_part_is_captured_by_itself():
    part = Attention(4, 1)
    x = torch.randn(1, 3, 4)
    seen = gf.capture(part, x, "*")
    assert seen["pattern"].shape == (1, 1, 3, 3)
    assert torch.equal(seen["out"], part(x, Pass(0, 3)).detach())
    assert torch.equal(gf.capture(part, x[0], "pattern")["pattern"], seen["pattern"])
    ffn = gf.preset("llama@0.3m").build(seed=0).layers[0].ffn
    assert "gate" in gf.capture(ffn, torch.randn(1, 3, 88), "*")


@pytest.mark.parametrize(
    ("x", "options", "code", "field"),
    [
        (torch.zeros(1, 3, dtype=torch.int64), {}, "type", "tokens"),
        (torch.zeros(1, 3, 5), {}, "unsupported", "model"),
        (torch.zeros(1, 3, 4), {"layers": 0}, "conflict", "layers"),
    ],
)
def test_a_part_that_cannot_be_captured_is_refused(x: torch.Tensor, options: dict, code: str, field: str):
    with pytest.raises(RequestError) as refused:
        gf.capture(Attention(4, 1), x, "*", **options)
    assert (refused.value.code, refused.value.field) == (code, field)
