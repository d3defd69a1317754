"""Costs against what torch does: tensors that autograd saves, operations it dispatches, states it allocates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.core import base
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import NUMBERS, Cost, Shape
from glassformer.parts.ffn import GluConfig
from glassformer.parts.forward_pass import Memory, Pass
from glassformer.parts.kernel import KernelConfig
from glassformer.parts.mixer import CrossAttentionConfig
from glassformer.parts.norm import RMSNorm, RMSNormConfig

SMALL = "layers=2+d_model=64+vocab_size=61+context=512"
ROWS = {
    "gpt2": f"gpt2@1m+{SMALL}+heads=4+kernel=sdpa",
    "naive": f"llama@1m+{SMALL}+heads=4+gqa:2+kernel=naive",
    "banded": f"gpt2@1m+{SMALL}+heads=4+kernel=banded",
    "gqa": f"llama@1m+{SMALL}+heads=4+gqa:2+kernel=sdpa",
    "gqa-banded": f"llama@1m+{SMALL}+heads=4+gqa:2+kernel=banded",
    "gated": f"llama@1m+{SMALL}+heads=4+qknorm+mixer.gated=true+kernel=sdpa",
    "wide values": f"llama@1m+{SMALL}+heads=4+mixer.value_dim=24+kernel=sdpa",
    "gated naive": f"gpt2@1m+{SMALL}+heads=4+mixer.gated=true+kernel=naive",
    "qknorm": f"llama@1m+{SMALL}+heads=4+qknorm+kernel=sdpa",
    "alibi": f"gpt2@1m+{SMALL}+heads=4+alibi+kernel=sdpa",
    "window": f"llama@1m+{SMALL}+heads=4+window:32+kernel=banded",
    "softcap": f"llama@1m+{SMALL}+heads=4+softcap:5+kernel=banded",
    "gelu gate": f"llama@1m+{SMALL}+heads=4+ffn.activation=gelu+kernel=sdpa",
    "parallel": f"gpt2@1m+{SMALL}+heads=4+parallel+kernel=sdpa",
    "parallel2": f"gpt2@1m+{SMALL}+heads=4+parallel2+kernel=sdpa",
    "sandwich": f"gpt2@1m+{SMALL}+heads=4+sandwich+kernel=sdpa",
    "post": f"gpt2@1m+{SMALL}+heads=4+post+kernel=sdpa",
    "respost": f"llama@1m+{SMALL}+heads=4+respost+kernel=sdpa",
    "no norm before the mixer": f"llama@1m+{SMALL}+heads=4+residual.mixer_normed=false+kernel=sdpa",
    "dropout": f"llama@1m+{SMALL}+heads=4+residual.dropout=0.1+kernel=sdpa",
    "mamba": f"mamba@1m+{SMALL}",
    "linear attention": f"llama@1m+{SMALL}+heads=4+linear_attention",
    "linear attention without features": f"llama@1m+{SMALL}+heads=4+linear_attention+mixer.feature=identity",
    "no norms": f"gpt2@1m+{SMALL}+heads=4+nonorm",
    "performer": f"llama@1m+{SMALL}+heads=4+performer:24",
    "retention": f"llama@1m+{SMALL}+heads=4+retention",
    "lightning": f"llama@1m+{SMALL}+heads=4+lightning",
    "mamba norms": f"mamba@1m+{SMALL}+mixer.norm_eps=1e-3",
    "mamba2": f"llama@1m+{SMALL}+mamba2+mixer.head_dim=16",
    "mamba2 groups": f"llama@1m+{SMALL}+mamba2+mixer.head_dim=16+mixer.n_groups=4+mixer.d_state=8",
    "gated_deltanet": f"llama@1m+{SMALL}+gated_deltanet+mixer.n_heads=2+mixer.n_v_heads=4+mixer.v_head_dim=24",
    "beside": f"llama@1m+{SMALL}+heads=4+kernel=sdpa+beside:mamba2",
    "rglru": f"llama@1m+{SMALL}+rglru+mixer.n_heads=4",
    "lstm": f"llama@1m+{SMALL}+lstm",
    "lstm wide": f"gpt2@1m+{SMALL}+lstm+mixer.width=100+nobias",
    "gru": f"llama@1m+{SMALL}+gru+mixer.width=48",
    "gru without biases": f"gpt2@1m+{SMALL}+gru+nobias",
    "conv": f"llama@1m+{SMALL}+conv:3",
    "s4": f"llama@1m+{SMALL}+s4",
    "s4 real": f"llama@1m+{SMALL}+s4+mixer.real=true",
    "mla": f"llama@1m+{SMALL}+heads=4+mla:24+mixer.value_dim=24+kernel=banded",
    "mla of heads' width": f"llama@1m+{SMALL}+heads=4+mla:24+window:40+kernel=banded",
    "mla fused": f"llama@1m+{SMALL}+heads=4+mla:24+kernel=sdpa",
    "mla fused in a window": f"llama@1m+{SMALL}+heads=4+mla:24+window:40+kernel=sdpa",
    "mla of wide values": f"llama@1m+{SMALL}+heads=4+mla:24+mixer.value_dim=40+kernel=sdpa",
    "linformer": f"gpt2@1m+{SMALL}+heads=4+linformer:24",
    "linformer by head": f"gpt2@1m+{SMALL}+heads=4+linformer:24+mixer.share=each",
    "xl_memory": f"gpt2@1m+{SMALL}+heads=4+xl_memory:200+kernel=naive",
    "xl_memory in blocks": f"gpt2@1m+{SMALL}+heads=4+xl_memory:32+kernel=banded",
    "two-sided": f"gpt2@1m+{SMALL}+heads=4+bidirectional+kernel=banded",
    "two-sided linear attention without features": f"llama@1m+{SMALL}+heads=4+linear_attention+bidirectional"
    "+mixer.feature=identity",
    "two-sided linear attention": f"llama@1m+{SMALL}+heads=4+linear_attention+bidirectional",
    "two-sided performer": f"llama@1m+{SMALL}+heads=4+performer:24+bidirectional",
    "two-sided bigbird": f"gpt2@1m+{SMALL}+heads=4+bigbird:16:1+visibility.causal=false+kernel=banded",
    "global_attention": f"gpt2@1m+{SMALL}+heads=4+longformer:32:2+visibility.causal=false"
    "+mixer.kind=global_attention+kernel=banded",
    "no global tokens": f"gpt2@1m+{SMALL}+heads=4+longformer:32+visibility.globals=0+visibility.causal=false"
    "+mixer.kind=global_attention+kernel=banded",
    "mla of latent queries": f"llama@1m+{SMALL}+heads=4+mla:24+mixer.q_rank=20+mixer.value_dim=24+kernel=naive+bias",
    "clamped experts": f"llama@1m+{SMALL}+heads=4+moe:4:2+ffn.clamp=7+ffn.router_bias=true+ffn.n_shared=1"
    "+ffn.shared_gate=true+kernel=sdpa",
    "experts that choose": f"gpt2@1m+{SMALL}+heads=4+expert_choice:4:2+bidirectional+kernel=sdpa",
    "experts": f"llama@1m+{SMALL}+heads=4+moe:4:2+kernel=sdpa",
}
STATES = ("gqa", "window", "mamba", "mamba2 groups", "gated_deltanet", "s4", "rglru", "lstm", "gru", "conv")
EXACT = 2e-4
"""Relative difference that is allowed: vectors of one number per expert or per query are not counted."""
FILLED = 0.02
"""Relative tolerance in bf16 for experts, whose blocks are filled up by a number of rows that depends on the data."""
B, S = 2, 150


def run(config: ModelConfig, dtype: torch.dtype | None = None, batch: int = B, s: int = S) -> Tensor:
    """The first block's output for a random input, in training, under autocast to `dtype`."""
    torch.manual_seed(0)
    x = torch.randn(batch, s, config.d_model, requires_grad=True)
    with torch.autocast("cpu", dtype) if dtype else nullcontext():
        return config.build(seed=0).train().layers[0](x, Pass.of(x))


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves inside, by address, parameters and buffers apart."""
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            found[x.untyped_storage().data_ptr()] = x
        return x

    sizes: dict[int, int] = {}
    with saved_tensors_hooks(pack, lambda x: x):
        yield sizes
    sizes.update({at: x.untyped_storage().nbytes() for at, x in found.items()})


def block_cost(config: ModelConfig, products: torch.dtype | None = None) -> Cost:
    return config.costs(Shape.training(B, S, products=products))["layers.0"]


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ROWS)
def test_kept_bytes_of_a_block_equal_tensors_saved_by_autograd(name: str, products: torch.dtype | None):
    config = gf.preset(ROWS[name])
    model = config.build(seed=0).train()
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    torch.manual_seed(0)
    x = torch.randn(B, S, config.d_model, requires_grad=True)
    with saved() as sizes, torch.autocast("cpu", products) if products else nullcontext():
        y = model.layers[0](x, Pass.of(x))
    measured = sum(size for at, size in sizes.items() if at not in owned)
    assert y.requires_grad and measured
    tolerance = FILLED if "experts" in name and products else EXACT
    assert block_cost(config, products).activation_bytes("none") == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("change", ["", "+ffn.n_groups=2"])
def test_kept_bytes_of_experts_of_few_tokens(change: str):
    config = gf.preset(ROWS["experts"] + change)
    layer = config.build(seed=0).train().layers[0]
    owned = {tensor.untyped_storage().data_ptr() for tensor in layer.parameters()}
    x = torch.randn(2, 30, config.d_model, requires_grad=True)
    with saved() as sizes:
        layer(x, Pass.of(x))
    measured = sum(size for at, size in sizes.items() if at not in owned)
    assert config.costs(Shape.training(2, 30))["layers.0"].kept == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "gqa", "alibi", "mamba"])
def test_kept_bytes_of_a_model_equal_tensors_saved_for_its_loss(name: str, products: torch.dtype | None):
    """Tables and masks that layers share once, and of the head gradients in place of logits."""
    config = gf.preset(ROWS[name])
    model = config.build(seed=0).train()
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    tokens = torch.randint(61, (B, S + 1))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with saved() as sizes, torch.autocast("cpu", products) if products else nullcontext():
        model.loss(tokens, targets)
    measured = sum(size for at, size in sizes.items() if at not in owned)
    assert config.costs(Shape.training(B, S, products=products)).kept == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("kernel", ["sdpa", "naive", "banded"])
def test_kept_bytes_of_cross_attention_equal_tensors_saved_by_autograd(kernel: str):
    kinds = KernelConfig.choices()
    config = CrossAttentionConfig(n_heads=4, n_kv_heads=2, kernel=kinds[kernel]())
    ctx = BuildContext(d_model=64, vocab_size=61, context=512, n_layers=2)
    mixer = config.build(ctx).train()
    owned = {weight.untyped_storage().data_ptr() for weight in mixer.parameters()}
    x, memory = (torch.randn(B, S, 64, requires_grad=True) for _ in range(2))
    with saved() as sizes:
        mixer(x, Pass(0, S, memory=Memory(memory)))
    measured = sum(size for at, size in sizes.items() if at not in owned)
    assert config.costs(ctx, Shape.training(B, S)).kept == pytest.approx(measured, rel=EXACT)


@pytest.mark.parametrize("name", ["gqa", "gpt2", "qknorm"])
@pytest.mark.parametrize("change", ["mixer.projection=separate", "mixer.clip=2", "gain"])
def test_a_projection_is_kept_while_a_part_of_it_is_read(name: str, change: str):
    config = gf.preset(f"{ROWS[name]}+{change}")
    block = config.build(seed=0).train().layers[0]
    owned = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    x = torch.randn(B, S, config.d_model, requires_grad=True)
    with saved() as sizes:
        block(x, Pass.of(x))
    measured = sum(size for at, size in sizes.items() if at not in owned)
    assert block_cost(config).kept == pytest.approx(measured, rel=EXACT)


class Results(TorchDispatchMode):
    """Bytes that matrix products and the fused attention kernel return."""

    kept = ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.kept:
            outs = made if isinstance(made, (tuple, list)) else (made,)
            self.bytes += sum(out.nbytes for out in outs if isinstance(out, Tensor))
        return made


@pytest.mark.parametrize("name", ["gpt2", "gqa", "qknorm", "parallel", "post", "mamba"])
def test_a_selective_recomputation_keeps_results_of_products_and_the_input_of_the_block(name: str):
    config = gf.preset(ROWS[name])
    with Results() as results:
        run(config)
    cost, stream = block_cost(config), B * S * config.d_model * 4
    assert cost.activation_bytes("selective") == results.bytes + stream
    assert cost.activation_bytes("full") == stream == cost["resid_pre"].activation_bytes("full")


def test_an_unknown_policy_is_refused():
    with pytest.raises(RequestError) as refused:
        Cost().activation_bytes("some")
    assert (refused.value.field, refused.value.value) == ("recompute", "some")
    with pytest.raises(RequestError) as refused:
        Shape(s=3, t=2)
    assert (refused.value.field, refused.value.value) == ("s", 3)


@pytest.mark.parametrize("name", ["naive", "mamba"])
def test_a_training_step_takes_three_times_the_products_of_its_forward_pass(name: str):
    config = gf.preset(ROWS[name])
    with FlopCounterMode(display=False) as forward:
        y = run(config)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    counted = forward.get_total_flops() + backward.get_total_flops()
    assert block_cost(config).flops == counted


@pytest.mark.parametrize("s", [1, 5, 12])
def test_flops_of_a_continued_prefill_equal_torchs_count(s: int):
    config = gf.preset(ROWS["naive"])
    model, tokens = config.build(seed=0).eval(), torch.randint(0, 61, (3, 12))
    state = model.init_state(3, 12)
    with torch.no_grad():
        if s < 12:
            model(tokens[:, : 12 - s], state=state)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, 12 - s :], state=state)
    assert config.costs(Shape(3, s, 12, "prefill")).flops == counter.get_total_flops()


def test_flops_count_only_keys_visible_to_the_last_queries():
    """Against a count, pair by pair."""
    config = gf.preset(ROWS["window"])
    for s, t in ((1, 100), (7, 40), (40, 40), (90, 100)):
        every, seen = (config.costs(Shape(1, s, t, "prefill", every_key=whole)).flops for whole in (True, False))
        pairs = sum(min(q + 1, 32) for q in range(t - s, t))
        assert every - seen == pytest.approx(2 * 4 * 64 * (s * t - pairs))  # 2 layers, 4 n h a pair


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_state_bytes_of_several_sequences(name: str, dtype: torch.dtype):
    config = gf.preset(ROWS[name])
    cost = config.costs(Shape(3, 1, 100, "decode", torch.float32, state_dtype=dtype))
    assert cost.state_bytes == config.build(seed=None).init_state(3, 100, dtype).nbytes
    assert config.costs(Shape(3, 100, 100, "train")).state_bytes == 0
    assert cost.kept == cost.kept_selective == cost.kept_full == 0


def test_bytes_moved_are_those_of_weights_and_states_at_least():
    config = gf.preset("llama-7b")
    cost = config.costs(Shape(1, 1, 4096, "decode", torch.bfloat16))
    weights = 2 * (config.num_params() - config.vocab_size * config.d_model)  # of one table a row is read
    least = weights + cost.state_bytes
    assert least <= cost.moved_bytes < 1.01 * least
    many = config.costs(Shape(16, 1, 4096, "decode", torch.bfloat16))
    assert many.moved_bytes < 16 * cost.moved_bytes and many.flops == 16 * cost.flops


class Operands(TorchFunctionMode):
    """Adds up the bytes of what matrix products and fused attention read and write, but for weights."""

    total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (F.linear, F.scaled_dot_product_attention):
            read = args[:1] if func is F.linear else args[:3]
            self.total += sum(x.nbytes for x in (*read, made))
        return made


@pytest.mark.parametrize("heads", ["mha", "gqa:2", "mqa"])
def test_bytes_moved_in_training_are_three_times_those_of_the_operators(heads: str):
    """KV heads count as KV heads, however many queries share them."""
    config = gf.preset(f"{ROWS['gqa']}+{heads}")
    with Operands() as counted:
        run(config)
    weights = sum(weight.nbytes for weight in config.build(seed=None).layers[0].parameters())
    assert block_cost(config).moved_bytes == 3 * (counted.total + weights)


def leaves(cost: Cost) -> Iterator[Cost]:
    """The parts of a tree that have none themselves."""
    for child in cost.children.values():
        yield from leaves(child)
    if not cost.children:
        yield cost


@pytest.mark.parametrize("name", ["gqa", "parallel", "experts", "mamba", "alibi"])
def test_the_tree_adds_up(name: str):
    config = gf.preset(ROWS[name])
    cost = config.costs(Shape.training(B, S))
    assert set(cost.children) == {"embedding", "layers", "final_norm", "head"}
    for number in ("parameters", "active_parameters", "flops", "state_bytes", "kept_selective", "kept_full"):
        assert sum(getattr(leaf, number) for leaf in leaves(cost)) == getattr(cost, number)
    layer = cost["layers.1"]
    assert layer is cost["layers.0"] and layer["mixer"] is cost["layers.1.mixer"]
    model = config.build(seed=None)
    assert layer["mixer"].parameters == sum(p.numel() for p in model.layers[1].mixer.parameters())
    shared = sum(one.kept for one in layer.shared.values())
    assert cost["layers"].kept == 2 * layer.kept - shared
    with pytest.raises(KeyError):
        cost["layers.2"]


def test_equal_layers_are_counted_once_and_written_once(monkeypatch: pytest.MonkeyPatch):
    config, asked, costs = gf.preset("llama-2-70b"), [], GluConfig.costs
    monkeypatch.setattr(GluConfig, "costs", lambda *args: asked.append(1) or costs(*args))
    cost = config.costs(Shape.training(1, 4096, torch.bfloat16))
    assert asked == [1]
    assert len(cost["layers"].children) == 80 and len(set(map(id, cost["layers"].children.values()))) == 1
    tree = json.loads(json.dumps(cost.to_dict()))
    assert list(tree["children"]["layers"]["children"]) == ["0-79"]
    assert tree["children"]["layers"]["children"]["0-79"]["times"] == 80
    assert tree["activation_bytes"]["full"] == cost.kept_full
    assert "0-79, each" in str(cost) and f"{cost.parameters:,}" in str(cost)


def test_a_part_that_asks_for_its_layer_is_counted_for_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_CLASSES", list(base._CLASSES))

    class ByLayerConfig(RMSNormConfig, kind="by_layer"):
        def build(self, ctx: BuildContext) -> RMSNorm:
            norm = super().build(ctx)
            norm.more = torch.nn.Linear(10**ctx.layer, 1, bias=False)
            return norm

        def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
            return super().costs(ctx, shape) + Cost.weights(10**ctx.layer)

    config = gf.preset(f"gpt2@1m+{SMALL}+heads=4")
    block = config.stack[0].blocks[0].replace(norm=ByLayerConfig())
    layers = config.replace(stack=(config.stack[0].replace(blocks=(block,)),)).costs(Shape())["layers"]
    assert [layers[f"{i}.ffn_norm"].parameters for i in range(2)] == [64 + 1, 64 + 10]


def test_cost_of_a_shared_table_is_added_once():
    own, table = Cost.weights(3, kept=5), Cost.once("table", Cost.weights(100, kept=7))
    both = own + table
    assert (both.parameters, both.kept) == (103, 12)
    assert (both + both).parameters == 106 and (4 * both).parameters == 112 and (both * 4).kept == 27
    tree = Cost.of({"a": both, "b": both, "c": own + Cost.once("table", Cost.weights(100, kept=7))})
    assert (tree.parameters, tree.kept) == (109, 22)
    assert (tree + Cost.once("other", Cost.weights(1))).parameters == 110
    assert (2 * tree).parameters == 118 and (2 * tree)["a"].parameters == 106
    assert all(getattr(Cost() + own, number) == getattr(own, number) for number in NUMBERS)
