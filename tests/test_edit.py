"""Edits, and options of capture: layers, heads, positions, reductions, pooled maps, compiled models."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.introspection import looking, sites
from glassformer.model import Model
from glassformer.parts.kernel import naive
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]
KERNELS = ["auto", "naive", "sdpa", "banded", "direct"]
TOKENS = torch.arange(24).view(2, 12)
ALL_PATTERNS = "layers.*.mixer.pattern"


def tiny(expression: str, seed: int = 0) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=seed).eval()


def untouched(model: Model) -> bool:
    return not any(site.watched for site in sites(model).values())


@torch.no_grad()
def logits_of(model: Model, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps arrive three queries at a time: 2 rows, 4 heads, 12 keys."""
    monkeypatch.setattr(naive, "VALUES_PER_BLOCK", 3 * 2 * 4 * 12)


# gf.edit


@pytest.mark.parametrize("expression", FAMILIES)
def test_an_edit_holds_inside_and_nothing_is_left_of_it(expression: str):
    """Against a hook of PyTorch on the layer itself."""
    model = tiny(expression)
    plain = logits_of(model)
    with gf.edit(model, {"layers.1.resid_post": lambda x: x * 2 + 1}):
        edited = logits_of(model)
    hook = model.layers[1].register_forward_hook(lambda module, args, x: x * 2 + 1)
    assert torch.equal(edited, logits_of(model)) and not torch.equal(edited, plain)
    hook.remove()
    assert torch.equal(logits_of(model), plain) and untouched(model)


def test_edits_of_one_site_are_applied_in_order():
    model, name = tiny("llama@1m"), "layers.0.ffn.out"
    twice, more = {name: lambda x: x * 2}, {name: lambda x: x + 1}
    plain = gf.capture(model, TOKENS, name)[name]
    with gf.edit(model, twice, more):
        assert torch.equal(gf.capture(model, TOKENS, name)[name], plain * 2 + 1)
    with gf.edit(model, twice), gf.edit(model, more):
        assert torch.equal(gf.capture(model, TOKENS, name)[name], plain * 2 + 1)
    with gf.edit(model, more), gf.edit(model, twice):
        assert torch.equal(gf.capture(model, TOKENS, name)[name], (plain + 1) * 2)
    assert torch.equal(gf.capture(model, TOKENS, name)[name], plain)


def test_a_pattern_edits_all_that_it_names():
    model, seen = tiny("gpt2@1m"), []
    with gf.edit(model, {"layers.*.ffn.out": lambda x: seen.append(x) or x}):
        logits_of(model)
    assert len(seen) == 3


def test_leaving_undoes_in_any_order_and_after_an_error():
    model, name = tiny("llama@1m"), "layers.0.mixer.z"
    plain = logits_of(model)
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(gf.edit(model, {name: lambda z: z * 3}))
    inner.enter_context(gf.edit(model, {name: lambda z: z + 1}))
    outer.close()
    with gf.edit(model, {name: lambda z: z + 1}):
        added = gf.capture(model, TOKENS, name)[name]
    inner.close()
    assert torch.equal(added, gf.capture(model, TOKENS, name)[name] + 1 + 1)
    with pytest.raises(ZeroDivisionError), gf.edit(model, {name: lambda z: z / (1 // 0)}):
        logits_of(model)
    with pytest.raises(RequestError), gf.edit(model, {name: lambda z: z, "layers.7.mixer.z": lambda z: z}):
        pass
    assert torch.equal(logits_of(model), plain) and untouched(model)


def test_edit_may_write_into_its_argument():
    """`embed` and the first `resid_pre` hold one tensor: what was seen there before must stay."""
    model = tiny("llama@1m")

    def silence(x: Tensor) -> Tensor:
        x[:, 0] = 0
        return x

    plain = gf.capture(model, TOKENS, "embed")["embed"]
    with gf.edit(model, {"layers.0.resid_pre": silence}):
        seen = gf.capture(model, TOKENS, ["embed", "layers.0.resid_pre"])
    assert torch.equal(seen["embed"], plain) and not seen["layers.0.resid_pre"][:, 0].any()
    assert seen["layers.0.resid_pre"][:, 1:].equal(plain[:, 1:])


def test_gradients_pass_through_an_edit():
    model = tiny("llama@1m")
    with gf.edit(model, {"layers.2.resid_post": lambda x: x * 0}):
        model.loss(TOKENS, TOKENS).backward()
    assert not model.layers[0].mixer.qkv.weight.grad.any()
    model.loss(TOKENS, TOKENS).backward()
    assert model.layers[0].mixer.qkv.weight.grad.any()


def test_an_edit_of_the_logits_reaches_the_loss():
    model = tiny("llama@1m")
    with torch.no_grad(), gf.edit(model, {"logits": torch.zeros_like}):
        torch.testing.assert_close(model.loss(TOKENS, TOKENS), torch.tensor(31.0).log())


@pytest.mark.parametrize("expression", FAMILIES)
def test_the_pattern_itself_can_be_edited(expression: str):
    """If every query attends only to its own position, z is the value there."""
    model = tiny(expression)
    with gf.edit(model, {"layers.1.mixer.pattern": lambda a: torch.eye(a.shape[-1]).expand_as(a)}):
        seen = gf.capture(model, TOKENS, "layers.1.mixer.*")
    v = seen["layers.1.mixer.v"]
    v = v.repeat_interleave(4 // v.shape[2], dim=2)
    torch.testing.assert_close(seen["layers.1.mixer.z"], v)
    assert seen["layers.1.mixer.pattern"].equal(torch.eye(12).expand(2, 4, 12, 12))


@pytest.mark.parametrize(
    ("function", "code", "field"),
    [
        (lambda z: z[:, :1], "conflict", "layers.0.mixer.z"),
        (lambda z: None, "type", "layers.0.mixer.z"),
    ],
)
def test_an_edit_that_returns_something_else_is_refused(function: Callable[[Tensor], Tensor], code: str, field: str):
    model = tiny("llama@1m")
    with refused(code=code, field=field), gf.edit(model, {"layers.0.mixer.z": function}):
        logits_of(model)
    with refused(code="type", field="layers.0.mixer.z"):
        gf.edit(model, {"layers.0.mixer.z": torch.zeros(3)}).__enter__()  # type: ignore[dict-item]
    with refused(code="unknown", field="sites"):
        gf.edit(model, {"layers.0.mixer.zz": function}).__enter__()
    assert untouched(model)


def test_other_dtypes_are_brought_back():
    model = tiny("llama@1m").bfloat16()
    with gf.edit(model, {"layers.0.mixer.z": lambda z: z.double()}):
        assert torch.equal(logits_of(model), logits_of(model)) and logits_of(model).dtype == torch.bfloat16


# Compiled models: in a separate process, because the checks of shapes that tests switch on cannot be compiled

COMPILED = """
import warnings
import torch
import glassformer as gf

torch.set_num_threads(1)
tokens, double = torch.arange(24).view(2, 12), {"layers.0.mixer.z": lambda z: z * 2}


def build():
    return gf.preset("llama@1m+layers=1+d_model=16+heads=2+vocab_size=31").build(seed=0).eval()


def times(run):
    "How often it was said, and what came of it."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = run()
    return len([one for one in said if "this model is compiled" in str(one.message)]), made


def edited(run):
    with gf.edit(run, double):
        gf.capture(run, tokens, "logits")  # inside an edit it need not be said again
        return run(tokens)


with torch.no_grad():
    model = build()
    plain, seen, doubled = model(tokens), gf.capture(model, tokens, "*"), edited(model)
    assert not torch.equal(plain, doubled)
    in_place = build()
    in_place.compile(backend="eager")
    for run in (torch.compile(model, backend="eager"), in_place):
        for _ in range(2):
            assert torch.equal(run(tokens), plain)
            count, again = times(lambda: gf.capture(run, tokens, "*"))
            assert count == 1 and all(torch.equal(again[name], seen[name]) for name in seen)
            count, made = times(lambda: edited(run))
            assert count == 1 and torch.equal(made, doubled)
    around = torch.compile(lambda tokens: model(tokens), backend="eager")  # who compiled this we cannot know
    assert torch.equal(around(tokens), plain)
    with gf.edit(model, double):
        assert torch.equal(around(tokens), doubled)
    assert torch.equal(around(tokens), plain)
"""


@pytest.mark.slow
def test_compiled_models_are_captured_and_edited_eagerly_with_one_warning():
    alone(COMPILED)


def alone(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Options of capture


def test_layers():
    model = tiny("llama@1m")
    assert list(gf.capture(model, TOKENS, "*.z", layers=-1)) == ["layers.2.mixer.z"]
    assert list(gf.capture(model, TOKENS, ["*.z", "embed"], layers=[0, 2])) == [
        "layers.0.mixer.z",
        "layers.2.mixer.z",
        "embed",
    ]


@pytest.mark.parametrize("expression", FAMILIES)
def test_heads_count_along_the_axis_of_the_site(expression: str):
    model = tiny(expression)
    names = [f"layers.1.mixer.{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "out")]
    whole, one = gf.capture(model, TOKENS, names), gf.capture(model, TOKENS, names, heads=[-1, 0])
    for name in names:
        axis = {"k": 2, "v": 2, "q": 2, "z": 2, "scores": 1, "pattern": 1}.get(name.rpartition(".")[2])
        last = whole[name].shape[axis] - 1 if axis else 0
        expected = whole[name].index_select(axis, torch.tensor([last, 0])) if axis else whole[name]
        assert torch.equal(one[name], expected), name
    assert gf.capture(model, TOKENS, "*.z", heads=2)["layers.0.mixer.z"].shape == (2, 12, 1, 8)


@pytest.mark.parametrize("given", [5, [5], [7, 0, -1], [3, 3, 11, 2]])
def test_positions_keep_their_order_across_blocks(given: list[int] | int, small_blocks: None):
    model, names = tiny("llama@1m"), ["layers.1.mixer.scores", "layers.1.mixer.q", "layers.1.resid_post"]
    whole, some = gf.capture(model, TOKENS, names), gf.capture(model, TOKENS, names, positions=given)
    at = [given] if isinstance(given, int) else given
    assert torch.equal(some[names[0]], whole[names[0]][:, :, at])
    assert all(torch.equal(some[name], whole[name][:, at]) for name in names[1:])


def test_positions_are_those_of_this_call():
    model = tiny("llama@1m")
    state = model.init_state(2, 16)
    logits_of(model, TOKENS)
    with torch.no_grad():
        model(TOKENS[:, :10], state)
    seen = gf.capture(model, TOKENS[:, 10:], ALL_PATTERNS, positions=-1, state=state)["layers.2.mixer.pattern"]
    whole = gf.capture(model, TOKENS, ALL_PATTERNS)["layers.2.mixer.pattern"]
    torch.testing.assert_close(seen, whole[:, :, -1:])


def entropy(pattern: Tensor) -> Tensor:
    return torch.special.entr(pattern).sum(-1)


def test_reduction_by_blocks_equals_reduction_of_the_whole(small_blocks: None):
    model, seen = tiny("llama@1m"), []
    whole = gf.capture(model, TOKENS, ALL_PATTERNS)

    def watched(pattern: Tensor) -> Tensor:
        seen.append(pattern.shape)
        return entropy(pattern)

    made = gf.capture(model, TOKENS, ALL_PATTERNS, reduce=watched, heads=[1, 2], positions=[9, 1])
    for name, value in whole.items():
        torch.testing.assert_close(made[name], entropy(value[:, [1, 2]][:, :, [9, 1]]))
    assert seen == [(2, 2, 1, 12)] * 6  # two of the blocks of three queries, in three layers
    assert gf.capture(model, TOKENS, "logits", reduce=lambda x: x.mean())["logits"].shape == ()


def test_a_reduction_that_loses_the_queries_is_refused():
    model = tiny("llama@1m")
    with refused(code="conflict", field="reduce"):
        gf.capture(model, TOKENS, ALL_PATTERNS, reduce=lambda a: a.amax((-2, -1)))
    assert untouched(model)


@pytest.mark.parametrize("pool", [1, 4, 5, 11])
@pytest.mark.parametrize("positions", [None, [0, 4, 5, 6, 9, 11, 3]])
def test_pooling_keeps_the_largest_of_every_tile(pool: int, positions: list[int] | None, small_blocks: None):
    model, name = tiny("bloom@1m"), "layers.1.mixer.scores"
    whole = gf.capture(model, TOKENS, name)[name]
    whole = whole if positions is None else whole[:, :, positions]
    seen = gf.capture(model, TOKENS, name, pool=pool, positions=positions)[name]
    height, width = -(-whole.shape[2] // pool), -(-12 // pool)
    expected = F.max_pool2d(whole, (height, width), ceil_mode=True)  # -inf in tiles without a visible pair
    assert torch.equal(seen, expected) and max(seen.shape[2:]) <= pool


def test_small_map_is_not_pooled_and_a_large_one_warns(small_blocks: None):
    model = tiny("llama@1m")
    whole = gf.capture(model, TOKENS, ALL_PATTERNS)
    assert all(
        torch.equal(value, whole[name]) for name, value in gf.capture(model, TOKENS, "*.pattern", pool=12).items()
    )
    needed = 3 * 2 * 4 * 12 * 12 * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gf.capture(model, TOKENS, ALL_PATTERNS, memory=needed).keys() == whole.keys()
    with pytest.warns(UserWarning, match=r"3 maps such as layers.0.mixer.pattern need 13,824 bytes.* 6 x 6") as said:
        seen = gf.capture(model, TOKENS, ALL_PATTERNS, memory=needed // 4)
    assert len(said) == 1 and sum(value.nbytes for value in seen.values()) <= needed // 4
    assert all(torch.equal(seen[name], F.max_pool2d(whole[name], 2)) for name in whole)


@pytest.mark.parametrize("length", [10, 12])
@pytest.mark.parametrize("size", range(1, 12))
def test_warned_size_equals_the_pooled_size(length: int, size: int):
    """The memory is a bound: for 12 tokens and room for 11, tiles of two give 6."""
    model, name = tiny("llama@1m"), "layers.1.mixer.pattern"
    row = 2 * 4 * 4  # bytes of a cell of every head of both texts
    with pytest.warns(UserWarning, match="are pooled to") as said:
        seen = gf.capture(model, TOKENS[:, :length], name, memory=row * min(size, length - 1) ** 2)[name]
    assert f"pooled to {seen.shape[2]} x {seen.shape[3]}," in str(said[0].message)


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"layers": 3}, "range", "layer"),
        ({"layers": [0, -4]}, "range", "layer"),
        ({"heads": 4}, "range", "head"),
        ({"positions": [0, 12]}, "range", "position"),
        ({"positions": -13}, "range", "position"),
        ({"positions": []}, "missing", "position"),
        ({"pool": 0}, "range", "pool"),
        ({"pool": 2.5}, "range", "pool"),
        ({"memory": -1}, "range", "memory"),
    ],
)
def test_wrong_requests_are_one_sentence(given: dict[str, object], code: str, field: str):
    model = tiny("llama@1m")
    with refused(code=code, field=field) as caught:
        gf.capture(model, TOKENS, ALL_PATTERNS, **given)
    assert "\n" not in str(caught.value) and untouched(model)


def test_heads_of_sites_that_have_none():
    with refused(code="conflict", field="heads"):
        gf.capture(tiny("llama@1m"), TOKENS, "*.ffn.out", heads=1)
    with refused(code="unknown", field="sites"):
        gf.capture(tiny("llama@1m"), TOKENS, "layers.0.ffn.out", layers=1)


def test_head_is_not_computed_without_observers():
    model = tiny("llama@1m")
    looked: list[Tensor] = []
    with looking(model, {"logits": lambda x, first, total: looked.append(x)}):
        gf.capture(model, TOKENS, "final_norm")
        assert not looked
        gf.capture(model, TOKENS, ["final_norm", "logits"])
    assert len(looked) == 1


# Looking changes nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("expression", FAMILIES)
def test_logits_are_the_same_bits_with_capture_on_and_off(expression: str, kernel: str, dtype: torch.dtype):
    model = tiny(f"{expression}+kernel={kernel}").to(dtype)
    for tokens in (TOKENS, torch.arange(80).view(2, 40) % 31):  # the longer one is read by products that end fused
        plain = logits_of(model, tokens)
        assert torch.equal(gf.capture(model, tokens, "*")["logits"], plain)
        with looking(model, {name: lambda x, first, total: None for name in sites(model)}):
            assert torch.equal(logits_of(model, tokens), plain)
        assert torch.equal(logits_of(model, tokens), plain)
    patterns = gf.capture(model, TOKENS, ALL_PATTERNS)  # and the pattern is that of the definition
    definition = tiny(f"{expression}+kernel=naive").to(dtype)
    expected = gf.capture(definition, TOKENS, ALL_PATTERNS)["layers.0.mixer.pattern"]
    torch.testing.assert_close(patterns["layers.0.mixer.pattern"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["llama@1m+gqa:2", "bloom@1m", "llama@1m+window:3"])
def test_so_they_are_where_attention_is_compiled(expression: str):
    torch._dynamo.reset()
    model = tiny(f"{expression}+head_dim=16+kernel=flex")
    plain = logits_of(model)
    assert torch.equal(gf.capture(model, TOKENS, "*")["logits"], plain)
    definition = tiny(f"{expression}+head_dim=16+kernel=naive")
    torch.testing.assert_close(plain, logits_of(definition), rtol=1e-4, atol=1e-5)


def test_decoding_is_the_same_with_capture_on_and_off():
    model, states = tiny("llama@1m+window:3"), []
    for watching in (False, True):
        state = model.init_state(2, 16)
        with ExitStack() as stack:
            if watching:
                stack.enter_context(looking(model, {name: lambda x, first, total: None for name in sites(model)}))
            states.append(torch.cat([logits_of_state(model, TOKENS[:, i : i + 1], state) for i in range(12)], 1))
    assert torch.equal(*states)


@torch.no_grad()
def logits_of_state(model: Model, tokens: Tensor, state: object) -> Tensor:
    return model(tokens, state)


LONG = """
import resource, time, torch, glassformer as gf
torch.set_num_threads(1)
model = gf.preset("llama@1m+layers=2+d_model=288+heads=9+vocab_size=256+context=16384").build(seed=0).eval()
tokens = torch.randint(256, (1, 16384))
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
seen = gf.capture(model, tokens, "layers.1.mixer.pattern", heads=3, pool=512)["layers.1.mixer.pattern"]
seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert seen.shape == (1, 1, 512, 512) and (seen.amax(-1) > 0).all() and not seen.triu(1).any()
print(f"{seconds:.1f} s, {before / 2**20:.2f} GiB before, {peak / 2**20:.2f} GiB at most")
assert peak < 1.5 * 2**20 and seconds < 90
"""


@pytest.mark.slow
def test_a_map_of_16384_tokens_fits_in_memory():
    """One of nine heads, pooled to 512 x 512: whole it would be 1 GiB, the layer's nine 9 GiB."""
    print(alone(LONG))
