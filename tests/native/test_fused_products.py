"""Networks and projections in blocks of rows: the machine code is the formulas, and parts of models use it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.machine import native
from glassformer.parts import fused_loops, fused_products
from glassformer.parts.core.site import look_at
from glassformer.parts.ffn import Glu, Mlp
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import ScoreBias
from glassformer.parts.mixer import Attention
from glassformer.parts.norm import RMSNorm
from glassformer.parts.position.rotary import Rotary
from glassformer.parts.projection import FusedQKV
from glassformer.parts.residual.base import PartBranch
from glassformer.parts.residual.pre import Pre

from .test_few_rows import SANITIZED, check_against_the_twin
from .test_fused_loops import drawn

SOURCE = Path(__file__).with_name("fused_products.cpp")
serves = pytest.mark.skipif(fused_products._library() is None, reason="no kernel for this processor, or no MKL here")


def test_machine_code_is_the_formulas_in_fp64(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*native.OPTIONS, *options), 40, SOURCE)


@pytest.mark.slow
def test_sanitizers_find_nothing(options: tuple[str, ...], tmp_path: Path) -> None:
    check_against_the_twin(tmp_path, (*SANITIZED, *options), 40, SOURCE)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of calls of each function that gave a result."""
    counts = {"feed": 0, "project": 0, "mix": 0}

    def told(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            counts[name] += result is not None
            return result

        return call

    for name in counts:
        monkeypatch.setattr(fused_products, name, told(name, getattr(fused_products, name)))
    return counts


def gradients(module: nn.Module, y: Tensor, x: Tensor) -> list[Tensor]:
    wanted = [x, *(one for one in module.parameters() if one.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, wanted, drawn(*y.shape, seed=9).to(y.dtype))]


def meant(network: Any, x: Tensor) -> Tensor:
    """The output of a network by its definition."""
    name = network.activation
    plain = {
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu2": lambda x: F.relu(x) ** 2,
        "sigmoid": torch.sigmoid,
    }
    phi = plain.get(name) or getattr(F, name)
    if isinstance(network, Glu):
        return network.down_proj(phi(network.gate_proj(x)) * network.up_proj(x))
    return network.down_proj(phi(network.up_proj(x)))


NETWORKS: dict[str, Any] = {
    "bias": lambda: Glu(9, 31, bias=True),
    **{f"glu {name}": partial(Glu, 24, 50, name) for name in ("silu", "sigmoid", "relu", "gelu", "gelu_tanh")},
    **{f"mlp {name}": partial(Mlp, 24, 50, name) for name in ("silu", "relu2", "relu", "gelu", "gelu_tanh")},
}


@serves
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_their_definition(name: str, normed: bool, threads: int, called: dict[str, int]) -> None:
    network, before = NETWORKS[name](), torch.get_num_threads()
    for one in network.parameters():
        nn.init.normal_(one, std=0.3)
    width = network.up_proj.in_features
    norm = RMSNorm(width, unit_offset=True)
    nn.init.normal_(norm.weight)
    parts = nn.ModuleList([network, *([norm] if normed else [])])
    x = drawn(3, 171, width).requires_grad_()
    torch.set_num_threads(threads)
    try:
        y = (network.added_at_once(x, norm) if normed else network)(x)
        made = gradients(parts, y, x)
    finally:
        torch.set_num_threads(before)
    assert called["feed"] == 1
    parts.double()
    wide = x.detach().double().requires_grad_()
    other = gradients(parts, wide + meant(network, norm(wide)) if normed else meant(network, wide), wide)
    assert called["feed"] == 1  # fp64 is torch's
    for a, b in zip(made, other, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5 * max(1.0, float(b.abs().max())))


@serves
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "llama+sinks"])
def test_models_take_them(name: str, called: dict[str, int]) -> None:
    """Qwen 3's rotation comes after a norm of queries and keys, and a sink is not in the machine code."""
    family, *changes = name.split("+")
    model = gf.preset("+".join([f"{family}@0.1m", "vocab_size=60", *changes])).build(seed=0)
    tokens = torch.randint(60, (4, 41))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert called == {"feed": 2, "project": 2 * (name == "llama+sinks"), "mix": 2 * (name in ("llama", "gpt2"))}


@serves
def test_weights_that_are_not_trained_have_no_gradient(called: dict[str, int]) -> None:
    network = Glu(24, 50)
    network.gate_proj.weight.requires_grad_(False)
    x = drawn(2, 64, 24)
    network(x).sum().backward()
    assert called["feed"] == 1 and network.gate_proj.weight.grad is None
    whole, other = network.up_proj.weight.grad, Glu(24, 50)
    other.load_state_dict(network.state_dict())
    other(x.requires_grad_()).sum().backward()
    assert whole is not None and torch.equal(whole, other.up_proj.weight.grad)


@serves
def test_torch_computes_what_it_watches(called: dict[str, int]) -> None:
    """Observed and hooked networks, counts of FLOPs, autocast, few rows, other matrices."""
    model = gf.preset("llama@0.1m+vocab_size=60").build(seed=0)
    tokens = torch.randint(60, (4, 41))
    with FlopCounterMode(display=False):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    model.loss(tokens[:1, :-1], tokens[:1, 1:])
    gf.preset("llama@0.1m+vocab_size=60+sigmareparam").build(seed=0).loss(tokens[:, :-1], tokens[:, 1:])
    assert called == {"feed": 0, "project": 0, "mix": 0}
    seen = []
    with look_at([(model.layers[0].ffn.hidden, lambda *_: seen.append(1))]):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    assert len(seen) == 1 and called == {"feed": 1, "project": 0, "mix": 2}
    for module in (model.layers[0].ffn.up_proj, model.layers[0].mixer.qkv, model.layers[1].residual.ffn_norm):
        module.register_forward_hook(lambda *_: seen.append(1))
    called.update(feed=0, project=0, mix=0)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    # of the first layer neither; of the second attention, and the network after its observed norm
    assert len(seen) == 4 and called == {"feed": 1, "project": 0, "mix": 1}


@serves
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_projections_are_their_definition(
    pairing: str, called: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"llama@0.1m+vocab_size=60+gqa:1+bias+position.fraction=0.5+position.pairing={pairing}"
    mixer: Any = gf.preset(name).build(seed=0).layers[0].mixer
    nn.init.normal_(mixer.qkv.bias)
    for ids in (None, torch.randint(99, (3, 50))):
        x = drawn(3, 50, mixer.qkv.in_features).requires_grad_()
        found = []
        for own in (True, False):
            with monkeypatch.context() as patch:
                if not own:
                    patch.setattr(fused_products, "_library", lambda: None)
                parts = mixer.adjusted(x, Pass(0, 50, ids=ids))
            total = sum((y * drawn(*y.shape)).sum() for y in parts)
            found.append([*parts, *torch.autograd.grad(total, [x, *mixer.qkv.parameters()])])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert called["project"] == 2


@serves
@pytest.mark.parametrize("name", fused_products.ACTIVATIONS)
def test_activations_at_their_edges(name: str) -> None:
    """Zeros of both signs, subnormal, large and infinite numbers, and NaN, which stays NaN."""
    edges = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, 5.0, -5.0, 60.0, -60.0, 1e4, -1e4, torch.nan])
    network = Mlp(1, 1, name, bias=False)
    for one in network.parameters():
        one.data.fill_(1.0)
    x = edges.repeat(8)[:, None].requires_grad_()
    y = network(x)
    made = y, torch.autograd.grad(y.sum(), x)[0]
    wide = x.detach().double().requires_grad_()
    assert network(torch.full((64, 1), torch.inf)).eq(torch.inf if name != "sigmoid" else 1).all()
    y = meant(network.double(), wide)
    for a, b in zip(made, (y, torch.autograd.grad(y.sum(), wide)[0]), strict=True):
        assert a.isnan().any()
        torch.testing.assert_close(a[~x.isnan()].double(), b[~x.isnan()], rtol=2e-5, atol=1e-6)


class Louder(Mlp):
    def forward(self, x: Tensor, pass_: Pass | None = None) -> Tensor:
        return 2 * super().forward(x, pass_)


class Longer(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Later(Attention):
    def score_bias(self, pass_: Pass) -> ScoreBias | None:
        return ScoreBias(lambda score, *_: score + 1 / (1 + _[2] - _[3]).abs(), True, "later")


class Shorter(Rotary):
    def forward(self, q: Tensor, k: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        q, k = super().forward(q, k, pass_)
        return q / 2, k


class Wider(FusedQKV):
    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().__call__(maps, x, pass_)
        return q, k, 5 * v


def test_subclasses_compute_as_they_say(called: dict[str, int]) -> None:
    x, pass_ = drawn(2, 64, 24), Pass(0, 64)
    for norm, network in ((RMSNorm(24), Louder(24, 50)), (Longer(24), Mlp(24, 50))):
        meant = x + network(norm(x))
        torch.testing.assert_close(Pre(norm, norm).feed(x, PartBranch(network, pass_)), meant)
    for name in ("qkv", "output"):
        patched: Any = Attention(24, 2)
        plain = patched(x)
        layer = getattr(patched, name)
        layer.forward = lambda x, own=layer.forward: 2 * own(x)
        assert not torch.allclose(patched(x), plain)
    mixer, norm = Later(24, 2), RMSNorm(24)
    other = nn.LayerNorm(24)
    torch.testing.assert_close(Pre(other).mix(x, PartBranch(mixer, pass_)), x + mixer(other(x)))
    torch.testing.assert_close(Pre(norm).mix(x, PartBranch(mixer, pass_)), x + mixer(norm(x)))
    assert called["mix"] == 2 * fused_loops.serves()
    patched = Mlp(24, 50)
    patched.forward = lambda x, pass_=None: x
    assert torch.equal(Pre(RMSNorm(24), RMSNorm(24)).feed(x, PartBranch(patched, pass_)), x + RMSNorm(24)(x))
    for one, times in ((Attention(24, 2, position=Shorter(12)), (0.5, 1, 1)),
                       (Attention(24, 2, position=Rotary(12), projection=Wider), (1, 1, 5))):  # fmt: skip
        plain = Attention(24, 2, position=Rotary(12))
        plain.load_state_dict(one.state_dict())
        for made, other, factor in zip(one.adjusted(x, pass_), plain.adjusted(x, pass_), times, strict=True):
            torch.testing.assert_close(made, factor * other)


def test_wrong_widths_are_torchs_errors(called: dict[str, int]) -> None:
    with pytest.raises(RuntimeError):
        Glu(24, 50)(drawn(2, 64, 40))
    with pytest.raises(RuntimeError):
        Attention(24, 2, position=Rotary(12))(drawn(2, 64, 40))
    assert called == {"feed": 0, "project": 0, "mix": 0}


def test_hooks_of_all_modules_see_all_modules(called: dict[str, int]) -> None:
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))):
        gf.preset("llama@0.1m+vocab_size=60").build(seed=0).loss(torch.randint(60, (2, 64)), torch.randint(60, (2, 64)))
    assert seen.count(Glu) == 2 and seen.count(RMSNorm) == 5 and not any(called.values())


def test_tables_that_are_kept_serve_later_steps() -> None:
    """After inference with the same length, with another base, and inside of a transform."""
    rotary, x = Rotary(8), drawn(1, 40, 2, 8)
    first = rotary(x, x, Pass(0, 40))[0]
    assert torch.equal(rotary(x, x, Pass(0, 40))[0], first)
    assert torch.equal(rotary(x, x, Pass(3, 43))[0][:, :-3], Rotary(8)(x, x, Pass(3, 43))[0][:, :-3])
    rotary.base = 500.0
    assert torch.equal(rotary(x, x, Pass(0, 40))[0], Rotary(8, base=500.0)(x, x, Pass(0, 40))[0])
    fresh = Rotary(8)
    with torch.inference_mode(), torch.enable_grad():
        fresh(x, x, Pass(0, 40))
    y = x.clone().requires_grad_()
    fresh(y, y, Pass(0, 40))[0].sum().backward()
    assert y.grad is not None


ATTENTIONS = (
    "llama",
    "gpt2",
    "llama+layernorm+gqa:1+bias+position.fraction=0.5+position.pairing=interleaved",
    "llama+bidirectional+norm.unit_offset=true",
    "gpt2+mixer.value_dim=24+nobias",
)


@serves
@pytest.mark.parametrize(("batch", "length"), [(4, 41), (1, 300), (3, 130)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_blocks_are_their_definition(
    name: str, batch: int, length: int, called: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of threads, and without gradients, against separate operations in fp64."""
    family, *changes = name.split("+")
    block: Any = gf.preset("+".join([f"{family}@0.1m", "vocab_size=60", *changes])).build(seed=0).layers[0]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in block.parameters():
            one.add_(torch.randn(one.shape, generator=generator) * (0.3 if one.dim() == 1 else 0.05))
    x, made, before = drawn(batch, length, block.mixer.qkv.in_features).requires_grad_(), [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(gradients(block, block(x, Pass.of(x)), x))
    finally:
        torch.set_num_threads(before)
    with torch.no_grad():
        made.append([block(x, Pass.of(x))])
    assert called == {"feed": 2, "project": 0, "mix": 2}
    block.double()
    wide = x.detach().double().requires_grad_()
    meant = gradients(block, block(wide, Pass.of(wide)), wide)
    assert called == {"feed": 2, "project": 0, "mix": 2}
    for found in made:
        for a, b in zip(found, meant, strict=False):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


@serves
def test_documents_and_states_have_separate_operations(called: dict[str, int]) -> None:
    model = gf.preset("llama@0.1m+vocab_size=60").build(seed=0)
    tokens = torch.randint(60, (2, 64))
    whole = model(tokens)
    assert called["mix"] == 2
    state = model.init_state(2, 64)
    with torch.no_grad():
        later = torch.cat([model(tokens[:, :40], state=state), model(tokens[:, 40:], state=state)], 1)
        two = model(tokens, documents=torch.arange(64).ge(40).long().expand(2, -1) + 1)
    assert called["mix"] == 2
    torch.testing.assert_close(later, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(two[:, :40], whole[:, :40], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(two[:, 40:], whole[:, 40:], atol=1e-3)


def trained(model: Any, length: int = 41) -> list[Tensor]:
    """Loss and gradients of a model on drawn tokens."""
    tokens = torch.randint(60, (4, length), generator=torch.Generator().manual_seed(0))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    wanted = [one for one in model.parameters() if one.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def apart(model: Any, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """`trained` with a call for each operation."""
    with patch.context() as only:
        only.setattr(fused_products, "MOST", 0)
        return trained(model)


@serves
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "llama+moe:4:2", "gpt2+post", "llama+layernorm+bias", "llama+residual.scale=0.5"]
)
def test_layers_together_have_the_bits_of_layers_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, *changes = name.split("+")
    model = gf.preset("+".join([f"{family}@0.1m", "vocab_size=60", *changes])).build(seed=0)
    made: list[int] = []
    run = fused_products._run

    def counted(calls: Any) -> None:
        made.append(len(calls))
        run(calls)

    monkeypatch.setattr(fused_products, "_run", counted)
    together = trained(model)
    if name in ("llama", "gpt2", "llama+layernorm+bias"):
        assert made == [4, 4]  # two layers
    else:
        assert max(made) == 1
    for a, b in zip(together, apart(model, monkeypatch), strict=True):
        assert torch.equal(a, b)
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    for a, b in zip(together, trained(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Wrapped(nn.Module):
    """Module that answers for another one, as wrappers of checkpointing and sharding do."""

    def __init__(self, inner: nn.Module, counts: list[int]):
        super().__init__()
        self.inner, self.counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *given: Any) -> Tensor:
        self.counts.append(1)
        y: Tensor = self.inner(*given)
        return y


def noted(notes: list[Any], note: Any, value: Any) -> Any:
    """Adds a note, and returns the value."""
    notes.append(note)
    return value


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


def three() -> Any:
    return gf.preset("llama@0.1m+vocab_size=60+layers=3").build(seed=0)


@serves
def test_layers_in_view_are_called(called: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, also those that change the shape, and wrappers, compiled modules, replaced sites and methods."""
    plain, model = trained(three()), three()
    seen: list[Any] = []
    called.update(feed=0, mix=0)
    model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert all(torch.equal(a, b) for a, b in zip(plain, trained(model), strict=True))
    assert len(seen) == 1 and called == {"feed": 3, "project": 0, "mix": 3}
    model.layers[2].residual.resid_mid.register_forward_hook(lambda *_: seen.append(2))
    trained(model)
    assert seen == [1, 1, 2]

    tokens, model = torch.randint(60, (4, 40)), three()
    model.layers[0].register_forward_hook(lambda module, given, y: y[:2])
    torch.testing.assert_close(model(tokens), three()(tokens)[:2], rtol=1e-4, atol=1e-5)

    def wrapped(change: Any) -> list[Tensor]:
        model, ran = three(), list[int]()
        change(model, ran)
        made = trained(model)
        assert ran
        return made

    def layer(model: Any, ran: list[int]) -> None:
        model.layers[1] = Wrapped(model.layers[1], ran)

    def mixer(model: Any, ran: list[int]) -> None:
        model.layers[1].mixer = Wrapped(model.layers[1].mixer, ran)

    def compiled(model: Any, ran: list[int]) -> None:
        model.layers[1].compile(backend=lambda graph, _: noted(ran, 1, graph.forward))

    for change in (layer, mixer, compiled):
        for a, b in zip(plain, wrapped(change), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for name in ("resid_pre", "resid_post"):
        model = three()
        setattr(model.layers[1], name, Half())
        assert not torch.equal(trained(model)[0], plain[0])
    for owner, name in ((type(three().layers[0]), "forward"), (Pre, "feed"), (Pre, "added")):
        with monkeypatch.context() as patch:
            own = getattr(owner, name)
            patch.setattr(owner, name, lambda *given, own=own, name=name: noted(seen, name, own(*given)))
            trained(three())
        assert seen[-1] == name


@serves
def test_frozen_layers_keep_nothing_and_gradients_have_none() -> None:
    """Layers below the first trained one have no part in the backward pass, and second derivatives are refused."""

    def kept(model: Any) -> int:
        """Number of storages that autograd keeps."""
        found: list[int] = []
        hook = partial(noted, found)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: hook(x.untyped_storage().data_ptr(), x), lambda x: x):
            trained(model)
        return len(set(found))

    model, whole = three(), kept(three())
    for one in (model.embedding, *model.layers[:2]):
        one.requires_grad_(False)
    assert kept(model) < whole / 2
    model.requires_grad_(True)
    block: Any = model.layers[0]
    x = drawn(2, 64, block.mixer.qkv.in_features).requires_grad_()
    y = block(x, Pass.of(x)).square().sum()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, [*block.parameters()], create_graph=True)


@serves
def test_layers_together_are_a_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights, a second pass through a graph, tensors that hooks move, and weights that change too early."""
    model: Any = gf.preset("llama@0.1m+vocab_size=60").build(seed=0)
    for frozen in (model.layers[0].ffn.up_proj.weight, model.layers[1].residual.mixer_norm.weight):
        frozen.requires_grad_(False)
    assert all(torch.equal(a, b) for a, b in zip(trained(model), apart(model, monkeypatch), strict=True))
    tokens = torch.randint(60, (4, 41))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    last = model.layers[0].mixer.output.weight
    first, second = (torch.autograd.grad(loss, last, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        moved = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(torch.autograd.grad(moved, last)[0], first)
    with torch.no_grad():
        last.add_(1)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, last)
