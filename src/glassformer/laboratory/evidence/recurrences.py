"""Claims about linear attention and state space models."""

from typing import Any

import torch
from torch import Tensor

from glassformer.laboratory.copying import HELD_OUT, answered, copying, taught
from glassformer.laboratory.evidence.attention import LENGTH, largest_difference
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim, credit
from glassformer.laboratory.evidence.contrast import SHORT, Gap, contrast
from glassformer.laboratory.evidence.figure import Outcome, exact, sampled
from glassformer.laboratory.evidence.timing import Pair, Race, races, training
from glassformer.naming import preset
from glassformer.parts.mixer.scan import naive_scan, selective_scan
from glassformer.text.tasks import Induction


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


RECALL = "gpt2+layers=2+d_model=64+ffn=none+untied"
"""Expression of two layers of a mixer without FFN, so that only the mixer carries what is recalled."""
RECALLING = {"attention": "+heads=4+rope+nobias", "LSTM": "+lstm+mixer.width=35", "GRU": "+gru+mixer.width=42"}
"""Name -> change to a mixer; parameters are equal within half a per cent."""
DISTANCES = (8, 16, 24, 32)


def recurrent_recall(bench: Bench) -> Outcome:
    """Trains attention and recurrent mixers on blocks of 8 to 32 symbols that repeat, and measures the share of symbols
    recalled correctly from the second occurrence on, by block length."""
    steps, batch, rows, seeds = bench.scaled(600, 2), bench.scaled(32, 2), bench.scaled(HELD_OUT, 8), bench.runs(3)
    how = bench.alone(*((name, seed) for name in RECALLING for seed in seeds))
    figures, far = [], DISTANCES[-1]
    for name, change in RECALLING.items():
        models = [taught(RECALL + change, Induction(), seed, steps, batch, **how(name, seed)).model for seed in seeds]
        for n in DISTANCES:
            right = [answered(model, Induction(least=n, most=n), rows, first=n)[0] for model in models]
            bounds = {} if n < far else {"least": 0.9} if name == "attention" else {"most": 0.5}
            figures.append(sampled(f"symbols right, {n} tokens back, {name}", right, **bounds))
    return Outcome(
        figures=tuple(figures), size=f"blocks of 64 symbols, width 64, 2 layers, {steps:,} steps of {batch} rows",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=("A mixer has 16,384 weights as attention, 16,444 as LSTM and 16,360 as GRU.",),
    )  # fmt: skip


def reaching_back(change: str, distances: tuple[int, ...], seed: int) -> list[float]:
    """Returns how strongly outputs of a newly initialised mixer depend on an input n tokens before, |d y_n / d x_0| at
    each distance n, divided by that at the first distance; inputs are normal."""
    model = preset(f"llama@1m+layers=1{change}").build(seed=seed)
    mixer: Any = model.layers[0].mixer
    mixer, width = mixer.double(), model.config.d_model
    made = torch.Generator().manual_seed(seed)

    def size(n: int) -> Tensor:
        x = torch.randn(8, n + 1, width, generator=made, dtype=torch.float64).requires_grad_()
        y = mixer(x)[:, -1]
        probe = torch.randn(y.shape, generator=made, dtype=torch.float64)
        return torch.autograd.grad((y * probe).sum(), x)[0][:, 0].norm()

    sizes = [float(size(n)) for n in distances]
    return [one / sizes[0] for one in sizes]


def recurrent_gradients(bench: Bench) -> Outcome:
    distances, seeds = (8, 16, 32, 64), bench.runs(8)
    changes = {"LSTM": "+lstm", "GRU": "+gru", "attention": ""}
    figures = []
    for name, change in changes.items():
        found = [reaching_back(change, distances, seed) for seed in seeds]
        for i, n in enumerate(distances[1:], 1):
            least, most = (None, 1e-3) if name != "attention" else (0.05, None)
            bounds = {"least": least, "most": most} if n == distances[-1] else {}
            figures.append(
                sampled(
                    f"gradient at {n} tokens over that at {distances[0]}, {name}", [one[i] for one in found], **bounds
                )
            )
    return Outcome(
        figures=tuple(figures), size="one mixer of llama@1m with fresh weights, fp64",
        sure=f"{len(seeds)} seeds of 8 texts, intervals of 95 %",
        notes=("The LSTM's forget gates are open at first, with a bias of one; the GRU's gates are half open.",
               "Fresh attention is nearly uniform, so that its gradient falls as one over the length."),
    )  # fmt: skip


def stepping(tokens: int, rows: int) -> Pair:
    """Returns two pieces of work to time: a training step of a model with LSTMs, and one with attention of equal
    parameters."""
    return lambda scale: (
        training("+lstm+mixer.width=426", tokens // scale, rows), training("", tokens // scale, rows)
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
        name="recurrent-gradients", kind="measured", minutes=0.2,
        statement="The gradient of an RNN's last output vanishes with the distance of the input; attention reaches "
        "every input by a path of one step.",
        source=credit("first-lesson") + "; 1211.5063; 1706.03762, table 1",
        published="exponential in the distance; a path of O(1)", size="64 tokens, width 128",
        measure=recurrent_gradients,
    ),
    Claim(
        name="recurrent-recall", kind="scoped", minutes=10,
        statement="Of equal parameters, attention recalls symbols that are 32 tokens back, and an LSTM and a GRU do "
        "not.",
        source=credit("first-lesson") + "; 2402.01032", published="a fixed state forgets what is far back",
        size="two layers of width 64",
        measure=recurrent_recall,
    ),
    Claim(
        name="attention-trains-faster", kind="measured", minutes=4,
        statement="A step of training takes an RNN tens of times as long as attention of equal parameters.",
        source=credit("in-depth"), published="tens of times", size="4 layers of width 768, steps of 1,024 tokens",
        measure=races(
            *(Race(f"a step of {rows} x {tokens:,} tokens with LSTMs over one with attention", stepping(tokens, rows),
                   least=10.0, published=10.0)
              for tokens, rows in ((128, 8), (1024, 1))),
        ),
    ),
    Claim(
        name="hybrid-beats-pure", kind="scoped", minutes=15,
        statement="Three layers of Mamba-2 and one of attention end at a lower loss than either by itself.",
        source="2403.19887, section 6; 2406.07887", published="lower than both", size="1M parameters, 400k tokens",
        measure=contrast(
            *(Gap("llama@1m+stack:mamba2*3,attention", pure, least=0.0) for pure in ("llama@1m+mamba2", "llama@1m")),
            tokens=SHORT,
            allow_unmatched=True,
        ),
    ),
]  # fmt: skip
