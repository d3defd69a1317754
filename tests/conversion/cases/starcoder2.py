from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "Starcoder2ForCausalLM",
    llama_like(
        hidden_size=st.sampled_from([22, 35, 48]),
        max_position_embeddings=st.sampled_from([20, 48]),
        sliding_window=st.sampled_from([None, 1, 3, 7]),
        norm_epsilon=st.sampled_from([1e-5, 1e-2]),
        hidden_act=st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"]),
        use_bias=st.booleans(),
    ),
)
