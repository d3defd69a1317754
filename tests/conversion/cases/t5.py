from hypothesis import strategies as st

from tests.conversion.cases.base import VOCAB, Case

FIELDS = {
    "vocab_size": st.just(VOCAB),
    "d_model": st.sampled_from([15, 24]),
    "d_kv": st.sampled_from([6, 8]),
    "num_heads": st.integers(1, 3),
    "d_ff": st.sampled_from([16, 28]),
    "num_layers": st.integers(1, 2),
    "num_decoder_layers": st.integers(1, 3),
    "relative_attention_num_buckets": st.sampled_from([8, 32]),
    "relative_attention_max_distance": st.sampled_from([18, 128]),
    "layer_norm_epsilon": st.sampled_from([1e-6, 1e-3]),
    "decoder_start_token_id": st.just(0),
    "pad_token_id": st.just(0),
}
CASE = Case(
    "T5ForConditionalGeneration",
    st.fixed_dictionaries(
        {
            **FIELDS,
            "tie_word_embeddings": st.booleans(),
            "feed_forward_proj": st.sampled_from(["relu", "gated-gelu", "gated-silu", "gelu_new"]),
        }
    ),
    quiet=("shared",),
    loud=0.8,  # scores are not scaled
)
