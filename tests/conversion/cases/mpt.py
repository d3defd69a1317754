from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case

CASE = Case(
    "MptForCausalLM",
    st.builds(
        lambda n, h, **more: {
            "vocab_size": VOCAB, "max_seq_len": CONTEXT, "n_heads": n, "d_model": n * h, **more
        },
        n=st.integers(1, 7),
        h=st.sampled_from([7, 8]),
        n_layers=st.integers(1, 3),
        layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
        attn_config=st.fixed_dictionaries(
            {},
            optional={
                "clip_qkv": st.sampled_from([None, 0.5, 2.0]),
                "softmax_scale": st.sampled_from([None, 0.2]),
            },
        ),
        tie_word_embeddings=st.booleans(),
    ),
    quiet=("wte",),
)  # fmt: skip
