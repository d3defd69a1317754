"""Feed-forward networks against their formulas in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.site import edit_at, look_at
from glassformer.parts.ffn import Glu, GluConfig, Mlp, MlpConfig
from glassformer.parts.precision import slow_in_bf16
from glassformer.parts.region import compiled_regions

ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}
MLP, GLU = ["relu", "gelu", "gelu_tanh", "silu", "relu2"], ["sigmoid", "relu", "gelu", "gelu_tanh", "silu"]


def ctx(d_model: int) -> BuildContext:
    return BuildContext(d_model=d_model, vocab_size=7, context=8, n_layers=2)


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


def mlp_formula(m: Mlp, activation: str, x: Tensor) -> Tensor:
    up = F.linear(x, m.up_proj.weight, m.up_proj.bias)
    return F.linear(ACTIVATIONS[activation](up), m.down_proj.weight, m.down_proj.bias)


def glu_formula(m: Glu, activation: str, x: Tensor) -> Tensor:
    gate, up = (
        F.linear(x, m.gate_proj.weight, m.gate_proj.bias),
        F.linear(x, m.up_proj.weight, m.up_proj.bias),
    )
    return F.linear(ACTIVATIONS[activation](gate) * up, m.down_proj.weight, m.down_proj.bias)


def same(mine: Tensor, theirs: Tensor, leaves: list[Tensor], tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(mine)
    for a, b in zip(
        torch.autograd.grad(mine, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", MLP)
def test_mlp_is_its_formula(activation: str, bias: bool):
    m = filled(Mlp(6, 10, activation, bias))
    x = torch.randn(2, 5, 6, requires_grad=True)
    same(m(x), mlp_formula(m, activation, x), [x, *m.parameters()])
    assert (m.up_proj.bias is not None) == (m.down_proj.bias is not None) == bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", GLU)
def test_glu_is_its_formula(activation: str, bias: bool):
    m = filled(Glu(6, 10, activation, bias))
    x = torch.randn(2, 5, 6, requires_grad=True)
    same(m(x), glu_formula(m, activation, x), [x, *m.parameters()])
    assert (m.gate_proj.bias is not None) == (m.down_proj.bias is not None) == bias


@pytest.mark.parametrize("kind", ["mlp", "glu"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "gelu"])
def test_gradients_are_those_of_the_values(kind: str, activation: str):
    m = filled((Mlp if kind == "mlp" else Glu)(3, 4, activation)).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(m, (x,))


@pytest.mark.parametrize("kind", ["mlp", "glu"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_far_from_zero_nothing_overflows(kind: str, activation: str):
    m = (Mlp if kind == "mlp" else Glu)(2, 2, activation, False)
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.copy_(torch.eye(2))
    x = torch.tensor([[1e4, -1e4], [88.0, -88.0], [0.0, -0.0]], requires_grad=True)
    y = m(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(y[:2, 1], torch.zeros(2))


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_half_precision_is_near(activation: str):
    for kind, formula in ((Mlp, mlp_formula), (Glu, glu_formula)):
        m = filled(kind(32, 64, activation, False))
        x = torch.randn(4, 5, 32)
        with torch.autocast("cpu", torch.bfloat16):
            half = m(x)
        assert half.dtype == torch.bfloat16
        exact = formula(m, activation, x)
        assert (half - exact).norm() < 0.015 * exact.norm()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind, activation", [(Mlp, name) for name in MLP] + [(Glu, name) for name in GLU])
def test_reading_ends_products_with_the_activation(kind: type[Mlp] | type[Glu], activation: str, bias: bool):
    m = filled(kind(48, 64, activation, bias)).bfloat16()
    x = torch.randn(2, 40, 48).bfloat16()
    plain, exact = m(x), kind(48, 64, activation, bias)
    exact.load_state_dict(m.state_dict())
    exact = (mlp_formula if kind is Mlp else glu_formula)(exact, activation, x.float())
    site = m.up if kind is Mlp else m.gate
    with torch.no_grad():
        read = m(x)
        assert torch.equal(m(x[0, 0]), m(x[:1, :1])[0, 0])  # one token takes three operations, however it is shaped
        seen: list[Tensor] = []
        with look_at([(site, lambda value, first, total: seen.append(value))]):
            assert torch.equal(m(x), read) and len(seen) == 1
        with edit_at([(site, torch.zeros_like)]):
            edited = m(x)
    linear = m.up_proj if kind is Mlp else m.gate_proj
    with torch.no_grad():
        assert torch.equal(seen[0], linear(x))
        product = F.linear(x.float(), *(one.float() for one in linear.parameters()))
    assert (seen[0] - product).norm() < 0.006 * product.norm()
    assert not torch.equal(edited, read)
    for y in (read, plain):
        assert (y - exact).norm() < 0.006 * exact.norm()
    if slow_in_bf16("cpu"):  # reading has a separate product, which is rounded once
        return
    if activation == "relu2":  # three operations in both
        assert torch.equal(read, plain)
    elif (kind, activation) != (Mlp, "relu"):  # which is rounded no differently
        assert not torch.equal(read, plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_regions_are_the_eager_ones(dtype: torch.dtype):
    for m in (filled(Mlp(16, 32, "gelu_tanh")), filled(Glu(16, 32, "silu"))):
        m, x = m.to(dtype), torch.randn(2, 5, 16).to(dtype).requires_grad_()
        plain = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
        with compiled_regions():
            fused = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
        for a, b in zip(fused, plain, strict=True):
            assert (a.float() - b.float()).norm() < (1e-5 if dtype is torch.float32 else 1e-2) * b.float().norm()


@pytest.mark.parametrize("d", [32, 100, 768, 4096])
def test_widths_keep_eight_d_squared_weights(d: int):
    assert MlpConfig().width(ctx(d)) == 4 * d and MlpConfig(hidden=5).width(ctx(d)) == 5
    width = GluConfig().width(ctx(d))
    assert width % 8 == 0 and 8 * d / 3 <= width < 8 * d / 3 + 8
    assert GluConfig(multiple_of=256).width(ctx(d)) % 256 == 0 and GluConfig(hidden=7).width(ctx(d)) == 7
    assert GluConfig(multiple_of=256).width(ctx(4096)) == 11008  # LLaMA-7B's


@pytest.mark.parametrize(
    "config", [MlpConfig(bias=False), MlpConfig(hidden=9), GluConfig(bias=True), GluConfig(hidden=9)]
)
def test_counts(config: MlpConfig | GluConfig):
    module = config.build(ctx(12))
    assert config.num_params(ctx(12)) == sum(p.numel() for p in module.parameters())
    matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert config.costs(ctx(12), Shape(phase="prefill")).flops == 2 * matrices
