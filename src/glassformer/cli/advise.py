"""The decision guide in the terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from glassformer.cli.show import output, ruled, size
from glassformer.laboratory.advice import Goal, advise


def show_advice(goal: Goal, context: int, memory: float, claims: str | None, model: str, as_json: bool) -> None:
    """Options, their costs, the evidence for them, and what is not known."""
    found = advise(goal, context, memory, claims, model)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(f"{model}, {context:,} tokens, {size(memory)} of memory: {goal}", style="bold", highlight=False)
    console.print(f"evidence: {found['claims']}", style="dim", highlight=False, soft_wrap=True)
    for question in found["questions"]:
        console.print(f"\n{question['asks']}", style="bold", highlight=False)
        console.print(_options(question))
        for one in question["evidence"]:
            of = f"{one['sure']}; {one['measured']}, {one['processor']}"
            console.print(f"  {one['claim']}: {one['statement']} {one['words']} ({of})", highlight=False)
        for words in question["undecided"]:
            console.print(f"  not known: {words}", style="dim", highlight=False)


def _options(question: dict[str, Any]) -> Table:
    table = ruled()
    for heading in ("option", "change", "weights, bf16", "state", "fits with weights in", "what speaks for it"):
        table.add_column(heading)
    for one in question["options"]:
        speaks = ", ".join(one["for"]) or "nothing that is measured"
        table.add_row(one["name"], one["change"], size(one["weight_bytes"]["bfloat16"]), size(one["state_bytes"]),
                      ", ".join(one["fits"]) or "none", speaks)  # fmt: skip
    return table
