"""Rules of diagnosis: the first mover, the known failure that matches, its confidence, and changes to try.

Every failure is a rule on a combination of statistics, because each statistic by itself moves in healthy training too.
Thresholds are those of the papers named at the rules; if a paper gives none, they are between the planted failures and
the healthy runs of tests/dynamics/test_why.py, all of them small models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from glassformer.config import ModelConfig
from glassformer.dynamics.diagnosis import Cause, Diagnosis
from glassformer.dynamics.evidence import (
    BACK,
    LOOKBACK,
    NATS_ABOVE,
    NATS_BACK,
    Evidence,
    Mover,
    Spike,
    Track,
    layer_of,
    median,
    share,
)
from glassformer.dynamics.rates import default_learning_rate
from glassformer.errors import RequestError
from glassformer.thresholds import ALIKE_COSINE, COLLAPSED_ENTROPY, COLLAPSED_LOGIT, DIVERGENCE_WINDOW
from glassformer.units import plural

HEALTHY = "nothing wrong"
MOST = 0.8
"""Share of the late rows in which a state must hold to count as lasting."""
TOO_LARGE = 0.5
"""Excess over a uniform guess, in nats, above which the first loss is too large; every untrained family has at most
0.2."""
LARGE_SPIKE = 12.0
"""Sigmas above which a spike is large; odd documents of a healthy run reach nine."""
USUAL_FIRST = 0.3
"""Usual ||dW|| / ||W|| of a newly initialised matrix at the peak learning rate; healthy runs have 0.15 to 0.5."""
ABSURD_FIRST, ABSURD_TIMES = 10.0, 100.0
"""Minimum ||dW|| / ||W|| of a first update, and minimum multiple of the usual learning rate, at which the rate explains
any move of weights."""
RATES_OF_ADAMW = ("adamw", "muon")
"""Optimizers whose updates have the size of AdamW's at the same learning rate."""
SHOWN_CAUSES = 6
SHOWN_MOVERS = 10
SHOWN_STEPS = 8
LONGEST_QUOTE = 60


@dataclass(frozen=True)
class Leap:
    """Change of a weight norm that is larger than updates can explain."""

    track: Track
    before: int
    row: int
    """Second of the two rows of the series, `before` and `row`, between which the norm changed."""
    head: int
    by: float
    allowed: float
    """Largest change of the norm's logarithm that updates allow."""

    @property
    def step(self) -> int:
        return int(self.track.steps[self.row])


def diagnose(
    metrics_rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    config: ModelConfig | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Returns the diagnosis of a run from the rows of `metrics.jsonl` and of `dynamics.jsonl` (see `read_records`).

    Rules read the config and the recipe as needed: the place of norms, Adam's eps. Without statistics only the loss is
    judged. Raises RequestError if there is neither a valid step nor a record."""
    with np.errstate(all="ignore"):  # records of a failed run may hold any value
        return _diagnose(Evidence(metrics_rows, records, config, recipe or {}))


def _diagnose(e: Evidence) -> Diagnosis:
    if not len(e.steps) and not e.records:
        raise RequestError(
            "the run has not made a step yet; there is nothing to diagnose", code="missing", field="steps"
        )
    found: list[Cause] = [min(by_rule, key=_rank) for rule in RULES if (by_rule := e.ask(rule))]
    around = _around(e, found)
    movers = e.movers(around) if around is not None else []
    if not found and e.onset is not None:
        found = [_unknown(e, movers)]
    ranked = sorted(_roots_first(found), key=_rank)[:SHOWN_CAUSES]
    causes = tuple(
        replace(
            cause,
            tries=tuple(change for change in cause.tries if not _is_so(change, e.recipe)),
            sigmas=_sigmas(e, cause, movers),
        )
        for cause in ranked
    )
    happened = _happened(e)
    notes = tuple(_notes(e, causes))
    story = (*_story(e, happened, causes, movers), *notes)
    batch = next((cause.batch for cause in causes if cause.batch), ()) or (
        e.batch(worst.step) if (worst := e.worst) else ()
    )
    return Diagnosis(
        f"{happened}: {causes[0].cause}" if causes else HEALTHY, causes, story, tuple(e.losses.tolist()),
        tuple(movers[:SHOWN_MOVERS]), notes, batch,
    )  # fmt: skip


def _sigmas(e: Evidence, cause: Cause, movers: Sequence[Mover]) -> float | None:
    """Returns the first finite sigmas: of the cause, of a mover at its site, of a mover in its layer, of a loss spike
    within BACK steps of its step; None without any."""
    beside = [
        *(mover.sigmas for mover in movers if mover.track.where == cause.site),
        *(mover.sigmas for mover in movers if cause.layer is not None and mover.track.layer == cause.layer),
        *(spike.sigmas for spike in e.spikes if cause.step is not None and abs(spike.step - cause.step) <= BACK),
    ]
    return next((found for found in (cause.sigmas, *beside) if found is not None and math.isfinite(found)), None)


def _is_so(change: str, recipe: Mapping[str, Any]) -> bool:
    """Returns True if the recipe already has the value that a change would set."""
    name, _, value = change.removeprefix("recipe.").partition("=")
    axis, field = {"warmup": ("schedule", "warmup"), "adam_eps": ("optimizer", "eps")}.get(name, ("", name))
    part = recipe.get(axis)
    have = part.get(field) if isinstance(part, Mapping) else recipe.get(name)
    if not change.startswith("recipe.") or have is None:
        return False
    try:
        return float(have) == float(value)
    except (TypeError, ValueError):
        return str(have) == value


def _rank(cause: Cause) -> tuple[float, float]:
    """Returns a sort key: the most likely cause first, at equal confidence the earliest."""
    return -cause.confidence, math.inf if cause.step is None else cause.step


def _roots_first(found: Sequence[Cause]) -> list[Cause]:
    """Returns the causes, with lower confidence in those that another cause explains: a root, a dead layer its dead
    units and moved weights, rank collapse its small gradients, an absurd learning rate any moved weights."""
    root = max((cause.confidence for cause in found if cause.cause in ROOTS), default=0.0)
    absurd = any(cause.cause == "learning rate above the stable edge" and cause.confidence >= 0.9 for cause in found)
    dead = {cause.layer for cause in found if cause.cause == "dead layer"}
    collapsed = any(cause.cause == "rank collapse" and cause.confidence > 0.6 for cause in found)

    def follows(cause: Cause) -> bool:
        return (
            (root > 0.6 and cause.cause in FOLLOWS)
            or (cause.cause in OF_A_DEAD_LAYER and (absurd or cause.layer in dead))
            or (cause.cause in OF_A_COLLAPSE and collapsed)
        )

    return [
        replace(cause, confidence=0.8 * min(cause.confidence, root or 1.0)) if follows(cause) else cause
        for cause in found
    ]


# The rules; each yields the causes that it finds


def value_not_finite(e: Evidence) -> Iterator[Cause]:
    """Finds the first site whose value is not finite. The site is the cause if the loss was calm before; if the step is
    finite in float32, the precision is; if weights are not finite, they were damaged, because a step with such
    gradients is not taken."""
    event = e.not_finite
    if event is None:
        return
    site, _, part = str(event.get("site") or "").partition(" ")
    what = _what(e)
    place = f"{site or 'the ' + what}"
    named, sure = f"not a number at {place}", 0.3 if e.rose else 0.95
    why = f"the first value not a number is {f'at {site} {part}'.strip() if site else 'the ' + what + ' itself'}, "
    why += f"and the loss {'had been rising' if e.rose else 'was calm before'}"
    tries: tuple[str, ...] = (f"recipe.learning_rate={_rate(e)}", "recipe.clip=1.0", "recipe.on_spike=skip")
    if "weights" in part:
        named, sure, tries = f"weights that are not numbers at {place}", 0.95, _again(e, event["step"])
        why = f"weights of {site} are not numbers, and a step with such a gradient is not taken: they were damaged"
    elif event.get("finite_in_float32"):
        named, sure, tries = f"precision too low at {place}", 0.95, ("recipe.dtype=float32",)
        why += ", and the same step is finite in float32"
    yield Cause(
        named, sure, why, tries, layer_of(site), site or None, "not_finite",
        step=event["step"], batch=tuple(event.get("batch", ())),
    )  # fmt: skip


def weights_rounded(e: Evidence) -> Iterator[Cause]:
    """Finds weights that are all representable in a short format after the first steps: updates below its last bit are
    lost."""
    event = e.event("rounded_weights")
    if event is not None:
        dtype = event.get("what", "a short format")
        yield Cause(
            f"weights kept in {dtype}", 0.7,
            f"at step {event['step']} every weight that moves is a number of {dtype}, so that an update smaller than "
            "its last bit is lost",
            ("recipe.dtype=float32",), statistic="weight_norm", step=event["step"],
        )  # fmt: skip


def targets_not_next(e: Evidence) -> Iterator[Cause]:
    """Finds targets that are not the next tokens of their inputs: shifted by another number of places, or of other
    text."""
    event = e.event("targets_not_next")
    if event is not None:
        yield Cause(
            "targets are not the next tokens", 0.97,
            f"{event.get('value', 1.0):.0%} of the targets of the first batch are not the tokens that follow its "
            "inputs; targets[:, :-1] must be inputs[:, 1:]",
            (), statistic="loss", step=event["step"],
        )  # fmt: skip


def initialisation_too_large(e: Evidence) -> Iterator[Cause]:
    """Finds a first loss, before any update, more than TOO_LARGE nats above that of a uniform guess: logits of the
    untrained model are far from even."""
    if not len(e.losses) or e.steps[0] != 1 or not e.losses[0] > e.blind + TOO_LARGE:
        return
    yield Cause(
        "initialisation too large", min(0.96, 0.8 + 0.1 * (e.losses[0] - e.blind)),
        f"the first loss is {e.losses[0]:.3g}, where a blind guess costs {e.blind:.3g}: before any update the model "
        "was sure of wrong tokens",
        ("init.std=0.02", "+qknorm"), statistic="loss", step=1,
    )  # fmt: skip


def rubbish(e: Evidence) -> Iterator[Cause]:
    """Finds sequences whose loss is nearly that of a uniform guess, in at least three, and at least a quarter, of the
    full records of the second half of the run: parts of the text that cannot be learned."""
    half = e.last_step / 2
    looks = sum(event["event"] == "unlike_sequence" and event["step"] > half for event in e.events)
    late = [step for step in e.full.tolist() if step > half]
    worst = e.event("unlike_sequence")
    if worst is None or looks < 3 or looks < len(late) / 4:
        return
    odd = _odd(worst.get("batch", ())[:1])
    yield Cause(
        "rubbish in the data", min(0.9, 0.5 + looks / len(late)),
        f"in {looks} of the last {len(late)} looks a sequence cost nearly what a blind guess costs, up to "
        f"{worst.get('value', math.nan):.3g} nats per token" + (f"; the text {odd}" if odd else ""),
        (), statistic="loss", step=worst["step"], batch=tuple(worst.get("batch", ())),
    )  # fmt: skip


def moved_alone(e: Evidence) -> Iterator[Cause]:
    """Finds a matrix or head whose norm changed faster than updates allow, at once or within 32 steps, and at least
    four times as far as is usual among the others: the weights were edited or corrupted."""
    for leap in e.ask(_leaps):
        track = leap.track
        head = leap.head if track.values.shape[1] > 1 else None
        what = _place(track.where) if head is None else f"head {head} of {track.where}"
        times, most = np.exp(np.minimum(700, (leap.by, leap.allowed)))
        before, step = int(track.steps[leap.before]), int(track.steps[leap.row])
        yield Cause(
            "one matrix moved by itself" if head is None else "one head's weights moved by themselves",
            min(0.95, 0.7 + 0.05 * abs(leap.by)),
            f"the norm of {what} became {times:.3g} times as large between steps {before} and {step}, where updates "
            f"allow {most:.3g}: the weights were edited or corrupted",
            _again(e, before),
            track.layer, track.where, "weight_norm", head, step, track.sigmas(leap.row, leap.head),
        )  # fmt: skip


def dead_layer(e: Evidence) -> Iterator[Cause]:
    """Finds a layer without gradient next to layers with one: less than 1e-5 of their gradient, or less than a
    twentieth while the layer leaves the residual stream unchanged or its weights have fallen. Its output is zero or cut
    off. A layer is not dead if the weights of another layer grew before and drown its output."""
    grown = [leap for leap in e.ask(_leaps) if leap.by > 0]
    for layer in e.layers:
        own, beside = e.gradient(layer), [t for n in (layer - 1, layer + 1) if (t := e.gradient(n)) is not None]
        if own is None or not beside or any(not np.array_equal(track.steps, own.steps) for track in beside):
            continue
        at = np.isin(own.steps, e.full)
        steps, values = own.steps[at], own.values[at, 0]
        near = np.min([track.values[at, 0] for track in beside], axis=0)
        idle = _unchanged(e, layer, steps) | _fallen(e, layer, steps)
        dead = (values < 1e-5 * near) | ((values < 0.05 * near) & idle)
        if len(dead) < 3 or not dead[-2:].all():
            continue
        first = _since(dead)
        drowned = any(leap.track.layer != layer and leap.step <= steps[first] for leap in grown)
        if drowned and values[-1] and not _fallen(e, layer, steps)[-1]:
            continue
        yield Cause(
            "dead layer", 0.95,
            f"since step {steps[first]} layer {layer} gets {values[-1] / near[-1]:.1g} of the gradient of the layers "
            f"next to it: its weights are zero, or what it computes is cut off",
            _again(e, int(steps[first])),
            layer, f"layers.{layer}", "gradient_norm", None, int(steps[first]),
            own.sigmas(int(np.searchsorted(own.steps, steps[first]))),
        )  # fmt: skip


def dead_units(e: Evidence) -> Iterator[Cause]:
    """Finds layers with more than nine in ten hidden units silent for every token, whose input matrices get less than
    1e-3 of the gradient of the mixer's."""
    for dead in e.of("dead_units"):
        inner, outer = e.gradient(dead.layer, "ffn.up", "ffn.gate"), e.gradient(dead.layer, "mixer.v", "mixer.out")
        silent = dead.values[:, 0] > 0.9
        if inner is None or outer is None or len(silent) < 3 or not silent[-2:].all():
            continue
        last = dead.steps[-2:]
        starved = inner.values[np.isin(inner.steps, last)] < 1e-3 * outer.values[np.isin(outer.steps, last)]
        if share(starved) < 1:
            continue
        first = _since(silent)
        yield Cause(
            "dead units", 0.85,
            f"since step {dead.steps[first]} {dead.values[-1, 0]:.0%} of the hidden units of layer {dead.layer} are "
            f"silent for every token, and their weights get no gradient",
            ("+swiglu", "+gelu", f"recipe.learning_rate={_rate(e)}", "recipe.warmup=0.1"),
            dead.layer, dead.where, "dead_units", None, int(dead.steps[first]), dead.sigmas(first),
        )  # fmt: skip


def rate_too_large(e: Evidence) -> Iterator[Cause]:
    """Finds a learning rate above the stable edge: at its peak one step would replace the first weights, updates stay
    above 1e-2, and the run shows trouble. Without statistics of the peak: trouble at ten times the usual rate, or a
    loss that rose or diverged."""
    shown, peak = _shows(e), _peak(e)
    if not shown:
        return
    more = ("recipe.warmup=0.1", "+qknorm")
    moved = [track for track in e.of("update_ratio") if track.layer is not None]
    high = [track.values[e.at(track.steps, "learning_rate") >= peak / 2] for track in moved]
    if not e.watched or (moved and not any(len(values) for values in high)):
        times, lost = _above_usual(e), e.diverged is not None or e.hump > NATS_BACK
        if times >= 10 or e.hump > NATS_ABOVE or lost:
            sure = (0.8 if lost else 0.5) if times >= 10 else 0.35
            yield Cause(
                "learning rate above the stable edge", 0.95 if lost and times >= ABSURD_TIMES else sure,
                _joined(shown[:3]) + ("" if math.isnan(times) else f", at {times:.3g} times the rule of thumb by size"),
                (f"recipe.learning_rate={_rate(e)}", *more), statistic="loss", step=e.onset,
            )  # fmt: skip
        return
    first = _first_update(e)
    kept = [median(values.ravel()) for values in high]
    known = first >= 1 or (not math.isfinite(first) and median(kept) > 2e-2)
    if not known or not any(value > 1e-2 for value in (median(v.max(initial=0) for v in high), median(kept))):
        return
    worst = moved[int(np.nanargmax(kept))]
    row = int(np.argmax(np.where(np.isfinite(worst.values), worst.values, 0.0).max(1)))
    replaced = f"at its peak, {peak:.3g}, one step would move the first weights by {first:.2g} of themselves, "
    yield Cause(
        "learning rate above the stable edge",
        min(0.95, (0.9 if first >= ABSURD_FIRST else 0.6 if first >= 1 else 0.4) + 0.12 * len(shown)),
        f"{replaced if first >= 1 else ''}updates stay at {median(kept):.2g} of the weights, and "
        f"{_joined(shown[:3])}",
        (f"recipe.learning_rate={_rate(e)}", *more),
        worst.layer, worst.where, "update_ratio", None, int(worst.steps[row]), worst.sigmas(row),
    )  # fmt: skip


def warmup_missing(e: Evidence) -> Iterator[Cause]:
    """Finds the combination of post-norm residuals, a learning rate without warm-up, and a run that stalls from its
    start (Xiong et al. 2020, 2002.04745)."""
    if e.config is None or len(e.rates) < 10 or not any(b.residual.wants_warmup for b in e.config.layers()):
        return
    at_peak = int(np.argmax(e.rates >= 0.99 * e.rates.max()))
    shown = [*_shows(e), *(cause.why for cause in e.ask(vanishing_gradient))]
    if at_peak > max(2, 0.005 * len(e.rates)) or not shown:
        return
    last = e.config.n_layers - 1
    yield Cause(
        "warm-up missing", min(0.9, 0.7 + 0.1 * len(shown)),
        f"norms follow the residual sum, the learning rate is at its peak from step {e.steps[at_peak]}, and "
        f"{_joined(shown[:3])}",
        ("recipe.warmup=0.1", "+pre", "+deepnorm", f"recipe.learning_rate={_rate(e)}"),
        last, f"layers.{last}", "gradient_norm", None, int(e.steps[0]),
    )  # fmt: skip


def entropy_collapse(e: Evidence) -> Iterator[Cause]:
    """Finds a head whose largest logit passes `COLLAPSED_LOGIT` while its normalised entropy is below
    `COLLAPSED_ENTROPY`, in most of the late rows (Zhai et al. 2023, 2303.06296; Wortsman et al. 2023, 2309.14322)."""
    yield from _sharp_heads(e, "attention-entropy collapse", 0.85, COLLAPSED_LOGIT, COLLAPSED_ENTROPY)


def logit_growth(e: Evidence) -> Iterator[Cause]:
    """Finds a head on its way to entropy collapse: largest logit above 100 and ten times the first one, normalised
    entropy below 0.1."""
    yield from _sharp_heads(e, "attention-logit growth", 0.65, 1e2, 0.1)


def _sharp_heads(e: Evidence, name: str, confidence: float, above: float, below: float) -> Iterator[Cause]:
    for logits in e.of("max_attention_logit"):
        entropy = e.get("attention_entropy", logits.where)
        if entropy is None or entropy.values.shape != logits.values.shape or len(logits.steps) < 2:
            continue
        sharp = (logits.values > above) & (entropy.values < below)
        late = max(2, len(logits.late()))
        grown = logits.values[-1] > 10 * np.abs(logits.values[0])
        for head in np.flatnonzero((sharp[-late:].mean(0) >= MOST) & grown).tolist():
            first = int(np.argmax(sharp[:, head]))
            largest = float(logits.values[-late:, head].max())
            yield Cause(
                name, min(0.95, confidence + 0.05 * math.log10(largest / above)),
                f"since step {logits.steps[first]} head {head} of layer {logits.layer} has logits up to {largest:.3g} "
                f"and a normalised entropy of {median(entropy.values[-late:, head]):.2g}",
                ("+qknorm", "+sigmareparam", "recipe.qk_clip=100", f"recipe.learning_rate={_rate(e)}"),
                logits.layer, logits.where, "max_attention_logit", head, int(logits.steps[first]),
                logits.sigmas(first, head),
            )  # fmt: skip


def rank_collapse(e: Evidence) -> Iterator[Cause]:
    """Finds a layer whose input tokens are all alike (rho > `ALIKE_COSINE`), and whose queries and keys get less than
    1e-3 of the gradient of its values (Dong et al. 2021, 2103.03404; Noci et al. 2022, 2206.03126), in most of the last
    third of the run: early in training both are common, and pass."""
    held = []
    for layer in e.layers[1:]:
        alike = e.get("token_cosine", f"layers.{layer - 1}.resid_post")
        inner, outer = e.gradient(layer, "mixer.q", "mixer.k"), e.gradient(layer, "mixer.v", "mixer.out")
        if alike is None or inner is None or outer is None or len(alike.late()) < 3:
            continue
        start = alike.steps[-len(alike.late())] - 1
        starved = inner.since(start) < 1e-3 * outer.since(start)
        if share(alike.late() > ALIKE_COSINE) >= MOST and share(starved) >= MOST:
            held.append((layer, alike))
    if held:
        layer, alike = held[0]
        first = int(np.argmax(alike.values[:, 0] > ALIKE_COSINE))
        yield Cause(
            "rank collapse", 0.6 + 0.25 * len(held) / (len(e.layers) - 1),
            f"before {len(held)} of {len(e.layers)} layers, the first of them {layer}, tokens have a mean cosine of "
            f"{median(alike.late()[:, 0]):.3f}, and queries and keys get less than a thousandth of the gradient",
            ("+pre", "+branch_scale", "+deepnorm", "+gain"),
            layer, alike.where, "token_cosine", None, int(alike.steps[first]), alike.sigmas(first),
        )  # fmt: skip


def vanishing_gradient(e: Evidence) -> Iterator[Cause]:
    """Finds gradient norms of the first and the last layer more than 1e3 times apart, with an RMS below ten times
    Adam's eps."""
    low, high = (e.gradient(layer) for layer in (e.layers[0], e.layers[-1])) if len(e.layers) > 2 else (None, None)
    if low is None or high is None or low.late().shape != high.late().shape or len(low.late()) < 3:
        return
    rms = [median(track.late().ravel()) for track in e.of("gradient_rms") if track.layer in (low.layer, high.layer)]
    if not rms or not min(rms) < 10 * _eps(e):
        return
    for end, other in ((low, high), (high, low)):
        if share(end.late() < 1e-3 * other.late()) >= MOST:
            apart = median(other.late().ravel()) / max(median(end.late().ravel()), 1e-30)
            yield Cause(
                "gradients vanish through depth", 0.55,
                f"the gradient of layer {end.layer} is {apart:.1g} times smaller than that of layer {other.layer}",
                ("+pre", "+branch_scale", "+deepnorm"),
                end.layer, end.where, "gradient_norm", None, int(end.steps[-len(end.late())]),
                end.sigmas(len(end.steps) - len(end.late())),
            )  # fmt: skip


def output_divergence(e: Evidence) -> Iterator[Cause]:
    """Finds log Z more than 5 from log V, with an output matrix that doubled or a loss that diverged or spiked; or such
    a loss with an output matrix ten times as large (Chowdhery et al. 2022, 2204.02311; Wortsman et al. 2023, 3.4)."""
    logz, head = e.get("log_z", "logits"), e.get("weight_norm", "head") or e.get("weight_norm", "embed")
    if logz is None or head is None or len(logz.steps) < 2:
        return
    level = math.log(e.config.vocab_size) if e.config else float(logz.values[0, 0])
    away = np.abs(logz.values[:, 0] - level) > 5
    late = min(2, len(logz.since(e.onset - 1)) or 2) if e.onset is not None else 2
    grown = float(head.values[-1, 0]) / max(float(np.median(head.values[: len(head.steps) // 2 + 1, 0])), 1e-30)
    spiked = len({*e.followed, *(spike.step for spike in e.spikes)}) >= 3
    trouble = e.diverged is not None or e.not_finite is not None or spiked
    if not (away[-late:].all() and (grown > 2 or trouble)) and not (grown > 10 and trouble):
        return
    first = int(np.argmax(away)) if away.any() else len(away) - 1
    yield Cause(
        "output-logit divergence", 0.8 if grown > 2 else 0.65,
        f"log Z is {logz.values[-1, 0]:.3g}, where log V is {level:.3g}, and the norm of the output matrix {grown:.3g} "
        f"times that of the first half",
        ("z_loss=1e-4", f"recipe.weight_decay={e.recipe.get('weight_decay') or 0.1}",
         f"recipe.learning_rate={_rate(e)}"),
        None, "logits", "log_z", None, int(logz.steps[first]), logz.sigmas(first),
    )  # fmt: skip


def eps_too_large(e: Evidence) -> Iterator[Cause]:
    """Finds gradients (clipped, as Adam receives them) below ten times Adam's eps, with updates below a tenth of the
    learning rate, where a fifth to a half is usual (Wortsman et al. 2023, 3.4): in at least 30 % of matrices and heads,
    in the last third of the run."""
    eps, clip = _eps(e), e.recipe.get("clip") or math.inf
    swallowed: dict[str, np.ndarray] = {}
    sizes = []
    for moved in e.of("update_ratio"):
        tracks = [e.get(name, moved.where) for name in ("gradient_rms", "gradient_norm", "weight_norm")]
        steps = moved.steps[-len(moved.late()) :] if len(moved.late()) else moved.steps[:0]
        rows = [track.values[np.isin(track.steps, steps)] for track in tracks if track is not None]
        if len(rows) < 3 or any(found.shape != moved.late().shape for found in rows) or not len(steps):
            continue
        rms, norm, weight = rows
        update = moved.late() * weight * rms / norm / e.at(steps, "learning_rate")[:, None]
        seen = rms * np.minimum(1, clip / np.maximum(e.at(steps, "grad_norm"), 1e-30))[:, None]
        swallowed[moved.where] = (seen < 10 * eps) & (update < 0.1)
        sizes.append(median(update.ravel()))
    how_much = share(np.concatenate([cells.ravel() for cells in swallowed.values()])) if swallowed else 0.0
    if how_much < 0.3:
        return
    given = eps > 1e-6
    worst = e.tracks["gradient_rms", max(swallowed, key=lambda where: share(swallowed[where]))]
    yield Cause(
        "Adam's eps too large" if given else "gradient RMS near Adam's eps",
        0.5 + 0.4 * how_much,
        f"in {how_much:.0%} of the matrices and heads the RMS of the gradient is below ten times eps={eps:g} and the "
        f"update below a tenth of the learning rate; the median of updates is {median(sizes):.2g} of it",
        ("recipe.adam_eps=1e-8",) if given else ("recipe.adam_eps=1e-15", "+pre"),
        None if given else worst.layer, worst.where, "gradient_rms", None,
        int(worst.steps[0] if given else worst.steps[-len(worst.late())]),
    )  # fmt: skip


def bad_batch(e: Evidence) -> Iterator[Cause]:
    """Finds an isolated spike without precursors: weights as before, the loss recovered within ten steps. Spikes up to
    twelve sigma are usual for text (an odd document) and left out, except for a loss as if nothing had been learned."""
    for spike in e.spikes:
        untaught = spike.loss >= e.losses[0] or spike.loss - spike.before > 5
        alone = not any(0 < abs(other.step - spike.step) <= DIVERGENCE_WINDOW for other in e.spikes)
        calm = e.diverged is None or spike.step < e.diverged - DIVERGENCE_WINDOW
        if not (spike.passed and alone and calm and (spike.sigmas > LARGE_SPIKE or untaught)):
            continue
        if _weights_jumped(e, spike.step):
            continue
        odd = _odd(e.batch(spike.step))
        yield Cause(
            "bad batch", min(0.95, 0.6 + 0.15 * (spike.sigmas > LARGE_SPIKE) + 0.1 * untaught + 0.1 * bool(odd)),
            f"the loss rose from {spike.before:.3g} to {spike.loss:.3g} in one step, with weights as before, and was "
            f"back within {BACK} steps" + (f"; the text {odd}" if odd else ""),
            ("recipe.on_spike=skip", "recipe.clip=1.0"),
            statistic="loss", step=spike.step, sigmas=spike.sigmas, batch=e.batch(spike.step),
        )  # fmt: skip


RULES: tuple[Callable[[Evidence], Iterator[Cause]], ...] = (
    value_not_finite, targets_not_next, initialisation_too_large, weights_rounded, rubbish, moved_alone, dead_layer,
    dead_units, rate_too_large, warmup_missing, entropy_collapse,
    logit_growth, rank_collapse, vanishing_gradient, output_divergence, eps_too_large, bad_batch,
)  # fmt: skip
ROOTS = {
    "learning rate above the stable edge", "warm-up missing", "initialisation too large",
    "targets are not the next tokens",
}  # fmt: skip
FOLLOWS = {
    "attention-entropy collapse", "attention-logit growth", "rank collapse", "gradients vanish through depth",
    "gradient RMS near Adam's eps", "output-logit divergence", "dead units", "dead layer",
}  # fmt: skip
"""Causes that one of ROOTS may bring about."""
OF_A_COLLAPSE = {"gradient RMS near Adam's eps", "gradients vanish through depth"}
"""Effects of rank collapse: tokens that are alike give queries and keys no gradient (Noci et al. 2022, 2206.03126)."""
OF_A_DEAD_LAYER = {"dead units", "one head's weights moved by themselves", "one matrix moved by itself"}


def _around(e: Evidence, found: Sequence[Cause]) -> int | None:
    """Returns the step before which the first move may be: the onset of the failure, or, if the loss shows none, the
    step of the most likely cause; None without a cause, or for a cause without a site, such as a bad batch, which has
    no precursor."""
    if e.onset is not None or not found:
        return e.onset
    likeliest = min(found, key=_rank)
    return None if likeliest.site is None else likeliest.step


def _unknown(e: Evidence, movers: Sequence[Mover]) -> Cause:
    """Returns the cause "cause unknown" for a failure that no rule explains, with the first mover, if any."""
    tries = (f"recipe.learning_rate={_rate(e)}", "recipe.warmup=0.1", "recipe.clip=1.0")
    if not movers:
        return Cause(
            "cause unknown", 0.2, "no statistic is known to have moved before the loss did", tries, step=e.onset
        )
    first = movers[0]
    track = first.track
    return Cause(
        "cause unknown", 0.3, f"{_named(first)} moved first, which matches no known failure", tries,
        track.layer, track.where, track.statistic, first.named_head, first.step, first.sigmas,
    )  # fmt: skip


# Questions of several rules


def _shows(e: Evidence) -> list[str]:
    """Returns the signs of unstable training, each a clause."""
    shown = []
    if e.not_finite:
        shown.append(f"the {_what(e)} became {e.not_finite.get('value', math.nan)}")
    if e.diverged is not None:
        shown.append(f"the loss diverged from step {e.diverged}")
    if e.hump > NATS_ABOVE:
        shown.append(f"the loss rose {e.hump:.2g} nats above its start")
    elif e.relapse > NATS_BACK:
        shown.append(f"the loss fell back by {e.relapse:.2g} nats within the first steps")
    if (spikes := sum(not spike.passed or spike.sigmas > LARGE_SPIKE for spike in e.spikes)) >= 3:
        shown.append(f"the loss spiked {spikes} times")
    if len(e.gradient_spikes) >= 3 and (shown or e.followed):
        shown.append(f"the gradient norm spiked {len(e.gradient_spikes)} times")
    if sharp := e.ask(logit_growth):
        shown.append(f"attention logits passed 100 in layer {sharp[0].layer}")
    streams = [track for track in e.of("residual_rms") if len(track.steps) >= 3 and track.values[0, 0] > 0]
    if blown := [track for track in streams if track.values[-1, 0] > 100 * max(1.0, track.values[0, 0])]:
        shown.append(f"the residual stream grew {blown[-1].values[-1, 0] / blown[-1].values[0, 0]:,.0f} times")
    if collapsed := e.ask(rank_collapse):
        shown.append(f"tokens became alike before layer {collapsed[0].layer}")
    return shown


def _leaps(e: Evidence) -> Iterator[Leap]:
    """Yields the norms that changed further than updates could have changed them, and at least four times as far as is
    usual among the others: beyond the updates by a factor of 1.5 from one row to the next, or of 3 within LOOKBACK
    steps."""
    groups: dict[tuple[int, ...], list[Track]] = {}
    for track in e.of("weight_norm"):
        groups.setdefault(tuple(track.steps.tolist()), []).append(track)
    for tracks in groups.values():
        steps, sudden = tracks[0].steps, dict[str, np.ndarray]()
        for at_once, after in ((True, np.arange(1, len(steps))), (False, np.searchsorted(steps, steps + LOOKBACK))):
            after = after[after < len(steps)]
            rows = np.arange(len(after))
            moves = [_moves(track, rows, after) for track in tracks]
            usual = np.median(np.abs(np.concatenate(moves, axis=1)), axis=1, keepdims=True)
            for track, by in zip(tracks, moves, strict=True):
                allowed = _allowed(track, e.get("update_ratio", track.where), rows, after)
                leapt = np.abs(by) > np.maximum(allowed + math.log(1.5 if at_once else 3), 4 * usual)
                if e.recipe.get("qk_clip") and track.where.endswith((".mixer.q", ".mixer.k")):
                    leapt &= by > 0  # clipping shrinks them
                if not at_once:  # the first steps of a growth that was not sudden
                    leapt &= (np.cumsum(leapt, axis=0) == 1) & ~sudden[track.where]
                sudden.setdefault(track.where, leapt.any(0))
                for row, head in np.argwhere(leapt).tolist():
                    yield Leap(track, row, int(after[row]), head, float(by[row, head]), float(allowed[row, head]))


def _moves(track: Track, rows: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the change of log(norm) from each of `rows` to its row in `after`, (rows, n); 0 from a matrix of zeros,
    which may go anywhere."""
    norms = np.nan_to_num(np.abs(track.values), posinf=1e300)
    logs = np.log(np.maximum(norms, 1e-30))
    return np.where(norms[rows] > 1e-12, logs[after] - logs[rows], 0.0)


def _allowed(track: Track, moved: Track | None, rows: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the largest usual change of log(norm) from each of `rows` to its row in `after`, (rows, n): three times
    the largest of the last three known updates per step, and a tenth more."""
    most = np.full((len(track.steps) - 1, track.values.shape[1]), 0.1)
    if moved is not None and moved.values.shape[1] == track.values.shape[1]:
        ratio = np.nan_to_num(moved.values, posinf=1e6)
        recent = np.max([ratio, *(np.vstack([ratio[:1].repeat(n, 0), ratio])[: len(ratio)] for n in (1, 2))], axis=0)
        last = np.searchsorted(moved.steps, track.steps[:-1], side="right") - 1
        most[last >= 0] = recent[last[last >= 0]]
    each = np.log1p(3 * most * np.diff(track.steps)[:, None])
    until = np.concatenate([np.zeros_like(each[:1]), np.cumsum(each, axis=0)])
    return until[after] - until[rows] + 0.1


def _weights_jumped(e: Evidence, step: int) -> bool:
    """Returns True if the norm of a matrix changed by more than a factor of 1.5 between two rows around a step."""
    for track in e.of("weight_norm"):
        rows = np.flatnonzero((track.steps >= step - 1) & (track.steps <= step + 1))
        if len(rows) >= 2 and np.abs(_moves(track, rows[:-1], rows[1:])).max() > math.log(1.5):
            return True
    return False


def _unchanged(e: Evidence, layer: int, steps: np.ndarray) -> np.ndarray:
    """Returns, for each of `steps`, True if the stream's statistics after a layer equal those before it to two per
    cent."""
    same = np.ones(len(steps), dtype=bool)
    for name in ("residual_rms", "token_cosine", "relative_residual", "activation_effective_rank"):
        before, after = (e.get(name, f"layers.{n}.resid_post") for n in (layer - 1, layer))
        if before is None or after is None or not all(np.isin(steps, track.steps).all() for track in (before, after)):
            return np.zeros(len(steps), dtype=bool)
        was, now = (track.values[np.isin(track.steps, steps), 0] for track in (before, after))
        same &= np.isclose(was, now, rtol=0.02, atol=0)
    return same


def _fallen(e: Evidence, layer: int, steps: np.ndarray) -> np.ndarray:
    """Returns, for each of `steps`, True if the weights of a layer are less than a third of their largest norm so
    far."""
    norm = e.together("weight_norm", layer)
    if norm is None or not np.isin(steps, norm.steps).all():
        return np.zeros(len(steps), dtype=bool)
    most = np.maximum.accumulate(norm.values[:, 0])
    return (norm.values[:, 0] < most / 3)[np.isin(norm.steps, steps)]


def _since(holds: np.ndarray) -> int:
    """Returns the index at which the last unbroken run of True, up to the end, starts."""
    return 0 if holds.all() else len(holds) - int(np.argmin(holds[::-1]))


def _odd(texts: Sequence[str]) -> str:
    """Returns "repeats itself" or "reads like noise", by how far the texts can be compressed; an empty string for
    ordinary or short texts."""
    raw = "".join(texts).encode()
    if len(raw) < 64:
        return ""
    kept = len(zlib.compress(raw, 9)) / len(raw)
    return "repeats itself" if kept < 0.15 else "reads like noise" if kept > 0.85 else ""


def _again(e: Evidence, since: int) -> tuple[str, ...]:
    """Returns the changes to try for weights damaged at a step: a rollback, if a spike would have triggered it, and
    another seed."""
    return (*(("recipe.on_spike=roll_back",) if e.spiked(since) else ()), "recipe.seed=1")


def _peak(e: Evidence) -> float:
    return float(e.rates.max()) if len(e.rates) else float(e.recipe.get("learning_rate") or 1e-3)


def _first_update(e: Evidence) -> float:
    """Returns the median ||dW|| / ||W|| of a newly initialised matrix, scaled to the peak learning rate; nan if
    unknown."""
    peak = _peak(e)
    return median(
        median(track.values[0]) * peak / e.at(track.steps[:1], "learning_rate")[0]
        for track in e.of("update_ratio")
        if track.layer is not None and track.steps[0] <= 2
    )


def _above_usual(e: Evidence) -> float:
    """Returns the peak learning rate as a multiple of AdamW's usual rate for a model of this size; nan without a
    config, or if the optimizer has rates of another scale."""
    kind = (e.recipe.get("optimizer") or {}).get("kind", "adamw")
    return _peak(e) / default_learning_rate(e.config) if e.config and kind in RATES_OF_ADAMW else math.nan


def _rate(e: Evidence) -> str:
    """Returns the learning rate to try, to one figure: a third of the peak, or less if a third would still be too
    large."""
    first = _first_update(e)
    if e.watched:
        times = first / USUAL_FIRST if first >= 1 else 3.0
    else:
        times = max(3.0, above) if (above := _above_usual(e)) >= 10 else 3.0
    return f"{_peak(e) / times:.0e}".replace("e-0", "e-")


def _eps(e: Evidence) -> float:
    """Returns Adam's eps; 0 for an optimizer without one."""
    optimizer = e.recipe.get("optimizer") or {}
    return float(optimizer.get("eps") or 1e-8) if optimizer.get("kind") in ("adamw", "muon") else 0.0


# The story


def _what(e: Evidence) -> str:
    return "gradient norm" if e.not_finite and e.not_finite.get("what") == "grad_norm" else "loss"


def _happened(e: Evidence) -> str:
    """Returns a clause with the visible failure."""
    if e.not_finite:
        return f"the {_what(e)} became {e.not_finite.get('value', math.nan)} at step {e.not_finite['step']}"
    if e.diverged is not None:
        return f"the loss diverged from step {e.onset}"
    if e.worst and e.worst.sigmas > LARGE_SPIKE:
        return f"the loss spiked at step {e.worst.step}, by {e.worst.sigmas:.0f} sigma"
    if e.hump > NATS_ABOVE:
        return f"the loss rose {e.hump:.2g} nats above its start"
    return "the loss neither spiked nor diverged, yet something is wrong"


def _story(e: Evidence, happened: str, causes: Sequence[Cause], movers: Sequence[Mover]) -> Iterator[str]:
    if causes:
        first = causes[0]
        yield f"{_capital(happened)}."
        if movers:
            yield f"First to move was {_named(movers[0])}, at step {movers[0].step}, by {movers[0].sigmas:+.1f} sigma."
        yield f"The cause is {_sure(first.confidence)} ({first.confidence:.0%}) this: {first.cause}."
        yield f"{_capital(first.why)}."
        if first.tries:
            yield f"Try {', '.join(first.tries)}."
        if len(causes) > 1:
            rest = ", ".join(f"{cause.cause} ({cause.confidence:.0%})" for cause in causes[1:3])
            yield f"Next in line, or along with it: {rest}."
    else:
        fell = f"; the loss went from {e.losses[0]:.3g} to {np.mean(e.losses[-10:]):.3g}" if len(e.losses) else ""
        yield f"Nothing wrong was found in {plural(e.last_step, 'step')}{fell}."


def _notes(e: Evidence, causes: Sequence[Cause]) -> Iterator[str]:
    """Yields sentences that hold for any verdict: passed spikes, gradient spikes, steps left out, rollbacks, missing
    statistics."""
    if passed := [spike for spike in e.spikes if spike.passed and not _told(spike, causes)]:
        worst = max(passed, key=lambda spike: spike.sigmas)
        several = f"{len(passed)} spikes of the loss, the largest" if len(passed) > 1 else "A spike of the loss,"
        yield f"{several} {worst.sigmas:.1f} sigma at step {worst.step}, passed without a trace."
        if texts := e.batch(worst.step):
            shown = ", ".join(f'"{" ".join(text[:LONGEST_QUOTE].split())}"' for text in texts)
            yield f"The sequences of its batch with the largest losses start with {shown}."
    if e.gradient_spikes:
        steps = sorted(e.gradient_spikes)
        more = [f"{len(steps) - SHOWN_STEPS} more"] if len(steps) > SHOWN_STEPS else []
        at = _joined([*(f"{step:,}" for step in steps[:SHOWN_STEPS]), *more])
        several = f"steps {at}" if len(steps) > 1 else f"step {at}"
        largest = max(e.gradient_spikes.values())
        many = len(steps) > 1
        followed = f"the loss followed{f' after {len(e.followed)} of them' if many else ''}"
        yield (
            f"The gradient norm spiked at {several}, by {'up to ' if many else ''}{largest:.1f} sigma; "
            f"{followed if e.followed else 'the loss did not follow'}."
        )
    if skipped := sum(event["event"] == "skipped" for event in e.events):
        yield f"{skipped} {'step was' if skipped == 1 else 'steps were'} left out."
    if back := sum(event["event"] == "rolled_back" for event in e.events):
        yield f"The run was rolled back {'once' if back == 1 else f'{back} times'}."
    if not e.watched:
        yield "Without statistics only the loss was judged; train with --watch to see inside."


def _told(spike: Spike, causes: Sequence[Cause]) -> bool:
    return any(cause.step == spike.step for cause in causes)


def _named(mover: Mover) -> str:
    head = "" if mover.named_head is None else f", head {mover.head}"
    return f"{mover.track.statistic} of {_place(mover.track.where)}{head}"


def _place(where: str) -> str:
    """Returns the name of a matrix for a sentence; `head` becomes "the output matrix", because it is not an attention
    head."""
    return "the output matrix (head)" if where == "head" else where


def _sure(confidence: float) -> str:
    words = ((0.85, "almost certainly"), (0.6, "probably"), (0.35, "possibly"), (0.0, "perhaps"))
    return next(word for least, word in words if confidence >= least)


def _joined(clauses: Sequence[str]) -> str:
    """Returns the clauses as "a, b and c"."""
    return " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
