from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case

CASE = Case(
    "DistilBertForMaskedLM",
    st.builds(
        lambda n, h, **more: {
            "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "n_heads": n, "dim": n * h, "pad_token_id": 0,
            **more,
        },
        n=st.integers(1, 4),
        h=st.sampled_from([6, 8]),
        n_layers=st.integers(1, 3),
        hidden_dim=st.sampled_from([28, 40]),
        activation=st.sampled_from(["gelu", "relu"]),
    ),
    quiet=("word_embeddings", "position_embeddings"),
    classes=("DistilBertForMaskedLM", "DistilBertModel"),
    first_token=1,
)  # fmt: skip
