"""The declared cuts: owners that hold a part each compute together what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.core.shard import Shard, piece_of, shards_of
from glassformer.parts.ffn import Experts, Glu, Mlp
from glassformer.parts.ffn.experts import Router
from glassformer.parts.mixer import Attention, Mamba
from glassformer.parts.mixer.qk_norm import QKNorm
from glassformer.parts.norm import RMSNorm
from glassformer.parts.position import Rotary

D, H, T, OWNERS = 16, 4, 6, 2
TINY = "layers=2+d_model=32+heads=4+vocab_size=64+context=16"


def x_of(width: int = D) -> Tensor:
    return torch.randn(2, T, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def randomise(module: nn.Module) -> nn.Module:
    """Weights that no two maps share, vectors included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


def owned(whole: nn.Module, small: nn.Module, owner: int) -> Any:
    """Returns `small` with one owner's parts of the weights of `whole`; only owner 0 has the biases added to a sum."""
    shards, values = shards_of(whole), dict(whole.named_parameters())
    pieces = {name: piece_of(values[name], shards[name], owner, OWNERS).detach() for name in shards}
    for name, cuts in shards.items():
        if cuts[0].cut == "row" and values[name].dim() == 1:
            pieces[name] = pieces[name] * (owner == 0)
    small.double().load_state_dict(pieces)
    return small


def attention(n: int, g: int, qk_norm: bool, bias: bool) -> Attention:
    norms = QKNorm(RMSNorm(H, sets=n), RMSNorm(H, sets=g), "each_head") if qk_norm else None
    return Attention(D, n, g, H, bias, position=Rotary(H), qk_norm=norms)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk norm of each head"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("n", "g"), [(4, 4), (4, 2)], ids=["mha", "gqa"])
def test_attention_of_half_the_heads_each_adds_up(n: int, g: int, qk_norm: bool, bias: bool):
    whole: Any = randomise(attention(n, g, qk_norm, bias))
    parts = [owned(whole, attention(n // 2, g // 2, qk_norm, bias), i) for i in range(OWNERS)]
    torch.testing.assert_close(sum(part(x_of()) for part in parts), whole(x_of()), rtol=0, atol=1e-12)


def test_the_rows_of_a_fused_matrix_are_cut_map_by_map():
    """[q; k; v] cut as one matrix would give the first of two owners queries and no values."""
    qkv = Attention(D, 4, 2, H).qkv
    rows = torch.arange(sum(qkv.outs))
    q, k, v = rows.split(qkv.outs)
    half = torch.cat([q[:8], k[:4], v[:4]])
    assert torch.equal(piece_of(rows, qkv.cuts, 0, OWNERS), half)


def test_heads_are_not_cut_in_two():
    with pytest.raises(RequestError) as raised:
        piece_of(Attention(D, 4, 1, H).qkv.weight, Attention(D, 4, 1, H).qkv.cuts, 0, OWNERS)
    assert (raised.value.code, raised.value.field, raised.value.value) == ("range", "owners", OWNERS)


@pytest.mark.parametrize("kind", [Glu, Mlp])
def test_a_feed_forward_network_of_half_the_width_each_adds_up(kind: type[nn.Module]):
    whole: Any = randomise(kind(D, 24, bias=True))
    parts = [owned(whole, kind(D, 12, bias=True), i) for i in range(OWNERS)]
    torch.testing.assert_close(sum(part(x_of()) for part in parts), whole(x_of()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_half_of_the_experts_each_add_up(gated: bool):
    """An owner computes the assignments to its own experts; the router is on every owner."""
    e = 4
    whole: Any = randomise(Experts(D, 8, Router(D, e, 2), gated, bias=True))
    x = x_of().flatten(0, 1)
    weights, chosen = whole.router.choose(whole.router.score(whole.router(x)))
    total = torch.zeros_like(x)
    for i in range(OWNERS):
        part = Experts(D, 8, Router(D, e // 2, 2), gated, bias=True)
        router = part.router
        part.router = Router(D, e, 2)
        part = owned(whole, part, i)
        part.router = router
        here = (chosen // (e // 2)) == i
        total = total + part.mix(x, weights * here, (chosen - i * (e // 2)).where(here, 0))
    torch.testing.assert_close(total, whole.mix(x, weights, chosen), rtol=0, atol=1e-12)


def test_mamba_cut_by_channels_needs_one_sum_inside_and_one_at_the_end():
    """dt's rank, B and C are sums over all channels; everything else of a channel is its owner's."""
    whole: Any = randomise(Mamba(D, d_state=3))
    parts = [owned(whole, Mamba(D, d_state=3, expand=1, dt_rank=1), i) for i in range(OWNERS)]
    assert whole.dt_proj.in_features == 1
    partial: list[Tensor] = []
    for part in parts:  # every owner's share of x_proj
        part.x_proj.register_forward_hook(lambda _m, _x, y: partial.append(y))
        part(x_of())
    together = partial[0] + partial[1]
    for part in parts:
        part.x_proj.register_forward_hook(lambda _m, _x, y: together)
    torch.testing.assert_close(sum(part(x_of()) for part in parts), whole(x_of()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_vocabulary_cut_in_two_gives_rows_and_loss(tied: str):
    """The loss from each owner's logits is the log of the summed exponentials, less the target's logit at its owner."""
    model = preset(f"llama+{TINY}+{tied}+head.bias=true").build(seed=0).double()
    shards, values = shards_of(model), dict(model.named_parameters())
    name = "embedding.weight" if tied == "tied" else "head.weight"

    def cut(name: str) -> list[Tensor]:
        return [piece_of(values[name], shards[name], i, OWNERS) for i in range(OWNERS)]

    tokens = torch.arange(2 * T).view(2, T) * 5
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows = sum(
        F.embedding((inputs - i * 32).clamp(0, 31), table) * (inputs // 32 == i)[..., None]
        for i, table in enumerate(cut("embedding.weight"))
    )
    torch.testing.assert_close(rows, F.embedding(inputs, values["embedding.weight"]), rtol=0, atol=0)
    hidden = model.hidden_states(inputs)
    logits = [F.linear(hidden, w, b) for w, b in zip(cut(name), cut("head.bias"), strict=True)]
    log_z = torch.stack([part.logsumexp(-1) for part in logits]).logsumexp(0)
    picked = sum(
        part.gather(-1, (targets - i * 32).clamp(0, 31)[..., None])[..., 0] * (targets // 32 == i)
        for i, part in enumerate(logits)
    )
    torch.testing.assert_close((log_z - picked).mean(), model.loss(inputs, targets), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "expression",
    ["llama", "gpt2", "mamba+layers=2+d_model=32+vocab_size=64", "llama+moe:4:2", "gpt2+qknorm:each_head+sigmareparam"],
)
def test_every_matrix_is_declared(expression: str):
    """Every parameter of two axes or more is named in its module's `shards`, map by map."""
    whole = expression if "layers" in expression else f"{expression}+{TINY}"
    for path, module in preset(whole).outline().named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            cuts = module.shards[name]  # type: ignore[index, union-attr]
            assert all(isinstance(cut, Shard) for cut in cuts), f"{path}.{name}"
            assert len(cuts) == 1 or sum(cut.rows or 0 for cut in cuts) == len(parameter), f"{path}.{name}"
