"""Answers from your own texts: passages as vectors, the nearest in the prompt. Both models are trained here."""

import argparse
import tempfile
from pathlib import Path

import glassformer as gf

folder = Path(tempfile.mkdtemp())
how = {"steps": 4, "batch_size": 4, "context": 256, "tokenizer": "bpe:512"}
encoder = gf.train("bert@0.3m", argparse.__file__, objective="masked:0.15", **how).loaded
writer = gf.train("llama@0.3m", argparse.__file__, **how).loaded

index = gf.index(argparse.__file__, out=folder / "index", encoder=encoder)
answer = gf.ask("How is an option added?", index, writer, encoder=encoder, k=2, max_new_tokens=20)
print(answer.text)
for source in answer.sources:
    print(f"{source.score:.2f}  {source.document}, character {source.start:,}")
