from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, ROPES, VOCAB, Case


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    n, layers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    said = {
        "vocab_size": VOCAB,
        "num_attention_heads": n,
        "hidden_size": n * draw(st.sampled_from([6, 8])),
        "intermediate_size": draw(st.sampled_from([16, 28])),
        "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT,
        "hidden_activation": draw(st.sampled_from(["gelu", "silu"])),
        "classifier_activation": draw(st.sampled_from(["gelu", "silu"])),
        "classifier_pooling": draw(st.sampled_from(["cls", "mean"])),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-2])),
        "local_attention": draw(st.sampled_from([2, 5, 8])),
        "num_labels": draw(st.integers(2, 4)),
        **{name: draw(st.booleans()) for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")},
        **{name: draw(st.booleans()) for name in ("decoder_bias", "tie_word_embeddings")},
    }
    if draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        said["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    near = {"rope_theta": draw(st.sampled_from([50.0, 1e4])), **draw(ROPES)}
    return {
        **said,
        "rope_parameters": {"sliding_attention": near, "full_attention": {"rope_theta": 16e4, **draw(ROPES)}},
    }


CASE = Case(
    "ModernBertForMaskedLM",
    fields(),
    quiet=("tok_embeddings",),
    loud=1.0,
    classes=("ModernBertForMaskedLM", "ModernBertModel", "ModernBertForSequenceClassification"),
)
