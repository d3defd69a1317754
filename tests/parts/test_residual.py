"""Wirings against their formulas, written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.norm import LayerNorm, RMSNormConfig
from glassformer.parts.residual import (
    DeepNorm,
    DeepNormConfig,
    NoResidual,
    NoResidualConfig,
    Normed,
    NormedConfig,
    Parallel,
    ParallelConfig,
    Post,
    PostConfig,
    Pre,
    PreConfig,
    Residual,
    ResidualConfig,
    ResPost,
    ResPostConfig,
    Sandwich,
    SandwichConfig,
)

D = 6
CTX = BuildContext(d_model=D, vocab_size=7, context=8, n_layers=2, norm=RMSNormConfig())


def norms(n: int) -> list[LayerNorm]:
    """Returns n norms of different weights, so that an exchange of two is detected."""
    made = [LayerNorm(D) for _ in range(n)]
    with torch.no_grad():
        for norm in made:
            norm.weight.copy_(torch.rand(D) + 0.5)
            norm.bias.copy_(torch.randn(D))  # type: ignore[union-attr]
    return made


def branches() -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(D, D), nn.Linear(D, D)


def pre(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable) -> Tensor:
    x = x + m(a(x))
    return x + f(b(x))


def post(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable) -> Tensor:
    x = a(x + m(x))
    return b(x + f(x))


def sandwich(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable, c: Callable, d: Callable) -> Tensor:
    x = x + b(m(a(x)))
    return x + d(f(c(x)))


def res_post(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable) -> Tensor:
    x = x + a(m(x))
    return x + b(f(x))


def no_residual(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable) -> Tensor:
    return f(b(m(a(x))))


def parallel(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable | None = None) -> Tensor:
    return x + m(a(x)) + f((b or a)(x))


@pytest.mark.parametrize(
    ("wiring", "n", "formula"),
    [
        (Pre, 2, pre),
        (Post, 2, post),
        (NoResidual, 2, no_residual),
        (DeepNorm, 2, post),
        (Sandwich, 4, sandwich),
        (ResPost, 2, res_post),
        (Parallel, 2, parallel),
        (Parallel, 1, parallel),
    ],
)
def test_a_wiring_is_its_formula(wiring: type[Residual], n: int, formula: Callable):
    (mixer, ffn), given, x = branches(), norms(n), torch.randn(2, 3, D)
    residual = wiring(*given)
    torch.testing.assert_close(residual(x, mixer, ffn), formula(x, mixer, ffn, *given))
    assert {id(p) for p in residual.parameters()} == {id(p) for norm in given for p in norm.parameters()}


@pytest.mark.parametrize(
    ("wiring", "n", "formula"),
    [
        (Pre, 1, lambda x, m, a: x + m(a(x))),
        (Post, 1, lambda x, m, a: a(x + m(x))),
        (DeepNorm, 1, lambda x, m, a: a(x + m(x))),
        (Sandwich, 2, lambda x, m, a, b: x + b(m(a(x)))),
        (ResPost, 1, lambda x, m, a: x + a(m(x))),
        (Parallel, 1, lambda x, m, a: x + m(a(x))),
    ],
)
def test_a_block_may_lack_an_ffn(wiring: type[Residual], n: int, formula: Callable):
    (mixer, _), given, x = branches(), norms(n), torch.randn(2, 3, D)
    torch.testing.assert_close(wiring(*given)(x, mixer, None), formula(x, mixer, *given))


def test_the_mixer_of_a_pre_block_may_read_the_stream_itself():
    """The first layer of ModernBERT."""
    (mixer, ffn), (norm, _), x = branches(), norms(2), torch.randn(2, 3, D)
    after = x + mixer(x)
    torch.testing.assert_close(Pre(None, norm)(x, mixer, ffn), after + ffn(norm(after)))
    assert PreConfig(mixer_normed=False).norm_names(has_ffn=True) == ("ffn_norm",)


@pytest.mark.parametrize(
    ("wiring", "formula", "norms_after"),
    [
        (Pre, pre, [False, False]),
        (Post, post, [False, False]),
        (DeepNorm, post, [False, False]),
        (Parallel, parallel, [False, False]),
        (Sandwich, sandwich, [False, True, False, True]),
        (ResPost, res_post, [True, True]),
    ],
)
def test_residual_scale_multiplies_each_branch(wiring: type[Residual], formula: Callable, norms_after: list[bool]):
    (mixer, ffn), given, x = branches(), norms(len(norms_after)), torch.randn(2, 3, D)

    def times(make: Callable, really: bool) -> Callable:
        return (lambda y: 0.3 * make(y)) if really else make

    last = any(norms_after)  # the norm behind a branch makes what it adds
    shrunk = [times(norm, after) for norm, after in zip(given, norms_after, strict=True)]
    expected = formula(x, times(mixer, not last), times(ffn, not last), *shrunk)
    torch.testing.assert_close(wiring(*given, scale=0.3)(x, mixer, ffn), expected)


def deepnorm(x: Tensor, m: Callable, f: Callable, a: Callable, b: Callable) -> Tensor:
    """Equation 1 of 2203.00555 for L = 2 layers: alpha = (2 L)^(1/4) = sqrt 2."""
    x = a(2**0.5 * x + m(x))
    return b(2**0.5 * x + f(x))


def test_deepnorm_weighs_the_stream_by_depth():
    (mixer, ffn), given, x = branches(), norms(2), torch.randn(2, 3, D)
    residual = DeepNormConfig().build(CTX)
    assert isinstance(residual, DeepNorm) and residual.alpha == 4**0.25
    torch.testing.assert_close(DeepNorm(*given, alpha=4**0.25)(x, mixer, ffn), deepnorm(x, mixer, ffn, *given))
    assert DeepNormConfig(alpha=3.0).build(CTX).alpha == 3.0
    assert DeepNormConfig().resolved(CTX) == DeepNormConfig(alpha=4**0.25, scale=1.0)


def test_a_normed_stream_is_deepnorm_with_its_norms_one_place_on():
    """Two blocks of one and a last norm, and a first norm and two blocks of the other."""
    a, b, c, d, last = norms(5)
    mixer, ffn = branches()
    x = torch.randn(2, 3, D)
    found = x
    for first, second in ((a, b), (c, d)):
        found = Normed(first, second, scale=0.7, alpha=1.7)(found, mixer, ffn)
    expected = a(x)
    for behind, after in ((b, c), (d, last)):
        expected = DeepNorm(behind, after, scale=0.7, alpha=1.7)(expected, mixer, ffn)
    torch.testing.assert_close(last(found), expected)


@pytest.mark.parametrize("layers", [1, 2, 24])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_branches_may_be_scaled_by_depth(layers: int, scale: float | None):
    ctx = CTX.within(n_layers=layers)
    config = PreConfig(scale=scale, depth_scaled=True)
    assert config.build(ctx).scale == pytest.approx((scale or 1.0) / layers**0.5)
    written = config.resolved(ctx)
    assert not written.depth_scaled and written.build(ctx).scale == written.scale
    assert written.scale == pytest.approx((scale or 1.0) / layers**0.5)


CONFIGS = [
    PreConfig(),
    PreConfig(mixer_normed=False),
    PostConfig(),
    DeepNormConfig(),
    NormedConfig(),
    SandwichConfig(),
    ResPostConfig(),
    NoResidualConfig(),
    ParallelConfig(shared_norm=True),
    ParallelConfig(shared_norm=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("has_ffn", [True, False])
def test_configs_hold_the_norms_they_count(config: ResidualConfig, has_ffn: bool):
    residual = config.build(CTX.within(has_ffn=has_ffn))
    assert config.num_params(CTX.within(has_ffn=has_ffn)) == sum(p.numel() for p in residual.parameters())
    assert residual.scale == 1.0 and config.replace(scale=0.3).build(CTX.within(has_ffn=has_ffn)).scale == 0.3
    (mixer, ffn), x = branches(), torch.randn(2, 3, D, requires_grad=True)
    y = residual(x, mixer, ffn if has_ffn else None)
    grads = torch.autograd.grad(y.sum() ** 2, [x, *residual.parameters(), *mixer.parameters()])
    assert all(grad.abs().sum() > 0 for grad in grads)
    used = torch.autograd.grad(
        residual(x, mixer, ffn if has_ffn else None).sum(), [*ffn.parameters()], allow_unused=True
    )
    assert all((grad is not None) == has_ffn for grad in used)


def test_dropout_without_a_residual_drops_a_branchs_values() -> None:
    dropped = NoResidualConfig(dropout=0.5).build(CTX).train()
    made = dropped(torch.randn(1, 64, D), nn.Identity(), lambda x: torch.ones_like(x))
    assert set(made.flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("config", [one for one in CONFIGS if one != NoResidualConfig()], ids=str)
def test_dropout_is_on_each_branch_while_training(config: ResidualConfig):
    """The stream itself passes; a dropped branch adds nothing, a kept one adds twice."""
    dropped, plain = (
        config.replace(dropout=0.5).build(CTX),
        config.build(CTX),
    )
    dropped.load_state_dict(plain.state_dict())
    (mixer, ffn), x = branches(), torch.randn(1, 4, D)
    torch.testing.assert_close(dropped.eval()(x, mixer, ffn), plain(x, mixer, ffn))
    dropped.train()
    assert not torch.equal(dropped(x, mixer, ffn), dropped(x, mixer, ffn))
    zero = nn.Linear(D, D)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    for mixed, fed in ((torch.ones_like, zero), (zero, torch.ones_like)):  # each branch is dropped by itself
        assert len({dropped(x, mixed, fed).sum().item() for _ in range(5)}) > 1
    if not config.ends_in_norm and not isinstance(config, NormedConfig):  # the stream stays as it is
        torch.testing.assert_close(dropped(x, zero, zero), x)
        ones = dropped(x, lambda y: torch.ones_like(y), zero) - x
        if not isinstance(config, SandwichConfig):
            assert set(ones.round(decimals=4).flatten().tolist()) == {0.0, 2.0}


def test_a_wiring_that_is_given_an_ffn_uses_it_or_refuses():
    """An ffn without its norm must not be left out in silence."""
    (mixer, ffn), x = branches(), torch.randn(2, 3, D)
    for wiring, n in ((Pre, 1), (Post, 1), (DeepNorm, 1), (Sandwich, 2), (ResPost, 1), (NoResidual, 1)):
        residual = wiring(*norms(n))
        try:
            with_ffn = residual(x, mixer, ffn)
        except Exception:
            continue
        assert not torch.equal(with_ffn, residual(x, mixer, None)), wiring.__name__
