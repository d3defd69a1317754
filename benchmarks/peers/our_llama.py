"""Training steps of a llama preset: takes a step for each line of standard input, and prints its seconds.

Arguments: preset, characters, texts, tokens of a text, threads, and 1 for compiled regions. It imports the
library only, so that PYTHONPATH can name an earlier version of it.
"""

import sys
import tempfile
import time
from pathlib import Path

from glassformer import machine
from glassformer.naming import preset
from glassformer.training.loop import begin, one_step, warm_up
from glassformer.training.request import prepare_run
from glassformer.training.state import Training

name = sys.argv[1]
vocab, batch, context, threads, compiled = map(int, sys.argv[2:])
machine.apply(machine.settings("cpu", "float32", threads=threads))
with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "text.txt"
    text.write_text("".join(chr(48 + i) for i in range(vocab)) * 4000, encoding="utf-8")
    recipe = {"tokens": 10**8, "batch_size": batch, "context": context, "device": "cpu", "dtype": "float32",
              "compile": bool(compiled), "threads": threads}  # fmt: skip
    request = prepare_run(preset(name), str(text), recipe, tokenizer="char")
machine.apply(request.how)
run = Training(request)
begin(run, request, ())
warm_up(run)
for _ in sys.stdin:
    began = time.perf_counter()
    one_step(run)
    print(time.perf_counter() - began, flush=True)
