"""A custom callback that logs to a list; `gf.Callback` lists the other moments of a run."""

import argparse

import glassformer as gf


class Curve(gf.Callback):
    def __init__(self):
        self.losses = []

    def after_update(self, run, moment):
        self.losses.append((moment.step, moment.loss))


curve = Curve()
gf.train("llama@0.3m", argparse.__file__, steps=4, batch_size=4, context=64, callbacks=[curve])
for step, loss in curve.losses:
    print(f"step {step}: loss {loss:.3f}")
