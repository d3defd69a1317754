"""Text to tokens to batches: `prepare(data)` is the whole pipeline, each submodule a part of it.

documents, files, embedded, named, languages, catalogues, tasks, hub, corpora
                                             DATA -> Corpus: documents, streamed
data                                         all of it: Corpus -> tokens of both sides
id_files, ids                                token ids -> tokens of both sides; `read_data` is the reader of all verbs
held_out                                     Corpus -> training side, held-out side
vocabulary, subword, tokenizers, gguf        text <-> ids
chat                                         messages -> text, by the template of a checkpoint
storage, shards                              ids on disk, mapped into memory
pairs                                        a source as an encoder reads it
permutation, batches                         (seed, step, rank) -> tensors
"""

from glassformer.files import cache_folder
from glassformer.progress import OnProgress
from glassformer.text.batches import (
    Batch,
    Batches,
    EvaluationBatch,
    EvaluationWindows,
    FedBatch,
    bits_per_byte,
    evaluation_windows,
    refuse_long,
)
from glassformer.text.corpora import EMBEDDED, Corpus, Document, open_corpus
from glassformer.text.data import TextData, Tokens, choose_tokenizer, prepare, trained_tokenizer
from glassformer.text.held_out import Split, split
from glassformer.text.ids import DataLike, named_or_read, prepare_ids, read_data
from glassformer.text.shards import TokenShards, token_shards
from glassformer.text.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    IdTokenizer,
    Tokenizer,
    WordTokenizer,
    as_file,
    load_tokenizer,
    make_tokenizer,
    replace_tokenizer,
    with_special_token,
)

__all__ = [
    "BPETokenizer", "Batch", "Batches", "ByteTokenizer", "CharTokenizer", "Corpus", "DataLike", "Document",
    "EMBEDDED", "EvaluationBatch", "EvaluationWindows", "FedBatch", "FileTokenizer", "IdTokenizer", "OnProgress",
    "Split", "TextData", "TokenShards", "Tokenizer", "Tokens", "WordTokenizer", "as_file", "bits_per_byte",
    "cache_folder", "choose_tokenizer", "evaluation_windows", "load_tokenizer", "make_tokenizer", "named_or_read",
    "open_corpus", "prepare", "prepare_ids", "read_data", "refuse_long", "replace_tokenizer", "split", "token_shards",
    "trained_tokenizer", "with_special_token",
]  # fmt: skip
