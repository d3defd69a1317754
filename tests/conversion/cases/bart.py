from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case

FIELDS = {
    "vocab_size": st.just(VOCAB),
    "d_model": st.sampled_from([24, 36]),
    "encoder_layers": st.integers(1, 2),
    "decoder_layers": st.integers(1, 3),
    "encoder_attention_heads": st.sampled_from([1, 2]),
    "decoder_attention_heads": st.sampled_from([2, 3]),
    "encoder_ffn_dim": st.sampled_from([16, 28]),
    "decoder_ffn_dim": st.sampled_from([20, 28]),
    "activation_function": st.sampled_from(["gelu", "relu", "swish"]),
    "max_position_embeddings": st.just(CONTEXT),
    "scale_embedding": st.booleans(),
    "decoder_start_token_id": st.just(2),
    "pad_token_id": st.just(1),
}
QUIET = ("shared", "embed_positions")
CASE = Case("BartForConditionalGeneration", st.fixed_dictionaries(FIELDS), quiet=QUIET, loud=1.0, first_token=3)
