from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case

CASE = Case(
    "GPT2LMHeadModel",
    st.builds(
        lambda n, h, **more: {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_head": n, "n_embd": n * h, **more},
        n=st.integers(1, 5),
        h=st.sampled_from([5, 8]),
        n_layer=st.integers(1, 3),
        n_inner=st.sampled_from([None, 36]),
        activation_function=st.sampled_from(["gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
        scale_attn_weights=st.booleans(),
        scale_attn_by_inverse_layer_idx=st.booleans(),
        tie_word_embeddings=st.booleans(),
    ),
    quiet=("wte", "wpe"),
)
