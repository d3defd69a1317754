from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.conversion.cases.base import CONTEXT, Case, encoder


def some_are_global(tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Marks three global tokens in each row; with different numbers per row, the published gradients are NaN."""
    chosen = torch.zeros_like(tokens)
    chosen[0, [0, 7, 20]] = chosen[1, [2, 3, 28]] = 1
    return {"global_tokens": chosen.bool()}, {"global_attention_mask": chosen}


CASE = Case(
    "LongformerForMaskedLM",
    encoder(
        type_vocab_size=st.integers(1, 2), pad_token_id=st.just(1), max_position_embeddings=st.just(CONTEXT + 2),
        hidden_act=st.sampled_from(["gelu", "relu"]), num_labels=st.integers(2, 3), num_hidden_layers=st.just(2),
        attention_window=st.sampled_from([4, 8, [8, 4]]),
    ),
    quiet=("word_embeddings", "position_embeddings", "token_type"),
    classes=("LongformerForMaskedLM", "LongformerModel", "LongformerForSequenceClassification"),
    first_token=2,  # that of the padding has no position
    also=some_are_global,
)  # fmt: skip
