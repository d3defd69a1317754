"""Claims about positions: encodings, and how far beyond the training context a model reads."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from glassformer.laboratory.evidence.bench import DATA, TINY_CONTEXT, Bench, Compared
from glassformer.laboratory.evidence.claim import Claim, credit
from glassformer.laboratory.evidence.contrast import SHORT, Gap, contrast, lost, outcome
from glassformer.laboratory.evidence.figure import Figure, Outcome, exact, sampled
from glassformer.laboratory.evidence.timing import Race, Work, races, training
from glassformer.machine import settings
from glassformer.naming import preset
from glassformer.naming.loading import load
from glassformer.naming.models import changed
from glassformer.parts.forward_pass import Pass
from glassformer.parts.position import Rotary
from glassformer.parts.position.alibi import alibi_slopes
from glassformer.parts.position.scaling import (
    LinearScalingConfig,
    NtkScalingConfig,
    RotaryScalingConfig,
    YarnScalingConfig,
)
from glassformer.parts.position.sinusoidal import sinusoid
from glassformer.text import prepare
from glassformer.training import evaluate

CONTEXT = 64
"""Training context in tokens; evaluation is on longer texts."""
ARM = {
    "alibi": "gpt2@1m+alibi",
    "rope": "gpt2@1m+rope",
    "nope": "gpt2@1m+nope",
    "sinusoidal": "gpt2@1m+sinusoidal+embedding.scale=11.3",
    "learned": "gpt2@1m",
}
"""Encoding -> expression; sinusoids with the embedding multiplied by sqrt(d), as published."""


def trained(bench: Bench, names: Sequence[str]) -> Compared:
    return bench.compare([ARM[name] for name in names], SHORT, context=CONTEXT)


def rise(found: Compared, name: str, times: int, **bounds: float | None) -> Figure:
    """Returns, as a measured value, the increase of an encoding's loss from the training context to `times` times that
    context."""
    values = found.rise(ARM[name], times)
    label = f"rise of the loss at {times} times the context, {name}"
    return found.judged(sampled(label, values, "nats", **bounds), ARM[name]) if values else lost(found, [ARM[name]])


def further(found: Compared, more: str, less: str, times: int) -> Figure:
    """Returns, as a measured value with the bound that it is positive, how much more the loss of the encoding `more`
    rises than that of `less` from the training context to `times` times it."""
    pairs = list(zip(found.rise(ARM[more], times), found.rise(ARM[less], times), strict=False))
    if not pairs:
        return lost(found, [ARM[more], ARM[less]])
    name = f"rise at {times} times the context, {more} less {less}"
    return found.judged(sampled(name, [a - b for a, b in pairs], "nats", least=0.0), ARM[more], ARM[less])


def slopes_are_powers(bench: Bench) -> Outcome:
    figures = []
    for heads in (8, 16):
        wanted = [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
        error = max(abs(a / b - 1) for a, b in zip(alibi_slopes(heads), wanted, strict=True))
        figures.append(exact(f"largest relative error of {heads} slopes", error, most=1e-12, published=0))
    ratio = alibi_slopes(16)[0] ** 2 / alibi_slopes(8)[0]
    figures.append(exact("first slope of 16 heads, squared, over that of 8", ratio, least=1 - 1e-12, most=1 + 1e-12))
    return Outcome(figures=tuple(figures), size="8 and 16 heads", sure="to 1e-12")


def extrapolates(bench: Bench, name: str) -> Outcome:
    found = trained(bench, [name])
    return outcome(found, [rise(found, name, 8, most=0.02, published=0.0), rise(found, name, 4)])


def nope_extrapolates(bench: Bench) -> Outcome:
    found = trained(bench, ["nope", "rope"])
    return outcome(found, [further(found, "rope", "nope", 8), rise(found, "nope", 8), rise(found, "rope", 8)])


def positions_order(bench: Bench) -> Outcome:
    perplexity = {"alibi": 1.03, "rope": 1.2, "sinusoidal": 2.5}
    """Encoding -> perplexity at four times the context divided by that at the context, as in the guide."""
    found = trained(bench, list(perplexity))
    figures = [further(found, "rope", "alibi", 4), further(found, "sinusoidal", "rope", 4)]
    rises = (rise(found, name, 4).model_copy(update={"published": math.log(times)})
             for name, times in perplexity.items())  # fmt: skip
    return outcome(found, [*figures, *rises])


def sinusoid_linear(bench: Bench) -> Outcome:
    length, width, k, tolerance = 128, 64, 17, 1e-4
    encoding = sinusoid(torch.arange(length + k), width, 10000.0).double()
    here, there = encoding[:length], encoding[k:]
    shift = torch.linalg.lstsq(here, there, driver="gelsd").solution
    dots = encoding @ encoding.T
    spread = max(float(dots.diagonal(i).max() - dots.diagonal(i).min()) for i in range(len(dots) - 1))
    figures = (
        exact(f"error of PE(p + {k}) as a matrix times PE(p)", float((here @ shift - there).abs().max()),
              most=tolerance, published=0),
        exact("spread of PE(p) PE(p + k) over p, relative", spread / (width / 2), most=tolerance, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{length} positions of {width} values", sure=f"to {tolerance:g}")


PLAIN, SCALED = "gpt2@1m+sinusoidal+embedding.scale=1", "gpt2@1m+sinusoidal+embedding.scale=11.3"


def rotary_relative(bench: Bench) -> Outcome:
    length, width, tolerance = 256, 64, 1e-4
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, width, generator=made).expand(1, length, 1, width) for _ in range(2))
    turned_q, turned_k = Rotary(width)(q, k, Pass(0, length))
    # an identical query and an identical key at all positions
    scores = torch.einsum("bsnh,btnh->st", turned_q, turned_k)
    spread = max(float(scores.diagonal(i).max() - scores.diagonal(i).min()) for i in range(1 - length, length))
    size = float(scores.abs().max())
    figure = exact("spread of scores of one distance over the largest score", spread / size, most=tolerance,
                   published=0)  # fmt: skip
    return Outcome(figures=(figure,), size=f"{length} positions, fp32", sure=f"to {tolerance:g}")


def rotary_pairings(bench: Bench) -> Outcome:
    length, width, tolerance = 64, 32, 1e-5
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, 1, width, generator=made) for _ in range(2))
    order = torch.arange(width).view(2, -1).T.flatten()  # half pairs, interleaved
    half = torch.einsum("bsnh,btnh->st", *Rotary(width)(q, k, Pass(0, length)))
    turned = Rotary(width, pairing="interleaved")(q[..., order], k[..., order], Pass(0, length))
    unordered = torch.einsum("bsnh,btnh->st", *Rotary(width, pairing="interleaved")(q, k, Pass(0, length)))
    interleaved = torch.einsum("bsnh,btnh->st", *turned)
    size = float(half.abs().max())
    figures = (
        exact("largest difference of scores, values permuted", float((half - interleaved).abs().max()) / size,
              most=tolerance, published=0),
        exact("the same, values as they are", float((half - unordered).abs().max()) / size),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{length} positions, fp32, over the largest score", sure=f"to {tolerance:g}")


def rotary_cost(scale: int) -> tuple[Work, Work]:
    tokens = 512
    return training("", tokens // scale), training("+nope", tokens // scale)


def interpolation_identities(bench: Bench) -> Outcome:
    width, context, factor, tolerance = 64, 2048, 8.0, 1e-6
    ctx = preset(f"llama@10m+context={context}").ctx

    def frequencies(config: RotaryScalingConfig | None) -> tuple[torch.Tensor, float]:
        rotary = Rotary(width, scaling=config.build(ctx) if config else None)
        return rotary.frequencies(context).double(), rotary.scaling.magnitude

    plain, _ = frequencies(None)
    linear, _ = frequencies(LinearScalingConfig(factor=factor))
    ntk, _ = frequencies(NtkScalingConfig(factor=factor))
    same, _ = frequencies(YarnScalingConfig(factor=1.0))
    _, magnitude = frequencies(YarnScalingConfig(factor=factor))
    wanted = 0.1 * math.log(factor) + 1
    near = {"least": 1 - tolerance, "most": 1 + tolerance, "published": 1.0}
    figures = (
        exact("interpolation: all frequencies over 1/8 of what they were", float((linear / plain).mean() * factor),
              **near),
        exact("NTK-aware: the slowest frequency over 1/8 of what it was", float(ntk[-1] / plain[-1]) * factor, **near),
        exact("NTK-aware: the fastest frequency over what it was", float(ntk[0] / plain[0]), **near),
        exact("YaRN of factor 1: largest change of a frequency", float((same / plain - 1).abs().max()),
              most=0.0, published=0),
        exact("YaRN of factor 8: cos and sin are multiplied by", magnitude, least=wanted - tolerance,
              most=wanted + tolerance, published=wanted),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"heads of {width}, {factor:g} times {context:,} tokens",
                   sure=f"to {tolerance:g}, fp32")  # fmt: skip


FACTOR = 4
"""Multiple of the training context at which two encodings are compared."""
FURTHER = (2, 4, 8)
"""Multiples of the training context at which all encodings are compared."""
EXTENDED = {
    "": "plain", "interpolate": "interpolation", "ntk": "NTK-aware", "dynamic_ntk": "dynamic NTK", "yarn": "YaRN",
}  # fmt: skip
"""Short name that extends the context -> its name; "" extends nothing."""
Losses = dict[tuple[int, str], list[float]]
"""(multiple of the context, short name) -> loss by seed."""


def losses(bench: Bench, words: Sequence[str], further: Sequence[int] = (FACTOR,)) -> Losses:
    """Trains models on a context; returns their losses on multiples of it, without further training, for each context
    extension in `words`."""
    context = bench.scaled(CONTEXT, TINY_CONTEXT)
    found: Losses = {(times, word): [] for times in further for word in words}
    for seed in bench.runs(3):
        run = bench.train("llama@1m", SHORT, seed, CONTEXT)
        for times, word in found:
            model = changed(run.config, [f"{word}:{times}"] if word else []).build(seed=0)
            model.load_state_dict(run.model.state_dict())
            scored = evaluate(model, bench.text.prepared, times * context, run.how, bench.scaled(65536, 64))
            found[times, word].append(scored["loss"])
    return found


def less(found: Losses, times: int, worse: str, better: str) -> Figure:
    """Returns, as a measured value with the bound that it is positive, the loss with the context extension `worse`
    minus that with `better`, at `times` times the context."""
    gaps = [a - b for a, b in zip(found[times, worse], found[times, better], strict=True)]
    name = f"loss at {times} times the context, {EXTENDED[worse]} less {EXTENDED[better]}"
    return sampled(name, gaps, "nats", least=0.0)


def told(found: Losses) -> list[Figure]:
    return [
        sampled(f"loss at {times} times the context, {EXTENDED[word]}", values, "nats")
        for (times, word), values in found.items()
    ]


def difference(bench: Bench, worse: str, better: str) -> Outcome:
    found = losses(bench, [worse, better])
    return Outcome(
        figures=(less(found, FACTOR, worse, better), *told(found)),
        size=f"llama@1m, {SHORT:,} tokens of context {CONTEXT}, read at {FACTOR * CONTEXT}",
        sure=f"{len(found[FACTOR, worse])} seeds, intervals of 95 %",
    )  # fmt: skip


def all_extended(bench: Bench) -> Outcome:
    """Measures how each context extension (interpolation, NTK, ...) changes the loss beyond the training context,
    against plain positions."""
    found = losses(bench, list(EXTENDED), FURTHER)
    judged = [less(found, times, "", word) for times in FURTHER for word in EXTENDED if word]
    return Outcome(
        figures=(*judged, *told(found)),
        size=f"llama@1m, {SHORT:,} tokens of context {CONTEXT}, read at 2, 4 and 8 times that",
        sure=f"{len(found[FACTOR, ''])} seeds, intervals of 95 %",
        notes=("Published for LLaMA 7B and a context of 2,048; extension-of-smollm2 asks it of published weights.",),
    )  # fmt: skip


def smollm2_extended(bench: Bench) -> Outcome:
    """Measures the loss of SmolLM2-135M with each context extension on one window of each length, which leaves the
    verdict open."""
    made = load("smollm2")
    context = bench.scaled(made.config.context, TINY_CONTEXT)
    text = prepare(bench.text.given or DATA, made.tokenizer or "byte")
    figures: list[Figure] = []
    plain: dict[int, float] = {}
    for times in FURTHER:
        for word, name in EXTENDED.items():
            model = changed(made.config, [f"{word}:{times}"] if word else []).build(seed=0)
            model.load_state_dict(made.model.state_dict())
            length = times * context
            loss = evaluate(model.eval(), text, length, settings(), max_tokens=length, batch=1)["loss"]
            plain.setdefault(times, loss)
            figures.append(exact(f"loss at {times} times the context, {name}", loss, "nats"))
            if word:
                label = f"loss at {times} times the context, plain less {name}"
                figures.insert(0, sampled(label, [plain[times] - loss], "nats", least=0.0))
    return Outcome(
        figures=tuple(figures),
        size=f"SmolLM2-135M, one window of {', '.join(str(times * context) for times in FURTHER)} tokens",
        sure="one window of each length",
    )  # fmt: skip


@torch.no_grad()
def change(name: str) -> float:
    """Returns how much a model's outputs change when its tokens are permuted: the largest difference, relative to the
    largest output."""
    length, words = 32, 64
    model = preset(f"{name}+vocab_size={words}+context={length}").build(seed=0).eval()
    made = torch.Generator().manual_seed(0)
    tokens, order = torch.randint(0, words, (1, length), generator=made), torch.randperm(length, generator=made)
    plain, permuted = model(tokens)[:, order], model(tokens[:, order])
    return float((plain - permuted).abs().max() / plain.abs().max())


def permutation_equivariance(bench: Bench) -> Outcome:
    tolerance = 1e-4
    figures = (
        exact("change of outputs, bidirectional and without positions", change("gpt2@1m+nope+bidirectional"),
              most=tolerance, published=0),
        exact("the same under a causal mask", change("gpt2@1m+nope")),
        exact("the same with learned positions", change("gpt2@1m+bidirectional")),
    )  # fmt: skip
    return Outcome(figures=figures, size="gpt2@1m+nope, 32 tokens, fp32", sure=f"to {tolerance:g}")


CLAIMS = [
    Claim(
        name="alibi-slopes", kind="exact", minutes=0.01,
        statement="The slopes of ALiBi's n heads are the powers 2^(-8 i / n).",
        source="2108.12409, section 3", published="1/2, 1/4, ..., 1/256 for 8 heads", size="any",
        measure=slopes_are_powers,
    ),
    Claim(
        name="alibi-extrapolates", kind="scoped", minutes=2,
        statement="Trained on short texts, a model with ALiBi reads texts eight times as long without a loss.",
        source="2108.12409, section 4", published="no loss to twice the length, and none beyond",
        size="1M parameters, 400k tokens of 64 characters",
        measure=partial(extrapolates, name="alibi"),
    ),
    Claim(
        name="rope-extrapolates", kind="scoped", minutes=2,
        statement="Rotary positions extrapolate without limit.",
        source=credit("architecture"), published="without limit",
        size="1M parameters, 400k tokens of 64 characters",
        measure=partial(extrapolates, name="rope"),
    ),
    Claim(
        name="nope-extrapolates", kind="scoped", minutes=4,
        statement="Beyond its context a decoder without positions loses less than one with rotary positions.",
        source="2305.19466, section 4", published="less", size="1M parameters, 400k tokens of 64 characters",
        measure=nope_extrapolates,
    ),
    Claim(
        name="positions-order", kind="scoped", minutes=6,
        statement="At four times the context ALiBi loses least, rotary positions more and absolute ones most.",
        source=credit("architecture"), published="perplexity +3 %, +20 %, +150 %",
        size="1M parameters, 400k tokens of 64 characters",
        measure=positions_order,
    ),
    Claim(
        name="sinusoid-linear", kind="exact", minutes=0.01,
        statement="PE(p + k) is a linear map of PE(p), and PE(p) PE(p + k) depends only on k.",
        source="1706.03762, section 3.5", published="exact", size="any",
        measure=sinusoid_linear,
    ),
    Claim(
        name="sinusoids-need-scale", kind="scoped", minutes=6,
        statement="Sinusoidal positions need an embedding that is multiplied by sqrt(d).",
        source="1706.03762, section 3.4", published="multiplied", size="1M parameters, 400k tokens",
        measure=contrast(Gap(SCALED, PLAIN, least=0.05), tokens=SHORT),
    ),
    Claim(
        name="rotary-relative", kind="exact", minutes=0.01,
        statement="With rotary positions a score depends only on the distance of query and key.",
        source="2104.09864, section 3.2", published="only m - n matters", size="any",
        measure=rotary_relative,
    ),
    Claim(
        name="rotary-pairings", kind="exact", minutes=0.01,
        statement="Turning neighbours and turning halves of a head are the same up to a permutation of its values.",
        source=credit("first-lesson"), published="equal up to a permutation",
        size="any",
        measure=rotary_pairings,
    ),
    Claim(
        name="rotary-costs-little", kind="measured", minutes=1,
        statement="Rotary positions add 1 to 3 % to the time of a training step.",
        source="2104.09864, as EleutherAI measured it", published="1 to 3 %", size="4 layers of width 768",
        measure=races(Race("a step with rotary positions over one without", rotary_cost, most=1.03, published=1.02)),
    ),
    Claim(
        name="interpolation-identities", kind="exact", minutes=0.01,
        statement="Interpolation divides every rotary frequency by s, NTK-aware scaling only the slowest, and YaRN "
        "sharpens logits by (0.1 ln s + 1)^2.",
        source="2306.15595; 2309.00071", published="1/s; 1/s and 1; 1.2079 for s = 8", size="any",
        measure=interpolation_identities,
    ),
    Claim(
        name="interpolation-reads-longer", kind="scoped", minutes=3,
        statement="Untuned, interpolated positions read four times the context at a lower loss than plain ones.",
        source="2306.15595, section 2", published="lower", size="1M parameters, 400k tokens of 64 characters",
        measure=partial(difference, worse="", better="interpolate"),
    ),
    Claim(
        name="ntk-reads-longer", kind="scoped", minutes=3,
        statement="Untuned, NTK-aware positions read four times the context at a lower loss than interpolated ones.",
        source="2309.00071, section 3", published="lower", size="1M parameters, 400k tokens of 64 characters",
        measure=partial(difference, worse="interpolate", better="ntk"),
    ),
    Claim(
        name="yarn-reads-longer", kind="scoped", minutes=3,
        statement="Untuned, YaRN reads four times the context at a lower loss than NTK-aware positions.",
        source="2309.00071, table 1", published="lower", size="1M parameters, 400k tokens of 64 characters",
        measure=partial(difference, worse="ntk", better="yarn"),
    ),
    Claim(
        name="extension-beats-plain", kind="scoped", minutes=5,
        statement="Untuned, interpolation, NTK-aware scaling, dynamic NTK and YaRN each read 2, 4 and 8 times the "
        "context at a lower loss than plain rotary positions.",
        source="2306.15595, section 2; 2309.00071, section 3", published="lower",
        size="1M parameters, 400k tokens of 64 characters",
        measure=all_extended,
    ),
    Claim(
        name="extension-of-smollm2", kind="scoped", minutes=240,
        statement="Untuned, SmolLM2-135M reads 2, 4 and 8 times its 8,192 tokens at a lower loss with each of the four "
        "than with plain rotary positions.",
        source="2306.15595, section 2; 2309.00071, section 3", published="lower",
        size="135M parameters, windows of 16,384 to 65,536 tokens",
        measure=smollm2_extended, needs="a text of 650,000 tokens or more (a tenth is held out)",
    ),
    Claim(
        name="permutation-equivariance", kind="exact", minutes=0.05,
        statement="Without positions and without a mask, permuting the tokens permutes what a transformer makes of "
        "them.",
        source="1912.10077, section 2", published="exact", size="any",
        measure=permutation_equivariance,
    ),
]  # fmt: skip
