from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case

CASE = Case(
    "OPTForCausalLM",
    st.builds(
        lambda n, h, **more: {
            "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "num_attention_heads": n, "hidden_size": n * h,
            **more,
        },
        n=st.integers(1, 5),
        h=st.sampled_from([7, 8]),
        num_hidden_layers=st.integers(1, 3),
        ffn_dim=st.sampled_from([28, 40]),
        activation_function=st.sampled_from(["relu", "gelu", "gelu_new"]),
        do_layer_norm_before=st.booleans(),
        _remove_final_layer_norm=st.booleans(),
        enable_bias=st.booleans(),
        tie_word_embeddings=st.booleans(),
    ),
    quiet=("embed_tokens", "embed_positions"),
)  # fmt: skip
