"""A checkpoint in, changed, and out again: weights that fit are kept, and `transformers` loads the folder."""

import argparse
import tempfile
from pathlib import Path

import glassformer as gf

folder = Path(tempfile.mkdtemp())
run = gf.train(
    "llama@0.3m+gqa:2", argparse.__file__, steps=4, batch_size=4, context=64, tokenizer="byte", out=folder / "run"
)
llm = gf.load(f"{folder}/run+gqa:1")  # each KV head is the mean of those it replaces
print("regrouped:", llm.regrouped, "| newly initialised:", list(llm.fresh))

gf.save(llm.model, llm.tokenizer, folder / "hf")
print(gf.convert(folder / "hf", folder / "model.gguf"))
print(sorted(file.name for file in (folder / "hf").iterdir()))
