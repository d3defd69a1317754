"""Results as tables and a plot: a loop over runs into one DataFrame."""

import argparse
import tempfile
from pathlib import Path

import matplotlib
import pandas

import glassformer as gf

matplotlib.use("agg")  # draws into files, without a screen
curves = []
for model in ("gpt2@0.3m", "llama@0.3m"):
    run = gf.train(model, argparse.__file__, steps=4, batch_size=4, context=64)
    curves.append(run.to_pandas().assign(model=model))
table = pandas.concat(curves)
print(table.groupby("model")["loss"].last())

axes = table.dropna(subset="loss").pivot(index="step", columns="model", values="loss").plot(ylabel="loss")
picture = Path(tempfile.mkdtemp(), "curves.png")
axes.figure.savefig(picture)
print(picture)
