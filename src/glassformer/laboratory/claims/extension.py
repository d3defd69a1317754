"""A model that was trained on short texts, read at longer ones with its rotary frequencies stretched."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.laboratory.claims.bench import TINY_CONTEXT, Bench
from glassformer.laboratory.claims.claim import Figure, Outcome, sampled
from glassformer.training import evaluate

MODEL, TOKENS, CONTEXT, FACTOR, SEEDS = "llama@1m", 400_000, 64, 4, 3


def losses(bench: Bench, kinds: list[str | None]) -> dict[str | None, list[float]]:
    """Loss at FACTOR times the context by the kind of scaling, None being none, one for each seed; weights stay."""
    context = bench.scaled(CONTEXT, TINY_CONTEXT)
    found: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for seed in range(bench.seeds or bench.scaled(SEEDS, 2)):
        run = bench.train(MODEL, TOKENS, seed, CONTEXT)
        for kind in kinds:
            model = stretched(run.config, kind, context).build(seed=0)
            model.load_state_dict(run.model.state_dict())
            scored = evaluate(model, bench.text.prepared, FACTOR * context, run.how, bench.scaled(65536, 64))
            found[kind].append(scored["loss"])
    return found


def stretched(config: ModelConfig, kind: str | None, context: int) -> ModelConfig:
    """The config with this scaling of its rotary positions."""
    tree: dict[str, Any] = config.to_dict()
    for stage in tree["stack"]:
        for block in stage["blocks"]:
            scaling = {"kind": kind, "factor": float(FACTOR), "original_context": context}
            block["mixer"]["position"]["scaling"] = scaling if kind else None
    return ModelConfig.from_dict(tree)


def difference(bench: Bench, worse: str | None, better: str | None) -> Outcome:
    """How much higher the loss is with one scaling than with the other; the claim is that it is higher."""
    found = losses(bench, [worse, better])
    names = {None: "none", "linear": "interpolation", "ntk": "NTK-aware", "yarn": "YaRN"}
    gaps = [a - b for a, b in zip(found[worse], found[better], strict=True)]
    figures: list[Figure] = [
        sampled(f"loss at {FACTOR} times the context, {names[worse]} less {names[better]}", gaps, "nats", least=0.0),
        *(sampled(f"loss with {names[kind]}", values, "nats") for kind, values in found.items()),
    ]
    return Outcome(
        figures=tuple(figures), size=f"{MODEL}, {TOKENS:,} tokens of context {CONTEXT}, read at {FACTOR * CONTEXT}",
        sure=f"{len(gaps)} seeds, intervals of 95 %",
    )  # fmt: skip
