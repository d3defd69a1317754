from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from glassformer.conversion.families.vit import of_class
from tests.conversion.cases.base import Case


def as_the_class(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {of_class(name): value for name, value in named.items()}


def images(size: int, channels: int) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(3))


CASE = Case(
    "ViTForImageClassification",
    st.builds(
        lambda n, h, **more: {"num_attention_heads": n, "hidden_size": n * h, **more},
        n=st.integers(1, 4),
        h=st.sampled_from([6, 8]),
        num_hidden_layers=st.integers(1, 3),
        intermediate_size=st.sampled_from([28, 40]),
        hidden_act=st.sampled_from(["gelu", "relu", "gelu_new"]),
        layer_norm_eps=st.sampled_from([1e-12, 1e-5]),
        image_size=st.sampled_from([12, 15]),
        patch_size=st.sampled_from([3, 4]),
        num_channels=st.sampled_from([1, 3]),
        qkv_bias=st.booleans(),
        num_labels=st.integers(2, 5),
        pooler_act=st.sampled_from(["tanh", "relu"]),
    ),
    quiet=("cls_token", "position_embeddings"),
    classes=("ViTForImageClassification", "ViTModel"),
    gather=as_the_class,
    reads=images,
)
