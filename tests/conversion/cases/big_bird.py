from hypothesis import strategies as st

from tests.conversion.cases.base import Case, encoder

CASE = Case(
    "BigBirdForMaskedLM",
    encoder(
        type_vocab_size=st.integers(1, 2), num_labels=st.integers(2, 3), pad_token_id=st.just(0),
        use_bias=st.booleans(), rescale_embeddings=st.booleans(),
        attention_type=st.sampled_from(["original_full", "block_sparse", "block_sparse"]),
        block_size=st.integers(1, 4), num_random_blocks=st.integers(1, 2),
    ),
    quiet=("word_embeddings", "position_embeddings", "token_type"),
    classes=("BigBirdForMaskedLM", "BigBirdModel", "BigBirdForSequenceClassification"),
    first_token=1,
    unused="bert.pooler",
)  # fmt: skip
