"""Matrices of 8 and 4 bits: the rounding is what the grid allows, the products are those of the unpacked values."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import glassformer as gf
from glassformer.conversion.weights import fold
from glassformer.generation.prompt_cache import fingerprint
from glassformer.model import Model
from glassformer.names.known import FAMILIES
from glassformer.parts import few_rows, quantized
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear
from glassformer.parts.precision import onednn_in_bf16
from glassformer.parts.quantized import (
    BLOCK,
    GROUP,
    PIECE,
    Bf16Linear,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    layout,
    quantize,
)
from tests.refused import refused

torch.set_num_threads(1)

U = 2.0**-8
"""Largest relative change by rounding to bf16."""
BOTH = pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
OURS = pytest.mark.parametrize("own", [pytest.param(True, id="our product"), pytest.param(False, id="torch's")])
SHAPES = [(64, 32), (17, 96), (70, 50), (200, 64), (960, 576), (PIECE // 1024 + 70, 1024), (4 * PIECE // 64 + 100, 64)]
"""One block, rows that fill none, several pieces while packing, and while unpacking."""


def multiplied_by(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has matrices packed for our own product, or for torch's."""
    if not own:
        monkeypatch.setattr(quantized, "own_product", lambda device: False)
    elif not few_rows.kernel():
        pytest.skip("our own product needs another processor, or a compiler")


def matrix(o: int, i: int, seed: int = 0, spread: float = 0.05, offset: float = 0.0) -> Tensor:
    return torch.randn(o, i, generator=torch.Generator().manual_seed(seed)) * spread + offset


def grid(packed: Int4Linear) -> tuple[Tensor, Tensor]:
    """s and z of each group, (o, i / 32, 1)."""
    s, z = packed.grid(slice(0, packed.rows))
    return s.float()[..., None], z.float()[..., None]


# Rounding


@given(
    st.integers(1, 130), st.integers(1, 5), st.integers(0, 99),
    st.sampled_from([1e-6, 0.05, 300.0]), st.sampled_from([0.0, 0.5, -20.0]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_int8_is_off_by_half_a_step(o: int, groups: int, seed: int, spread: float, offset: float) -> None:
    w = matrix(o, GROUP * groups, seed, spread, offset)
    packed = Int8Linear(w, None, (o,))
    step = packed.scales[:o].float()[:, None]
    assert torch.all((step - w.abs().amax(1, keepdim=True) / 127).abs() <= 1.01 * U * step)
    assert torch.all((packed.weight - w).abs() <= 0.5001 * step)


@given(
    st.integers(1, 130), st.integers(1, 5), st.integers(0, 99),
    st.sampled_from([1e-6, 0.05, 300.0]), st.sampled_from([0.0, 0.5, -20.0]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_int4_is_off_by_half_a_step(o: int, groups: int, seed: int, spread: float, offset: float) -> None:
    """Half a step, or, at a group's ends, what bf16 cannot say of its middle and of 8 steps."""
    w = matrix(o, GROUP * groups, seed, spread, offset)
    packed = Int4Linear(w, None, (o,))
    (s, z), by_group = grid(packed), w.unflatten(1, (-1, GROUP))
    span = by_group.amax(-1, keepdim=True) - by_group.amin(-1, keepdim=True)
    assert torch.all((s - span / 15).abs() <= 1.01 * U * s)
    ends = 1.01 * U * (z.abs() + 8 * s)
    error = (packed.weight - w).abs().unflatten(1, (-1, GROUP))
    assert torch.all(error <= torch.maximum(0.5001 * s, ends))


def test_values_on_the_grid_are_kept_exactly() -> None:
    """Steps and middles that bf16 holds, every group with its ends: nothing is rounded, whatever the layout."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(16, (200, 6, GROUP), generator=draw)
    q[..., 3], q[..., 17] = 0, 15
    s, z = 2.0 ** torch.randint(-9, 2, (200, 6, 1), generator=draw), torch.randint(-20, 20, (200, 6, 1), generator=draw)
    w = ((q - 8) * s + z * s).flatten(1)
    assert torch.equal(Int4Linear(w, None, (200,)).weight, w)
    q8 = torch.randint(-127, 128, (200, 50), generator=draw).float()
    q8[:, 7] = -127
    assert torch.equal(Int8Linear(q8 * s[:, 0], None, (200,)).weight, q8 * s[:, 0])


@BOTH
def test_rows_of_one_value(kind: type[QuantizedLinear]) -> None:
    w = torch.tensor([0.0, 1e-38, 0.3, -7.0])[:, None].expand(4, 64)
    assert torch.all((kind(w, None, (4,)).weight - w).abs() <= U * w.abs() + 1e-37)


@BOTH
def test_quantizing_does_not_change_the_given_matrix(kind: type[QuantizedLinear]) -> None:
    w = matrix(70, 64)
    before = w.clone()
    kind(w, None, (70,))
    assert torch.equal(w, before)
    half = kind(w.bfloat16(), None, (70,))
    assert torch.equal(half.weight, kind(w.bfloat16().float(), None, (70,)).weight)


# Products


def few(packed: QuantizedLinear) -> int:
    """Largest number of rows of a product with the packed matrix; some number if that is any."""
    return min(packed.few, 64)


def check_products(packed: QuantizedLinear, dtype: torch.dtype = torch.bfloat16) -> None:
    """Against float64. Sums run in fp32; x and the result are rounded to bf16, and the values where many are read.

    Our own product rounds x to 16 bits of the largest of 32 values."""
    w, i = packed.weight.double(), packed.in_features
    for n in (1, 5, few(packed), few(packed) + 1):
        x = torch.randn(n, i, generator=torch.Generator().manual_seed(n)).to(dtype)
        y, expected, size = packed(x), x.double() @ w.T, x.double().abs() @ w.abs().T
        assert y.shape == expected.shape and y.dtype == dtype
        rounded = (n > packed.few) + (dtype != torch.bfloat16)
        bound = 1.02 * U * expected.abs() + (1.02 * U * rounded + i * 2.0**-23) * size
        if n <= packed.few and getattr(packed, "own", False):
            groups = F.pad(x.double(), (0, -i % GROUP)).view(n, -1, GROUP)
            lost = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)[:, :i] / few_rows.MOST / 2
            bound += lost @ w.abs().T
        assert torch.all((y.double() - expected).abs() <= bound), n


@BOTH
@OURS
@pytest.mark.parametrize(("o", "i"), SHAPES)
def test_products_are_those_of_the_unpacked_values(
    kind: type[QuantizedLinear], own: bool, o: int, i: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied_by(own, monkeypatch)
    packed = kind(matrix(o, i), None, (o,))
    assert packed.weight.shape == (o, i)
    check_products(packed)


@BOTH
@OURS
def test_unpacked_weights_equal_packed_product_with_identity(
    kind: type[QuantizedLinear], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I W^T is W itself, in bf16: every value, so that no two can have changed places."""
    multiplied_by(own, monkeypatch)
    packed = kind(matrix(200, 96), None, (200,))
    shown = packed.product(torch.eye(96, dtype=torch.bfloat16)).T
    assert torch.equal(packed.weight.bfloat16(), shown)
    for rows in (slice(0, 200), slice(64, 200), slice(128, 192)):
        assert torch.equal(packed.unpacked(torch.bfloat16, rows), shown[rows])


LAYOUT = """
import torch
from glassformer.parts.quantized import Int4Linear, layout
torch.set_num_threads(1)
packed = Int4Linear(torch.randn(200, 96), None, (200,))
shown = packed.product(torch.eye(96, dtype=torch.bfloat16)).T
print(torch.backends.cpu.get_cpu_capability(), layout("cpu"), torch.equal(packed.weight.bfloat16(), shown))
"""


@pytest.mark.parametrize(("capability", "layout"), [("avx2", "AVX2 (32, True)"), ("default", "DEFAULT (32, False)")])
def test_layout_follows_cpu_capability(capability: str, layout: str) -> None:
    """This processor lays numbers out as a lesser one if torch is set to that one's instructions."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "GLASSFORMER_CPU": "none"}
    done = subprocess.run([sys.executable, "-c", LAYOUT], capture_output=True, text=True, env=environment, timeout=120)
    if capability.upper() not in done.stdout:
        pytest.skip(f"this processor cannot be {capability}: {done.stdout}{done.stderr[-200:]}")
    assert done.stdout.strip() == f"{layout} True"


def test_alayout_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unknown layout is read only by torch's product, for any number of tokens."""
    multiplied_by(False, monkeypatch)
    known = Int4Linear(matrix(100, 64), None, (100,))
    monkeypatch.setattr("glassformer.parts.quantized.layout", lambda device: None)
    packed = Int4Linear(matrix(100, 64), None, (100,))
    assert torch.equal(packed.weight, known.weight.bfloat16().float())
    x = torch.randn(few(known) + 1, 64).bfloat16()
    assert torch.equal(packed(x), packed.product(x))


def test_thislayout_is_known() -> None:
    assert layout("cpu") is not None


@BOTH
@pytest.mark.parametrize("more", [0, 1])
def test_rows_do_not_meet(kind: type[QuantizedLinear], more: int) -> None:
    packed = kind(matrix(100, 64), torch.randn(100), (60, 40))
    n = few(packed) + more
    x = torch.randn(n, 64)
    other = x.clone()
    other[1:] = torch.randn(n - 1, 64) * 100
    other[2] = float("nan")
    y = packed(other)
    assert torch.equal(packed(x)[0], y[0]) and y[2].isnan().all() and not y[3:].isnan().any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_linear_has_shapes_and_dtypes_of_linear(kind: type[QuantizedLinear], dtype: torch.dtype) -> None:
    plain = Linear(64, (40, 30, 30), bias=True)
    nn.init.normal_(plain.bias)
    packed = kind(plain.weight, plain.bias, plain.outs).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(packed.weight)
    for shape in ((64,), (3, 64), (2, 3, 64), (2, 100, 64), (0, 64)):
        x = torch.randn(shape).to(dtype)
        y, expected = packed(x), plain(x.float()).detach()
        assert y.dtype == dtype and y.shape == expected.shape
        torch.testing.assert_close(y.float(), expected, rtol=3 * U, atol=0.03)
    assert [part.shape[-1] for part in packed.split(y)] == [40, 30, 30]
    assert f"bits={packed.bits}" in repr(packed)


@BOTH
def test_scales_keep_their_dtype(kind: type[QuantizedLinear]) -> None:
    """fp16 has no place for scales of 1e-8, and the product wants bf16."""
    packed = kind(matrix(64, 64, spread=1e-6), torch.zeros(64), (64,))
    w = packed.weight
    for change in (lambda m: m.half(), lambda m: m.float(), lambda m: m.double(), copy.deepcopy):
        changed = change(packed)
        assert changed.scales.dtype is torch.bfloat16 and torch.equal(changed.weight, w)
    assert packed.bias is not None and packed.bias.dtype is torch.float64


@BOTH
def test_it_stays_on_its_device(kind: type[QuantizedLinear]) -> None:
    with refused(code="conflict", field="device") as error:
        kind(matrix(64, 64), None, (64,)).to("meta")
    assert error.value.value == "meta"


def test_bytes() -> None:
    """8 bits and a scale of 2 bytes for each row; 4 bits and two scales for each group of 32: 5 bits in all."""
    assert Int8Linear(matrix(128, 96), None, (128,)).nbytes == 128 * 96 + 2 * 128
    assert Int4Linear(matrix(128, 96), None, (128,)).nbytes == 128 * 96 * 5 // 8
    assert Int4Linear(matrix(65, 96), None, (65,)).nbytes == 2 * BLOCK * 96 * 5 // 8


@BOTH
@pytest.mark.parametrize("i", [1, 8, 31, 33, 40, 100])
def test_rows_of_partial_groups_are_quantized(kind: type[QuantizedLinear], i: int) -> None:
    """Torch's products read past the end of such rows; what fills them up changes nothing, not even a last group of
    numbers far from zero."""
    w = matrix(21, i, offset=10.0)
    packed = kind(w, None, (21,))
    assert packed.weight.shape == (21, i)
    assert (packed.weight - w).abs().max() <= (0.05 if kind is Int8Linear else 0.06)
    check_products(packed, torch.float32)


# Whole models


def loud(config: gf.ModelConfig) -> Model:
    """Random weights in every parameter, biases too, so that each is heard."""
    model, draw = config.build(seed=0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn(weight.shape, generator=draw)
    return model.eval()


def unpacked(model: Model, like: Model) -> Model:
    """Returns `like` with the values that the packed model represents."""
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, QuantizedLinear) and path != "head.packed":
                like.get_submodule(path).weight.copy_(module.weight)
    like.head.weight = nn.Parameter(model.head.packed.weight)  # type: ignore[union-attr]
    return like


def check_model(model: Model, kind: str, head: str) -> None:
    vocab, like = model.embedding.weight.shape[0], copy.deepcopy(model)
    left = {name for name, _ in model.named_parameters()}
    quantize(model, kind, head)
    assert not [name for name, module in model.named_modules() if type(module) is Linear]
    gone = left - {name for name, _ in model.named_parameters()}
    assert gone >= {f"{name}.weight" for name, module in like.named_modules() if isinstance(module, Linear)}
    own = ("conv1d.weight", "A_log", "position.table.weight")  # no matrices that multiply x
    rest = {name: weight for name, weight in model.named_parameters() if not name.endswith(own)}
    tables = ("embedding.", "encoder.embedding.")
    assert all(weight.dim() == 1 for name, weight in rest.items() if not name.startswith(tables))
    for length in (3, 60):
        tokens = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(length))
        more = {} if model.encoder is None else {"source": tokens.flip(1)}
        logits, expected = model(tokens, **more), unpacked(model, like)(tokens, **more).detach()
        assert (logits - expected).abs().max() <= 0.04 * expected.abs().max()
        targets = tokens.roll(-1)
        losses = model.loss(tokens, targets, reduction="none", **more)
        torch.testing.assert_close(
            losses.flatten(), nn.functional.cross_entropy(logits[0], targets[0], reduction="none")
        )
        torch.testing.assert_close(model.loss(tokens, targets, **more), losses.mean())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, kind: str) -> None:
    depth = "" if family == "modernbert" else "+layers=2"  # its layers are of two kinds
    check_model(loud(gf.preset(f"{family}@1m{depth}+vocab_size=100")), kind, kind)


@pytest.mark.parametrize("change", [
    "untied", "tied", "untied+head.bias=true", "tied+head.bias=true+head.softcap=3", "untied+head.softcap=3",
    "tied+head.scale=0.25", "parallel", "mqa", "vocab_size=101", "d_model=144+ffn.hidden=80",
])  # fmt: skip
def test_every_head(change: str) -> None:
    for kind, head in (("int8", "int8"), ("int4", "int8"), ("int4", "int4")):
        check_model(loud(gf.preset(f"llama@1m+layers=1+vocab_size=100+{change}")), kind, head)


def test_a_bias_forgotten_is_seen() -> None:
    """The bound above is narrow enough to tell."""
    model = loud(gf.preset("gpt2@1m+layers=2+vocab_size=100"))
    like = copy.deepcopy(model)
    quantize(model, "int4")
    model.layers[1].mixer.output.bias = None
    tokens = torch.arange(20)[None]
    logits, expected = model(tokens), unpacked(model, like)(tokens).detach()
    assert (logits - expected).abs().max() > 0.04 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pass_without_gradients_unpacks_no_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(self: QuantizedLinear, dtype: torch.dtype, rows: slice) -> Tensor:
        raise AssertionError("unpacked")

    model = quantize(gf.preset(f"{family}@1m+layers=1+vocab_size=100").build(seed=0), "int4")
    for kind in (Int8Linear, Int4Linear):
        monkeypatch.setattr(kind, "unpacked", unpacked)
    with torch.no_grad():
        assert model(torch.arange(9)[None]).isfinite().all()


def test_a_tied_embedding_stays() -> None:
    model = loud(gf.preset("gpt2@1m+vocab_size=100"))
    before = model.embedding.weight.clone()
    quantize(model, "int4")
    assert model.head.packed is not None and isinstance(model.head, Head)
    assert torch.equal(model.embedding.weight, before)


def test_nothing_trains_it() -> None:
    model = quantize(gf.preset("llama@1m+layers=1+vocab_size=64").build(), "int8")
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert not model(torch.zeros(1, 3, dtype=torch.long)).requires_grad
    with refused(code="unsupported", field="quantize"):
        model.train()
    model.embedding.weight.requires_grad_(True)  # type: ignore[union-attr, operator]
    with refused(code="unsupported", field="quantize"):
        model(torch.zeros(1, 3, dtype=torch.long))
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))


def test_wrong_requests() -> None:
    model = gf.preset("llama@1m+layers=1+vocab_size=64").build()
    for field, *arguments in (("quantize", "int3"), ("head", "int8", "fp8")):
        with refused(code="unknown", field=field):
            quantize(model, *arguments)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    quantize(model, "int8")
    with refused(code="conflict", field="quantize"):
        quantize(model, "int4")


# bf16, laid out


@pytest.fixture
def bf16() -> None:
    if not onednn_in_bf16():
        pytest.skip("this processor has no products in bf16")


@pytest.mark.parametrize(("o", "i"), [*SHAPES[:5], (1, 1), (5, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_alayout_changes_no_number(o: int, i: int, bias: bool, bf16: None) -> None:
    weight, shift = matrix(o, i).bfloat16(), matrix(1, o)[0].bfloat16() if bias else None
    linear = Bf16Linear(weight, shift, (o,))
    assert torch.equal(linear.weight, weight.float()) and linear.nbytes == weight.nbytes and linear.outs == (o,)
    for rows in (1, 3, 40):
        x = torch.randn(2, rows, i)
        exact = F.linear(x.bfloat16().double(), weight.double())
        sizes = F.linear(x.abs().double(), weight.abs().double())  # what rounding a sum is relative to
        for rows_of in (x, x.bfloat16()):
            made = linear(rows_of)
            assert made.dtype == rows_of.dtype
            shifted = exact if shift is None else exact + shift.double()
            assert ((made.double() - shifted).abs() <= 2 * U * shifted.abs() + 2 * U * exact.abs() + 1e-6 * sizes).all()


def test_alayout_is_copied_kept_and_stays(bf16: None) -> None:
    linear = Bf16Linear(matrix(17, 96), None, (17,))
    x = torch.randn(3, 96)
    for other in (copy.deepcopy(linear), copy.copy(linear), linear.to(torch.float32).double(), linear.cpu()):
        assert torch.equal(other(x), linear(x))
    assert torch.equal(linear.state_dict()["weight"], matrix(17, 96).bfloat16())
    with refused(code="conflict", field="device"):
        linear.to("meta")


def test_bf16_is_refused_on_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "onednn_in_bf16", lambda device="cpu": False)
    with refused(code="unsupported", field="quantize"):
        quantize(gf.preset("llama@1m+layers=1+vocab_size=64").build(), "bf16")


CHANGES = ["", "+tied", "+head.bias=true+head.softcap=3", "+moe:4:2", "+mamba", "+sigmareparam"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_prepacked_model_has_equal_logits(family: str, change: str, bf16: None) -> None:
    model = loud(gf.preset(f"{family}@1m+layers=2+vocab_size=100+context=64{change}")).bfloat16().eval()
    like, tokens = fold(model).eval(), torch.arange(40)[None]
    model = quantize(copy.deepcopy(like), "bf16")
    assert isinstance(model.head.packed, Bf16Linear) and not any(one.requires_grad for one in model.parameters())
    with torch.no_grad():
        for text in (tokens, tokens[:, :3]):
            expected, made = like(text).float(), model(text).float()
            assert (made - expected).norm() <= 4 * U * expected.norm()
    assert fingerprint(model) == fingerprint(like)


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("kind", [Bf16Linear, Int8Linear, Int4Linear])
def test_many_rows_use_fp32_if_bf16_is_slow(kind: type[QuantizedLinear], slow: bool, monkeypatch: pytest.MonkeyPatch):
    """In fp32 where bf16 is slow: rounded once, at the end."""
    if kind is Bf16Linear and not onednn_in_bf16():
        pytest.skip("this processor has no products in bf16")
    monkeypatch.setattr("glassformer.parts.quantized.slow_in_bf16", lambda device: slow)
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 64, generator=draw), torch.randn(200, 64, generator=draw).bfloat16()
    linear = kind(weight, None, (96,))
    exact = x.double() @ linear.weight.double().T
    error = float((linear(x).double() - exact).norm() / exact.norm())
    assert linear(x).dtype == torch.bfloat16 and error < (0.002 if slow else 0.005)
    assert torch.allclose(linear(x[:3]).double(), exact[:3], rtol=0.05, atol=0.05)


@BOTH
def test_matrices_of_a_model_share_memory(kind: type[QuantizedLinear], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the modules, each aligned; a copy of the model has separate memory, with equal results."""
    name = f"int{kind.bits}"
    apart = quantize(loud(gf.preset("llama@1m+layers=2+vocab_size=100+context=64")), name)
    monkeypatch.setattr(quantized, "LARGE", 1)
    together = quantize(loud(gf.preset("llama@1m+layers=2+vocab_size=100+context=64")), name)
    parts = [one for one in together.modules() if isinstance(one, kind)]
    starts = [tensor.data_ptr() for one in parts for tensor in (one.packed, one.scales)]
    assert starts == sorted(starts) and not any(start % quantized.ALIGNED for start in starts)
    assert starts[-1] - starts[0] < sum(one.nbytes for one in parts) + 2 * quantized.ALIGNED * len(parts)
    again, tokens = copy.deepcopy(together), torch.arange(20)[None]
    with torch.no_grad():
        found = [model(tokens) for model in (apart, together, again)]
        first: Any = parts[0]
        first.packed.zero_()
        assert all(torch.equal(one, found[0]) for one in (*found, again(tokens)))
        assert not torch.equal(together(tokens), found[0])
