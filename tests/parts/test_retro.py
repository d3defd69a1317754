"""RETRO's chunked cross-attention against the paper's formula, written out token by token; nothing changes the past."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.model import Model
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.forward_pass import Memory, Pass
from glassformer.parts.kernel import Banded, Kernel, Naive, Sdpa
from glassformer.parts.mixer import AttentionConfig, CrossAttention, CrossAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import BidirectionalConfig
from tests.refused import refused

B, M, W, D, N = 2, 4, 6, 16, 2  # W: two neighbours of three tokens


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def of_the_paper(mixer: CrossAttention, x: Tensor, memory: Tensor, real: Tensor | None) -> Tensor:
    """Section 2.4 of 2112.04426: the attending chunk H_u^+ = (h_{u m + i - 1}), i in [1, m], whose tokens attend to the
    neighbours E_u of chunk u; the first m - 1 tokens attend to nothing. Tokens and chunks count from 1."""
    (b, s), g, h = x.shape[:2], mixer.n_kv_heads, mixer.head_dim
    rows: dict[tuple[int, int], Tensor] = {}
    for row in range(b):
        for u in range(1, s // M + 1):
            of_u = memory[row, (u - 1) * W : u * W]
            for i in range(1, M + 1):
                place = u * M + i - 1  # from 1
                if place > s:
                    continue
                heads = []
                for n in range(mixer.n_heads):
                    group = n // (mixer.n_heads // g)
                    q = mixer.q_proj.weight[n * h : (n + 1) * h] @ x[row, place - 1]
                    weights = mixer.kv_proj.weight
                    k = of_u @ weights[group * h : (group + 1) * h].T
                    v = of_u @ weights[(g + group) * h : (g + group + 1) * h].T
                    scores = k @ q / h**0.5
                    if real is not None:
                        scores = scores.masked_fill(real[row, (u - 1) * W : u * W] == 0, float("-inf"))
                    heads.append(scores.softmax(0) @ v)
                rows[row, place - 1] = mixer.output.weight @ torch.cat(heads)
    nothing = x.new_zeros(D) + 0 * x.sum()
    return torch.stack([torch.stack([rows.get((row, t), nothing) for t in range(s)]) for row in range(b)])


@pytest.mark.parametrize("kernel", [None, Naive(), Sdpa(), Banded(2)], ids=["auto", "naive", "sdpa", "banded"])
@pytest.mark.parametrize("s", [3, 4, 12, 14, 15])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_papers(kernel: Kernel | None, s: int, padded: bool):
    """Chunk by chunk and under the mask: outputs, and gradients of x, memory and weights."""
    mixer = CrossAttention(D, N, 1, chunks=(M, W), kernel=kernel)
    x, memory = seeded(B, s, D), seeded(B, max(1, s // M) * W, D, seed=1)
    real = (torch.rand(memory.shape[:2], generator=torch.Generator().manual_seed(2)) > 0.3).long() if padded else None
    if real is not None:
        real[:, ::W] = 1
    wanted = of_the_paper(mixer, x, memory, real)
    folded = mixer(x, Pass(0, s, memory=Memory(memory, real)))
    pass_ = Pass(0, s, memory=Memory(memory, real))
    call = mixer.call_of(mixer.q(mixer.projection.queries(mixer, x)), *mixer.memory(x, pass_, None)[:2], real, pass_)
    masked = mixer.put_out(mixer.attend(call))
    given, leaves = seeded(B, s, D, seed=3).detach(), [x, memory, *mixer.parameters()]
    oracle = torch.autograd.grad((wanted * given).sum(), leaves, allow_unused=True, materialize_grads=True)
    for found in (folded, masked):
        torch.testing.assert_close(found, wanted)
        grads = torch.autograd.grad((found * given).sum(), leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(grads, oracle, rtol=1e-4, atol=1e-5)


def config(encoder: bool = True, **changes: Any) -> ModelConfig:
    """Two layers of RETRO: self-attention, chunked cross-attention to what a two-sided encoder makes of neighbours."""
    shared: dict[str, Any] = {"norm": RMSNormConfig(), "residual": PreConfig()}
    own = BlockConfig(mixer=AttentionConfig(n_heads=N, position=RotaryConfig()), ffn=None, **shared)
    cross = CrossAttentionConfig(n_heads=N, chunks={"chunk": M, "width": W}, **changes)
    both = AttentionConfig(n_heads=N, position=RotaryConfig(), visibility=BidirectionalConfig())
    reads = BlockConfig(mixer=both, ffn=MlpConfig(hidden=24), **shared)
    tower = TowerConfig(stack=(Stage(repeat=1, blocks=(reads,)),), final_norm=RMSNormConfig()) if encoder else None
    return ModelConfig(
        vocab_size=31, d_model=D, context=64, encoder=tower, final_norm=RMSNormConfig(),
        stack=(Stage(repeat=2, blocks=(own, BlockConfig(mixer=cross, ffn=MlpConfig(hidden=24), **shared))),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    model = config().build(seed=0).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 5)
    return model


S = 14
TOKENS = torch.randint(31, (B, S), generator=torch.Generator().manual_seed(0))
NEIGHBOURS = torch.randint(31, (B, S // M * W), generator=torch.Generator().manual_seed(1))
APART = (torch.arange(S // M * W) // 3 + 1).expand(B, -1)
"""Two neighbours for each chunk, each a separate document."""


def test_no_neighbour_and_no_token_changes_the_past(model: Model):
    """Neighbours of chunk u reach the last token of u first, m (u + 1) - 1; a token reaches itself and later ones."""
    with torch.no_grad():
        logits = model(TOKENS, source=NEIGHBOURS, source_documents=APART)
        for u in range(S // M):
            other = NEIGHBOURS.clone()
            other[:, u * W : (u + 1) * W] = (other[:, u * W : (u + 1) * W] + 1) % 31
            moved = (model(TOKENS, source=other, source_documents=APART) - logits).abs().amax((0, 2)) > 1e-6
            assert not moved[: (u + 1) * M - 1].any() and moved[(u + 1) * M - 1 : (u + 2) * M - 1].all()
        for t in range(S):
            other = TOKENS.clone()
            other[:, t] = (other[:, t] + 1) % 31
            moved = (model(other, source=NEIGHBOURS, source_documents=APART) - logits).abs().amax((0, 2)) > 1e-6
            assert not moved[:t].any() and moved[t]


@pytest.mark.parametrize("piece", [1, 3, 5])
def test_a_state_reads_neighbours_as_they_are_found(model: Model, piece: int):
    """Reading piece by piece, with the memory of finished chunks given at each chunk's end, equals one call."""
    with torch.no_grad():
        whole = model(TOKENS, source=NEIGHBOURS, source_documents=APART)
        memory, found, known = model.encode(NEIGHBOURS, APART), [], -1
        state = model.init_state(B, S, memory_len=NEIGHBOURS.shape[1])
        for first in range(0, S, piece):
            chunks = max(1, min(first + piece, S) // M)
            given = Memory(memory.x[:, : chunks * W], APART[:, : chunks * W]) if chunks > known else None
            found.append(model(TOKENS[:, first : first + piece], state, memory=given))
            known = chunks
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-5)


def test_it_counts_itself():
    made = config(encoder=False, n_kv_heads=1)
    model = made.build(seed=0)
    assert made.num_params() == sum(p.numel() for p in model.parameters())
    assert ModelConfig.from_dict(made.to_dict()) == made
    assert made.state_bytes(S, torch.float32) == model.init_state(1, S, memory_len=S // M * W).nbytes
    for layer in model.layers:
        layer.mixer.kernel = Naive()
    for s in (12, 14):
        with FlopCounterMode(display=False) as counter:
            model(TOKENS[:1, :s], memory=Memory(seeded(1, s // M * W, D)))
        assert made.flops(s) * s == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_retro_refuses_unfit_neighbours_and_documents(model: Model):
    for tokens, given in ((TOKENS, NEIGHBOURS[:, : 2 * W]), (TOKENS[:, : 2 * M], NEIGHBOURS[:, : 2 * W - 1])):
        with refused(code="range", field="memory"):
            model(tokens, source=given)
    with refused(code="conflict", field="documents"):
        model(TOKENS, source=NEIGHBOURS, documents=torch.ones_like(TOKENS))
    with refused(code="range", field="chunks.chunk"):
        CrossAttentionConfig(n_heads=2, chunks={"chunk": 0})
