"""The Transformer of 1706.03762 as its presets make it, against `torch.nn.Transformer`: logits, and the gradient of
every weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassformer.architectures.transformer import transformer_base
from glassformer.config import ModelConfig
from glassformer.model import Model

D, N, F, V, S, T, LAYERS = 24, 3, 40, 37, 6, 9, 2


def tiny(bias: bool) -> ModelConfig:
    config = transformer_base(D, F, N, bias=bias)
    assert config.encoder is not None
    encoder = config.encoder.replace(stack=(config.encoder.stack[0].replace(repeat=LAYERS),))
    return config.replace(vocab_size=V, context=16, stack=(config.stack[0].replace(repeat=LAYERS),), encoder=encoder)


def sinusoid(length: int) -> Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) its cosine."""
    rows = []
    for pos in range(length):
        angles = [pos / 10000 ** (2 * i / D) for i in range(D // 2)]
        rows.append([f(angle) for angle in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows)


def pairs(mine: Model, theirs: Any) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    """(ours, theirs, which of its rows are ours)."""
    found: list[tuple[nn.Parameter, nn.Parameter, slice]] = []

    def same(one: Any, other: Any) -> None:
        for name, weight in one.named_parameters():
            found.append((weight, other.get_parameter(name), slice(None)))

    def fused(one: Any, other: nn.MultiheadAttention, rows: slice) -> None:
        found.append((one.weight, other.in_proj_weight, rows))
        if one.bias is not None:
            found.append((one.bias, other.in_proj_bias, rows))

    def own(block: Any, layer: Any) -> None:
        fused(block.mixer.qkv, layer.self_attn, slice(None))
        same(block.mixer.output, layer.self_attn.out_proj)
        same(block.residual.mixer_norm, layer.norm1)

    def network(block: Any, layer: Any, norm: nn.Module) -> None:
        same(block.ffn.up_proj, layer.linear1)
        same(block.ffn.down_proj, layer.linear2)
        same(block.residual.ffn_norm, norm)

    assert mine.encoder is not None
    for block, layer in zip(mine.encoder.layers, theirs.encoder.layers, strict=True):
        own(block, layer)
        network(block, layer, layer.norm2)
    blocks: list[Any] = list(mine.layers)
    for self_block, cross, layer in zip(blocks[::2], blocks[1::2], theirs.decoder.layers, strict=True):
        own(self_block, layer)
        fused(cross.mixer.q_proj, layer.multihead_attn, slice(0, D))
        fused(cross.mixer.kv_proj, layer.multihead_attn, slice(D, None))
        same(cross.mixer.output, layer.multihead_attn.out_proj)
        same(cross.residual.mixer_norm, layer.norm2)
        network(cross, layer, layer.norm3)
    return found


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("bias", [False, True])
def test_the_whole_model_is_torchs(bias: bool) -> None:
    """Without biases of attention, as the authors' code, torch's are zero. Sources are padded, and no target sees a
    later one."""
    mine = tiny(bias).build(seed=0).double().eval()
    theirs = nn.Transformer(
        D, N, LAYERS, LAYERS, F, dropout=0.0, activation="relu", layer_norm_eps=1e-6, batch_first=True,
        dtype=torch.float64,
    )  # fmt: skip
    theirs.encoder.norm = theirs.decoder.norm = None  # which the paper has not
    together, draw = pairs(mine, theirs), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64) * 0.3 + norm)
            if not bias and ("in_proj_bias" in name or "out_proj.bias" in name):
                weight.zero_()
        for ours, other, rows in together:
            ours.copy_(other[rows])
    table = mine.embedding.weight
    assert {id(weight) for weight in mine.parameters()} == {id(table), *(id(ours) for ours, _, _ in together)}
    tokens, source = (torch.randint(V, (3, length), generator=draw) for length in (S, T))
    real = (torch.arange(T) < torch.tensor([[T], [4], [7]])).long()

    def embedded(ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, table) * D**0.5 + sinusoid(ids.shape[1]).double()

    hidden = theirs(
        embedded(source), embedded(tokens), tgt_mask=nn.Transformer.generate_square_subsequent_mask(S).double(),
        src_key_padding_mask=real == 0, memory_key_padding_mask=real == 0,
    )  # fmt: skip
    expected = hidden @ table.T
    found = mine(tokens, source=source, source_documents=real)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # our sinusoids are made in fp32
    probe = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    mine_too, his = [ours for ours, _, _ in together], [other for _, other, _ in together]
    grads = torch.autograd.grad((found * probe).sum(), [table, *mine_too])
    wanted = torch.autograd.grad((expected * probe).sum(), [table, *his])
    for grad, other, rows in zip(grads, wanted, [slice(None), *(rows for _, _, rows in together)], strict=True):
        torch.testing.assert_close(grad, other[rows], rtol=1e-5, atol=1e-5)
        assert grad.any()
