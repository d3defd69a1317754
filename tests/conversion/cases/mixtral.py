from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like, merged

CASE = Case(
    "MixtralForCausalLM",
    llama_like(
        head_dim=st.sampled_from([6, 8, 14]),
        hidden_size=st.sampled_from([32, 36, 52]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        hidden_act=st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
        sliding_window=st.sampled_from([None, 1, 5, 100]),
        num_local_experts=st.sampled_from([2, 3, 5]),
        num_experts_per_tok=st.sampled_from([1, 2]),
    ),
    gather=lambda named: merged(named, "block_sparse_moe.", "w1", "w3", "w2"),
)
