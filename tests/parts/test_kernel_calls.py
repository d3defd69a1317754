"""Facts of a call, the kernel that `auto` takes for it, learned biases, and masks shared within a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassformer.errors import RequestError
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import (
    AttentionCall,
    Auto,
    Banded,
    CallFacts,
    Direct,
    Flex,
    Kernel,
    Naive,
    ScoreBias,
    Sdpa,
    softcap,
)
from glassformer.parts.kernel.on_gpu import OnGpu
from glassformer.parts.kernel.table import ranking
from glassformer.parts.mixer import Attention
from glassformer.parts.position import AttentionPosition
from glassformer.parts.visibility import Bidirectional, Causal, SameDocument, SlidingWindow, Visibility

KERNELS: dict[str, Kernel] = {
    "naive": Naive(),
    "sdpa": Sdpa(),
    "banded": Banded(),
    "banded of 7": Banded(block=7),
    "direct": Direct(),
    "auto": Auto(),
}
RADIUS = 6


def relative(table: Tensor) -> ScoreBias:
    """score + table[clamp(q - k, -R, R) + R, n]: Shaw et al. 2018, 1803.02155, without its products; T5."""
    return ScoreBias(
        lambda score, b, n, q_idx, k_idx: score + table[(q_idx - k_idx).clamp(-RADIUS, RADIUS) + RADIUS, n],
        additive=True, key="relative", parameters=(table,),
    )  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(s: int, t: int, visibility: Visibility | None = None, n: int = 4, g: int = 2, **kwargs: Any) -> AttentionCall:
    q, k, v = random(2, s, n, 8, seed=1), random(2, t, g, 8, seed=2), random(2, t, g, 8, seed=3)
    return AttentionCall(q, k, v, visibility or Causal(), **kwargs)


def ids(t: int, seed: int = 4) -> Tensor:
    return torch.randint(0, 3, (2, t), generator=torch.Generator().manual_seed(seed)).sort(dim=1).values


VISIBILITIES = {
    "causal": lambda t: Causal(),
    "all": lambda t: Bidirectional(),
    "window": lambda t: SlidingWindow(5),
    "documents": lambda t: SameDocument(Causal(), ids(t)),
}


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "naive"])
@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize(("s", "t"), [(20, 20), (3, 20), (1, 20), (300, 300)])
@pytest.mark.parametrize("g", [4, 2])
def test_a_learned_bias_gets_its_gradient(name: str, visibility: str, s: int, t: int, g: int):
    """With the definition's outputs, and its gradients of q, k, v and the table."""
    found = []
    for kernel in (KERNELS[name], Naive()):
        table = random(2 * RADIUS + 1, 4).requires_grad_()
        given = call(s, t, VISIBILITIES[visibility](t), g=g, bias=relative(table))
        leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
        z = kernel(given)
        found.append((z, *torch.autograd.grad((z * random(*z.shape, seed=5)).sum(), [*leaves, table])))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert found[0][-1].abs().max() > 0.1


@pytest.mark.parametrize("name", ["banded", "direct", "auto"])
def test_a_learned_bias_may_be_bent(name: str):
    table = random(2 * RADIUS + 1, 4).requires_grad_()
    given = call(20, 20, bias=ScoreBias.chain(relative(table), softcap(2.0)))
    expected, mine = (
        torch.autograd.grad(kernel(given).square().sum(), table)[0] for kernel in (Naive(), KERNELS[name])
    )
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_a_bias_is_learned_where_a_gradient_is_wanted():
    table = random(2 * RADIUS + 1, 4).requires_grad_()
    bias = relative(table)
    assert bias.learned and call(4, 4, bias=bias).facts.learned and call(4, 4, bias=bias).facts.grad
    with torch.no_grad():
        assert not call(4, 4, bias=bias).facts.learned
    frozen = call(4, 4, bias=relative(table.detach())).facts
    assert not frozen.learned and not frozen.grad
    chained = ScoreBias.chain(softcap(2.0), bias)
    assert chained is not None and chained.learned
    assert hash(relative(table).key) == hash(bias.key) != hash(relative(table.clone()).key)


def test_a_call_that_a_kernel_cannot_compute_is_refused():
    """With the reason that the kernel gives at construction."""
    given = call(4, 4, bias=softcap(2.0))
    reason = Sdpa().serves(given)
    assert reason is not None and reason == Sdpa().refusal(CallFacts(additive=False))
    with pytest.raises(RequestError) as error:
        Sdpa()(given)
    assert (error.value.code, error.value.field, error.value.value) == ("conflict", "kernel", "sdpa")
    assert reason in str(error.value)
    for kernel in (Naive(), Banded(), Direct(), Auto()):
        assert kernel.serves(given) is None


def test_flex_refuses_calls_without_backward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("glassformer.parts.kernel.flex._has_triton", lambda: True)
    given = call(4, 4, bias=relative(random(2 * RADIUS + 1, 4).requires_grad_()))
    assert "backward" in str(Flex().serves(given))
    with pytest.raises(RequestError) as error:
        Flex()(given)
    assert (error.value.field, error.value.value) == ("kernel", "flex")
    gpu = CallFacts(device="cuda", grad=True)
    assert Flex().refusal(gpu) is None
    assert "learned" in str(Flex().refusal(gpu._replace(learned=True)))
    assert Flex().refusal(gpu._replace(sinks=True)) is None
    assert "sinks" in str(Flex().refusal(CallFacts(device="cpu", sinks=True)))
    assert "dropout" in str(Flex().refusal(gpu._replace(dropout=True)))
    assert "head_dim" in str(Flex().refusal(gpu._replace(head_dim=8)))
    assert "float64" in str(Flex().refusal(gpu._replace(dtype=torch.float64)))
    assert "mps" in str(Flex().refusal(gpu._replace(device="mps")))
    monkeypatch.setattr("glassformer.parts.kernel.flex._has_triton", lambda: False)
    assert "Triton" in str(Flex().refusal(gpu))


class Table(AttentionPosition):
    """Learned bias by distance, written as by a user of the library."""

    def __init__(self, n_heads: int, seed: int):
        super().__init__()
        self.table = nn.Parameter(random(2 * RADIUS + 1, n_heads, seed=seed))

    def bias(self, pass_: Pass) -> ScoreBias:
        return relative(self.table)


@pytest.mark.parametrize("kernel", ["sdpa", "banded", "direct", "auto"])
@pytest.mark.parametrize("learning", [True, False])
def test_layers_do_not_share_bias_tables(kernel: str, learning: bool):
    """Two layers of one shape in one pass: neither fetches the other's mask, and both tables learn."""

    def pair(kernel: Kernel) -> list[Attention]:
        return [Attention(16, 4, 2, position=Table(4, seed), kernel=kernel) for seed in (7, 8)]

    layers, results = [pair(KERNELS[kernel]), pair(Naive())], []
    for mine, theirs in zip(*layers, strict=True):
        theirs.load_state_dict(mine.state_dict())
    x = random(2, 20, 16)
    for first, second in layers:
        with torch.set_grad_enabled(learning):
            pass_ = Pass.of(x)
            z = first(x, pass_) - second(x, pass_)
        tables = [first.position.table, second.position.table] if learning else []
        results.append((z, *(torch.autograd.grad(z.square().sum(), tables) if tables else ())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "banded", "direct", "auto"])
@pytest.mark.parametrize(("s", "t"), [(20, 20), (1, 20), (4, 20)])
def test_attentions_of_one_shape_keep_their_own_masks(kernel: str, s: int, t: int):
    """In one pass: over other documents (as a cross-attention has), over other tokens, and over the same again."""
    pass_ = Pass(t - s, t)
    made: list[Any] = []

    def once(key: Any, make: Any) -> Any:
        return pass_.once(key, lambda: (made.append(key), make())[1])

    mine, other = ids(t), ids(t, seed=9)
    assert not torch.equal(mine, other)
    index = (torch.arange(t - s, t) + 3, torch.arange(t) + 3)
    later = (torch.arange(t - s, t), torch.arange(t))
    longer = torch.cat((mine, mine[:, -3:]), dim=1)
    calls = [
        call(s, t, SameDocument(Causal(), mine)),
        call(s, t, SameDocument(Causal(), other)),
        call(s, t, SameDocument(Bidirectional(), mine)),
        call(s, t, SameDocument(Causal(), longer), index=index),
        call(s, t, SameDocument(Causal(), longer), index=later),
    ]
    for given in [*calls, *calls]:
        torch.testing.assert_close(KERNELS[kernel](given.replace(once=once)), Naive()(given), rtol=1e-4, atol=1e-5)
    assert len(made) == len(set(made)) <= len(calls)
    if kernel != "banded":
        assert len(made) == len(calls)


def test_layers_of_one_window_share_the_mask_of_their_rings():
    """Rows of different lengths are decoded: each layer's state names the tokens it holds in one shared tensor."""
    made: list[Any] = []
    layers = [Attention(16, 4, 2, visibility=SlidingWindow(5)) for _ in range(3)]
    states = [layer.init_state(2, 40, torch.float32) for layer in layers]
    rows = torch.tensor([3, 0])
    with torch.no_grad():
        for s in (8, 1, 1, 3):
            pass_ = Pass(int(rows.max()), int(rows.max()) + s, rows=rows, tokens=s)
            keep = pass_.once
            pass_.once = lambda key, make, keep=keep: keep(key, lambda: (made.append(key), make())[1])
            for layer, state in zip(layers, states, strict=True):
                layer(random(2, s, 16), pass_, state)
            rows = rows + s
    assert [key[0] for key in made[::2]] == ["ring"] * 4 and len(made) == 8  # and one mask for each pass


CUDA = CallFacts(device="cuda", dtype=torch.bfloat16, batch=8, s=1024, t=1024, grad=True)
DECODING = CUDA._replace(s=1, grad=False)
GPU_CHOICES = {
    "causal": (CUDA, "sdpa"),
    "window": (CUDA._replace(width=128, plain=False, masked=True), "flex"),
    "alibi or documents": (CUDA._replace(plain=False, masked=True), "flex"),
    "softcap": (CUDA._replace(plain=False, masked=True, additive=False), "flex"),
    "a prompt": (CUDA._replace(plain=False, masked=True, grad=False), "flex"),
    "a continued prompt": (CUDA._replace(s=512, masked=True, grad=False), "flex"),
    "a token": (DECODING, "sdpa"),
    "a token in a ring": (DECODING._replace(plain=False, masked=True), "sdpa"),
    "a token with softcap": (DECODING._replace(plain=False, masked=True, additive=False), "direct"),
    "a draft to verify": (DECODING._replace(s=5, masked=True), "sdpa"),
    "dropout": (CUDA._replace(plain=False, masked=True, dropout=True), "sdpa"),
    "dropout and softcap": (CUDA._replace(plain=False, masked=True, additive=False, dropout=True), "banded"),
    "a learned bias": (CUDA._replace(plain=False, masked=True, learned=True), "sdpa"),
    "float64": (CUDA._replace(plain=False, masked=True, dtype=torch.float64), "sdpa"),
    "small heads": (CUDA._replace(plain=False, masked=True, head_dim=8), "sdpa"),
    "sinks": (CUDA._replace(sinks=True), "flex"),
    "sinks in a window": (CUDA._replace(width=128, plain=False, masked=True, sinks=True), "flex"),
    "sinks and dropout": (CUDA._replace(sinks=True, dropout=True), "banded"),
    "a token with sinks": (DECODING._replace(sinks=True), "direct"),
    "another device": (CUDA._replace(plain=False, masked=True, device="mps"), "sdpa"),
}


@pytest.mark.parametrize("case", GPU_CHOICES)
def test_auto_choice_of_kernel_on_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch):
    """The choice depends only on facts of the call: no GPU is needed, and no GPU has run them."""
    facts, expected = GPU_CHOICES[case]
    monkeypatch.setattr("glassformer.parts.kernel.flex._has_triton", lambda: True)
    assert Auto().fastest(facts).name == expected
    monkeypatch.setattr("glassformer.parts.kernel.flex._has_triton", lambda: False)
    without = {"flex": "sdpa" if facts.additive and not facts.sinks else "banded"}.get(expected, expected)
    assert Auto().fastest(facts).name == without


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_last_of_every_ranking_serves(device: str, dtype: torch.dtype):
    for s, t in ((1, 1), (1, 50), (4, 50), (40, 4000), (300, 300), (9000, 9000)):
        for bits in range(64):
            plain, additive, learned, dropout, grad, sinks = ((bits >> i) & 1 == 1 for i in range(6))
            rest = (plain and additive, not plain, additive, learned and grad, dropout, grad, sinks)
            facts = CallFacts(device, dtype, 2, s, t, 8, None, *rest)
            last = ranking(facts)[-1]
            assert last in {"sdpa", "banded", "direct"} and Auto.kernels[last].refusal(facts) is None


def test_call_facts_describe_shapes_and_masks():
    """The facts come from shapes only, since tensors are on the meta device."""

    def facts(s: int, t: int, visibility: Visibility, **kwargs: Any) -> CallFacts:
        q, k = torch.empty(2, s, 4, 16, device="meta"), torch.empty(2, t, 2, 16, device="meta")
        return AttentionCall(q, k, k, visibility, **kwargs).facts

    square = facts(9, 9, Causal())
    assert square == CallFacts("meta", torch.float32, 2, 9, 9, 16, None, True, False, True, False, False, False)
    assert not facts(1, 9, Causal()).masked and facts(3, 9, Causal()).masked and facts(3, 9, Causal()).plain
    assert not facts(3, 9, Bidirectional()).masked
    assert not facts(9, 9, SlidingWindow(9)).masked and facts(9, 9, SlidingWindow(8)).masked
    assert facts(9, 9, SlidingWindow(8)).width == 8
    bent = facts(9, 9, Causal(), bias=softcap(2.0), dropout=0.1)
    assert bent.masked and not bent.plain and not bent.additive and bent.dropout
    assert facts(9, 9, SameDocument(Causal(), ids(9))).masked
    assert facts(1, 9, Causal(), index=(torch.tensor([8]), torch.arange(9))).masked


def test_auto_serves_the_meta_device():
    q, k = torch.empty(2, 300, 4, 16, device="meta"), torch.empty(2, 300, 2, 16, device="meta")
    for visibility in (Causal(), SlidingWindow(20)):
        assert Auto()(AttentionCall(q, k, k, visibility)).shape == (2, 300, 4, 16)


def test_planned_gpu_kernel_has_pairs_as_its_kernel() -> None:
    """Pieces of a sequence gather keys for a kernel that has a value for every pair, and pass them round otherwise."""
    assert not OnGpu().has_pairs(CallFacts()) and not OnGpu().has_pairs(CallFacts(sinks=True))
    assert Naive().has_pairs(CallFacts())
