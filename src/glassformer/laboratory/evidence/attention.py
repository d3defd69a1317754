"""Attention: what it computes, its kernels and windows, and how many heads share keys and values."""

import math

import torch
from torch import Tensor

from glassformer.introspection import capture
from glassformer.laboratory.evidence.bench import POOL, TINY_CONTEXT, Bench
from glassformer.laboratory.evidence.claim import Claim, credit, undecidable
from glassformer.laboratory.evidence.contrast import LONG, SHORT, Gap, contrast
from glassformer.laboratory.evidence.figure import Figure, Outcome, exact, sampled
from glassformer.laboratory.evidence.stored import quoted
from glassformer.laboratory.evidence.timing import MODEL as TIMED
from glassformer.laboratory.evidence.timing import (
    Pair,
    Passes,
    Race,
    Work,
    attention,
    decoding,
    each,
    races,
    recomputing,
    training,
)
from glassformer.laboratory.uptraining import KEPT, MODEL, WAYS, Curve, UptrainingPlan, all_uptrained, base, gaps, tiny
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape
from glassformer.parts.kernel import AttentionCall, Auto, Kernel, Naive, Sdpa
from glassformer.parts.kernel.banded import Banded
from glassformer.parts.mixer.performer import orthogonal_features
from glassformer.parts.visibility import Bidirectional, Causal, SlidingWindow


def softmax_stable(bench: Bench) -> Outcome:
    large, tolerance = 200.0, 1e-6
    x = torch.tensor([0.0, 1.0, 2.0])
    shifted = (x + large - (x + large).max()).exp()
    plain = x.exp() / x.exp().sum()
    overflowed = (x + large).exp() / (x + large).exp().sum()
    figures = (
        exact("change by a shift of 200, largest subtracted", float((shifted / shifted.sum() - plain).abs().max()),
              most=tolerance, published=0),
        exact("numbers that are left without the subtraction", int(overflowed.isfinite().sum()), most=0, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size="three scores, fp32", sure=f"to {tolerance:g}")


def score_variance(bench: Bench) -> Outcome:
    widths, keys, draws, tolerance = (16, 64, 256, 1024), 64, 8, 0.05
    pairs, made = bench.scaled(4096, 256), torch.Generator().manual_seed(0)

    def scores(d: int) -> torch.Tensor:
        q, k = (torch.randn(pairs, d, generator=made) for _ in range(2))
        return (q * k).sum(1)

    def entropy(d: int, scale: float) -> float:
        """Returns the entropy of attention of a random query over `keys` random keys, relative to that of uniform
        attention."""
        q, k = torch.randn(64, d, generator=made), torch.randn(keys, d, generator=made)
        p = (q @ k.T * scale).softmax(-1).clamp_min(1e-30)
        return float(-(p * p.log()).sum(-1).mean()) / math.log(keys)

    ratios = [float(scores(d).var()) / d for d in widths for _ in range(draws)]
    scaled = [float((scores(d) / math.sqrt(d)).var()) for d in widths for _ in range(draws)]
    near = {"least": 1 - tolerance, "most": 1 + tolerance, "published": 1.0}
    widest = widths[-1]
    figures = (
        sampled("variance of q k over d", ratios, **near),
        sampled("variance of q k / sqrt(d)", scaled, **near),
        sampled(f"entropy of a pattern, d = {widest:,}, scaled", [entropy(widest, widest**-0.5) for _ in range(draws)],
                "of the most"),
        sampled("the same, not scaled", [entropy(widest, 1.0) for _ in range(draws)], "of the most", most=0.25),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"normal queries and keys, d = {widths[0]} to {widest:,}",
                   sure=f"{draws} draws of {pairs:,} pairs for each width, intervals of 95 %")  # fmt: skip


def dictionary_lookup(bench: Bench) -> Outcome:
    entries, width, sharp, tolerance = 64, 64, 1e4, 1e-5
    made = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(entries, width, generator=made), dim=-1)
    values = torch.randn(entries, width, generator=made)
    asked = keys + 0.3 * torch.randn(entries, width, generator=made) / width**0.5
    best = values[(asked @ keys.T).argmax(-1)]

    def answers(sharpness: float) -> torch.Tensor:
        q, k, v = (x[None, :, None] for x in (asked, keys, values))
        return Naive()(AttentionCall(q, k, v, Bidirectional(), scale=sharpness))[0, :, 0]

    figures = (
        exact("difference from the value of the nearest key, temperature 1e-4",
              float((answers(sharp) - best).abs().max()), most=tolerance, published=0),
        exact("the same, temperature 1", float((answers(1.0) - best).abs().max())),
        exact("difference from the mean value, temperature 1e6",
              float((answers(1e-6) - values.mean(0)).abs().max()), most=tolerance, published=0),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{entries} keys of {width} values, fp32", sure=f"to {tolerance:g}")


def dictionary_size(bench: Bench) -> Outcome:
    widths, draws = (8, 16, 24, 32), 8
    entries, made = bench.scaled(4096, 128), torch.Generator().manual_seed(0)
    margins: dict[int, list[float]] = {}
    for d in widths:
        for _ in range(draws):
            keys = torch.nn.functional.normalize(torch.randn(entries, d, generator=made), dim=-1)
            close = (keys @ keys.T).fill_diagonal_(-1)
            margins.setdefault(d, []).append(1 - float(close.max(-1).values.mean()))
    narrow, wide = widths[0], widths[-1]
    needed = [math.log(entries / 0.01) / margin for margin in margins[wide]]
    growth = [b / a for a, b in zip(margins[narrow], margins[wide], strict=True)]
    figures = (
        *(sampled(f"margin of the right key, d = {d}", values) for d, values in margins.items()),
        sampled(f"margin at d = {wide} over that at d = {narrow}", growth, least=2.0),
        sampled(f"sharpness that leaves 1 % to the others, d = {wide}", needed),
    )
    return Outcome(
        figures=figures, size=f"{entries:,} random keys of length 1", sure=f"{draws} draws, intervals of 95 %"
    )


def low_rank_scores(bench: Bench) -> Outcome:
    tokens, widths = 128, (8, 32)
    made = torch.Generator().manual_seed(0)
    figures = []
    for width in widths:
        q, k = (torch.randn(tokens, width, generator=made, dtype=torch.float64) for _ in range(2))
        scores = q @ k.T
        figures += [
            exact(f"rank of the scores of a head of {width}", int(torch.linalg.matrix_rank(scores)), most=width,
                  published=width),
            exact(f"rank of its pattern, of {tokens}",
                  int(torch.linalg.matrix_rank((scores / width**0.5).softmax(-1)))),
        ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{tokens} tokens, fp64", sure="numerical rank",
                   notes=("The softmax raises the rank: the bound is on scores, not on patterns.",))  # fmt: skip


def held(patterns: Tensor) -> Tensor:
    """Returns how much of attention patterns (..., n, n) low-rank matrices capture, (...): the sum of the largest
    quarter of the singular values over the sum of all."""
    values = torch.linalg.svdvals(patterns.double())
    return values[..., : values.shape[-1] // 4].sum(-1) / values.sum(-1)


def shares(model: Model, tokens: Tensor) -> Tensor:
    """Returns the share of the singular values' sum that the largest quarter has (`held`), for the pattern of each
    head, (layers, heads), averaged over texts."""
    model.eval()
    found = capture(model, tokens, ["layers.*.mixer.pattern"])
    return torch.stack([held(pattern).mean(0) for pattern in found.values()])


def low_rank_patterns(bench: Bench) -> Outcome:
    model, texts, context = "llama@1m", 8, bench.scaled(256, TINY_CONTEXT)
    trained, drawn, least = [], [], []
    for seed in bench.runs(3):
        run = bench.train(model, SHORT, seed, 256)
        ids = bench.text.prepared.validation.tokens[: texts * context].astype("int64")
        tokens = torch.from_numpy(ids).view(texts, context)
        found = shares(run.model, tokens)
        trained.append(float(found.mean()))
        least.append(float(found.min()))
        drawn.append(float(shares(run.config.build(seed=seed), tokens).mean()))
    figures = (
        sampled("share of the first quarter of singular values, trained", trained, least=0.9, published=0.9),
        sampled("the same of the head that has least", least),
        sampled("the same before training", drawn),
    )
    return Outcome(
        figures=figures,
        size=f"{model}, {preset(model).n_layers} layers, {SHORT:,} tokens, {texts} texts of {context} characters",
        sure=f"{len(trained)} seeds, intervals of 95 %",
        notes=("The source studies a bidirectional encoder: patterns here are triangular, and their diagonal "
               "gives them full rank.",),
    )  # fmt: skip


def performer_features(bench: Bench) -> Outcome:
    width, features, groups, off = 16, (16, 64, 256, 1024, 4096), 5, 0.1
    # length of q and of k, times d^-1/4: the kernel is then near 1, and its error is that of the features
    length = 0.35
    draws = bench.scaled(200, 20)
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(width, generator=made, dtype=torch.float64) for _ in range(2))
    q, k = length * q / q.norm() * width**0.25, length * k / k.norm() * width**0.25
    kernel = math.exp(float(q @ k))
    both = float((q + k).square().sum())
    lemma = math.exp(both) * kernel**2 * (1 - math.exp(-both))

    def estimate(w: torch.Tensor) -> float:
        phi = torch.exp(w @ q - q.square().sum() / 2) * torch.exp(w @ k - k.square().sum() / 2)
        return float(phi.mean())

    slopes, ratios, better = [], [], []
    for group in range(groups):
        errors = {}
        for m in features:
            random = torch.randn(draws, m, width, generator=made, dtype=torch.float64)
            errors[m] = sum((estimate(w) - kernel) ** 2 for w in random) / draws
            ratios.append(errors[m] * m / lemma)
        drawn = (orthogonal_features(draws * group + i, 0, features[0], width) for i in range(draws))
        better.append(sum((estimate(w) - kernel) ** 2 for w in drawn) / draws / errors[features[0]])
        x, y = ([math.log(one) for one in ones] for ones in (features, errors.values()))
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slopes.append(
            sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
        )
    figures = (
        sampled("slope of log error in log features", slopes, least=-1 - off, most=-1 + off, published=-1),
        sampled("squared error over Lemma 2's", ratios, least=1 - off, most=1 + off, published=1),
        sampled("squared error of orthogonal features over random ones", better, most=1),
    )
    return Outcome(figures=figures, size=f"d = {width}, {features[0]} to {features[-1]:,} features",
                   sure=f"{groups} times {draws} draws, intervals of 95 %")  # fmt: skip


def flash_exact(bench: Bench) -> Outcome:
    heads, width, tolerance = 4, 32, 1e-5
    s = bench.scaled(1024, 64)
    made = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, s, heads, width, generator=made) for _ in range(3)]

    def run(kernel: Kernel) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        z = kernel(AttentionCall(q, k, v, Causal()))
        return [z.detach(), *torch.autograd.grad(z.square().sum(), (q, k, v))]

    wanted = run(Naive())
    figures = []
    for name, kernel in (("torch's fused kernel", Sdpa()), ("our blocks", Banded())):
        found = run(kernel)
        output = float((found[0] - wanted[0]).abs().max())
        gradient = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[1:], wanted[1:], strict=True))
        figures += [
            exact(f"largest difference of outputs, {name}", output, most=tolerance, published=0),
            exact(f"largest difference of gradients over the largest, {name}", gradient, most=tolerance, published=0),
        ]
    return Outcome(figures=tuple(figures), size=f"{s} tokens, {heads} heads of {width}, fp32", sure=f"to {tolerance:g}")


def kept(kernel: Kernel, s: int, width: int = 16) -> int:
    """Returns the bytes of distinct tensors that autograd keeps of one call of an attention kernel with 2 heads and `s`
    tokens."""
    q, k, v = (torch.randn(1, s, 2, width, requires_grad=True) for _ in range(3))
    seen: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        z = kernel(AttentionCall(q, k, v, Causal()))
    del z
    return sum(seen.values())


def flash_memory(bench: Bench) -> Outcome:
    short, long, tolerance = 512, 2048, 0.1
    figures = []
    for name, kernel, wanted in (("all scores", Naive(), 2.0), ("a fused kernel", Sdpa(), 1.0)):
        found = math.log(kept(kernel, long) / kept(kernel, short)) / math.log(long / short)
        figures.append(exact(f"exponent of the bytes that {name} keeps", found, least=wanted - tolerance,
                             most=wanted + tolerance, published=wanted))  # fmt: skip
    saved = kept(Naive(), long) / kept(Sdpa(), long)
    figures.append(exact(f"times less at {long:,} tokens", saved))
    return Outcome(figures=tuple(figures), size=f"{short:,} to {long:,} tokens, 2 heads of 16, fp32",
                   sure=f"bytes that autograd keeps, counted; within {tolerance:g}")  # fmt: skip


def flash(scale: int) -> tuple[Passes, Passes]:
    tokens = 2048 // scale
    return attention(Naive(), Causal(), tokens), attention(Auto(), Causal(), tokens)


flash_times = races(
    Race("forward pass, all scores over blocks", each(Passes.forward, flash), least=3.0, published=3.6),
    Race("backward pass, all scores over blocks", each(Passes.backward, flash), least=3.0, published=3.4),
)


def flash_table(bench: Bench) -> Outcome:
    """Measures time and memory of forward and backward passes of attention with and without FlashAttention, and the
    longest text that fits the memory taken by all attention scores of 2,048 tokens."""
    tokens, width = bench.scaled(2048, 64), 64
    times, memory = flash_times(bench), kept(Naive(), tokens, width)
    longest = tokens * memory // kept(Sdpa(), tokens, width)
    while kept(Sdpa(), longest, width) > memory:
        longest -= tokens // 16
    figures = (
        exact("bytes kept for gradients, all scores over a fused kernel", memory / kept(Sdpa(), tokens, width),
              least=3.5, published=3.9),
        exact("longest text in the memory of all scores, over theirs", longest / tokens, least=4.0, published=4.0),
    )  # fmt: skip
    return times.model_copy(update={"figures": (*times.figures, *figures)})


def window(scale: int) -> tuple[Passes, Passes]:
    tokens, window = 4096, 1024
    whole, part = Causal(), SlidingWindow(window // scale)
    return attention(Auto(), whole, tokens // scale), attention(Auto(), part, tokens // scale)


def transfers(tokens: int, width: int, held: int) -> tuple[int, int]:
    """Counts the elements that forward attention of one head moves between large and fast memory: with all scores
    written and read again, and by the loops of FlashAttention (2205.14135, algorithm 1) with room for `held` values in
    the fast memory."""
    scores = tokens * tokens
    plain = 3 * tokens * width + scores + 2 * scores + scores + tokens * width
    keys = held // (4 * width)
    queries = min(keys, width)
    moved = 0
    for k in range(0, tokens, keys):
        moved += 2 * width * min(keys, tokens - k)  # a block of keys and values is read once
        for q in range(0, tokens, queries):
            rows = min(queries, tokens - q)
            moved += rows * (2 * width + 2) + rows * (width + 2)  # q, z, sums, maxima are read; z, sums, maxima written
    return plain, moved


def flash_traffic(bench: Bench) -> Outcome:
    tokens, width, held, tolerance = 4096, 64, 32768, 0.1
    plain, tiled = transfers(tokens, width, held)
    twice = transfers(2 * tokens, width, held)[1], transfers(tokens, width, 2 * held)[1]
    figures = (
        exact("exponent of the values moved in tokens", math.log2(twice[0] / tiled), least=2 - tolerance,
              most=2 + tolerance, published=2),
        exact("exponent of the values moved in the room of the fast memory", math.log2(twice[1] / tiled),
              least=-1 - tolerance, most=-1 + tolerance, published=-1),
        exact("values moved, all scores over blocks", plain / tiled, least=1.0),
        exact("values moved, all scores over blocks, at 1,024 tokens",
              transfers(1024, width, held)[0] / transfers(1024, width, held)[1], least=1.0),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{tokens:,} tokens, a head of {width}, room for {held:,} values",
                   sure="counted over the loops of algorithm 1")  # fmt: skip


def scores_in_memory(bench: Bench) -> Outcome:
    """Counts the attention scores of one layer that a capture returns for short texts, and extrapolates to longer texts
    by the law that they follow."""
    heads, short, tolerance = 32, (64, 128), 0.0
    model = preset(f"gpt2@0.3m+heads={heads}+d_model={8 * heads}+layers=1+vocab_size=64+context=128").build(seed=0)
    counts = []
    for tokens in short:
        seen = capture(model, torch.zeros(1, tokens, dtype=torch.int64), "layers.0.mixer.pattern")
        counts.append(seen["layers.0.mixer.pattern"].numel())
    law = [count - heads * tokens * tokens for count, tokens in zip(counts, short, strict=True)]
    mebibytes = {tokens: 4 * heads * tokens * tokens / 2**20 for tokens in (1024, 2048, 4096, 8192)}
    figures = (
        exact("scores counted less heads times tokens squared", sum(map(abs, law)), most=tolerance, published=0),
        exact("scores at 2,048 tokens", heads * 2048 * 2048, least=134e6, most=135e6, published=134e6),
        exact("memory at 2,048 tokens", mebibytes.pop(2048), "MiB", least=512, most=512, published=512),
        *(exact(f"memory at {tokens:,} tokens", size, "MiB") for tokens, size in mebibytes.items()),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"one layer of {heads} heads, fp32, one text", sure="counted")


def cache_is_faster(scale: int) -> tuple[Work, Work]:
    before, tokens = 256 // scale, 8
    return recomputing(before, tokens), decoding("", before, tokens)


TWO_PERCENT = math.log(1.02)
"""Change of the loss in nats that is 2 % of perplexity."""


def training_with(change: str) -> Pair:
    """Returns two pieces of work to time: a training step of a model with 12 KV heads, and one with a change of
    these."""
    return lambda scale: (training("+mha", 512 // scale), training(change, 512 // scale))


def decoding_with(change: str) -> Pair:
    """Returns two pieces of work to time: decoding after 2,048 tokens of a model with 12 KV heads, and of one with a
    change of these."""
    return lambda scale: (decoding("+mha", 2048 // scale), decoding(change, 2048 // scale))


heads_times = races(
    Race("a token with 12 KV heads over one with 4", decoding_with("+gqa:4"), least=1.2, published=1.3),
    Race("a token with 12 KV heads over one with 1", decoding_with("+mqa"), least=1.4, published=1.5),
    Race("a step with 12 KV heads over one with 4", training_with("+gqa:4"), least=1.05, published=1.1),
    Race("a step with 12 KV heads over one with 1", training_with("+mqa"), least=1.1, published=1.2),
)


def heads_table(bench: Bench) -> Outcome:
    """Measures the cache, inference and training of models with 12, 4 and 1 KV heads, and quotes the loss that sharing
    KV heads costs."""
    times, shape = heads_times(bench), Shape(s=1, t=2048, phase="decode")
    whole = preset(f"{TIMED}+mha").costs(shape).state_bytes
    caches = (
        exact(f"cache with {heads} of 12 KV heads", preset(TIMED + change).costs(shape).state_bytes / whole,
              least=published - 0.01, most=published + 0.01, published=published)
        for heads, change, published in ((4, "+gqa:4", 0.33), (1, "+mqa", 0.08))
    )  # fmt: skip
    losses = quoted("shared-keys-cost-little")
    notes = ("Losses are those of claim shared-keys-cost-little, at two and one of four KV heads.",) if losses else ()
    return times.model_copy(update={"figures": (*caches, *times.figures, *losses), "notes": notes})


def uptraining_repairs(bench: Bench) -> Outcome:
    close = 0.02  # nats: the largest gap that counts as closed
    plan = UptrainingPlan(tokens=1_000_000, steps=12, every=12)
    plan = tiny(plan) if bench.tiny else plan
    curves: list[Curve] = []
    seeds = bench.runs(3)
    for seed in seeds:
        name = f"uptraining-{plan.tokens}-{seed}"
        run = base(bench.text.prepared, bench.folder.with_name(POOL) / name, plan, seed)
        curves += all_uptrained(run, bench.text.prepared, bench.folder, plan, seeds=[seed])
    single = {way: gaps(curves, "mqa", way) for way in WAYS}
    before, after = 0, plan.steps

    def worse(one: str, other: str) -> Figure:
        pairs = zip(single[one][after], single[other][after], strict=True)
        return sampled(f"one head, {one} less {other}, after", [a - b for a, b in pairs], "nats", least=0.0)

    figures = [
        worse("first", "mean"), worse("new", "first"),
        sampled("gap of two heads from their means, after", gaps(curves, "gqa:2", "mean")[after], "nats", most=close),
        *(sampled(f"gap of one head, {way}, {when}", single[way][at], "nats")
          for way in WAYS for when, at in (("before", before), ("after", after))),
        sampled("loss with all four heads, after", [c.losses[after] for c in curves if c.way == KEPT], "nats"),
    ]  # fmt: skip
    return Outcome(
        figures=tuple(figures),
        size=f"{MODEL}, {plan.tokens:,} tokens and {plan.steps} steps more ({plan.share:.0%}), 4 heads to 2 and 1",
        sure=f"{len(seeds)} seeds, each with a separate base, intervals of 95 %",
    )


LENGTH = 24
"""Tokens that `largest_difference` reads at once and one after the other."""


@torch.no_grad()
def largest_difference(name: str) -> float:
    """Returns the largest difference between the logits that model `name` gives for a text read at once and read token
    by token."""
    model = preset(f"{name}+vocab_size=64+context={LENGTH}").build(seed=0).eval()
    tokens = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    state = model.init_state(1, LENGTH, torch.float32)
    cached = torch.cat([model(tokens[:, i : i + 1], state) for i in range(LENGTH)], dim=1)
    return float((whole - cached).abs().max())


def cached_decoding(bench: Bench) -> Outcome:
    models, tolerance = ("gpt2@1m", "llama@1m+gqa:2", "mamba@1m"), 1e-4
    figures = [exact(f"largest difference of logits, {name}", largest_difference(name), most=tolerance, published=0)
               for name in models]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{', '.join(models)}, {LENGTH} tokens, fp32", sure=f"to {tolerance:g}")


CLAIMS = [
    Claim(
        name="softmax-stable", kind="exact", minutes=0.01,
        statement="Subtracting the largest score changes no softmax and keeps it from overflowing.",
        source=credit("first-lesson"), published="equal", size="any",
        measure=softmax_stable,
    ),
    Claim(
        name="score-variance", kind="measured", minutes=0.05,
        statement="Unscaled scores of independent queries and keys have variance d, and their softmax saturates.",
        source="1706.03762, section 3.2.1", published="variance d, and 1 when divided by sqrt(d)", size="any",
        measure=score_variance,
    ),
    Claim(
        name="dictionary-lookup", kind="exact", minutes=0.01,
        statement="As its temperature goes to 0, attention gives the value of the nearest key, and to infinity their "
        "mean.",
        source=credit("mathematics"), published="the argmax, and the mean", size="any",
        measure=dictionary_lookup,
    ),
    Claim(
        name="dictionary-size", kind="measured", minutes=0.1,
        statement="The width of a head limits how many keys it tells apart: the margin of the right one grows with d.",
        source=credit("mathematics") + "; concentration of random directions",
        published="grows with d",
        size="any",
        measure=dictionary_size,
    ),
    Claim(
        name="low-rank-scores", kind="exact", minutes=0.01,
        statement="The scores of a head have at most the rank of its width.",
        source="2002.07028, theorem 1", published="at most d_head", size="any",
        measure=low_rank_scores,
    ),
    Claim(
        name="low-rank-patterns", kind="scoped", minutes=3,
        statement="The patterns of trained attention are nearly of low rank: a quarter of their singular values has "
        "nine tenths of the sum.",
        source="2006.04768, section 3 and figure 1",
        published="about 0.9, read off a figure, for 128 of 512 in RoBERTa",
        size="1M parameters, 400k tokens",
        measure=low_rank_patterns,
    ),
    Claim(
        name="linformer-quality", kind="undecidable", minutes=0,
        statement="Linformer with 128 projected keys reads 512 tokens as well as RoBERTa.",
        source="2006.04768, section 5", published="k = 128 near RoBERTa",
        size="a pretrained RoBERTa, months of one processor",
        measure=undecidable("The claim is about fine-tuned scores of pretrained encoders of 110M parameters."),
    ),
    Claim(
        name="performer-features", kind="measured", minutes=0.3,
        statement="The squared error of positive random features is that of Lemma 2, falls as 1/m, and is less if "
        "they are orthogonal.",
        source="2009.14794, lemma 2 and theorem 2", published="slope -1; less", size="d = 16",
        measure=performer_features,
    ),
    Claim(
        name="flash-exact", kind="exact", minutes=0.05,
        statement="FlashAttention computes attention exactly, in outputs and gradients.",
        source="2205.14135, theorem 1", published="no approximation", size="any",
        measure=flash_exact,
    ),
    Claim(
        name="flash-memory", kind="exact", minutes=0.05,
        statement="FlashAttention's memory grows linearly with the text, where plain attention's grows with its "
        "square.",
        source="2205.14135, section 3", published="exponents 1 and 2", size="512 to 2,048 tokens",
        measure=flash_memory,
    ),
    Claim(
        name="blocks-are-faster", kind="measured", minutes=1,
        statement="At 2,048 tokens attention in blocks takes a third of the time of plain attention in each pass and a "
        "quarter of its memory, and reads four times the text in the memory of plain attention.",
        source=credit("architecture") + "; 2205.14135, section 4",
        published="forward 3.6, backward 3.4, memory 3.9 times less, text 4 times, on a GPU",
        size="2,048 tokens, 16 heads of 64",
        measure=flash_table,
    ),
    Claim(
        name="flash-traffic", kind="exact", minutes=0.01,
        statement="FlashAttention moves fewer values between large and fast memory than plain attention: their number "
        "grows with the square of the text over the room of the fast memory.",
        source="2205.14135, theorem 2", published="n^2 d^2 / M, against n d + n^2", size="any",
        measure=flash_traffic,
    ),
    Claim(
        name="scores-in-memory", kind="exact", minutes=0.01,
        statement="The scores of 32 heads at 2,048 tokens are 134 million numbers, 512 MiB in fp32, in each layer.",
        source=credit("architecture"), published="134M numbers, 512 MB", size="any",
        measure=scores_in_memory,
    ),
    Claim(
        name="flash-speed-on-gpu", kind="undecidable", minutes=0,
        statement="FlashAttention is three times as fast as plain attention on a GPU.",
        source="2205.14135, abstract", published="3x on GPT-2 at 1,024 tokens", size="a GPU",
        measure=undecidable(
            "The claim is about an A100, and the ratio depends on its memory: a processor decides nothing about it."
        ),
    ),
    Claim(
        name="window-costs-little", kind="scoped", minutes=6,
        statement="A window of a quarter of the context costs less than 2 % of perplexity.",
        source="2004.05150, section 4", published="little", size="1M parameters, 400k tokens",
        measure=contrast(Gap("llama@1m", "llama@1m+window:64", most=TWO_PERCENT), tokens=SHORT),
    ),
    Claim(
        name="window-is-faster", kind="measured", minutes=1,
        statement="A window of a quarter of 4,096 tokens makes attention four times as fast.",
        source="2004.05150", published="4 times", size="4,096 tokens, 16 heads of 64",
        measure=races(
            Race("attention to all before over a window of 1,024", each(Passes.both, window), least=4.0, published=4.0),
        ),
    ),
    Claim(
        name="shared-keys-cost-little", kind="scoped", minutes=18,
        statement="With two KV heads instead of four, or with one, perplexity rises by less than 2 %.",
        source=credit("architecture") + "; 2305.13245, table 1", published="less than 2 %",
        size="1M parameters, 1.5M tokens",
        measure=contrast(
            *(Gap("llama@1m+mha", f"llama@1m{change}", most=TWO_PERCENT) for change in ("+gqa:2", "+mqa")),
            tokens=LONG,
            allow_unmatched=True,
            notes=["Nothing pays for the weights of the keys and values that are left out."],
        ),
    ),
    Claim(
        name="grouped-trains-faster", kind="measured", minutes=1,
        statement="With 4 of 12 KV heads a training step takes a tenth less time.",
        source=credit("architecture"), published="1.1 times as fast",
        size="4 layers of width 768",
        measure=races(
            Race("a step with 12 KV heads over one with 4", training_with("+gqa:4"), least=1.1, published=1.1),
        ),
    ),
    Claim(
        name="multi-query-decodes-faster", kind="measured", minutes=1,
        statement="With one KV head a token after 2,048 takes 30 to 40 % less time.",
        source=credit("architecture") + "; 1911.02150", published="30 to 40 % less",
        size="4 layers of width 768",
        measure=races(
            Race("a token with 12 KV heads over one with 1", decoding_with("+mqa"), least=1 / 0.7, published=1.54),
        ),
    ),
    Claim(
        name="heads-table", kind="measured", minutes=3,
        statement="With 4 of 12 KV heads, and with one, the cache takes 33 and 8 %, a token 1.3 and 1.5 times less "
        "time and a training step 1.1 and 1.2 times less, at less than 2 % of perplexity.",
        source=credit("architecture"), published="33 and 8 %; 1.3 and 1.5; 1.1 and 1.2; less than 2 %",
        size="4 layers of width 768",
        measure=heads_table,
    ),
    Claim(
        name="uptraining-repairs", kind="scoped", minutes=15,
        statement="Fewer KV heads lose least if they are means of the former ones, more as the first of "
        "these, most as new ones; a twentieth of the training closes the gap of grouped heads.",
        source="2305.13245, sections 2.1 and 3.3, table 1 and figure 4",
        published="47.1 with 8 groups against 47.2 with all heads; mean, first, random in this order",
        size="1M parameters, 1M tokens",
        measure=uptraining_repairs,
    ),
    Claim(
        name="cache-is-faster", kind="measured", minutes=1,
        statement="After 256 tokens, decoding from a cache takes less than a quarter of the time of computing all keys "
        "and values again for each token.",
        source=credit("core"), published="O(L n d) for a token, against O(L n^2 d)", size="4 layers of width 768",
        measure=races(Race("8 tokens computed again over 8 from a cache", cache_is_faster, least=4.0)),
    ),
    Claim(
        name="cached-decoding", kind="exact", minutes=0.05,
        statement="Decoding from a cache gives the logits of the whole forward pass.",
        source=credit("mathematics"), published="equal", size="any",
        measure=cached_decoding,
    ),
]  # fmt: skip
