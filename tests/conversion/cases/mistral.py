from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "MistralForCausalLM",
    llama_like(
        head_dim=st.sampled_from([6, 8, 14]),
        hidden_size=st.sampled_from([35, 50, 64]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        hidden_act=st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
        sliding_window=st.sampled_from([None, 1, 5, 17, 100]),
    ),
)
