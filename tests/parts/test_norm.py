"""Norms against torch's own, in outputs and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.core.base import BuildContext
from glassformer.parts.norm import BatchNorm, LayerNorm, LayerNormConfig, RMSNorm, RMSNormConfig, fused_layer_norm
from glassformer.parts.norm.batchnorm import naive_batch_norm
from glassformer.parts.norm.rmsnorm import naive_rms_norm, rms_norm
from glassformer.parts.region import compiled_regions

CTX = BuildContext(d_model=16, vocab_size=7, context=8, n_layers=2)

SHAPES = [(2, 3, 16), (5, 16), (1, 1, 1, 16), (4, 7, 1)]


def with_gradients(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """y, dx, and the gradient of each parameter."""
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], upstream)]


def agree(mine: nn.Module, theirs: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    for a, b in zip(with_gradients(mine, x), with_gradients(theirs, x), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def moved(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    return norm


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_is_torchs(shape: tuple[int, ...], bias: bool):
    theirs = moved(nn.LayerNorm(shape[-1], eps=1e-3, bias=bias))
    mine = LayerNorm(shape[-1], eps=1e-3, bias=bias)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    agree(mine, theirs, 3 * torch.randn(shape) + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm_is_torchs(shape: tuple[int, ...]):
    theirs = moved(nn.RMSNorm(shape[-1], eps=1e-3))
    mine = RMSNorm(shape[-1], eps=1e-3)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    agree(mine, theirs, 3 * torch.randn(shape) + 1)


def test_a_single_vector_is_normalised():
    """(..., d) with no dots."""
    for mine, theirs in ((RMSNorm(8), nn.RMSNorm(8, eps=1e-5)), (LayerNorm(8), nn.LayerNorm(8))):
        agree(mine, theirs, torch.randn(8))


@pytest.mark.parametrize("norm", [RMSNorm(16, unit_offset=True), RMSNorm(16), LayerNorm(16)])
def test_initial_norms_are_identity_on_normed_vectors(norm: nn.Module):
    x = torch.randn(9, 16)
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x), x, rtol=1e-4, atol=1e-4)


def test_unit_offset_stores_the_weight_minus_one():
    plain, offset, x = moved(RMSNorm(16)), RMSNorm(16, unit_offset=True), torch.randn(3, 16)
    with torch.no_grad():
        offset.weight.copy_(plain.weight - 1)
    agree(offset, plain, x)
    assert (RMSNorm(4, unit_offset=True).weight == 0).all() and (RMSNorm(4).weight == 1).all()


@pytest.mark.parametrize(
    "config",
    [LayerNormConfig(eps=1e-3), LayerNormConfig(bias=False), RMSNormConfig(eps=1e-3), RMSNormConfig(unit_offset=True)],
    ids=str,
)
def test_sets_are_norms_side_by_side(config: LayerNormConfig | RMSNormConfig):
    """Inputs are (..., sets, d): each set is normed as by a separate norm, which the tests above compare with torch."""
    mine, x = moved(config.build(CTX.within(sets=3))), torch.randn(2, 5, 3, 16)
    assert sum(p.numel() for p in mine.parameters()) == 3 * config.num_params(CTX)
    y, dx, *grads = with_gradients(mine, x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    for i in range(3):
        alone = config.build(CTX)
        alone.load_state_dict({name: weight[i] for name, weight in mine.state_dict().items()})
        leaf = x[:, :, i].clone().requires_grad_()
        out = alone(leaf)
        expected = torch.autograd.grad(out, [leaf, *alone.parameters()], upstream[:, :, i])
        torch.testing.assert_close([y[:, :, i], dx[:, :, i], *(grad[i] for grad in grads)], [out.detach(), *expected])


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_half_precision_in_and_out(name: str):
    """The mean is taken in full precision, so the error is that of rounding in and out."""
    mine: nn.Module = LayerNorm(256) if name == "layernorm" else RMSNorm(256)
    theirs: nn.Module = nn.LayerNorm(256) if name == "layernorm" else nn.RMSNorm(256, eps=1e-5)
    x = (300 + torch.randn(8, 256)).bfloat16() if name == "rmsnorm" else (20 * torch.randn(8, 256)).bfloat16()
    exact = theirs(x.float())
    for norm in (mine, mine.bfloat16()):
        y, dx, *_ = with_gradients(norm, x)
        assert y.dtype == dx.dtype == torch.bfloat16
        assert ((y.float() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_products_may_have_their_dtype_at_once(name: str):
    """A norm that only products read gives their dtype, under autocast; the stream stays as it is."""
    kind = LayerNorm if name == "layernorm" else RMSNorm
    norm, feeding, x = kind(16), kind(16, feeds_products=True), torch.randn(3, 16)
    plain = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.float32
        fed = feeding(x)
    assert fed.dtype == torch.bfloat16 and feeding(x).dtype == torch.float32
    torch.testing.assert_close(fed.float(), plain, rtol=2**-8, atol=1e-6)


def test_tiny_and_huge_vectors_stay_finite():
    for norm in (LayerNorm(8), RMSNorm(8)):
        for size in (0.0, 1e-20, 1e15):
            values = with_gradients(norm, torch.full((2, 8), size) * torch.tensor([1.0, -1] * 4))
            assert all(value.isfinite().all() for value in values), size


def test_the_fused_twins_are_the_definitions():
    """The formulas that training compiles are run here uncompiled."""
    x, weight, bias = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 8), (8,), (8,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), naive_rms_norm(x, weight, 1e-3))
    apply = fused_layer_norm._LayerNorm.apply
    for b in (bias, None):
        made = apply(x, weight, b, 1e-3, torch.float64)
        torch.testing.assert_close(made, nn.functional.layer_norm(x, (8,), weight, b, 1e-3))
        leaves = [x, weight] if b is None else [x, weight, b]
        assert torch.autograd.gradcheck(
            lambda *v: apply(*v[:2], v[2] if len(v) > 2 else None, 1e-3, torch.float64), leaves
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_regions_are_the_eager_ones(dtype: torch.dtype):
    x = torch.randn(4, 6, 32).to(dtype)
    for norm in (
        moved(RMSNorm(32)),
        moved(LayerNorm(32)),
        moved(LayerNorm(32, bias=False)),
        moved(RMSNorm(32, unit_offset=True)),
    ):
        plain = with_gradients(norm, x)
        with compiled_regions():
            fused = with_gradients(norm, x)
        for a, b in zip(fused, plain, strict=True):
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_configs_count_and_build():
    for config, count in (
        (LayerNormConfig(), 20),
        (LayerNormConfig(bias=False), 10),
        (RMSNormConfig(unit_offset=True), 10),
    ):
        norm = config.build(CTX.within(width=10))
        assert config.num_params(CTX.within(width=10)) == count == sum(p.numel() for p in norm.parameters())
        assert norm.eps == config.eps


def test_norm_without_affine_has_no_parameters():
    norm, x = RMSNorm(6, 1e-3, affine=False), torch.randn(3, 6, requires_grad=True)
    assert list(norm.parameters()) == [] and not norm.state_dict()
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), wanted)
    probe = torch.randn(3, 6)
    (a,), (b,) = (torch.autograd.grad((y * probe).sum(), x) for y in (norm(x), wanted))
    torch.testing.assert_close(a, b)
    assert RMSNormConfig(affine=False).num_params(BuildContext(d_model=6, vocab_size=7, context=8, n_layers=1)) == 0


# Batch norm


def test_batchnorm_is_torchs_in_training_and_evaluation() -> None:
    """Outputs, gradients and running statistics over three batches, then with these."""
    theirs, mine = moved(nn.BatchNorm1d(16, eps=1e-3)), BatchNorm(16, eps=1e-3)
    statistics = {"mean": theirs.running_mean, "variance": theirs.running_var}
    mine.load_state_dict({"weight": theirs.weight, "bias": theirs.bias, **statistics})
    for seed in range(3):
        x = 3 * torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(seed)) + 1
        for a, b in zip(with_gradients(mine, x), with_gradients(theirs, x.flatten(0, 1)), strict=True):
            torch.testing.assert_close(a.flatten(), b.flatten(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.mean, theirs.running_mean)
        torch.testing.assert_close(mine.variance, theirs.running_var)
    mine.eval(), theirs.eval()
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(mine(x).flatten(0, 1), theirs(x.flatten(0, 1)))
    torch.testing.assert_close(mine(x[:1, :1]), mine(x)[:1, :1])  # a token does not depend on the others


def test_batchnorm_equals_its_naive_twin() -> None:
    norm, x = moved(BatchNorm(5, eps=1e-2)), torch.randn(9, 5)
    torch.testing.assert_close(norm(x), naive_batch_norm(x, norm.weight, norm.bias, 1e-2))
    again = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(naive_batch_norm(again, norm.weight, norm.bias, 1e-2).square().sum(), again)
    (found,) = torch.autograd.grad(norm(again).square().sum(), again)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_batchnorm_lets_later_tokens_through_while_training_only() -> None:
    with pytest.warns(UserWarning):
        config = preset("llama@1m+layers=1+vocab_size=11+context=8+batchnorm")
    model = config.build(seed=0)
    tokens = torch.arange(8)[None] % 11
    changed = tokens.clone()
    changed[0, -1] = 0
    first, second = (model.train()(one)[0, 0] for one in (tokens, changed))
    assert not torch.allclose(first, second)
    first, second = (model.eval()(one)[0, 0] for one in (tokens, changed))
    torch.testing.assert_close(first, second)


def test_batchnorm_of_one_token_is_refused_while_training() -> None:
    with pytest.raises(RequestError) as refused:
        BatchNorm(4)(torch.randn(1, 1, 4))
    assert (refused.value.code, refused.value.field) == ("range", "norm")


def test_batchnorm_holds_its_scale_for_attribution() -> None:
    norm = moved(BatchNorm(6))
    norm(torch.randn(5, 6))
    x, direction = torch.randn(2, 6, dtype=torch.float64)
    below, constant = norm.eval().held(x, direction)
    torch.testing.assert_close(below @ x + constant, direction @ norm.double()(x[None])[0])
