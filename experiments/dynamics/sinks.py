"""Attention sinks and massive activations in a real model, and that the one holds the other."""

from __future__ import annotations

import torch
from torch import Tensor

import glassformer as gf
from experiments.dynamics.common import Outcome, canvas
from glassformer import dynamics
from glassformer.model import Model

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
    """Sink mass (l, n), massive activations after each layer, and the loss."""
    wanted = ["layers.*.mixer.pattern", "layers.*.resid_post", "logits"]
    seen = gf.capture(model, tokens, wanted)
    layers = range(len(model.layers))
    mass = torch.stack([dynamics.sink_mass(seen[f"layers.{layer}.mixer.pattern"]) for layer in layers])
    found = [dynamics.massive(seen[f"layers.{layer}.resid_post"]) for layer in layers]
    loss = torch.nn.functional.cross_entropy(seen["logits"][:, :-1].flatten(0, 1), tokens[:, 1:].flatten().long())
    return mass, found, loss.item()


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "sinks",
        "A trained model sends most of its attention to the first token, where a few fixed features of the stream are "
        "thousands of times larger than the median; they are constants: replaced by their mean nothing changes, "
        "without them the model breaks.",
        "Sun et al. 2024, arXiv 2402.17762; Xiao et al. 2023, 2309.17453; Gu et al. 2024, 2410.10781",
    )
    loaded = gf.load("smollm2")
    assert loaded.tokenizer is not None
    texts = TEXTS[:2] if quick else TEXTS
    tokens = torch.tensor([loaded.tokenizer.encode(text)[:TOKENS].tolist() for text in texts])
    mass, found, loss = look(loaded.model, tokens)

    for layer, (one, heads) in enumerate(zip(found, mass, strict=True)):
        outcome.rows.append(
            {"layer": layer, "sink mass": heads.mean().item(), "sink rate": (heads > 0.3).float().mean().item(),
             "massive": int(one.count.sum()), "max |x|": one.largest.max().item(),
             "median |x|": one.median.mean().item(), "max / median": one.ratio.max().item()}
        )  # fmt: skip
    at = torch.cat([one.mask.nonzero() for one in found])  # (found, [text, token, feature])
    layers = [layer for layer, one in enumerate(found) if bool((one.count > 0).all())]
    features = at[:, 2].unique().tolist()
    outcome.check(
        len(layers) >= 10 and len(features) <= 4 and bool((at[:, 1] == 0).all()),
        f"massive activations, all at the first token and in features {features} of {loaded.config.d_model}, after "
        f"{len(layers)} of {len(found)} layers ({layers[0]} to {layers[-1]}) of all {len(tokens)} texts, up to "
        f"{max(one.ratio.max() for one in found):,.0f} times the median",
    )
    held, rest = mass[[layer + 1 for layer in layers if layer + 1 < len(found)]], mass[: layers[0] + 1]
    outcome.check(
        held.mean() > 1.5 * rest.mean(),
        f"mean mass on the first of {TOKENS} tokens is {held.mean():.2f} in the layers that read them, "
        f"{rest.mean():.2f} up to there; {(mass > 0.3).float().mean():.0%} of all heads are sinks",
    )

    born, mask = layers[0], found[layers[0]].mask
    cuts = {
        "set to 0": lambda x: x.masked_fill(mask, 0.0),
        "set to their mean over the texts": lambda x: torch.where(mask, x.mean(0), x),
        "their neighbours set to 0": lambda x: x.masked_fill(mask.roll(1, -1), 0.0),
    }
    masses, losses = {"as it is": mass}, {}
    for name, cut in cuts.items():
        with gf.edit(loaded.model, {f"layers.{born}.resid_post": cut}):
            masses[name], _, losses[name] = look(loaded.model, tokens)
    zero, constant, neighbours = losses.values()
    outcome.check(zero > loss + 2, f"set to 0 after layer {born}, the loss rises from {loss:.2f} to {zero:.2f}")
    outcome.check(abs(constant - loss) < 0.1, f"set to their mean over the texts, it is {constant:.2f}")
    outcome.check(abs(neighbours - loss) < 0.1, f"their neighbours set to 0, it is {neighbours:.2f}")
    first, last = (masses[name][born + 1 :].mean() for name in ("as it is", "set to 0"))
    outcome.note(
        f"above layer {born} mass on the first token falls from {first:.2f} to {last:.2f} only: heads tell it by more "
        "than these features"
    )
    if not quick:
        draw(outcome, masses, found)
    return outcome


def draw(outcome: Outcome, masses: dict[str, Tensor], found: list[dynamics.Massive]) -> None:
    figure, axes = canvas(1, 3, width=11.5)
    picture = axes[0][0].imshow(masses["as it is"].T, aspect="auto", vmin=0, vmax=1, cmap="viridis", origin="lower")
    axes[0][0].set(title="attention to the first token", xlabel="layer", ylabel="head")
    axes[0][0].grid(False)
    figure.colorbar(picture, ax=axes[0][0])
    depth = range(len(found))
    axes[0][1].plot(depth, torch.stack([one.largest for one in found]).mean(1), label="max |x|")
    axes[0][1].plot(depth, median := torch.stack([one.median for one in found]).mean(1), label="median |x|")
    axes[0][1].plot(depth, (1000 * median).clamp(min=100), "k:", label="massive from here")
    axes[0][1].set(title="the stream after each layer", xlabel="layer", yscale="log")
    axes[0][1].legend(loc="center right")
    for (name, mass), style in zip(list(masses.items())[:3], ("-", "-", "k:"), strict=True):
        axes[0][2].plot(depth, mass.mean(1), style, label=name)
    axes[0][2].set(title="attention to the first token, mean over heads", xlabel="layer", ylim=(0, 1.3))
    axes[0][2].legend(loc="upper left", title="massive activations", alignment="left")
    outcome.draw(figure)
