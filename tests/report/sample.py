"""A realistic results.json: four arms; one diverges, another cannot read longer contexts."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from glassformer.report import render
from glassformer.runs.results import Results
from glassformer.runs.verdicts import verdicts

HOSTILE = "</script><script>alert(1)</script>"
_SAMPLE = (
    " the function returns a list of the values that are not in the mapping.\n\n"
    "   >>> sorted(d.items())\n   [('a', 1), ('b', 2)]\n\nThe *key* argument must be a callable which takes "
    "one argument and is used to compare the elements of the sequence."
)


def attention(position: dict | None = None, **other: Any) -> dict[str, Any]:
    return {
        "kind": "attention",
        "n_heads": 6,
        "n_kv_heads": 6,
        "head_dim": 64,
        "bias": False,
        "position": position,
        "visibility": {"kind": "causal"},
        **other,
    }


def config(mixer: dict, ffn: dict, norm: dict, wiring: str = "pre", position: dict | None = None) -> dict[str, Any]:
    block = {"mixer": mixer, "ffn": ffn, "norm": norm, "residual": {"kind": wiring}}
    return {
        "vocab_size": 4096,
        "d_model": 384,
        "max_len": 256,
        "embedding": {"kind": "embedding", "dropout": 0.0, "position": position},
        "stack": [{"repeat": 6, "blocks": [block]}],
        "final_norm": norm,
        "head": {"kind": "head", "tied": True},
    }


LAYERNORM = {"kind": "layernorm", "eps": 1e-5, "bias": True}
RMSNORM = {"kind": "rmsnorm", "eps": 1e-5}
MLP = {"kind": "mlp", "hidden": 1536, "activation": "gelu", "bias": True}
GLU = {"kind": "glu", "hidden": 1024, "activation": "silu", "bias": False}
ROTARY = {"kind": "rotary", "base": 10000.0}
LEARNED = {"kind": "learned", "max_len": 256}

# name, config, final loss, tokens/s, penalty at 2x 4x 8x (None if it cannot)
_ARMS: list[tuple[str, dict, float, float, tuple[float, ...] | None]] = [
    ("gpt2@10m", config(attention(), MLP, LAYERNORM, position=LEARNED), 4.121, 7100.0, None),
    ("gpt2@10m+rope", config(attention(ROTARY), MLP, LAYERNORM), 4.052, 6850.0, (0.09, 0.61, 1.32)),
    ("llama@10m", config(attention(ROTARY), GLU, RMSNORM), 3.969, 6480.0, (0.07, 0.55, 1.20)),
    (
        "gpt2@10m+alibi+parallel",
        config(attention({"kind": "alibi"}), MLP, LAYERNORM, "parallel"),
        4.085,
        7420.0,
        (-0.03, -0.05, -0.04),
    ),
]


def _curve(final: float, tokens: int, steps: int, rng: random.Random) -> list[list[float]]:
    curve = []
    for step in range(1, steps + 1):
        share = step / steps
        loss = final + (8.32 - final) * math.exp(-5.2 * share**0.62) + rng.gauss(0, 0.07) * (0.4 + 0.6 * (1 - share))
        curve.append([round(tokens * share), round(loss, 5)])
    return curve


def _run(name: str, tree: dict, final: float, speed: float, penalty: tuple | None, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{name}/{seed}")
    final += rng.gauss(0, 0.012)
    tokens, steps = 1_000_000, 244
    curve = _curve(final - 0.05, tokens, steps, rng)
    speed *= 1 + rng.gauss(0, 0.01)
    validation = [[t, round(final + (8.32 - final) * math.exp(-5.2 * (t / tokens) ** 0.62), 4)]
                  for t in range(100_000, tokens + 1, 100_000)]  # fmt: skip
    loss = validation[-1][1] = round(final, 4)
    longer: list[dict[str, Any]] = [{"context": 256, "loss": loss}]
    for i, context in enumerate((512, 1024, 2048)):
        if penalty is None:
            reason = "cannot: learned positions end at 256"
            longer.append({"context": context, "loss": None, "reason": reason})
        else:
            longer.append({"context": context, "loss": round(loss + penalty[i], 4)})
    return {
        "name": name,
        "seed": seed,
        "parameters": 10_646_784 + len(name) * 1024,
        "flops_per_token": 6.9e7,
        "config": copy.deepcopy(tree),
        "train": {
            "steps": steps,
            "tokens": tokens,
            "seconds": tokens / speed,
            "tokens_per_second": speed,
            "peak_memory_bytes": int(1.42e9 + 3e5 * speed),
            "learning_rate": 1e-3,
            "curve": curve,
            "curve_seconds": [[round(t / speed, 2), y] for t, y in curve],
            "validation_curve": validation,
            "validation_tokens": 16_384,
        },
        "validation": {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss * 0.4312,
            "tokens": 96_000,
        },
        "generation": {
            "tokens_per_second": 96.0,
            "seconds_per_token": 7e-5 * speed / 48,
            "state_bytes_per_token": 9216,
            "sample": {"prompt": "If the argument is omitted,", "text": _SAMPLE},
        },
        "extrapolation": longer,
        "dynamics": {},
        "status": "ok",
        "error": None,
    }


def _diverged(run: dict[str, Any]) -> dict[str, Any]:
    """The run after its loss ran away at a third of the way."""
    train = run["train"]
    for key in ("curve", "curve_seconds"):
        kept = train[key][:80]
        train[key] = [[x, y + (0 if i < 66 else (i - 65) ** 1.5 * 0.35)] for i, (x, y) in enumerate(kept)]
    train["curve"].append([train["curve"][-1][0] + 4096, None])
    train["validation_curve"] = train["validation_curve"][:3]
    run["validation"] = run["generation"] = None
    run["extrapolation"] = []
    run["status"], run["error"] = (
        "diverged",
        "The loss was not a number at step 81; try a lower learning rate.",
    )
    return run


def _verdict(runs: list[dict[str, Any]], a: str, b: str) -> dict[str, Any]:
    """b minus a over paired seeds, with the interval of Student's t for three seeds."""
    losses = {name: [run["validation"]["loss"] for run in runs if run["name"] == name] for name in (a, b)}
    gaps = [y - x for x, y in zip(losses[a], losses[b], strict=True)]
    difference, half = statistics.fmean(gaps), 4.303 * statistics.stdev(gaps) / math.sqrt(len(gaps))
    verdict = "no difference shown"
    if abs(difference) > half:
        verdict = "a better" if difference > 0 else "b better"
    return {
        "a": a,
        "b": b,
        "metric": "validation.loss",
        "difference": difference,
        "low": difference - half,
        "high": difference + half,
        "confidence": 0.95,
        "seeds": len(gaps),
        "verdict": verdict,
    }


def results(seeds: int = 3, diverge: bool = True) -> dict[str, Any]:
    """A comparison as `glassformer compare` leaves it."""
    runs = [_run(*arm, seed) for arm in _ARMS for seed in range(seeds)]  # type: ignore[arg-type]
    if diverge:
        tree = config(attention(), MLP, LAYERNORM, "post", LEARNED)
        runs += [_diverged(_run("gpt2@10m+post", tree, 4.4, 7000.0, None, seed)) for seed in range(seeds)]
    names = [arm[0] for arm in _ARMS]
    command = f"glassformer compare {' '.join(names)} --data python-docs --tokens 1M"
    return {
        "schema": 1, "created": "2026-11-21T08:00:00+00:00",
        "command": command + (f" --seeds {seeds}" if seeds > 1 else ""),
        "again": {"seeds": f"{command} --seeds 3", "tune": f"{command} --tune", "watch": f"{command} --watch"},
        "data": {"name": "python-docs", "fingerprint": "sha256:5f0c1b", "documents": 812, "bytes": 3_400_000,
                 "train_tokens": 1_050_000, "validation_tokens": 96_000,
                 "tokenizer": {"kind": "bpe", "vocab_size": 4096}},
        "budget": {"match": "tokens", "tokens": 1_000_000, "flops": None, "minutes": None, "seeds": seeds,
                   "batch_size": 16, "context": 256, "learning_rates": dict.fromkeys(names, 1e-3),
                   "notes": ["Every arm saw the same batches in the same order (paired seeds).",
                             "Each learning rate is the best of 5 tried on 100k tokens."]},
        "machine": {"processor": "Intel Xeon (Sapphire Rapids)", "cores": 2, "memory_bytes": 16_000_000_000,
                    "device": "cpu", "dtype": "bfloat16", "threads": 2, "compile": False, "torch": "2.13.0",
                    "python": "3.11.7", "glassformer": "0.1.0", "platform": "Linux 6.1 x86_64"},
        "runs": runs,
        "verdicts": [_verdict(runs, a, b) for a, b in combinations(names, 2)] if seeds > 1 else [],
    }  # fmt: skip


def hostile() -> dict[str, Any]:
    """Returns results with markup in every place that holds untrusted text."""
    made = results(1)
    for run in made["runs"][:2]:
        run["name"] += HOSTILE
        run["generation"]["sample"] = {
            "prompt": f"<b>{HOSTILE}",
            "text": f"\"'&{HOSTILE}<!--\x00\u2028",
        }
    made["runs"][-1]["error"] = HOSTILE
    made["runs"][0]["config"]["stack"][0]["blocks"][0]["ffn"]["kind"] = HOSTILE
    made["title"] = f'{HOSTILE}" onload="alert(1)'
    made["command"] = f"glassformer compare {HOSTILE}"
    made["data"]["name"] = made["machine"]["processor"] = made["budget"]["match"] = HOSTILE
    made["budget"]["notes"] = [HOSTILE]
    made["created"] = HOSTILE
    made["verdicts"] = [{
        "a": HOSTILE, "b": HOSTILE, "metric": "validation.loss", "difference": 0.1, "low": None, "high": None,
        "confidence": 0.95, "seeds": 3, "verdict": "no difference shown", "terms": HOSTILE, "unit": HOSTILE,
    }]  # fmt: skip
    made["data"][HOSTILE] = HOSTILE
    return made


def bare(runs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Results with these runs and nothing else."""
    return {"schema": 1, "data": {}, "budget": {}, "runs": list(runs)}


def rendered(tree: dict[str, Any]) -> str:
    """The page of a results.json with this content."""
    return render(Results.of(tree))


def judged(tree: dict[str, Any], looks: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the runs with the verdicts of the judge."""
    return tree | {"verdicts": [one.to_dict() for one in verdicts(Results.of(tree).runs, looks=looks)]}
