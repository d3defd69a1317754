"""Every family against its published implementation: the largest relative error over tiny random models.

Shapes and options are drawn as in the tests (odd heads, groups, ties, biases, scalings, windows). Each model is saved
by `transformers`, loaded here, compared in fp32, saved here, and loaded by `transformers` again, with identical bits.
Errors are relative to the largest value: of the logits, of all gradients, and of the logits of cached decoding.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from glassformer import machine
from glassformer.conversion.families import FAMILIES


def few(count: int) -> settings:
    """Returns settings of hypothesis with `count` examples, equal at every call."""
    return settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck))  # fmt: skip


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Compares `rounds` models of each family with the published class; returns the largest errors."""
    from tests.conversion.cases import CASES
    from tests.conversion.test_parity import prove

    torch.set_num_threads(threads or 1)
    rows = []
    for name, family in FAMILIES.items():
        worst: dict[str, float] = {}

        def one(fields: dict[str, Any], seed: int, name: str = name, worst: dict[str, float] = worst) -> None:
            for what, error in prove(name, fields, seed).items():
                worst[what] = max(error, worst.get(what, 0.0))

        drawn = given(st.tuples(CASES[name].fields, st.integers(0, 1000)))(lambda case: one(*case))
        few(rounds)(drawn)()
        gguf = family.gguf.architecture if family.gguf else ""
        rows.append({"family": name, "oracle": family.architecture, "gguf": gguf, **worst})
        if not quiet:
            print(f"{name}: {worst}", file=sys.stderr)
    lines = [
        "| family | oracle | logits | gradients | cached decoding | saved and loaded | GGUF |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cached = f"{row['cached']:.1e}" if "cached" in row else "–"
        lines.append(f"| {row['family']} | {row['oracle']} | {row['logits']:.1e} | {row['gradients']:.1e} | {cached} "
                     f"| identical bits | {row['gguf'] or '–'} |")  # fmt: skip
    note = f"{rounds} models each; transformers {transformers.__version__}."
    return {"machine": machine.machine(), "rows": rows, "table": "\n".join([*lines, "", note])}
