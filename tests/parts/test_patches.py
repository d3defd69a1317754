"""Images as a sequence, against a convolution; and what a model of images refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import glassformer as gf
from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.kernel import NaiveConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.patches import Patches, PatchesConfig
from glassformer.parts.position import LearnedConfig
from glassformer.parts.visibility import BidirectionalConfig
from tests.refused import refused

SMALL = PatchesConfig(size=11, patch=3, channels=2)
IMAGES = torch.randn(3, 2, 11, 11, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> ModelConfig:
    config = preset("vit-base@1m")
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=2, visibility=BidirectionalConfig(), kernel=NaiveConfig()), ffn=None,
        norm=LayerNormConfig(),
    )  # fmt: skip
    embedding = EmbeddingConfig(position=LearnedConfig(), patches=SMALL)
    sizes = {"d_model": 16, "context": SMALL.tokens, "stack": (Stage(repeat=2, blocks=(block,)),)}
    return config.replace(**{**sizes, "embedding": embedding, **changes})


def test_patches_are_a_convolution() -> None:
    """With its weights, the border that no patch reaches left out."""
    part = Patches(16, 11, 3, 2)
    given = IMAGES.clone().requires_grad_()
    weight = part.projection.weight.view(16, 2, 3, 3)
    expected = F.conv2d(given, weight, part.projection.bias, stride=3).flatten(2).transpose(1, 2)
    found = part(given)
    assert found.shape == (3, 10, 16) == (3, part.tokens, 16)
    torch.testing.assert_close(found[:, 1:], expected)
    assert torch.equal(found[:, 0], part.first.weight.expand(3, -1))
    probe = torch.randn(found.shape)
    (mine,) = torch.autograd.grad((found * probe).sum(), given)
    (theirs,) = torch.autograd.grad((expected * probe[:, 1:]).sum(), given)
    torch.testing.assert_close(mine, theirs)
    assert not mine[..., 9:].any() and mine[..., :9].any()


def test_a_model_of_images_counts_itself_and_learns() -> None:
    config = small()
    model = config.build()
    assert config.num_params() == sum(weight.numel() for weight in model.parameters())
    labels, shape = torch.tensor([1, 999, 0]), Shape(b=3, s=SMALL.tokens, t=SMALL.tokens, phase="prefill")
    with FlopCounterMode(display=False) as counter:
        model(IMAGES)
    assert counter.get_total_flops() == config.costs(shape).flops
    first = model.loss(IMAGES, labels)
    first.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    assert model.loss(IMAGES, labels) < first


def test_the_sites_of_an_image_are_those_of_a_text() -> None:
    model = small().build()
    seen = gf.capture(model, IMAGES, ["embed", "layers.1.mixer.pattern"])
    assert seen["embed"].shape == (3, 10, 16) and seen["layers.1.mixer.pattern"].shape == (3, 2, 10, 10)


@pytest.mark.parametrize("shape", [(3, 2, 11, 12), (3, 3, 11, 11), (2, 11, 11), (3, 10)])
def test_another_size_is_refused(shape: tuple[int, ...]) -> None:
    with refused(code="conflict", field="images") as problem:
        small().build().hidden_states(torch.zeros(shape))
    assert problem.value.field == "images" and problem.value.value == shape
    with refused(code="conflict", field="images"):
        small().build().hidden_states(IMAGES.long())


def test_patches_refuse_tokens_and_text_models_refuse_images() -> None:
    with refused(code="conflict", field="tokens"):
        preset("gpt2@1m+layers=1+vocab_size=61").build().hidden_states(IMAGES)
    with refused(code="conflict", field="head"):
        small(head=preset("gpt2").head.replace(tied=False))
    with refused(code="range", field="context"):
        small(context=9)
    with refused(code="range", field="patch"):
        PatchesConfig(size=8, patch=9)


def test_a_decoder_reads_an_image() -> None:
    """An encoder of images is an encoder: the source has any number of dimensions."""
    norm, image = LayerNormConfig(), small()
    own = BlockConfig(mixer=AttentionConfig(n_heads=2), ffn=None, norm=norm)
    cross = BlockConfig(mixer=CrossAttentionConfig(n_heads=2), ffn=None, norm=norm)
    encoder = TowerConfig(embedding=image.embedding, stack=image.stack, final_norm=norm)
    model = ModelConfig(
        vocab_size=31, d_model=16, context=12, stack=(Stage(blocks=(own, cross)),), final_norm=norm, encoder=encoder
    ).build()  # fmt: skip
    tokens = torch.randint(31, (3, 5))
    logits = model(tokens, source=IMAGES)
    assert logits.shape == (3, 5, 31) and not torch.equal(logits, model(tokens, source=-IMAGES))
    with refused(code="conflict", field="images"):
        model(tokens, source=tokens)
