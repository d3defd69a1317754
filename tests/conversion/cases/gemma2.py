from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    said = draw(
        llama_like(
            hidden_size=st.sampled_from([36, 72]),  # a multiple of every number of heads here
            head_dim=st.sampled_from([6, 8, 14]),
            num_hidden_layers=st.integers(1, 4),
            max_position_embeddings=st.sampled_from([20, 48]),
            rms_norm_eps=st.sampled_from([1e-6, 1e-2]),
            hidden_activation=st.sampled_from(["gelu_pytorch_tanh", "gelu"]),
            attention_bias=st.booleans(),
            query_pre_attn_scalar=st.sampled_from([3, 16, 144]),
            sliding_window=st.sampled_from([1, 3, 7]),
            attn_logit_softcapping=st.sampled_from([None, 1.5]),
            final_logit_softcapping=st.sampled_from([None, 2.0]),
        )
    )
    if draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        n = said["num_hidden_layers"]
        said["layer_types"] = draw(st.lists(kinds, min_size=n, max_size=n))
    return said


CASE = Case("Gemma2ForCausalLM", fields(), quiet=("norm",), loud=1.0)
