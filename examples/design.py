"""An experiment as a value: it is checked when it is made, kept in a file, and repeated from it."""

import argparse
import tempfile
from pathlib import Path

import glassformer as gf

data = argparse.__file__  # any text file; this one is on every machine
arms = {"grouped heads": "llama@0.3m+gqa:1", "all heads": gf.preset("llama@0.3m")}
design = gf.Design.of(arms, data, steps=4, batch_size=2, context=32, seeds=2)

try:
    design.replace(seeds=0)
except gf.RequestError as problem:
    print("refused before anything is computed:", problem.field)

if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    found = gf.compare(design, out=folder)
    print(found)
    again = gf.Design.from_file(folder / "design.yaml")  # glassformer run FOLDER/design.yaml does the same
    print("the same design:", again == design, "| report:", found.report(folder / "mine.html").name)
