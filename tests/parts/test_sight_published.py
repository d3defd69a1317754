"""Sparse attention and sinks against the published classes of transformers, in outputs and in every gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassformer.naming import preset
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import Kernel, Naive
from glassformer.parts.mixer import Attention, GlobalAttention
from glassformer.parts.visibility import BigBird, Causal, Chunked, Longformer, SameDocument, SlidingWindow
from tests.refused import refused

D, N = 32, 4


def moved(module: nn.Module, seed: int = 0) -> Any:
    """With every parameter off its start, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


def stacked(*maps: Any) -> dict[str, Tensor]:
    return {name: torch.cat([getattr(one, name) for one in maps]) for name in ("weight", "bias")}


def give(ours: nn.Module, **maps: Any) -> None:
    """Our fused maps take the weights of theirs, and the output passes z on."""
    held = {f"{name}.{key}": value for name, parts in maps.items() for key, value in stacked(*parts).items()}
    held |= {"output.weight": torch.eye(D).double(), "output.bias": torch.zeros(D).double()}
    missing, unexpected = ours.load_state_dict(held, strict=False)
    assert not unexpected and set(missing) <= {"sinks.weight"}


def same(mine: Tensor, theirs: Tensor, pairs: list[tuple[Tensor, tuple[Tensor, ...]]], tolerance: float = 1e-8) -> None:
    """Equal results, and equal gradients of each of our parameters and of those of theirs that are stacked in it."""
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(mine.shape, generator=torch.Generator().manual_seed(9), dtype=mine.dtype)
    a = torch.autograd.grad(mine, [ours for ours, _ in pairs], upstream)
    b = torch.autograd.grad(theirs, [one for _, some in pairs for one in some], upstream)
    for grad, (_, some) in zip(a, pairs, strict=True):
        found, b = torch.cat(b[: len(some)]), b[len(some) :]
        assert grad.abs().max() > 0
        scale = found.abs().max().item()
        torch.testing.assert_close(grad, found, rtol=10 * tolerance, atol=10 * tolerance * scale)


CHOSEN: dict[str, dict[int, list[int]]] = {
    "first": {},
    "chosen": {0: [0, 7, 8], 1: [2, 11, 18]},
    "ragged": {0: [0, 7], 1: [11]},
}


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("kernel", [None, Naive()], ids=["auto", "naive"])
def test_longformer_is_the_published_one(first: int, kernel: Kernel | None, chosen: str):
    """Global tokens are the first ones, or those that a caller names in each row. Where rows have different numbers of
    them, the gradients of the published class are NaN."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=D, num_attention_heads=N, attention_window=[6], attention_probs_dropout_prob=0.0
    )
    theirs = moved(LongformerSelfAttention(config, 0))
    ours = moved(GlobalAttention(D, N, bias=True, visibility=Longformer(6, first, causal=False), kernel=kernel))
    give(
        ours,
        qkv=(theirs.query, theirs.key, theirs.value),
        **{"global_maps.qkv": (theirs.query_global, theirs.key_global, theirs.value_global)},
    )
    s = 24
    x, real = torch.randn(2, s, D, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([s, s - 5])
    mask = torch.zeros(2, s, dtype=torch.float64)
    mask[:, :first] = 0.0 if CHOSEN[chosen] else 10000.0
    for row, tokens in CHOSEN[chosen].items():
        mask[row, tokens] = 10000.0
    is_global = mask > 0 if CHOSEN[chosen] else None
    documents = (torch.arange(s) < real[:, None]).long()
    mask[documents == 0] = -10000.0
    expected = theirs(x, mask, mask < 0, mask > 0, True)[0]
    found = ours(x, Pass(0, s, documents=documents, global_tokens=is_global))
    here = documents.bool()[..., None]
    qkv, theirs_qkv = ours.qkv, (theirs.query, theirs.key, theirs.value)
    wide, theirs_wide = ours.global_maps["qkv"], (theirs.query_global, theirs.key_global, theirs.value_global)
    pairs = [
        (getattr(a, name), tuple(getattr(one, name) for one in b))
        for a, b in ((qkv, theirs_qkv), (wide, theirs_wide))
        for name in ("weight", "bias")
    ]
    # Their softmax is in fp32 whatever the input.
    if chosen == "ragged":
        torch.testing.assert_close(found * here, expected * here, rtol=1e-5, atol=1e-5)
    else:
        same(found * here, expected * here, pairs, 1e-5)
    alone = Pass(0, s, global_tokens=None if is_global is None else is_global[:1])
    torch.testing.assert_close(ours(x[:1], alone), found[:1])  # and without documents
    with refused(code="causal", field="mixer"):
        ours.init_state(1, 8, torch.float32)


@pytest.mark.parametrize("s", [32, 40])
def test_bigbird_is_the_published_one(s: int, monkeypatch: pytest.MonkeyPatch):
    """With our random blocks in the place of theirs, and in training mode: in eval mode the published class draws none
    and weighs block 0 more."""
    import numpy as np
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    visibility, block, m = BigBird(4, 1, seed=5, causal=False), 4, s // 4
    config = BigBirdConfig(
        hidden_size=D, num_attention_heads=N, num_random_blocks=1, block_size=4, attention_probs_dropout_prob=0.0,
        max_position_embeddings=64, use_bias=True,
    )  # fmt: skip
    theirs = moved(BigBirdBlockSparseAttention(config, seed=0)).train()
    near = [{0, i - 1, i, i + 1, m - 1} for i in range(m)]
    sized = visibility.sized(s)
    table = np.array([[next(iter(sized.row(i, s) - near[i]))] for i in range(1, m - 1)])
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda *a, **k: [table] * N)
    monkeypatch.setattr(theirs, "_get_rand_attn_plan", lambda *a, **k: ([s], [1]))
    ours = moved(Attention(D, N, bias=True, visibility=visibility))
    give(ours, qkv=(theirs.query, theirs.key, theirs.value))
    x = torch.randn(2, s, D, generator=torch.Generator().manual_seed(1)).double()
    blocked, band, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(2, s).double(), block
    )
    expected = theirs(x, band, from_mask, to_mask, blocked, blocked)[0]
    maps = (theirs.query, theirs.key, theirs.value)
    pairs = [(getattr(ours.qkv, name), tuple(getattr(one, name) for one in maps)) for name in ("weight", "bias")]
    same(ours(x), expected, pairs)


@pytest.mark.parametrize("kernel", ["auto", "naive", "sdpa", "banded"])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_those_of_gpt_oss(kernel: str, window: int | None):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    config = preset(f"llama@1m+vocab_size=61+d_model={D}+heads={N}+gqa:2+sinks+nope+kernel={kernel}")
    mixer = next(config.layers()).mixer.replace(
        bias=True, **({} if window is None else {"visibility": _window(window)})
    )
    ours = moved(mixer.build(config.ctx), 3)
    s = 11
    x = torch.randn(2, s, D, generator=torch.Generator().manual_seed(1)).double()
    h, projection = D // N, ours.projection
    q, k, v = (one.transpose(1, 2) for one in projection(ours, x, Pass.of(x)))
    seen = ours.visibility.visible(torch.tensor(0), torch.tensor(0), torch.arange(s)[:, None], torch.arange(s))
    hidden = torch.zeros(s, s, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    module = SimpleNamespace(sinks=ours.sinks.weight, num_key_value_groups=N // 2, training=False)
    z, pattern = eager_attention_forward(module, q, k, v, hidden, h**-0.5)  # type: ignore[arg-type]
    expected = ours.output(z.flatten(-2))
    everything = [(one, (one,)) for one in ours.parameters()]
    same(ours(x), expected, everything)
    assert (pattern.sum(-1) < 1).all()


def _window(window: int) -> Any:
    from glassformer.parts.visibility import SlidingWindowConfig

    return SlidingWindowConfig(window=window)


def test_chunks_are_those_of_llama4():
    """Borders count from a row's first real token; and without padding from its first."""
    from transformers.masking_utils import causal_mask_function, chunked_overlay

    t, padding = 23, torch.tensor([0, 4, 9])
    overlay = chunked_overlay(5, padding)
    real = torch.arange(t) >= padding[:, None]
    mine = SameDocument(Chunked(5), real.long())
    rows, q, k = torch.arange(3).view(3, 1, 1), torch.arange(t).view(t, 1), torch.arange(t).view(1, t)
    expected = overlay(rows, 0, q, k) & causal_mask_function(0, 0, q, k)  # type: ignore[arg-type]
    found = mine.visible(rows, torch.tensor(0), q, k)
    both = real[:, :, None] & real[:, None, :]
    assert torch.equal(found & both, expected & both) and not torch.equal(expected[0], expected[1])


def test_global_projections_ask_for_the_longformer_that_has_global_tokens():
    for visibility in (None, Causal(), SlidingWindow(4), Longformer(4, 1)):
        with refused(code="conflict", field="mixer.visibility"):
            GlobalAttention(D, N, visibility=visibility)
    base = "gpt2@1m+vocab_size=61"
    with refused(code="conflict", field="stack.0.blocks.0.mixer.visibility"):
        preset(f"{base}+mixer.kind=global_attention")
    config = preset(f"{base}+longformer:4:2+visibility.causal=false+mixer.kind=global_attention")
    assert not config.causal and config.num_params() == sum(p.numel() for p in config.build().parameters())
