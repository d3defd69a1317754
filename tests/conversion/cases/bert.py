from hypothesis import strategies as st

from tests.conversion.cases.base import Case, encoder

CASE = Case(
    "BertForMaskedLM",
    encoder(type_vocab_size=st.integers(1, 3)),
    quiet=("word_embeddings", "position_embeddings", "token_type"),
    classes=("BertForMaskedLM", "BertModel", "BertForSequenceClassification"),
)
