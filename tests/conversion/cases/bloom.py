from hypothesis import strategies as st

from tests.conversion.cases.base import VOCAB, Case

CASE = Case(
    "BloomForCausalLM",
    st.builds(
        lambda n, h, **more: {"vocab_size": VOCAB, "n_head": n, "hidden_size": n * h, **more},
        n=st.integers(1, 7),
        h=st.sampled_from([7, 8]),
        n_layer=st.integers(1, 3),
        layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
        tie_word_embeddings=st.booleans(),
    ),
    quiet=("word_embeddings.",),
)
