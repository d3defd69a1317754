"""Embedding, classification and search of texts, and answers from an index: `gf.embed`, `gf.classify`, `gf.index`,
`gf.ask`."""

from glassformer.retrieval.answer import Answer, AnswerReply, Asker, Source, ask
from glassformer.retrieval.classifying import Classes, classify
from glassformer.retrieval.embedding import Embeddings, embed
from glassformer.retrieval.indexing import Found, Index, index
from glassformer.retrieval.marginal import marginal_nll, rag_loss
from glassformer.retrieval.passages import Passage

__all__ = [
    "Answer",
    "AnswerReply",
    "Asker",
    "Classes",
    "Embeddings",
    "Found",
    "Index",
    "Passage",
    "Source",
    "ask",
    "classify",
    "embed",
    "index",
    "marginal_nll",
    "rag_loss",
]
