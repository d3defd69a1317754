"""Projections by their definition; what one keeps of a token, and what the kernel reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.shard import Shard
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import Naive
from glassformer.parts.linear import Matrix
from glassformer.parts.mixer import Attention
from glassformer.parts.projection import (
    FusedQKV,
    MakeProjection,
    MapShape,
    Projection,
    SelfProjectionConfig,
    SeparateQKV,
)
from glassformer.parts.visibility import SlidingWindow
from tests.refused import refused

TINY = "llama@1m+layers=2+d_model=32+heads=4+gqa:2+vocab_size=61+context=64"
TOKENS = torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(1))


def carried(fused: nn.Module, separate: nn.Module) -> None:
    """Gives `separate` the weights of `fused`."""
    weights = fused.state_dict()
    for name in [name for name in weights if ".qkv." in f".{name}"]:
        value, (path, leaf) = weights.pop(name), name.rsplit("qkv.", 1)
        h = value.shape[0] // 8
        for map_, rows in zip("qkv", value.split((4 * h, 2 * h, 2 * h)), strict=True):
            weights[f"{path}{map_}_proj.{leaf}"] = rows
    separate.load_state_dict(weights)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_separate_qkv_equals_fused_qkv(clip: float | None):
    fused = Attention(32, 4, 2, bias=True, projection=partial(FusedQKV, clip=clip))
    nn.init.normal_(fused.qkv.bias)  # type: ignore[arg-type, union-attr]
    separate = Attention(32, 4, 2, bias=True, projection=partial(SeparateQKV, clip=clip))
    carried(fused, separate)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(separate(x), fused(x))
    for name, matrix in separate.matrices().items():
        assert torch.equal(matrix.applied(), fused.matrices()[name].applied()), name


def test_a_model_with_separate_maps_equals_its_fused_twin(tmp_path: Path):
    """Counts, cached decoding and files are equal."""
    fused, config = gf.preset(TINY).build(seed=0), gf.preset(f"{TINY}+mixer.projection=separate")
    separate = config.build(seed=0)
    assert config.num_params() == sum(p.numel() for p in separate.parameters()) == fused.config.num_params()
    assert config.flops(10) == fused.config.flops(10) and config.state_bytes(9) == fused.config.state_bytes(9)
    carried(fused, separate)
    full = separate(TOKENS)
    torch.testing.assert_close(full, fused(TOKENS))
    state = separate.init_state(2, 10)
    pieces = torch.cat([separate(TOKENS[:, :6], state), separate(TOKENS[:, 6:], state)], 1)
    torch.testing.assert_close(pieces, full)
    assert ModelConfig.from_dict(config.to_dict()) == config and config != fused.config
    assert gf.save(separate, None, tmp_path).model_type == "glassformer"
    torch.testing.assert_close(gf.load(str(tmp_path)).model(TOKENS), full)


def test_files_written_before_there_were_projections_load():
    config = gf.preset(TINY)
    tree = config.to_dict()
    assert tree["stack"][0]["blocks"][0]["mixer"].pop("projection") == {"kind": "fused"}
    assert ModelConfig.from_dict(tree) == config
    names = {name for name, _ in config.build().named_parameters() if "mixer" in name and "norm" not in name}
    assert names == {f"layers.{i}.mixer.{name}.weight" for i in (0, 1) for name in ("qkv", "output")}


def test_only_a_projection_of_the_own_sequence_serves_attention():
    with pytest.raises(RequestError) as refused:
        gf.preset(f"{TINY}+mixer.projection=elsewhere")
    assert (refused.value.field or "").endswith("projection")


class Latent(Projection):
    """k and v of a latent c (r values per token), the only cached tensor: shape of MLA (DeepSeek-V2, 2405.04434)."""

    def __init__(self, heads: Heads, clip: float | None = None, rank: int = 6, value_dim: int = 5):
        super().__init__(heads, clip)
        self.rank, self._value_dim = rank, value_dim

    def shapes(self, d_model: int) -> dict[str, MapShape]:
        n, _, h = self.heads
        whole = (Shard(),)
        return {
            "q_proj": MapShape(d_model, (n * h,), ("score",), whole),
            "down": MapShape(d_model, (self.rank,), ("hidden",), whole),
            "up": MapShape(self.rank, (n * h, n * self._value_dim), ("score", "hidden"), 2 * whole),
        }

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        latent = maps.down(x)[:, :, None]
        return self.by_head(maps.q_proj(x)), latent, latent[..., :0]

    def expand(self, maps: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = maps.up.split(maps.up(k[:, :, 0]))
        return self.by_head(k), v.unflatten(-1, (-1, self._value_dim))

    def matrices(self, maps: Any) -> dict[str, Matrix]:
        return {"q": Matrix.of(maps.q_proj, 0, self.heads.n_heads), "latent": Matrix.of(maps.down)}

    @property
    def value_dim(self) -> int:
        return self._value_dim

    @property
    def kept_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (1, self.rank), (1, 0)


class LatentConfig(SelfProjectionConfig, kind="toy_latent"):
    rank: int = 6
    value_dim: int = 5

    def build(self, ctx: BuildContext) -> MakeProjection:
        return partial(Latent, rank=self.rank, value_dim=self.value_dim)


@pytest.mark.parametrize("visibility", [None, SlidingWindow(4)], ids=["all", "window"])
def test_a_latent_is_kept_in_place_of_keys_and_values(visibility: SlidingWindow | None):
    """The seam for MLA: other widths of what is kept and of z, and the same answer as keys and values written out."""
    torch.manual_seed(0)
    mixer = Attention(32, 4, projection=Latent, visibility=visibility, kernel=Naive())
    x = torch.randn(2, 9, 32)
    full = mixer(x)
    k, v = mixer.projection.expand(mixer, mixer.down(x)[:, :, None], x)  # type: ignore[operator]
    oracle = torch.einsum("bsnh,btnh->bnst", mixer.q_proj(x).unflatten(-1, (4, 8)), k) / 8**0.5  # type: ignore[operator]
    ahead = torch.arange(9)[:, None] - torch.arange(9)
    hidden = (ahead < 0) | (ahead >= (4 if visibility else 9))
    z = torch.einsum("bnst,btnv->bsnv", oracle.masked_fill(hidden, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(full, mixer.output(z.flatten(2)))
    state = mixer.init_state(2, 9, torch.float32)
    pieces = [mixer(x[:, a:b], Pass(a, b), state) for a, b in ((0, 5), (5, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), full)
    assert state.nbytes == 2 * (4 if visibility else 9) * 6 * 4


def test_a_latent_counts_itself():
    config = gf.preset(f"{TINY}+nope+kernel=naive")
    block = config.stack[0].blocks[0]
    config = config.replace(
        stack=(config.stack[0].replace(blocks=(block.replace(mixer=block.mixer.replace(projection=LatentConfig())),)),)
    )
    model = config.build(seed=0)
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    state = model.init_state(1, 16, torch.bfloat16)
    assert config.state_bytes(16) == state.nbytes
    with FlopCounterMode(display=False) as counter:
        model(TOKENS[:1])
    assert config.flops(10) == pytest.approx(counter.get_total_flops() / 10)


def test_a_projection_serves_without_a_mixer():
    projection, x = FusedQKV(Heads(4, 2, 8)), torch.randn(2, 3, 32)
    maps = SimpleNamespace(**projection.maps(32))
    q, k, v = projection(maps, x, Pass.of(x))
    assert q.shape == (2, 3, 4, 8) and k.shape == v.shape == (2, 3, 2, 8)
    assert torch.equal(torch.cat([part.flatten(2) for part in (q, k, v)], -1), maps.qkv(x))


class Sharing(FusedQKV):
    """Keys and values that layers above use too (YOCO, 2405.05254; Gemma 3n)."""

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().__call__(maps, x, pass_)
        pass_.share("kv", (k, v))
        return q, k, v


class QueriesAlone(Projection):
    def shapes(self, d_model: int) -> dict[str, MapShape]:
        n, _, h = self.heads
        return {"q_proj": MapShape(d_model, (n * h,), ("score",), (Shard(),))}

    def __call__(self, maps: Any, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor, Tensor]:
        return self.by_head(maps.q_proj(x)), *pass_.shared("kv")

    def matrices(self, maps: Any) -> dict[str, Matrix]:
        return {"q": Matrix.of(maps.q_proj, 0, self.heads.n_heads)}


def test_layers_may_share_keys_and_values():
    lower, upper = Attention(32, 4, 2, projection=Sharing), Attention(32, 4, 2, projection=QueriesAlone)
    x, pass_ = torch.randn(2, 7, 32), Pass(0, 7)
    between = lower(x, pass_)
    found = upper(between, pass_)
    _, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in lower.qkv.split(lower.qkv(x)))  # type: ignore[operator, union-attr]
    q = upper.q_proj(between).unflatten(-1, (-1, 8)).transpose(1, 2)  # type: ignore[operator]
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, upper.output(z.transpose(1, 2).flatten(2)))
    states = [mixer.init_state(2, 7, torch.float32) for mixer in (lower, upper)]
    pieces = []
    for a, b in ((0, 4), (4, 7)):
        part = Pass(a, b)
        pieces.append(upper(lower(x[:, a:b], part, states[0]), part, states[1]))
    torch.testing.assert_close(torch.cat(pieces, 1), found)
    with pytest.raises(RequestError) as refused:
        upper(x, Pass(0, 7))
    assert (refused.value.code, refused.value.field) == ("missing", "kv")


# Values of another width


@pytest.mark.parametrize("kind", [FusedQKV, SeparateQKV])
def test_wide_values_are_attention_by_its_definition(kind: type[Projection]) -> None:
    """softmax(q k^T / sqrt(d_k)) v W_O with d_v of 5 and d_k of 8 (1706.03762, section 3.2), grouped heads."""
    attention = Attention(32, 4, 2, projection=partial(kind, value_dim=5))
    x = torch.randn(2, 7, 32)
    q, k, v = (attention.matrices()[name].applied().reshape(-1, 32) for name in "qkv")
    assert (q.shape[0], k.shape[0], v.shape[0]) == (32, 16, 10)
    q, k, v = ((x @ matrix.T).unflatten(-1, (n, -1)) for matrix, n in ((q, 4), (k, 2), (v, 2)))
    k, v = (one.repeat_interleave(2, dim=2) for one in (k, v))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) / 8**0.5
    pattern = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    z = torch.einsum("bnst,btnh->bsnh", pattern, v).flatten(-2)
    torch.testing.assert_close(attention(x), z @ attention.output.weight.T)


@pytest.mark.parametrize("projection", ["fused", "separate"])
def test_wide_values_are_counted_kept_and_stored(projection: str, tmp_path: Path) -> None:
    config = gf.preset(f"{TINY}+mixer.value_dim=12+mixer.projection={projection}")
    plain = gf.preset(TINY)
    model = config.build(seed=0)
    # d g (hv - h) of W_V and d n (hv - h) of W_O more in each of two layers
    assert config.num_params() - plain.num_params() == 2 * 32 * (2 + 4) * (12 - 8)
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    assert config.state_bytes(9) - plain.state_bytes(9) == 2 * 9 * 2 * (12 - 8) * 2  # bf16
    full = model(TOKENS)
    state = model.init_state(2, 10)
    pieces = torch.cat([model(TOKENS[:, :6], state), model(TOKENS[:, 6:7], state), model(TOKENS[:, 7:], state)], 1)
    torch.testing.assert_close(pieces, full)
    assert gf.save(model, None, tmp_path).model_type == "glassformer"
    torch.testing.assert_close(gf.load(str(tmp_path)).model(TOKENS), full)


def test_values_as_wide_as_keys_are_the_default() -> None:
    config = gf.preset(f"{TINY}+mixer.value_dim=8")
    assert config.resolved() == gf.preset(TINY).resolved()
    with refused(code="conflict", field="mixer.value_dim"):
        gf.preset(f"{TINY}+mixer.value_dim=12+share:2")
