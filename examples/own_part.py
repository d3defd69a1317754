"""A custom part (parts/snake.py) against a baseline, on three seeds."""

import argparse

from parts import snake  # noqa: F401  # makes its short name known

import glassformer as gf

if __name__ == "__main__":
    found = gf.compare(
        ["llama@0.3m", "llama@0.3m+snake"], argparse.__file__, steps=4, batch_size=2, context=32, seeds=3
    )
    print(found.to_pandas()[["name", "seed", "loss"]])
    print(found)
