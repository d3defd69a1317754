"""Linear attention and state space models."""

import torch

from glassformer.laboratory.copying import HELD_OUT, copying
from glassformer.laboratory.evidence.attention import LENGTH, largest_difference
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.contrast import SHORT, Gap, contrast
from glassformer.laboratory.evidence.figure import Outcome, exact, sampled
from glassformer.naming import preset
from glassformer.parts.mixer.scan import naive_scan, selective_scan


def linear_attention_state(bench: Bench) -> Outcome:
    name, tolerance = "llama@1m+linear_attention", 1e-4
    config = preset(f"{name}+vocab_size=64+context={LENGTH}")
    figures = (
        exact("largest difference of logits, at once and token by token", largest_difference(name),
              most=tolerance, published=0),
        exact("bytes of the state after 65,536 tokens over those after 256",
              config.state_bytes(65536) / config.state_bytes(256), least=1, most=1, published=1),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{name}, {LENGTH} tokens, fp32", sure=f"to {tolerance:g}")


def scan_is_recurrence(bench: Bench) -> Outcome:
    channels, states, tolerance = 16, 8, 1e-5
    made = torch.Generator().manual_seed(0)
    s = bench.scaled(512, 32)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    u, dt = draw(2, s, channels), draw(2, s, channels).sigmoid()
    a, b, c, h = -draw(states, channels).exp(), draw(2, s, states), draw(2, s, states), torch.zeros(2, states, channels)
    wanted, last = naive_scan(u, dt, a, b, c, h)
    found, state = selective_scan(u, dt, a, b, c, h)
    size = float(wanted.abs().max())
    config = preset("mamba@10m")
    figures = (
        exact("largest difference of outputs, over the largest output", float((found - wanted).abs().max()) / size,
              most=tolerance, published=0),
        exact("largest difference of the last state", float((state - last).abs().max()), most=tolerance),
        exact("bytes of the state after 65,536 tokens over those after 256",
              config.state_bytes(65536) / config.state_bytes(256), least=1, most=1, published=1),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{s} tokens, fp32; mamba@10m", sure=f"to {tolerance:g}")


def selective_copying(bench: Bench) -> Outcome:
    steps, seeds = bench.scaled(2_000, 2), bench.runs(2)
    batch, rows = bench.scaled(64, 2), bench.scaled(HELD_OUT, 8)
    models = {"mamba": "mamba+layers=2+d_model=64", "s4": "gpt2+layers=2+d_model=64+s4+ffn=none"}
    how = bench.alone(*((name, seed) for name in models for seed in seeds))
    mamba, s4 = (
        [copying(model, seed, steps, batch, rows=rows, **how(name, seed)) for seed in seeds]
        for name, model in models.items()
    )
    figures = (
        sampled("symbols right, mamba", [run.accuracy for run in mamba], least=0.95, published=0.998),
        sampled("symbols right, s4", [run.accuracy for run in s4], most=0.6, published=0.183),
    )
    return Outcome(
        figures=figures, size=f"8 of 64 tokens, width 64, 2 layers, {steps:,} steps of 64 rows",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("Published with 16 of 4,096 tokens.",),
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="linear-attention-state", kind="exact", minutes=0.05,
        statement="Transformers with linear attention are recurrences with a state of fixed size.",
        source="2006.16236, section 3.4", published="equal", size="any",
        measure=linear_attention_state,
    ),
    Claim(
        name="linear-attention-costs-loss", kind="scoped", minutes=8,
        statement="Linear attention ends at a higher loss than attention with a softmax.",
        source="2006.16236, section 4; 2102.11174", published="higher in language modelling",
        size="1M parameters, 400k tokens",
        measure=contrast(Gap("llama@1m", "llama@1m+linear_attention", least=0.0), tokens=SHORT),
    ),
    Claim(
        name="scan-is-recurrence", kind="exact", minutes=0.05,
        statement="Mamba's scan of a whole text is its recurrence token by token, from a state of fixed size.",
        source="2312.00752, section 3.3", published="equal; O(1) state", size="any",
        measure=scan_is_recurrence,
    ),
    Claim(
        name="selective-copying", kind="scoped", minutes=30,
        statement="A state space model whose weights depend on what it reads copies symbols from among noise; one of "
        "fixed weights does not.",
        source="2312.00752, table 1", published="99.8 % against 18.3 %", size="64 tokens, width 64",
        measure=selective_copying,
    ),
    Claim(
        name="hybrid-beats-pure", kind="scoped", minutes=15,
        statement="Three layers of Mamba-2 and one of attention end at a lower loss than either alone.",
        source="2403.19887, section 6; 2406.07887", published="lower than both", size="1M parameters, 400k tokens",
        measure=contrast(
            *(Gap("llama@1m+stack:mamba2*3,attention", pure, least=0.0) for pure in ("llama@1m+mamba2", "llama@1m")),
            tokens=SHORT,
            allow_unmatched=True,
        ),
    ),
]  # fmt: skip
