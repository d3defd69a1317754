from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    said = draw(
        llama_like(
            partial_rotary_factor=st.sampled_from([1.0, 0.5]),
            head_dim=st.sampled_from([8, 12]),
            hidden_size=st.sampled_from([22, 35, 48]),
            original_max_position_embeddings=st.sampled_from([12, 24, 40]),
            sliding_window=st.sampled_from([None, 3, 7]),
            rms_norm_eps=st.sampled_from([1e-5, 1e-2]),
            hidden_act=st.sampled_from(["silu", "gelu"]),
        )
    )
    rope: dict[str, Any] = {"rope_theta": 1e4, "rope_type": "default"}
    if draw(st.booleans()):
        said["hidden_size"] = said["head_dim"] * said["num_attention_heads"]
        pairs = int(said["head_dim"] * said["partial_rotary_factor"]) // 2
        factors = st.lists(st.sampled_from([1.0, 1.1, 2.5, 8.0]), min_size=pairs, max_size=pairs)
        rope |= {"rope_type": "longrope", "short_factor": draw(factors), "long_factor": draw(factors)}
        rope |= draw(st.sampled_from([{}, {"factor": 4.0}, {"attention_factor": 1.3}]))
    return {**said, "rope_parameters": rope}


CASE = Case("Phi3ForCausalLM", fields(), quiet=("qkv_proj",))
