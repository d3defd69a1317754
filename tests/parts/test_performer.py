"""FAVOR+ against its formula, its estimate against softmax, its causality, and its draws."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.parts.core.base import after_step
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Performer
from glassformer.parts.mixer.chunked import CHUNK
from glassformer.parts.mixer.performer import orthogonal_features, running_maximum
from glassformer.parts.visibility import Bidirectional
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def moved(mixer: Performer, by: float = 0.3) -> Performer:
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=by)
    return mixer


def definition(mixer: Performer, x: Tensor, causal: bool, documents: Tensor | None = None) -> Tensor:
    """All pairs, without any maximum."""
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)) for part in mixer.qkv(x).split(mixer.qkv.outs, dim=-1))
    w, h = mixer.features, mixer.head_dim

    def phi(x: Tensor) -> Tensor:
        x = x / h**0.25
        return torch.exp(x @ w.t() - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))

    weights = torch.einsum("bsnm,btnm->bnst", phi(q), phi(k))
    place = torch.arange(x.shape[1])
    seen = (place[None] <= place[:, None] if causal else torch.ones(len(place), len(place), dtype=torch.bool))[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    weights = weights * seen[:, None]
    z = torch.einsum("bnst,btnh->bsnh", weights / weights.sum(-1, keepdim=True), v)
    return mixer.output(z.flatten(-2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_its_formula(causal: bool, packed: bool):
    """In outputs and in the gradient of every weight and of x."""
    mixer = Performer(12, 3, 5, features=7, bias=True, visibility=None if causal else Bidirectional())
    mixer = moved(mixer.double())
    s = CHUNK + 6
    x = torch.randn(2, s, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.stack([torch.arange(s) // 5, (torch.arange(s) > 2).long() + (torch.arange(s) > CHUNK)])
    documents = ids if packed else None
    wanted, found = definition(mixer, x, causal, documents), mixer(x, Pass(0, s, documents=documents))
    torch.testing.assert_close(found, wanted)
    over = [x, *mixer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(found.sin().sum(), over), torch.autograd.grad(wanted.sin().sum(), over), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_no_token_changes_the_past():
    """However large its key is: what a maximum over the sequence would tell."""
    mixer = moved(Performer(16, 2, features=9).double(), 1.0)
    x = torch.randn(1, CHUNK + 8, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, -1] *= 30
    with torch.no_grad():
        torch.testing.assert_close(mixer(changed)[:, :-1], mixer(x)[:, :-1], rtol=1e-13, atol=1e-13)


def test_it_is_stable_where_exponents_are_far_apart():
    """fp32 has no exp(-200): one maximum of all would leave the first tokens 0 / 0."""
    mixer = moved(Performer(16, 1, features=8))
    x = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(1.2, -1, 40)[:, None]
    exponents = mixer.exponents(mixer.project(x)[1])
    assert exponents.max() - exponents.amax(-1).min() > 200
    x.requires_grad_()
    y = mixer(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    torch.testing.assert_close(y, deepcopy(mixer).double()(x.double()).float(), rtol=1e-3, atol=1e-4)


def test_its_error_falls_with_the_root_of_the_features():
    """Slope -1/2 in the logarithms, of entries of standard deviation 0.25 (docs/log.md has longer ones)."""
    made = torch.Generator().manual_seed(0)
    s, h, errors = 32, 16, {}
    q, k = (torch.randn(s, h, generator=made, dtype=torch.float64) / 4 for _ in range(2))
    v = torch.randn(s, h, generator=made, dtype=torch.float64)
    exact = torch.softmax(q @ k.t() / h**0.5, -1) @ v
    mixer = Performer(h, 1, features=16, visibility=Bidirectional()).double()
    with torch.no_grad():
        mixer.qkv.weight.copy_(torch.eye(h).repeat(3, 1))
        mixer.output.weight.copy_(torch.eye(h))
    for m in (64, 256, 1024, 4096):
        squares = []
        for seed in range(12):
            mixer.features = orthogonal_features(seed, 0, m, h)
            phi_q, phi_k = (torch.exp(mixer.exponents(x[None, :, None])[0, :, 0]) for x in (q, k))
            weights = phi_q @ phi_k.t()
            squares.append(((weights / weights.sum(-1, keepdim=True)) @ v - exact).square().mean())
        errors[m] = torch.stack(squares).mean().sqrt().log()
    x = torch.tensor([math.log(m) for m in errors], dtype=torch.float64)
    y = torch.stack(list(errors.values()))
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert -0.56 < slope < -0.44, slope


def test_features_are_orthogonal_and_as_long_as_normal_ones():
    w = orthogonal_features(3, 0, 4 * 12, 12)
    for block in w.split(12):
        unit = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(unit @ unit.t(), torch.eye(12, dtype=torch.float64))
    many = orthogonal_features(0, 0, 4096, 16)
    assert abs(float(many.square().sum(1).mean()) - 16) < 0.5 and abs(float(many.mean())) < 0.02
    assert torch.equal(w, orthogonal_features(3, 0, 48, 12)) and not torch.equal(w, orthogonal_features(3, 1, 48, 12))
    assert orthogonal_features(0, 0, 5, 12).shape == (5, 12)


def test_features_are_redrawn_from_seed_and_step():
    """Every second step here; a model that was saved in between continues with equal features."""
    model = gf.preset(f"llama@1m+{SIZE}+performer:8+mixer.redraw=2").build(seed=0)
    first = model.layers[0].mixer.features.clone()  # type: ignore[union-attr, operator]
    assert not torch.equal(first, model.layers[1].mixer.features)  # type: ignore[union-attr, arg-type]
    after_step(model)
    other = gf.preset(f"llama@1m+{SIZE}+performer:8+mixer.redraw=2").build(seed=5)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.layers[0].mixer.features, first)  # type: ignore[union-attr, arg-type]
    for each in (model, other):
        after_step(each)
    again = model.layers[0].mixer.features  # type: ignore[union-attr]
    assert not torch.equal(first, again) and torch.equal(again, other.layers[0].mixer.features)  # type: ignore[arg-type, union-attr]
    still = gf.preset(f"llama@1m+{SIZE}+performer:8").build(seed=0)
    for _ in range(3):
        after_step(still)
    assert torch.equal(still.layers[0].mixer.features, first)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("cut", [False, True])
def test_running_maximum_restarts_with_each_document(cut: bool):
    x = torch.randn(2, 13, 3)
    age = torch.stack([torch.cat([torch.arange(5), torch.arange(8)]), torch.arange(13)]) if cut else None
    found = running_maximum(x, age)
    for row in range(2):
        for t in range(13):
            first = 0 if age is None else t - int(age[row, t])
            torch.testing.assert_close(found[row, t], x[row, first : t + 1].amax(0))


def test_performer_state_continues_and_rewinds():
    mixer, s = moved(Performer(16, 2, features=11).double(), 1.0).eval(), CHUNK + 9
    x = torch.randn(2, s, 16, dtype=torch.float64) * torch.linspace(1, 3, s)[:, None]
    with torch.no_grad():
        full, memory = mixer(x), mixer.init_state(2, s, torch.float64, rewind=3)
        for first, last in ((0, 5), (5, CHUNK + 1), (CHUNK + 1, s)):
            torch.testing.assert_close(mixer(x[:, first:last], Pass(first, last), memory), full[:, first:last])
        memory.truncate(s - 3)
        torch.testing.assert_close(mixer(x[:, s - 3 :], Pass(s - 3, s), memory), full[:, s - 3 :])
    assert memory.nbytes == 2 * 4 * 2 * (11 * 9 + 1) * 8  # rows, ring, heads, m (h + 1) + 1, bytes


def test_performer_refuses_unsupported_settings():
    for features in (0, -1):
        with refused(code="range", field="mixer.features"):
            Performer(16, 2, features=features)
    for change, code, field in (
        ("mixer.features=0", "range", "stack.0.blocks.0.mixer.features"),
        ("mixer.redraw=0", "range", "stack.0.blocks.0.mixer.redraw"),
        ("window:8", "conflict", "mixer.visibility"),
        ("mup", "conflict", "mup"),
    ):
        with refused(code=code, field=field):
            gf.preset(f"llama@1m+{SIZE}+performer:16+{change}").build()
    with refused(code="range", field="performer"):
        gf.preset("llama@1m+performer:0")
