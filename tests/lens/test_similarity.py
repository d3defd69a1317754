"""How alike tokens are by depth, against loops over pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.model import Model
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
TOKENS = (torch.arange(26).view(2, 13) * 7) % 31
DEPTHS = ["embed", "layers.0.resid_post", "layers.1.resid_post", "layers.2.resid_post"]


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).eval()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a @ a).sqrt() / (b @ b).sqrt())


@pytest.mark.parametrize("expression", ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"])
def test_rho_and_mu_are_means_over_pairs_of_tokens(expression: str):
    model = tiny(expression)
    found, seen = gf.lens.token_similarity(model, TOKENS, depth=-1), gf.capture(model, TOKENS, DEPTHS)
    for depth, name in enumerate(DEPTHS):
        rho = mu = 0.0
        for x in seen[name].double():
            rho += sum(cosine(x[i], x[j]) for i in range(13) for j in range(13) if i != j) / (13 * 12) / 2
            mu += math.sqrt(float(((x - x.mean(0)) ** 2).sum() / (x**2).sum())) / 2
        assert float(found.rho[depth]) == pytest.approx(rho, abs=1e-9)
        assert float(found.mu[depth]) == pytest.approx(mu, abs=1e-9)
    x = seen[DEPTHS[3]][0].double()
    expected = torch.tensor([[cosine(x[i], x[j]) for j in range(13)] for i in range(13)]).double()
    torch.testing.assert_close(found.cosines, expected)
    assert found.depth == 3 and found.tile == 1


def test_a_cell_of_the_pooled_matrix_is_the_mean_of_its_tile():
    model = tiny("llama@1m")
    whole, pooled = (gf.lens.token_similarity(model, TOKENS, depth=1, pool=pool) for pool in (13, 5))
    assert pooled.tile == 3 and pooled.cosines.shape == (5, 5)
    ends = [0, 3, 6, 9, 12, 13]
    for i in range(5):
        for j in range(5):
            tile = whole.cosines[ends[i] : ends[i + 1], ends[j] : ends[j + 1]]
            assert float(pooled.cosines[i, j]) == pytest.approx(float(tile.mean()), abs=1e-12)


def test_collapse_is_seen():
    """All tokens made one: rho 1, mu 0."""
    model = tiny("llama@1m")
    with gf.edit(model, {"layers.1.resid_post": lambda x: x.mean((0, 1), keepdim=True).expand_as(x)}):
        found = gf.lens.token_similarity(model, TOKENS)
    assert float(found.rho[2]) == pytest.approx(1) and float(found.mu[2]) == pytest.approx(0, abs=1e-6)
    assert (
        found.depth == 2
        and str(found).splitlines()[2] == f"depth 1: rho {float(found.rho[1]):.3f}, mu {float(found.mu[1]):.3f}"
    )


def test_it_is_drawn():
    found = gf.lens.token_similarity(tiny("llama@1m"), TOKENS)
    left, right = found.figure().axes[:2]
    assert list(left.lines[0].get_ydata()) == found.rho.tolist()
    assert list(left.lines[1].get_ydata()) == found.mu.tolist()
    assert right.images[0].get_array().shape == (13, 13)


@pytest.mark.parametrize(
    ("tokens", "given", "code", "field"),
    [
        (TOKENS[:, :1], {}, "range", "tokens"),
        (TOKENS, {"depth": 4}, "range", "depth"),
        (TOKENS, {"pool": 0}, "range", "pool"),
    ],
)
def test_wrong_requests_are_one_sentence(tokens: Tensor, given: dict[str, int], code: str, field: str):
    with refused(code=code, field=field):
        gf.lens.token_similarity(tiny("llama@1m"), tokens, **given)
