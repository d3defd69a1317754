from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "truncate": False}
YARN |= {"rope_theta": 150000.0}

CASE = Case(
    "GptOssForCausalLM",
    llama_like(
        head_dim=st.sampled_from([6, 8, 14]),
        hidden_size=st.sampled_from([32, 36]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        attention_bias=st.booleans(),
        sliding_window=st.sampled_from([1, 5, 100]),
        layer_types=st.none(),
        num_local_experts=st.sampled_from([2, 3, 5]),
        num_experts_per_tok=st.sampled_from([1, 2]),
        swiglu_limit=st.sampled_from([0.5, 7.0]),
        swiglu_alpha=st.sampled_from([1.0, 1.702]),
        rope_parameters=st.sampled_from([YARN, {"rope_type": "default", "rope_theta": 1e4}]),
    ),
)
