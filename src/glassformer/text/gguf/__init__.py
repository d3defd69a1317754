"""Conversion of tokenizers to and from the `tokenizer.*` metadata of a GGUF file, as llama.cpp reads it."""

from __future__ import annotations

from glassformer.text.gguf.reader import tokenizer_from_gguf
from glassformer.text.gguf.writer import tokenizer_to_gguf

__all__ = ["tokenizer_from_gguf", "tokenizer_to_gguf"]
