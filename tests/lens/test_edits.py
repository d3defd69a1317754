"""Ready-made edits, against the same weights changed by hand, and hooks of PyTorch on layers and their matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassformer as gf
from glassformer.introspection import sites
from glassformer.lens.edits import AXES
from glassformer.model import Model
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]
TOKENS = torch.arange(24).view(2, 12)
OTHER = (TOKENS * 7 + 3) % 31
each_family = pytest.mark.parametrize("expression", FAMILIES)


def tiny(expression: str) -> Model:
    """fp64: what is the same in formula is then the same but for the last digits. Biases are not zero, and layers do
    enough that not every token is followed by itself."""
    model = gf.preset(f"{expression}+untied+{TINY}").build(seed=0).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter *= 4 if parameter.dim() == 2 else 1
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@torch.no_grad()
def logits_of(model: Model, *edits: dict[str, Any], tokens: Tensor = TOKENS) -> Tensor:
    with gf.edit(model, *edits):
        return model(tokens)


@contextmanager
def changed_input(matrix: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, a matrix reads change(x)."""
    hook = matrix.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
    yield
    hook.remove()


close = torch.testing.assert_close


@each_family
def test_an_ablated_head_is_one_whose_part_of_the_output_matrix_is_zero(expression: str):
    model, plain = tiny(expression), logits_of(tiny(expression))
    edited = logits_of(model, gf.lens.ablate_heads(1, [0, -1]))
    assert torch.equal(logits_of(model), plain) and not torch.equal(edited, plain)
    with torch.no_grad():
        model.layers[1].mixer.output.weight.view(32, 4, 8)[:, [0, 3]] = 0
    close(edited, logits_of(model))


@each_family
def test_mean_ablated_head_is_constant_over_positions(expression: str):
    model = tiny(expression)
    edited = logits_of(model, gf.lens.ablate_heads(1, 2, by="mean"))

    def level(z: Tensor) -> Tensor:
        z = z.clone()
        for feature in range(2 * 8, 3 * 8):
            z[..., feature] = sum(z[b, s, feature] for b in range(2) for s in range(12)) / 24
        return z

    with changed_input(model.layers[1].mixer.output, level):
        close(edited, logits_of(model))


def neurons(model: Model) -> None:
    model.layers[0].ffn.down_proj.weight[:, [3, -2]] = 0


def branches(layer: int, *paths: str) -> Callable[[Model], None]:
    def zero(model: Model) -> None:
        for path in paths:
            for weight in model.get_submodule(f"layers.{layer}.{path}").parameters():
                weight.zero_()

    return zero


MIXER, FFN = "mixer.output", "ffn.down_proj"
BY_HAND = [
    (lambda: gf.lens.ablate_neurons(0, [3, -2]), neurons),
    (lambda: gf.lens.ablate_mixer(1), branches(1, MIXER)),
    (lambda: gf.lens.ablate_ffn(1), branches(1, FFN)),
    (lambda: gf.lens.ablate_layer(2), branches(2, MIXER, FFN)),
]


@each_family
def test_ablated_neurons_and_branches_are_zeroed_matrices(expression: str):
    model, together = tiny(expression), tiny(expression)
    with torch.no_grad():
        for make, by_hand in BY_HAND:
            other = tiny(expression)
            by_hand(other)
            by_hand(together)
            close(logits_of(model, make()), logits_of(other))
    edits = [make() for make, _ in BY_HAND]
    close(logits_of(model, *edits), logits_of(together))
    with gf.edit(model, edits[3]), gf.edit(model, edits[0]):
        close(logits_of(model, edits[1], edits[2]), logits_of(together))
    close(logits_of(model), logits_of(tiny(expression)), rtol=0, atol=0)


def test_a_block_without_a_feed_forward_network_is_ablated_too():
    model = tiny("llama@1m+ffn=none")
    seen = gf.capture(model, TOKENS, ["layers.1.resid_pre", "layers.1.resid_post"])
    assert not torch.equal(*seen.values())
    with gf.edit(model, gf.lens.ablate_layer(1)):
        assert torch.equal(*gf.capture(model, TOKENS, list(seen)).values())


@each_family
def test_scaled_heads_are_scaled_weights(expression: str):
    model, other = tiny(expression), tiny(expression)
    edits = gf.lens.scale("layers.0.mixer.z", 3.0, heads=1), gf.lens.scale("layers.*.ffn.hidden", 0.5)
    with torch.no_grad():
        other.layers[0].mixer.output.weight.view(32, 4, 8)[:, 1] *= 3
        for layer in other.layers:
            layer.ffn.down_proj.weight *= 0.5
    close(logits_of(model, *edits), logits_of(other))


@each_family
def test_a_direction_is_added_as_a_hook_would(expression: str):
    model, direction = tiny(expression), torch.linspace(-1, 1, 32)

    def add(x: Tensor, at: Any) -> Tensor:
        x = x.clone()
        x[:, at] += 2.5 * direction
        return x

    for positions, at in ((None, slice(None)), ([0, -1], [0, 11]), (4, 4)):
        edited = logits_of(model, gf.lens.add_direction("layers.0.resid_post", direction, 2.5, positions))
        hook = model.layers[0].register_forward_hook(lambda module, args, x, at=at: add(x, at))
        close(edited, logits_of(model))
        hook.remove()


@pytest.mark.parametrize(("site", "axis"), [("z", 2), ("q", 2), ("k", 2), ("v", 2), ("pattern", 1), ("scores", 1)])
def test_replace_sets_all_pairs_of_positions_and_heads(site: str, axis: int):
    model, name = tiny("llama@1m"), f"layers.1.mixer.{site}"
    plain = gf.capture(model, TOKENS, name)[name]
    with gf.edit(model, gf.lens.replace(name, 7.0, positions=[2, 5, -1], heads=[0, 3])):
        seen = gf.capture(model, TOKENS, name)[name]
    chosen = torch.zeros_like(plain, dtype=torch.bool)
    for position in (2, 5, 11):
        for head in (0, 3):
            chosen.select(axis, head).select(1, position).fill_(True)
    assert (seen[chosen] == 7).all() and torch.equal(seen[~chosen], plain[~chosen])


def test_a_tensor_that_replaces_is_broadcast():
    model, name = tiny("llama@1m"), "layers.1.mixer.z"
    values = torch.randn(3, 2, 8)
    with gf.edit(model, gf.lens.replace(name, values, positions=[2, 5, 6], heads=[0, 3])):
        seen = gf.capture(model, TOKENS, name)[name]
    for row in seen:
        assert torch.equal(row[[2, 5, 6]][:, [0, 3]], values.double())
    embedding = model.embedding.weight[OTHER]
    close(logits_of(model, gf.lens.replace("embed", embedding)), logits_of(model, tokens=OTHER))


# Patching


@each_family
def test_everything_of_another_run_makes_it_that_run(expression: str):
    model = tiny(expression)
    clean = gf.capture(model, OTHER, "*")
    for site in ("embed", "layers.1.resid_pre", "layers.2.resid_post", "layers.*.resid_post", "logits"):
        assert torch.equal(logits_of(model, gf.lens.patch(clean, site)), clean["logits"]), site
    mine = gf.capture(model, TOKENS, "*")
    for site in mine:
        if "pattern" not in site and "scores" not in site:  # those make the definition compute the attention
            assert torch.equal(logits_of(model, gf.lens.patch(mine, site)), mine["logits"]), site
    for site in ("layers.*.mixer.pattern", "layers.*.mixer.scores"):
        close(logits_of(model, gf.lens.patch(mine, site)), mine["logits"])


@each_family
def test_a_patch_of_some_positions_and_heads_is_that_of_a_hook(expression: str):
    model = tiny(expression)
    run = gf.capture(model, OTHER, ["layers.1.mixer.z", "layers.0.resid_post"])

    def mixed(z: Tensor) -> Tensor:
        z = z.clone().view(2, 12, 4, 8)
        for position in (3, 10):
            for head in (1, 2):
                z[:, position, head] = run["layers.1.mixer.z"][:, position, head]
        return z.view(2, 12, 32)

    edited = logits_of(model, gf.lens.patch(run, "*.z", positions=[3, -2], heads=[1, 2]))
    with changed_input(model.layers[1].mixer.output, mixed):
        close(edited, logits_of(model))
    edited = logits_of(model, gf.lens.patch(run, "layers.0.resid_post", positions=6))
    hook = model.layers[0].register_forward_hook(
        lambda module, args, x: torch.cat([x[:, :6], run["layers.0.resid_post"][:, 6:7], x[:, 7:]], dim=1)
    )
    close(edited, logits_of(model))
    hook.remove()


def test_a_run_of_one_row_serves_every_row():
    model = tiny("gpt2@1m")
    run = gf.capture(model, OTHER[:1], "layers.0.resid_post")
    edited = logits_of(model, gf.lens.patch(run, "*"))
    close(edited, logits_of(model, tokens=OTHER[:1]).expand_as(edited))


@pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'")
def test_nnsight_makes_the_same_edits():
    nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")
    model = tiny("llama@1m+gqa:2")
    run = gf.capture(model, OTHER, "layers.1.resid_post")
    edits = gf.lens.patch(run, "layers.1.resid_post", positions=5), gf.lens.ablate_ffn(2)
    edited = logits_of(model, *edits)
    opened = nnsight.NNsight(model)
    with opened.trace(TOKENS):
        opened.layers[1].output[:, 5] = run["layers.1.resid_post"][:, 5]
        opened.layers[2].ffn.output = torch.zeros_like(opened.layers[2].ffn.output)
        found = opened.output.save()
    close(edited, found.detach())


# With a state, and while generating

STEADY = [
    lambda: gf.lens.ablate_heads(1, [0, 2]),
    lambda: gf.lens.ablate_neurons(0, [1, 5, 9]),
    lambda: gf.lens.ablate_layer(2),
    lambda: gf.lens.scale("layers.0.mixer.k", 0.5, heads=0),
    lambda: gf.lens.add_direction("layers.1.resid_post", torch.ones(32), 0.3),
]
"""Edits that do to a token what they do whatever pass it comes in."""


@each_family
def test_edits_hold_when_tokens_come_one_by_one(expression: str):
    model, edits = tiny(expression), [make() for make in STEADY]
    whole = logits_of(model, *edits)
    state = model.init_state(2, 16)
    with torch.no_grad(), gf.edit(model, *edits):
        parts = [model(TOKENS[:, :5], state), *(model(TOKENS[:, i : i + 1], state) for i in range(5, 12))]
    close(torch.cat(parts, dim=1), whole)


@each_family
def test_edits_hold_while_text_is_generated(expression: str):
    model, other = tiny(expression), tiny(expression)
    with torch.no_grad():
        other.layers[1].mixer.output.weight.view(32, 4, 8)[:, [0, 2]] = 0
        branches(2, MIXER, FFN)(other)
    plain = gf.generate(model, TOKENS, max_new_tokens=12)
    with gf.edit(model, STEADY[0](), STEADY[2]()):
        edited = gf.generate(model, TOKENS, max_new_tokens=12)
        streamed = torch.stack(list(gf.stream(model, TOKENS, max_new_tokens=12)), dim=1)
    assert torch.equal(edited, gf.generate(other, TOKENS, max_new_tokens=12)) and not torch.equal(edited, plain)
    assert torch.equal(streamed, edited[:, 12:])
    assert torch.equal(gf.generate(model, TOKENS, max_new_tokens=12), plain)


def test_edits_hold_in_a_running_batch_and_in_speculation():
    from glassformer.generation.beams import beams
    from glassformer.generation.engine import Engine
    from glassformer.generation.speculate import PromptLookup, speculate

    model, other = tiny("llama@1m"), tiny("llama@1m")
    with torch.no_grad():
        branches(2, MIXER, FFN)(other)
    expected = gf.generate(other, TOKENS[:1], max_new_tokens=10)[0, 12:].tolist()
    assert expected != gf.generate(model, TOKENS[:1], max_new_tokens=10)[0, 12:].tolist()
    with gf.edit(model, gf.lens.ablate_layer(2)):
        engine = Engine(model, slots=2, context=32)
        request = engine.submit(TOKENS[0], max_new_tokens=10)
        for _ in engine:
            pass
        assert request.tokens == expected
        assert list(speculate(model, TOKENS[:1], PromptLookup(), max_new_tokens=10)) == expected
        assert beams(model, TOKENS[:1], 1, max_new_tokens=10)[0].tokens == expected


def test_the_last_position_of_every_pass_is_the_new_token():
    """At -1 a prompt's last token and then every new one is steered, as if each row were steered in a separate pass."""
    model = tiny("llama@1m")
    edits = gf.lens.add_direction("layers.1.resid_post", torch.ones(32), 3.0, positions=-1)
    with gf.edit(model, edits):
        text = gf.generate(model, TOKENS[:1], max_new_tokens=5)
    steered = gf.lens.add_direction("layers.1.resid_post", torch.ones(32), 3.0, positions=list(range(11, 16)))
    predicted = logits_of(model, steered, tokens=text[:, :-1]).argmax(-1)[:, 11:]
    assert torch.equal(predicted, text[:, 12:])


# What is refused


def test_the_axes_of_sites_are_those_of_the_model():
    for expression in FAMILIES:
        for name, site in sites(tiny(expression)).items():
            assert AXES.get(name.rpartition(".")[2], site.axes) == site.axes
            assert site.axes.startswith("bs") or name.rpartition(".")[2] in AXES


@pytest.mark.parametrize(
    ("make", "code", "field"),
    [
        (lambda: gf.lens.ablate_heads(-1, 0), "range", "layer"),
        (lambda: gf.lens.ablate_heads(0, 0, by="median"), "unknown", "by"),
        (lambda: gf.lens.scale("layers.0.ffn.out", 2.0, heads=1), "conflict", "heads"),
        (lambda: gf.lens.patch({"layers.0.mixer.z": TOKENS}, "layers.0.mixer.q"), "unknown", "site"),
    ],
)
def test_invalid_edits_are_refused_at_once(make: Callable[[], object], code: str, field: str):
    with refused(code=code, field=field):
        make()


def test_ablated_experts_are_asked_by_no_token_while_text_is_generated():
    """Against a router whose selection bias forbids them."""
    moe = "llama@1m+moe:4:2+ffn.balance_rate=0"
    model, other = tiny(moe), tiny(moe)
    other.layers[1].ffn.router.selection_bias[[0, 3]] = -torch.inf
    plain, edit = gf.generate(model, TOKENS, max_new_tokens=12), gf.lens.ablate_experts(1, [0, -1])
    with gf.edit(model, edit):
        close(model(TOKENS), other(TOKENS))
        edited = gf.generate(model, TOKENS, max_new_tokens=12)
    assert torch.equal(edited, gf.generate(other, TOKENS, max_new_tokens=12)) and not torch.equal(edited, plain)
    assert torch.equal(gf.generate(model, TOKENS, max_new_tokens=12), plain)


def test_remaining_experts_serve_all_tokens_if_too_few():
    model = tiny("llama@1m+moe:4:2")
    seen: list[Tensor] = []
    model.layers[1].ffn.register_forward_hook(lambda part, given, out: seen.append(given[0]))
    with gf.edit(model, gf.lens.ablate_experts(1, [0, 1, 2])):
        out = gf.capture(model, TOKENS, "layers.1.ffn.out")["layers.1.ffn.out"]
    ffn = model.layers[1].ffn
    gate, up, down = (linear.maps()[3] for linear in (ffn.gate_proj, ffn.up_proj, ffn.down_proj))
    close(out, (nn.functional.silu(seen[0] @ gate.T) * (seen[0] @ up.T)) @ down.T)
    assert not logits_of(model, gf.lens.ablate_experts(1, range(4))).isnan().any()


@pytest.mark.parametrize(
    ("edit", "code", "field"),
    [
        (lambda: gf.lens.ablate_experts(1, 0), "unknown", "sites"),
        (lambda: gf.lens.ablate_heads(0, [0, 4]), "range", "head"),
        (lambda: gf.lens.ablate_heads(3, 0), "unknown", "sites"),
        (lambda: gf.lens.ablate_heads(0, []), "missing", "head"),
        (lambda: gf.lens.ablate_neurons(0, 999), "range", "unit"),
        (
            lambda: gf.lens.replace("embed", 0.0, positions=12),
            "range",
            "position",
        ),
        (
            lambda: gf.lens.replace("embed", torch.ones(3)),
            "conflict",
            "value",
        ),
        (
            lambda: gf.lens.add_direction("embed", torch.ones(3)),
            "conflict",
            "direction",
        ),
        (
            lambda: gf.lens.patch({"embed": torch.ones(2, 11, 32)}, "embed"),
            "conflict",
            "run",
        ),
    ],
)
def test_edits_that_do_not_fit_the_model_are_refused_when_run(
    edit: Callable[[], dict[str, Any]], code: str, field: str
):
    model = tiny("llama@1m")
    plain = logits_of(model)
    with refused(code=code, field=field) as caught:
        logits_of(model, edit())
    assert "\n" not in str(caught.value) and torch.equal(logits_of(model), plain)


def test_the_mean_of_one_token_is_refused():
    model = tiny("llama@1m")
    with refused(code="conflict", field="by"):
        logits_of(model, gf.lens.ablate_heads(0, 0, by="mean"), tokens=TOKENS[:1, :1])
