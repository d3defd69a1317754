"""Claims about attention sinks and massive activations of a trained model, loss spikes, and activations by width."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import dynamics
from glassformer.dynamics.coord_check import coordinate_check
from glassformer.dynamics.spikes import STAYS, Spikes
from glassformer.dynamics.watch import GRADIENT_TIMES
from glassformer.introspection import capture, edit
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Outcome, Picture, curve, exact
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.naming.loading import load

TOKENS = 64
TEXTS = (
    "The river rises in the hills above the old mill and runs south for forty miles before it meets the sea. In spring "
    "the meadows along its banks are flooded, and the farmers move their cattle to higher ground. A stone bridge with "
    "seven arches carries the road to the market town, where a fair has been held every September since the first "
    "charter was granted.",
    "def area(shape):\n    kind, *sizes = shape\n    if kind == 'circle':\n        return 3.14159 * sizes[0] ** 2\n    "
    "if kind == 'rectangle':\n        return sizes[0] * sizes[1]\n    raise ValueError(kind)\n\nfor shape in "
    "[('circle', 2), ('rectangle', 3, 4)]:\n    print(shape, area(shape))\n",
    '"You are late," said the clerk without looking up. "The office closed at four, and the ledgers are already locked '
    'away." She put the parcel on his desk all the same. "Then you will have to open them again, because this has to '
    'leave with the night train, and somebody must sign for it before it does."',
    "Water boils at 100 degrees Celsius at sea level, and at about 93 degrees at a height of 2,000 metres, because the "
    "pressure of the air is lower there. Sound travels at roughly 343 metres a second in dry air at 20 degrees, four "
    "times as fast in water, and about fifteen times as fast in steel.",
)


def look(model: Model, tokens: Tensor) -> tuple[Tensor, list[dynamics.Massive], float]:
    """Runs a model on a text; returns its attention sinks' mass (l, n), the massive activations after each layer, and
    the loss."""
    seen = capture(model, tokens, ["layers.*.mixer.pattern", "layers.*.resid_post", "logits"])
    layers = range(len(model.layers))
    mass = torch.stack([dynamics.sink_mass(seen[f"layers.{layer}.mixer.pattern"]) for layer in layers])
    found = [dynamics.massive(seen[f"layers.{layer}.resid_post"]) for layer in layers]
    loss = F.cross_entropy(seen["logits"][:, :-1].flatten(0, 1), tokens[:, 1:].flatten().long())
    return mass, found, loss.item()


def attention_sinks(bench: Bench) -> Outcome:
    loaded = load("smollm2")
    assert loaded.tokenizer is not None
    texts = TEXTS[: bench.scaled(len(TEXTS), 1)]
    tokens = torch.tensor([loaded.tokenizer.encode(text)[:TOKENS].tolist() for text in texts])
    mass, found, loss = look(loaded.model, tokens)
    at = torch.cat([one.mask.nonzero() for one in found])  # (found, [text, token, feature])
    layers = [layer for layer, one in enumerate(found) if bool((one.count > 0).all())]
    held, rest = mass[[layer + 1 for layer in layers if layer + 1 < len(found)]], mass[: layers[0] + 1]
    born, mask = layers[0], found[layers[0]].mask
    cuts: dict[str, Callable[[Tensor], Tensor]] = {
        "set to 0": lambda x: x.masked_fill(mask, 0.0),
        "set to their mean over the texts": lambda x: torch.where(mask, x.mean(0), x),
        "their neighbours set to 0": lambda x: x.masked_fill(mask.roll(1, -1), 0.0),
    }
    masses, changes = {"unchanged": mass}, {}
    for name, cut in cuts.items():
        with edit(loaded.model, {f"layers.{born}.resid_post": cut}):
            masses[name], _, changed = look(loaded.model, tokens)
        changes[name] = changed - loss
    zero, constant, neighbours = changes.values()
    figures = (
        exact(f"layers of {len(found)} with massive activations in every text", len(layers), least=10),
        exact(f"features of {loaded.config.d_model} that are massive", len(at[:, 2].unique()), most=4),
        exact("massive activations at other tokens than the first", int((at[:, 1] > 0).sum()), most=0, published=0),
        exact("largest activation over the median", float(max(one.ratio.max() for one in found))),
        exact("attention to the first token in layers that read them, over that up to there",
              float(held.mean() / rest.mean()), least=1.5),
        exact(f"loss if they are set to 0 after layer {born}, less {loss:.2f}", zero, "nats", least=2),
        exact("the same, set to their mean over the texts", constant, "nats", least=-0.1, most=0.1, published=0),
        exact("the same, neighbouring features set to 0", neighbours, "nats", least=-0.1, most=0.1, published=0),
        exact("share of all heads that are sinks (mass above 0.3)", float((mass > 0.3).float().mean())),
    )  # fmt: skip
    depth = range(len(found))
    largest, median = (torch.stack([getattr(one, name) for one in found]).mean(1) for name in ("largest", "median"))
    pictures = (
        Picture(title="attention to the first token, mean over heads", x="layer",
                curves=tuple(curve(name, depth, [of.mean(1).tolist()]) for name, of in list(masses.items())[:3])),
        Picture(title="size of activations", x="layer", log="y",
                curves=(curve("largest", depth, [largest.tolist()]), curve("median", depth, [median.tolist()]))),
    )  # fmt: skip
    first, last = (masses[name][born + 1 :].mean() for name in ("unchanged", "set to 0"))
    return Outcome(
        figures=figures, pictures=pictures, size=f"SmolLM2-135M, {len(texts)} texts of {TOKENS} tokens",
        sure="one model, nothing is drawn at random",
        notes=(f"Set to 0, they lower the attention to the first token in later layers from {first:.2f} to {last:.2f} "
               "only: heads recognize it by more than these features.",),
    )  # fmt: skip


STEPS, SPIKES, HEIGHT, NOISE = 10_000, 20, 8.0, 0.05
CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda t: np.full(len(t), 3.0),
    "line, 7 nats down": lambda t: 10 - 7 * t / STEPS,
    "exponential, 300 steps": lambda t: 2 + 4 * np.exp(-t / 300),
    "power law": lambda t: 1.5 + 6 * (t + 1.0) ** -0.3,
}
PHIS = (0.0, 0.5, 0.9)
WINDOW, SIGMA = 128, 6.0


def ar1(phi: float, seed: int, steps: int = STEPS) -> np.ndarray:
    """Returns a random time series x_t = phi x_(t-1) + e_t, whose standard deviation is NOISE for any phi."""
    drawn = np.random.default_rng(seed).normal(size=steps) * NOISE
    noise = drawn * np.sqrt(1 - phi**2)
    noise[0] = drawn[0]
    for t in range(1, steps):
        noise[t] += phi * noise[t - 1]
    return noise


def places(seed: int, steps: int = STEPS, first: int = 200) -> np.ndarray:
    """Returns SPIKES different random steps at which spikes are planted, none before `first`; two of them are adjacent,
    as spikes often are."""
    chosen = np.sort(np.random.default_rng(1000 + seed).choice(np.arange(first, steps), SPIKES, replace=False))
    chosen[-1] = chosen[-2] + 1
    return chosen


def alarms(series: np.ndarray) -> set[int]:
    """Returns the steps of a series at which the detector of loss spikes (`dynamics`) raises an alarm."""
    spikes = Spikes()
    return {t for t, value in enumerate(series) if spikes.see(float(value)) is not None}


def plain_alarms(series: np.ndarray) -> set[int]:
    """Returns the steps of a series at which a simple rule raises an alarm: values more than SIGMA deviations above the
    mean of the last WINDOW values."""
    windows = np.lib.stride_tricks.sliding_window_view(series, WINDOW)[:-1]
    above = (series[WINDOW:] - windows.mean(1)) / windows.std(1)
    return set((np.flatnonzero(above > SIGMA) + WINDOW).tolist())


def spikes_found(bench: Bench) -> Outcome:
    seeds, steps = bench.runs(3), bench.scaled(STEPS, 400)
    time = np.arange(steps)
    found, false, plain_found, plain_false = [], [], [], []
    for shape in CURVES.values():
        for phi in PHIS:
            for seed in seeds:
                where = places(seed, steps)
                series = shape(time) + ar1(phi, seed, steps)
                series[where] += HEIGHT * NOISE
                ours, theirs, planted = alarms(series), plain_alarms(series), set(where.tolist())
                found.append(len(ours & planted))
                false.append(len(ours - planted))
                plain_found.append(len(theirs & planted))
                plain_false.append(len(theirs - planted))
    of_gradients, false_gradients = zip(*(_gradients(seed, steps) for seed in seeds), strict=True)
    figures = (
        exact(f"fewest of {SPIKES} spikes found in a series", min(found), least=SPIKES),
        exact("most false alarms in a series", max(false), most=1),
        exact("fewest found in gradient norms with tails", min(of_gradients), least=SPIKES),
        exact("most false alarms there", max(false_gradients), most=1),
        exact("values that are not numbers, caught of 30", _not_numbers(), least=30),
        exact("decisions that change if the detector is resumed", _resumed(steps), most=0),
        exact("alarms at a level 20 sigma higher, and a spike above it", _level(), least=STAYS + 1, most=STAYS + 1),
        exact("spikes found by mean and deviation, share of all", sum(plain_found) / SPIKES / len(plain_found)),
        exact("false alarms by mean and deviation, most of a series", max(plain_false)),
    )
    return Outcome(
        figures=figures, size=f"{len(found)} series of {steps:,} steps with spikes of {HEIGHT:g} sigma",
        sure=f"{len(seeds)} seeds, every series counted",
        notes=(f"Series: {', '.join(CURVES)}; noise is AR(1) with phi of {', '.join(map(str, PHIS))}.",),
    )  # fmt: skip


def _gradients(seed: int, steps: int) -> tuple[int, int]:
    """Returns the spike detector's (spikes detected, false alarms) in a series like gradient norms: noise is
    multiplicative, one step in a hundred is at 2 to 8 times its usual norm, as in healthy runs on real text, and
    planted spikes are at 30 times."""
    random, where = np.random.default_rng(2000 + seed), places(seed, steps)
    tails = np.where(random.random(steps) < 0.01, random.uniform(2, 8, steps), 1)
    series = np.exp(2 * ar1(0.5, seed, steps)) * tails
    series[where] = 30 * np.exp(2 * NOISE * random.normal(size=SPIKES))
    detector, planted = Spikes(sigma=SIGMA, log=True, times=GRADIENT_TIMES), set(where.tolist())
    ours = {t for t, norm in enumerate(series) if detector.see(float(norm)) is not None}
    return len(ours & planted), len(ours - planted)


def _not_numbers() -> int:
    """Returns the number of alarms that the spike detector raises for 30 NaN or infinite values, the first step among
    them; 0 if such a value changes later decisions."""
    spikes, clean, caught = Spikes(), Spikes(), 0
    for t, value in enumerate(3 + ar1(0.5, 0, 1000)):
        if t % 100 == 0:
            caught += sum(spikes.see(bad) == np.inf for bad in (np.nan, np.inf, -np.inf))
        if spikes.see(float(value)) != clean.see(float(value)):
            return 0
    return caught


def _resumed(steps: int) -> int:
    """Returns the number of the spike detector's decisions that change if it is serialised to JSON and restored at many
    steps, spikes among them."""
    series = 10 - 7 * np.arange(steps) / STEPS + ar1(0.9, 1, steps)
    series[places(1, steps)] += HEIGHT * NOISE
    whole, parts, changed = Spikes(), Spikes(), 0
    cuts = set(np.random.default_rng(0).choice(steps, 200, replace=False).tolist()) | set(places(1, steps).tolist())
    for t, value in enumerate(series):
        if t in cuts:
            state = json.loads(json.dumps(parts.state()))
            parts = Spikes()
            parts.restore(state)
        changed += whole.see(float(value)) != parts.see(float(value))
    return changed


def _level() -> int:
    """Returns the number of alarms that the spike detector raises for a level shift and for a spike above the new
    level; -1 if it raises others."""
    series = 3 + ar1(0.5, 2, 2000)
    series[1000:] += 1.0
    series[1500] += HEIGHT * NOISE
    found = sorted(alarms(series))
    return len(found) if found == [*range(1000, 1000 + STAYS), 1500] else -1


WIDE = "llama@1m+layers=2"
PARAMETRIZATIONS = {"standard": WIDE, "muP": f"{WIDE}+mup:64"}
WATCHED = {"resid_post": "residual stream", "logits": "logits", "mixer.scores": "attention scores"}


def mup_coordinates(bench: Bench) -> Outcome:
    widths, seeds = ((32, 64), 1) if bench.tiny else ((64, 128, 256, 512), bench.seeds or 3)
    found = {name: coordinate_check(preset(of), widths, 4, 1e-2, seeds) for name, of in PARAMETRIZATIONS.items()}
    slopes = {name: check.slopes for name, check in found.items()}
    steepest = max(slopes["muP"], key=lambda kind: slopes["muP"][kind])
    figures = (
        exact("slope of the residual stream, standard", slopes["standard"]["resid_post"], least=0.5, published=1),
        exact(f"steepest slope under muP, {steepest}", slopes["muP"][steepest], most=0.1, published=0),
        *(exact(f"slope of {words}, {name}", of[kind]) for name, of in slopes.items()
          for kind, words in WATCHED.items() if (name, kind) != ("standard", "resid_post")),
    )  # fmt: skip
    pictures = tuple(
        Picture(title=f"mean |x_4 - x_0| of {words}", x="width", log="xy",
                curves=tuple(curve(name, widths, [check.changes[kind][-1]]) for name, check in found.items()))
        for kind, words in WATCHED.items()
    )  # fmt: skip
    return Outcome(
        figures=figures, pictures=pictures, size=f"llama of 2 layers, widths {widths[0]} to {widths[-1]}, 4 steps of "
        "Adam at 0.01", sure=f"means over {seeds} seeds",
        notes=("A slope is that of log2 mean |x_4 - x_0| against log2 width, on one batch of random tokens.",),
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="attention-sinks", kind="measured", minutes=2,
        statement="A trained model attends most to the first token, where a few fixed features are thousands of times "
        "larger than the median; their mean can replace them, and without them the model fails.",
        source="2402.17762; 2309.17453; 2410.10781", published="constant massive activations at the first token",
        size="SmolLM2-135M",
        measure=attention_sinks,
    ),
    Claim(
        name="spikes-found", kind="measured", minutes=4,
        statement="On flat and falling curves every spike of 8 sigma is found, with at most one false alarm in 10,000 "
        "steps.",
        source="2501.00656, on spikes of the loss", published="spikes counted by a deviation from a moving mean",
        size="series of 10,000 steps",
        measure=spikes_found,
    ),
    Claim(
        name="mup-coordinates", kind="measured", minutes=3,
        statement="With Adam at one learning rate the change of activations by a step grows with the width in the "
        "standard parametrization, and not under muP.",
        source="2203.03466, appendix D.1", published="no growth under muP", size="widths 64 to 512",
        measure=mup_coordinates,
    ),
]  # fmt: skip
