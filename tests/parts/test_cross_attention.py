"""Cross-attention against torch.nn.MultiheadAttention, the definition, and torch.nn.TransformerDecoderLayer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.errors import RequestError
from glassformer.model import Block, Model
from glassformer.parts.core.site import edit_at, look_at
from glassformer.parts.ffn import Mlp, MlpConfig
from glassformer.parts.forward_pass import Memory, Pass
from glassformer.parts.kernel import Banded, Kernel, Naive, Sdpa
from glassformer.parts.mixer import Attention, AttentionConfig, CrossAttention, CrossAttentionConfig
from glassformer.parts.norm import LayerNorm, LayerNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import Post, PostConfig, Pre, PreConfig

B, S, T, D, N = 3, 5, 7, 32, 4
REAL = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
"""Real tokens of the memory, padded right and left."""


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def copied(mine: CrossAttention, theirs: nn.MultiheadAttention) -> None:
    """Theirs holds q|k|v as one matrix, or q, k, v apart where the memory has another width."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
        apart = theirs.in_proj_weight is None
        weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
        q, k, v = weights if apart else theirs.in_proj_weight.chunk(3)
        mine.q_proj.weight.copy_(q)  # type: ignore[operator, union-attr]
        mine.kv_proj.weight.copy_(torch.cat([k, v]))  # type: ignore[operator, union-attr]
        mine.q_proj.bias.copy_(theirs.in_proj_bias[:D])  # type: ignore[operator, union-attr]
        mine.kv_proj.bias.copy_(theirs.in_proj_bias[D:])  # type: ignore[operator, union-attr]
        mine.output.weight.copy_(theirs.out_proj.weight)
        mine.output.bias.copy_(theirs.out_proj.bias)  # type: ignore[union-attr]


@pytest.mark.parametrize("kernel", [None, Naive(), Sdpa(), Banded(2)], ids=["auto", "naive", "sdpa", "banded"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("width", [None, 20], ids=["width d", "width 20"])
def test_it_is_torchs_attention_to_another_sequence(kernel: Kernel | None, padded: bool, width: int | None):
    """Outputs and the gradients of x, of the memory and of every parameter."""
    config = CrossAttentionConfig(n_heads=N, bias=True, projection={"kind": "cross", "memory_width": width})
    mine = config.build(context())
    mine.kernel = kernel or mine.kernel
    theirs = nn.MultiheadAttention(D, N, bias=True, kdim=width, vdim=width, batch_first=True)
    copied(mine, theirs)
    x, memory = seeded(B, S, D), seeded(B, T, width or D, seed=1)
    documents = REAL if padded else None
    found = mine(x, Pass(0, S, memory=Memory(memory, documents)))
    wanted, _ = theirs(x, memory, memory, key_padding_mask=REAL == 0 if padded else None, need_weights=False)
    torch.testing.assert_close(found, wanted)
    given = torch.randn_like(found)
    grads = torch.autograd.grad((found * given).sum(), [x, memory, *mine.parameters()])
    other = [p for p in (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight) if p is not None]
    other = other or [theirs.in_proj_weight]
    oracle = torch.autograd.grad(
        (wanted * given).sum(), [x, memory, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias, *other]
    )
    named = dict(zip(["x", "memory", *(name for name, _ in mine.named_parameters())], grads, strict=True))
    torch.testing.assert_close(named["x"], oracle[0])
    torch.testing.assert_close(named["memory"], oracle[1])
    torch.testing.assert_close(torch.cat([named["q_proj.bias"], named["kv_proj.bias"]]), oracle[2])
    torch.testing.assert_close(named["output.weight"], oracle[3])
    torch.testing.assert_close(named["output.bias"], oracle[4])
    inward = oracle[5] if len(other) == 1 else None
    mapped = (named["q_proj.weight"], named["kv_proj.weight"])
    if inward is None:
        torch.testing.assert_close(mapped[0], oracle[5])
        torch.testing.assert_close(mapped[1], torch.cat(oracle[6:]))
    else:
        torch.testing.assert_close(torch.cat(mapped), inward)


def context(**changes: Any) -> Any:
    return model_config(**changes).ctx


def model_config(norm_first: bool = True, encoder_width: int | None = None) -> ModelConfig:
    """Decoder layers of an encoder-decoder: two blocks each."""
    shared: dict[str, Any] = {"norm": LayerNormConfig(), "residual": PreConfig() if norm_first else PostConfig()}
    projection = {"kind": "cross", "memory_width": encoder_width}
    own = BlockConfig(mixer=AttentionConfig(n_heads=N, bias=True, position=RotaryConfig()), ffn=None, **shared)
    cross = CrossAttentionConfig(n_heads=N, n_kv_heads=2, bias=True, projection=projection)
    other = BlockConfig(mixer=cross, ffn=MlpConfig(hidden=48), **shared)
    return ModelConfig(
        vocab_size=61, d_model=D, context=32, stack=(Stage(repeat=2, blocks=(own, other)),), final_norm=None
    )


@pytest.mark.parametrize("g", [1, 2, 4])
def test_grouped_heads_are_the_definition(g: int):
    mixer, x, memory = CrossAttention(D, N, g, head_dim=6), seeded(B, S, D), seeded(B, T, D, seed=1)
    q = mixer.q_proj(x).view(B, S, N, 6)  # type: ignore[operator]
    k, v = (part.view(B, T, g, 6) for part in mixer.kv_proj(memory).chunk(2, -1))  # type: ignore[operator]
    out = []
    for i in range(N):
        j = i // (N // g)
        scores = torch.einsum("bsh,bth->bst", q[:, :, i], k[:, :, j]) / 6**0.5
        scores = scores.masked_fill((REAL == 0)[:, None], float("-inf"))
        out.append(scores.softmax(-1) @ v[:, :, j])
    wanted = mixer.output(torch.cat(out, -1))
    torch.testing.assert_close(mixer(x, Pass(0, S, memory=Memory(memory, REAL))), wanted)


def test_packed_pairs_see_their_own_memory():
    """Documents on both sides separate the pairs: the result is that of each pair in a separate call."""
    mixer, x, memory = CrossAttention(D, N), seeded(1, 6, D), seeded(1, 7, D, seed=1)
    mine, theirs = torch.tensor([[1, 1, 1, 1, 2, 2]]), torch.tensor([[1, 1, 2, 2, 2, 0, 0]])
    packed = mixer(x, Pass(0, 6, documents=mine, memory=Memory(memory, theirs)))
    for a, b, c, d in ((0, 4, 0, 2), (4, 6, 2, 5)):
        alone = mixer(x[:, a:b], Pass(0, b - a, memory=Memory(memory[:, c:d])))
        torch.testing.assert_close(packed[:, a:b], alone)


@pytest.mark.parametrize("norm_first", [True, False])
def test_two_blocks_are_torchs_decoder_layer(norm_first: bool):
    """Outputs and all gradients, with a padded memory."""
    theirs = nn.TransformerDecoderLayer(D, N, 48, dropout=0.0, norm_first=norm_first, batch_first=True)
    wiring = Pre if norm_first else Post
    own = Block(Attention(D, N, bias=True), None, wiring(LayerNorm(D)))
    cross = Block(CrossAttention(D, N, bias=True), Mlp(D, 48, "relu", bias=True), wiring(LayerNorm(D), LayerNorm(D)))
    copied(cross.mixer, theirs.multihead_attn)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, theirs_too in theirs.named_parameters():
            if "norm" in name or "bias" in name:
                theirs_too.copy_(torch.randn(theirs_too.shape) / 3 + ("norm" in name))
        copied_bias(cross.mixer, theirs.multihead_attn)
        pairs = [
            (own.mixer.qkv, (theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias)),
            *((mine, (his.weight, his.bias)) for mine, his in (
                (own.mixer.output, theirs.self_attn.out_proj), (own.residual.mixer_norm, theirs.norm1),
                (cross.residual.mixer_norm, theirs.norm2), (cross.residual.ffn_norm, theirs.norm3),
                (cross.ffn.up_proj, theirs.linear1), (cross.ffn.down_proj, theirs.linear2),
            )),
        ]  # fmt: skip
        for mine, (weight, bias) in pairs:
            mine.weight.copy_(weight)
            mine.bias.copy_(bias)
    x, memory = seeded(B, S, D), seeded(B, T, D, seed=1)
    pass_ = Pass(0, S, memory=Memory(memory, REAL))
    found = cross(own(x, pass_), pass_)
    wanted = theirs(x, memory, nn.Transformer.generate_square_subsequent_mask(S), memory_key_padding_mask=REAL == 0)
    torch.testing.assert_close(found, wanted)
    given = torch.randn_like(found)
    mine_too = [p for layer, _ in pairs for p in (layer.weight, layer.bias)]
    his = [p for _, two in pairs for p in two]
    grads = torch.autograd.grad((found * given).sum(), [x, memory, *mine_too, *cross.mixer.parameters()])
    oracle = torch.autograd.grad((wanted * given).sum(), [x, memory, *his])
    for one, other in zip(grads, oracle, strict=False):
        torch.testing.assert_close(one, other)


def copied_bias(mine: Any, theirs: nn.MultiheadAttention) -> None:
    mine.q_proj.bias.copy_(theirs.in_proj_bias[:D])
    mine.kv_proj.bias.copy_(theirs.in_proj_bias[D:])
    mine.output.bias.copy_(theirs.out_proj.bias)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_config().build(seed=0)


TOKENS = torch.randint(61, (B, 9), generator=torch.Generator().manual_seed(2))
MEMORY = Memory(seeded(B, T, D, seed=3).detach(), REAL)


@pytest.mark.parametrize("documents", [REAL, None], ids=["padded", "whole"])
def test_the_memory_is_read_once_by_a_state(model: Model, documents: Tensor | None):
    memory = MEMORY._replace(documents=documents)
    full = model(TOKENS, memory=memory)
    state = model.init_state(B, 9, memory_len=T)
    pieces = [model(TOKENS[:, :4], state, memory=memory)]
    pieces += [model(TOKENS[:, a:b], state) for a, b in ((4, 5), (5, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), full)
    state.truncate(6)  # which keeps the memory
    torch.testing.assert_close(model(TOKENS[:, 6:], state), full[:, 6:])
    state.reorder(torch.tensor([2, 0, 0]))
    state.truncate(0)  # which does not
    with pytest.raises(RequestError) as refused:
        model(TOKENS, state)
    assert (refused.value.code, refused.value.field) == ("missing", "memory")
    torch.testing.assert_close(model(TOKENS, state, memory=memory), full)


def test_rows_of_a_state_are_moved_with_their_memory(model: Model):
    """Beams and a batch that requests join: memories of different lengths in one state."""
    full = model(TOKENS, memory=MEMORY)
    state = model.init_state(B, 9, memory_len=T)
    model(TOKENS[:, :5], state, memory=MEMORY)
    index = torch.tensor([2, 0, 0])
    state.reorder(index)
    torch.testing.assert_close(model(TOKENS[index, 5:], state), full[index, 5:])
    batch = model.init_state(2, 9, memory_len=T)
    for row, length in ((0, 7), (0, 3), (1, 7)):  # a row is taken over from a longer memory
        alone, memory = model.init_state(1, 9, memory_len=T), Memory(MEMORY.x[row : row + 1, :length])
        model(TOKENS[row : row + 1, :5], alone, memory=memory)
        batch.put(row, alone)
    batch.spread([5, 5])
    found = model(TOKENS[:2, 5:], batch)
    for row, length in ((0, 3), (1, 7)):
        wanted = model(TOKENS[row : row + 1], memory=Memory(MEMORY.x[row : row + 1, :length]))
        torch.testing.assert_close(found[row : row + 1], wanted[:, 5:])


def test_without_a_memory_it_is_refused(model: Model):
    with pytest.raises(RequestError) as refused:
        model(TOKENS)
    assert (refused.value.code, refused.value.field) == ("missing", "memory")
    with pytest.raises(RequestError) as refused:
        model(TOKENS, model.init_state(B, 9, memory_len=T - 1), memory=MEMORY)
    assert (refused.value.code, refused.value.field, refused.value.value) == ("range", "memory_len", T - 1)


@pytest.mark.parametrize("width", [None, 20])
def test_it_counts_itself(width: int | None):
    config = model_config(encoder_width=width)
    model = config.build(seed=0)
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    assert ModelConfig.from_dict(config.to_dict()) == config
    for dtype in (torch.float32, torch.int8):
        assert config.state_bytes(9, dtype) == model.init_state(1, 9, dtype, memory_len=9).nbytes
    for layer in model.layers:
        layer.mixer.kernel = Naive()  # the counter does not know those of the others on a CPU
    with FlopCounterMode(display=False) as counter:
        model(TOKENS[:1], memory=Memory(seeded(1, 9, width or D)))
    assert config.flops(9) * 9 == counter.get_total_flops()
    assert model.causal


def test_its_pattern_is_seen_and_edited(model: Model):
    """Rows are queries, columns the memory."""
    mixer: Any = model.layers[1].mixer
    kept: list[Tensor] = []
    with look_at([(mixer.pattern, lambda x, first, total: kept.append(x))]):
        full = model(TOKENS, memory=MEMORY)
    assert kept[0].shape == (B, N, 9, T) and not kept[0].transpose(1, 3)[REAL == 0].any()
    torch.testing.assert_close(kept[0].sum(-1), torch.ones(B, N, 9))
    with edit_at([(mixer.pattern, lambda x: x)]):
        torch.testing.assert_close(model(TOKENS, memory=MEMORY), full)


def test_masks_of_self_and_cross_attention_are_cached_separately():
    """Self- and cross-attention of equal shape, both with documents, in one pass (SDPA keeps masks by key)."""
    own, cross = Attention(D, N, kernel=Sdpa()), CrossAttention(D, N, kernel=Sdpa())
    x, memory = seeded(1, 6, D), seeded(1, 6, D, seed=1)
    documents, ids = torch.tensor([[1, 1, 1, 2, 2, 2]]), torch.tensor([[2, 2, 1, 1, 1, 0]])
    shared = Pass(0, 6, documents=documents, memory=Memory(memory, ids))
    for mixer in (own, cross):
        apart = Pass(0, 6, documents=documents, memory=Memory(memory, ids))
        torch.testing.assert_close(mixer(x, shared), mixer(x, apart))


def test_quantised_and_saved(tmp_path: Any, model: Model):
    gf.save(model, None, tmp_path)
    torch.testing.assert_close(gf.load(str(tmp_path)).model(TOKENS, memory=MEMORY), model(TOKENS, memory=MEMORY))
    packed = gf.load(str(tmp_path), quantize="int8").model
    torch.testing.assert_close(packed(TOKENS, memory=MEMORY), model(TOKENS, memory=MEMORY), atol=0.05, rtol=0.05)
