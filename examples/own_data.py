"""Custom data: a folder of text files, JSON lines, a Hugging Face dataset on disk, token ids."""

import argparse
import json
import tempfile
from pathlib import Path

import glassformer as gf

lines = Path(argparse.__file__).read_text().splitlines()
folder = Path(tempfile.mkdtemp())
(folder / "texts").mkdir()
for n in range(3):
    (folder / "texts" / f"{n}.txt").write_text("\n".join(lines[n::3]))
(folder / "stories.jsonl").write_text("\n".join(json.dumps({"story": line}) for line in lines))
ids = (ord(character) for line in lines for character in line if character < "\x80")

data = {"folder": folder / "texts", "JSON lines": f"{folder}/stories.jsonl,column=story", "token ids": ids}
try:
    from datasets import Dataset  # pip install 'glassformer[data]'

    Dataset.from_dict({"story": lines}).save_to_disk(folder / "dataset")
    data["dataset"] = f"hf:{folder}/dataset"
except ImportError:
    print("datasets is not installed")

for name, source in data.items():
    run = gf.train("llama@0.3m", source, steps=2, batch_size=4, context=64)
    print(f"{name}: vocabulary {run.config.vocab_size}, held-out loss {run.validation['loss']:.3f}")
