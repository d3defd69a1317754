"""Predicted beside measured steps of training and decoding of sampled models on this machine.

Models of 1M to 60M are drawn by a fixed seed from families and changes, none of them among the references that the
profile is fitted on. A step is forward, backward, clipping and AdamW, eager, as `glassformer plan --here` predicts it;
a step of decoding writes a token to each sequence at the end of the context.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from glassformer import machine
from glassformer.naming import preset
from glassformer.planning import here
from glassformer.planning.processor import shortest

FAMILIES = ("gpt2", "llama", "bloom", "falcon")
CHANGES = ("", "", "+mqa", "+window:64", "+qknorm", "+rmsnorm", "+parallel")
SIZES = {"1m": 2048, "3m": 2048, "10m": 1024, "30m": 512, "60m": 256}
"""Most tokens of a step by size, so that all take seconds at most."""
ASKED = 0.15
UNTIMED = ("name", "parameters", "batch", "context")


def sampled(count: int = 20, seed: int = 0) -> list[tuple[str, int, int]]:
    """(expression, batch, context) of so many models, of all sizes alike."""
    drawn = random.Random(seed)
    found: list[tuple[str, int, int]] = []
    while len(found) < count:
        size = list(SIZES)[len(found) % len(SIZES)]
        context = drawn.choice((64, 128, 256))
        batch = drawn.choice([b for b in (1, 2, 4, 8, 16) if b * context <= SIZES[size]] or [1])
        vocabulary = drawn.choice((256, 1024, 4096))
        name = f"{drawn.choice(FAMILIES)}@{size}{drawn.choice(CHANGES)}+vocab_size={vocabulary}+context=256"
        found.append((name, batch, context))
    return found


def row(name: str, batch: int, context: int, by: here.Profile) -> dict[str, Any]:
    """What is planned."""
    config = preset(name)
    planned = here.here(config, batch, context, by)
    assert planned.token_seconds is not None
    return {
        "name": name, "parameters": config.num_params(), "batch": batch, "context": context,
        "step": float("inf"), "planned_step": planned.step_seconds,
        "token": float("inf"), "planned_token": planned.token_seconds,
    }  # fmt: skip


def run(rounds: int = 1, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    """Every model once in each round: of all bursts of a step the shortest counts, as for the profile."""
    machine.keep_freed_memory()
    by = here.profile(again=True, threads=threads)
    torch.set_num_threads(by.threads)
    rows = [row(*one, by) for one in sampled(2 if quick else 20)]
    for turn in range(rounds):
        for one in rows:
            step, token = here.steps(preset(one["name"]), one["batch"], one["context"], by.dtype)
            found = shortest({"step": step, "token": token}, rounds=8, least=0.02)
            one.update({what: min(one[what], seconds) for what, seconds in found.items()})
            if not quiet:
                print(turn, one["name"], *(f"{1e3 * one[what]:.2f}" for what in one if what not in UNTIMED), flush=True)
    result = {"machine": machine.machine(), "threads": torch.get_num_threads(), "dtype": by.dtype, "rows": rows}
    return {**result, "table": markdown(result)}


def within(result: dict[str, Any], what: str) -> int:
    return sum(abs(one[f"planned_{what}"] / one[what] - 1) <= ASKED for one in result["rows"])


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| model | parameters | batch x context | step, ms | planned | error | token, ms | planned | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in result["rows"]:
        cells = []
        for what in ("step", "token"):
            measured, planned = one[what], one[f"planned_{what}"]
            cells += [f"{1e3 * measured:.2f}", f"{1e3 * planned:.2f}", f"{planned / measured - 1:+.0%}"]
        size = f"{one['batch']} x {one['context']}"
        lines.append(f"| `{one['name']}` | {one['parameters']:,} | {size} | {' | '.join(cells)} |")
    count = len(result["rows"])
    told = (
        f"Within {ASKED:.0%}: {within(result, 'step')} of {count} steps, {within(result, 'token')} of {count} tokens. "
        f"{result['machine']['processor']}, {result['threads']} threads, products in {result['dtype']}, "
        f"torch {result['machine']['torch']}."
    )
    return "\n".join([told, "", *lines])
