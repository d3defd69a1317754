"""Models with an encoder: a source is read by one tower, and what it makes by the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.core.cost import Shape
from glassformer.parts.core.init import SmallInitConfig
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.kernel import Naive
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.mup import parameter_groups
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import BidirectionalConfig
from glassformer.training.objectives import NextTokenConfig
from tests.refused import refused

NORM = LayerNormConfig()
FFN = MlpConfig(hidden=24, bias=True)
LEARNED = EmbeddingConfig(position=LearnedConfig())
V, S, T = 31, 6, 9


def towers(tied: bool = False, **changes: object) -> ModelConfig:
    """Returns a config with two towers of two layers; the encoder is wider and reads more tokens, unless `tied`."""
    reads = BlockConfig(mixer=AttentionConfig(n_heads=2, visibility=BidirectionalConfig()), ffn=FFN, norm=NORM)
    encoder = TowerConfig(
        d_model=None if tied else 24, context=13,
        embedding=LEARNED.replace(tied=tied), stack=(Stage(repeat=2, blocks=(reads,)),), final_norm=NORM,
    )  # fmt: skip
    own = BlockConfig(mixer=AttentionConfig(n_heads=2), ffn=None, norm=NORM)
    cross = BlockConfig(mixer=CrossAttentionConfig(n_heads=2), ffn=FFN, norm=NORM)
    config = ModelConfig(
        vocab_size=V, d_model=16, context=11, embedding=LEARNED, stack=(Stage(repeat=2, blocks=(own, cross)),),
        final_norm=NORM, head=HeadConfig(tied=tied), encoder=encoder,
    )  # fmt: skip
    return config.replace(**changes)


@pytest.fixture(params=[False, True], ids=["apart", "tied"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return towers(request.param)


@pytest.fixture
def texts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (3, S), sources (3, T), and which of their tokens are real."""
    generator = torch.Generator().manual_seed(0)
    tokens, source = (torch.randint(V, (3, length), generator=generator) for length in (S, T))
    real = torch.ones(3, T, dtype=torch.int64)
    real[0, 5:] = real[2, 3:] = 0
    return tokens, source, real


def moved(config: ModelConfig) -> Model:
    """Returns the model with noise on every parameter, because some are initialised to zeros or ones."""
    model = config.build(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.2
    return model.eval()


def test_counts_are_those_of_the_modules(config: ModelConfig):
    model = config.build()
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    ends = [name for name, _ in model.named_parameters() if name.startswith(("embedding", "encoder.embedding", "head"))]
    assert config.num_params(embeddings=False) == config.num_params() - sum(
        model.get_parameter(name).numel() for name in ends
    )


def test_flops_are_those_counted(config: ModelConfig):
    """The source as long as the text, which a cost assumes."""
    model, tokens = config.build(), torch.zeros(1, 8, dtype=torch.int64)
    for module in model.modules():
        if hasattr(module, "kernel"):
            module.kernel = Naive()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, source=tokens)
    assert counter.get_total_flops() == config.flops(8) * 8
    state = model.init_state(2, 8, torch.bfloat16, memory_len=8)
    assert state.nbytes == 2 * config.state_bytes(8)
    decode = config.costs(Shape(s=1, t=8, phase="decode"))["encoder"]
    assert (decode.flops, decode.state_bytes, decode.moved_bytes) == (0, 0, 0)


def test_padding_of_a_source_changes_nothing(config: ModelConfig, texts):
    model, (tokens, source, real) = moved(config), texts
    padded = model(tokens, source=source, source_documents=real)
    for row in range(3):
        alone = model(tokens[row : row + 1], source=source[row : row + 1, : int(real[row].sum())])
        torch.testing.assert_close(padded[row : row + 1], alone)
    assert not torch.allclose(padded[0], model(tokens, source=source)[0])


def test_cached_equals_full_and_beams_take_their_source_along(config: ModelConfig, texts):
    model, (tokens, source, real) = moved(config), texts
    full = model(tokens, source=source, source_documents=real)
    state = model.init_state(3, S + 1, memory_len=T)
    first = model(tokens[:, :2], state, source=source, source_documents=real)
    rest = [model(tokens[:, i : i + 1], state) for i in range(2, S)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), full)
    index = torch.tensor([2, 0, 0])
    state.reorder(index)
    after = model(tokens[:, :1], state)
    again = torch.cat([tokens[index], tokens[:, :1]], 1)
    torch.testing.assert_close(after, model(again, source=source[index], source_documents=real[index])[:, -1:])


def test_packed_pairs_read_their_own_sources(config: ModelConfig, texts):
    """Two pairs in one row are the two of two rows."""
    model, (tokens, source, _) = moved(config), texts
    pairs = [(tokens[:1, :4], source[:1, :5]), (tokens[1:2, :3], source[1:2, :4])]
    packed = [torch.cat(some, 1) for some in zip(*pairs, strict=True)]
    documents = [torch.tensor([[1] * a + [2] * b]) for a, b in ((4, 3), (5, 4))]
    together = model(packed[0], documents=documents[0], source=packed[1], source_documents=documents[1])
    apart = torch.cat([model(one, source=other) for one, other in pairs], 1)
    torch.testing.assert_close(together, apart)


def test_a_tied_table_learns_from_both_towers(texts):
    tokens, source, _ = texts
    model = moved(towers(tied=True))
    only_in_source = [token for token in set(source.flatten().tolist()) if token not in set(tokens.flatten().tolist())]
    own = model.hidden_states(tokens, source=source).square().sum()
    (grad,) = torch.autograd.grad(own, [model.embedding.weight])
    assert only_in_source and bool((grad[only_in_source].abs().sum(1) > 0).all())


def test_depth_factors_are_those_of_each_tower():
    """Small-init's outputs are 4 / (branches sqrt(d)): 4 additions in the encoder, 6 in the decoder."""
    model = towers(tied=True, init=SmallInitConfig()).build(seed=0)
    stds = [tower.layers[1].ffn.down_proj.weight.std().item() for tower in (model.encoder, model)]  # type: ignore[union-attr]
    assert stds[0] / stds[1] == pytest.approx(6 / 4, rel=0.15)


def test_sites_of_both_towers_are_captured_and_edited(config: ModelConfig, texts):
    model, (tokens, source, real) = moved(config), texts
    seen = gf.capture(model, tokens, "*.pattern", source=source, source_documents=real)
    shapes = {name: tuple(value.shape[-2:]) for name, value in seen.items()}
    assert shapes["encoder.layers.1.mixer.pattern"] == (T, T)
    assert shapes["layers.0.mixer.pattern"] == (S, S) and shapes["layers.1.mixer.pattern"] == (S, T)
    assert not seen["layers.1.mixer.pattern"][0, ..., 5:].any()  # no token attends to padding
    plain = model(tokens, source=source)
    with gf.edit(model, {"encoder.layers.1.mixer.z": torch.zeros_like}):
        edited = model(tokens, source=source)
    assert not torch.allclose(plain, edited)
    torch.testing.assert_close(model(tokens, source=source), plain, rtol=0, atol=0)


def test_saved_and_quantised(config: ModelConfig, texts, tmp_path: Path):
    model, (tokens, source, _) = moved(config), texts
    gf.save(model, None, tmp_path / "m")
    loaded = gf.load(tmp_path / "m")
    assert loaded.config == config
    assert torch.equal(loaded.model(tokens, source=source), model(tokens, source=source))
    packed = gf.load(tmp_path / "m", quantize="int8").model
    kinds = {type(packed.get_submodule(f"{tower}layers.1.ffn.up_proj")).__name__ for tower in ("", "encoder.")}
    assert kinds == {"Int8Linear"}
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens, source=source), model(tokens, source=source), atol=0.2, rtol=0.1)


def test_files_and_slices(config: ModelConfig, tmp_path: Path):
    config.save(tmp_path / "config.yaml")
    assert ModelConfig.from_file(tmp_path / "config.yaml") == config
    name = "encoder.layers.1.ffn.up_proj.weight"
    whole = config.build(seed=3).get_parameter(name)
    assert torch.equal(config.initial_weights(seed=3).piece(name, rows=slice(2, 5)), whole[2:5])


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("source", {}),
        ("source", {"source": torch.zeros(3, 0, dtype=torch.int64)}),
        ("source", {"source": torch.zeros(3, 14, dtype=torch.int64)}),
        ("source", {"source": torch.zeros(2, 4, dtype=torch.int64)}),
    ],
    ids=["missing", "empty", "too long", "rows"],
)
def test_sources_that_cannot_be_read(field: str, given: dict[str, torch.Tensor], texts):
    with pytest.raises(RequestError) as problem:
        towers().build().hidden_states(texts[0], **given)
    assert problem.value.field == field and "\n" not in str(problem.value)


def test_loss_with_an_encoded_memory_equals_loss_with_its_source(texts):
    """With the memory, the source need not be read again."""
    model, (tokens, source, real) = moved(towers()), texts
    before, targets = tokens[:, :-1], tokens[:, 1:]
    read = model.loss(before, targets, source=source, source_documents=real)
    assert torch.equal(model.loss(before, targets, memory=model.encode(source, real)), read)
    assert not torch.equal(model.loss(before, targets, memory=model.encode(source)), read)


def test_a_decoder_takes_no_source(texts):
    with refused(code="conflict", field="source") as problem:
        gf.preset("gpt2@1m+vocab_size=31").build()(texts[0], source=texts[1])
    assert problem.value.field == "source"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"embedding": EmbeddingConfig(tied=True)}, "embedding.tied"),
        ({"stack": (Stage(blocks=(BlockConfig(mixer=AttentionConfig(n_heads=2), ffn=FFN, norm=NORM),)),)}, "encoder"),
        ({"encoder": towers().encoder.replace(embedding=EmbeddingConfig(tied=True))}, "encoder.d_model"),  # type: ignore[union-attr]
        ({"encoder": towers().encoder.replace(stack=towers().stack)}, "encoder.stack"),  # type: ignore[union-attr]
    ],
)
def test_towers_that_do_not_fit(change: dict[str, object], field: str):
    with refused(code="conflict", field=field):
        towers(**change)


def test_a_plain_text_trains_no_encoder():
    with refused(code="conflict", field="objective") as problem:
        NextTokenConfig().check(towers())
    assert problem.value.field == "objective"


def test_an_optimizer_takes_every_parameter_once(config: ModelConfig):
    """A tied table counts only for the decoder."""
    model = config.build(seed=0)
    groups = parameter_groups(model, 1e-3, 0.1, {})
    assert sorted(id(one) for group in groups for one in group["params"]) == sorted(map(id, model.parameters()))
