"""Tensor Programs V: under muP activations move as far in a wide model as in a narrow one."""

from __future__ import annotations

from experiments.dynamics.common import COLOURS, Outcome, canvas
from glassformer import preset
from glassformer.dynamics.coord_check import CoordinateCheck, coordinate_check

MODEL = "llama@1m+layers=2"
ARMS = {"standard": MODEL, "muP": f"{MODEL}+mup:64"}
WATCHED = {"resid_post": "residual stream", "logits": "logits", "mixer.scores": "attention scores"}


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "mup",
        "With Adam at one learning rate, what a step changes grows with the width in the standard parametrisation and "
        "not under muP.",
        "Yang et al. 2022, arXiv 2203.03466, appendix D.1",
    )
    widths, seeds = ((32, 64, 128), 1) if quick else ((64, 128, 256, 512), 3)
    found = {name: coordinate_check(preset(model), widths, 4, 1e-2, seeds) for name, model in ARMS.items()}
    slopes = {name: check.slopes for name, check in found.items()}
    for kind in slopes["muP"]:
        outcome.rows.append({"site": kind, **{f"{name} slope": slopes[name][kind] for name in ARMS}})
    outcome.check(
        slopes["standard"]["resid_post"] > 0.5,
        f"the standard parametrisation's residual stream grows: slope {slopes['standard']['resid_post']:+.2f} > 0.5",
    )
    steepest = max(slopes["muP"], key=lambda kind: slopes["muP"][kind])
    outcome.check(
        slopes["muP"][steepest] < 0.1,
        f"no site grows under muP: the steepest, {steepest}, {slopes['muP'][steepest]:+.2f} < 0.1",
    )
    outcome.note("slope of log2 mean |x_4 - x_0| against log2 width, learning rate 0.01, one batch of random tokens")
    if not quick:
        _draw(outcome, found)
    return outcome


def _draw(outcome: Outcome, found: dict[str, CoordinateCheck]) -> None:
    figure, axes = canvas(1, len(WATCHED))
    for place, (kind, words) in zip(axes[0], WATCHED.items(), strict=True):
        for (name, check), colour in zip(found.items(), COLOURS, strict=False):
            values = check.changes[kind][-1]
            place.plot(check.widths, values, "o-", color=colour, label=f"{name}: {check.slopes[kind]:+.2f}")
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.set_xticks(check.widths, [str(width) for width in check.widths])
        place.minorticks_off()
        place.set(title=words, xlabel="width")
        place.legend()
    axes[0][0].set_ylabel("mean |x₄ − x₀|")
    outcome.draw(figure)
