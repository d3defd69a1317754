from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, Case, encoder

CASE = Case(
    "RobertaForMaskedLM",
    encoder(
        type_vocab_size=st.just(1), pad_token_id=st.just(1), max_position_embeddings=st.just(CONTEXT + 2),
        hidden_act=st.just("gelu"),
    ),
    quiet=("word_embeddings", "position_embeddings", "token_type"),
    classes=("RobertaForMaskedLM", "RobertaModel"),
    first_token=2,  # that of the padding has no position
)  # fmt: skip
