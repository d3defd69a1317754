"""Why a run failed: what moved first, which known failure that is, how sure that is, and what to try.

Every failure is a rule on a combination of statistics: each of them alone moves in healthy training, too. Thresholds
are those of the papers named at the rules; where a paper gives none, they lie between the planted failures of
tests/dynamics/test_why.py and healthy runs, on models of a few thousand to a few million parameters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from glassformer.config import ModelConfig
from glassformer.dynamics.evidence import BACK, WINDOW, Evidence, Spike, Track, layer_of, median, share
from glassformer.errors import RequestError
from glassformer.parts.residual import PostConfig

HEALTHY = "nothing wrong"
MOST = 0.8
"""The share of the late rows in which a state must hold to count as one."""
SHOWN_CAUSES = 6


@dataclass(frozen=True)
class Cause:
    """One known failure that the run matches."""

    cause: str
    confidence: float
    why: str
    """The evidence, in a sentence."""
    tries: tuple[str, ...]
    """Changes that the literature offers, as expressions and fields of the recipe."""
    layer: int | None = None
    site: str | None = None
    statistic: str | None = None
    head: int | None = None
    step: int | None = None
    sigmas: float | None = None
    batch: tuple[str, ...] = ()
    """The text of the batch, where that is the cause."""

    def to_dict(self) -> dict[str, Any]:
        """Sigmas are null where they cannot be counted; a statistic of head 2 is `weight_norm[2]`."""
        counted = self.sigmas is not None and math.isfinite(self.sigmas)
        return {
            "cause": self.cause,
            "layer": self.layer,
            "site": self.site,
            "statistic": self.statistic if self.head is None else f"{self.statistic}[{self.head}]",
            "step": self.step,
            "sigmas": round(self.sigmas, 2) if self.sigmas is not None and counted else None,
            "confidence": round(self.confidence, 2),
            "try": list(self.tries),
        }

    @property
    def place(self) -> str:
        """`layers.2.mixer.q, head 1`."""
        return (self.site or "") + (f", head {self.head}" if self.head is not None else "")


@dataclass(frozen=True)
class Diagnosis:
    verdict: str
    """`nothing wrong`, or what happened and why in a line."""
    causes: tuple[Cause, ...]
    """The likeliest first."""
    story: tuple[str, ...]
    """Sentences: what happened, what moved first, the likeliest cause, what else."""
    losses: tuple[float, ...] = field(default=(), repr=False)
    """Of every step known."""

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "causes": [cause.to_dict() for cause in self.causes]}

    def paragraph(self) -> str:
        return " ".join(self.story)


def diagnose(
    metrics_rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    config: ModelConfig | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """What `metrics.jsonl` and `dynamics.jsonl` (as `read_records` gives it) say went wrong, if anything did.

    The config and the recipe's fields are asked where a rule needs them: a warm-up, Adam's eps, where the norms stand.
    Without statistics the loss alone is judged. Raises RequestError where there is no step at all."""
    evidence = Evidence(metrics_rows, records, config, recipe or {})
    if not len(evidence.steps) and not records:
        raise RequestError("the run has not made a step yet; there is nothing to diagnose")
    found = [cause for rule in RULES for cause in _best(rule(evidence))]
    movers = evidence.movers()
    if not found and evidence.onset is not None:
        found = [_unknown(evidence, movers)]
    found = _roots_first(found)
    found.sort(key=lambda cause: (-cause.confidence, cause.step if cause.step is not None else math.inf))
    causes = tuple(found[:SHOWN_CAUSES])
    happened = _happened(evidence)
    verdict = HEALTHY if not causes else f"{happened}: {causes[0].cause}"
    return Diagnosis(verdict, causes, tuple(_story(evidence, happened, causes, movers)), tuple(evidence.losses.tolist()))


def _best(causes: Iterator[Cause]) -> list[Cause]:
    """Of one rule's findings the likeliest, the earliest of those that are as likely."""
    ranked = sorted(causes, key=lambda cause: (-cause.confidence, cause.step if cause.step is not None else math.inf))
    return ranked[:1]


ROOTS = {"learning rate above the stable edge", "warm-up missing"}
FOLLOWS = {
    "attention-entropy collapse", "attention-logit growth", "rank collapse", "gradients vanish through depth",
    "gradient RMS near Adam's eps", "output-logit divergence", "dead units", "dead layer",
}  # fmt: skip
"""What a root brings with it, and is then less likely to be the cause."""


def _roots_first(found: list[Cause]) -> list[Cause]:
    surest = max((cause.confidence for cause in found if cause.cause in ROOTS), default=0.0)
    return [
        replace(cause, confidence=min(cause.confidence, surest) * 0.8) if surest > 0.6 and cause.cause in FOLLOWS else cause
        for cause in found
    ]


# The rules: each yields what it finds


def value_not_finite(e: Evidence) -> Iterator[Cause]:
    """The first site whose value is no number. Sure only where nothing led up to it."""
    event = e.not_finite
    if event is None:
        return
    site, _, part = str(event.get("site") or "").partition(" ")
    led_up = any(spike.step >= event["step"] - 50 and not spike.passed for spike in e.spikes) or e.hump > NATS_ABOVE
    what = {"loss": "loss", "grad_norm": "gradient norm"}.get(str(event.get("what")), "loss")
    where = f" first at {site}{' ' + part if part else ''}" if site else " at no site: the loss or its gradient overflowed"
    yield Cause(
        f"not a number at {site or 'the ' + what}", 0.6 if led_up else 0.95,
        f"the {what} became {event.get('value', math.nan)} at step {event['step']}, and a value is no number{where}; "
        + ("the loss had been rising before" if led_up else "the loss before was calm"),
        ("recipe.dtype=float32", f"recipe.learning_rate={_rounded(_peak(e) / 3)}", "recipe.clip=1.0"),
        layer_of(site), site or None, "not_finite", None, event["step"], None, tuple(event.get("batch", ())),
    )  # fmt: skip


def entropy_collapse(e: Evidence) -> Iterator[Cause]:
    """A head whose largest logit passes 1e3 while its entropy is below 0.05 (Zhai et al. 2023, 2303.06296; Wortsman et
    al. 2023, 2309.14322)."""
    yield from _sharp(e, "attention-entropy collapse", 1e3, 0.85)


def logit_growth(e: Evidence) -> Iterator[Cause]:
    """The same on its way: logits past 100, ten times those of the beginning, and a head below 0.1."""
    yield from _sharp(e, "attention-logit growth", 1e2, 0.65, entropy_below=0.1)


def _sharp(e: Evidence, name: str, above: float, confidence: float, entropy_below: float = 0.05) -> Iterator[Cause]:
    for logits in e.of("max_attention_logit"):
        entropy = e.get("attention_entropy", logits.where)
        if entropy is None or entropy.values.shape != logits.values.shape:
            continue
        late = len(logits.late()) or min(2, len(logits.steps))
        sharp = (logits.values > above) & (entropy.values < entropy_below)
        for head in range(sharp.shape[1]):
            if share(sharp[-late:, head]) < MOST or logits.values[-1, head] < 10 * abs(logits.values[0, head]):
                continue
            first = int(np.flatnonzero(sharp[:, head])[0])
            size = math.log10(logits.values[-1, head] / above)
            yield Cause(
                name, min(0.95, confidence + 0.05 * size),
                f"head {head} of layer {logits.layer} has logits up to {logits.values[-late:, head].max():.3g} and a "
                f"normalised entropy of {median(entropy.values[-late:, head]):.2g} since step {logits.steps[first]}",
                ("+qknorm", "+sigmareparam", f"recipe.learning_rate={_rounded(_peak(e) / 3)}", "recipe.warmup=0.1"),
                logits.layer, logits.where, "max_attention_logit", head, int(logits.steps[first]),
                logits.sigmas(first, head),
            )  # fmt: skip


def rank_collapse(e: Evidence) -> Iterator[Cause]:
    """All tokens alike before a layer (rho > 0.95), whose queries and keys get less than 1e-3 of the gradient of its
    other matrices (Dong et al. 2021, 2103.03404; Noci et al. 2022, 2206.03126), for the whole last third of the run:
    early in training both are common and pass."""
    held = []
    for layer in e.layers[1:]:
        alike, inner = e.get("token_cosine", f"layers.{layer - 1}.resid_post"), _gradients(e, layer, ("q", "k"))
        outer = _gradients(e, layer, ("v", "out"))
        if alike is None or inner is None or outer is None or len(alike.late()) < 3:
            continue
        start = alike.steps[-len(alike.late())] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            starved = inner.since(start) < 1e-3 * outer.since(start)
        if share(alike.late() > 0.95) >= MOST and share(starved) >= MOST:
            held.append((layer, alike))
    if held:
        layer, alike = held[0]
        first = int(np.flatnonzero(alike.values[:, 0] > 0.95)[0])
        yield Cause(
            "rank collapse", 0.6 + 0.25 * len(held) / max(1, len(e.layers) - 1),
            f"from layer {layer} on ({len(held)} of {len(e.layers)} layers) tokens are alike, with a mean cosine of "
            f"{median(alike.late()[:, 0]):.3f}, and queries and keys get less than a thousandth of the gradient",
            ("+pre", "+branch_scale", "+deepnorm", "recipe.warmup=0.1"),
            layer, alike.where, "token_cosine", None, int(alike.steps[first]), alike.sigmas(first),
        )  # fmt: skip


def vanishing_gradient(e: Evidence) -> Iterator[Cause]:
    """Gradients of the first and the last layer more than 1e3 apart, and those of one end too small for Adam's eps."""
    if len(e.layers) < 3:
        return
    low, high = (e.layer_gradient(layer) for layer in (e.layers[0], e.layers[-1]))
    if low is None or high is None or low.late().shape != high.late().shape or len(low.late()) < 3:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = low.late() / high.late()
    rms = [median(track.late().ravel()) for track in e.of("gradient_rms") if track.layer in (low.layer, high.layer)]
    if not rms or min(rms) > 10 * _eps(e):
        return
    for end, apart in ((low, ratio < 1e-3), (high, ratio > 1e3)):
        if share(apart) >= MOST:
            yield Cause(
                "gradients vanish through depth", 0.55,
                f"the gradient of layer {low.layer} is {median(ratio.ravel()):.1g} times that of layer {high.layer}",
                ("+pre", "+branch_scale", "+deepnorm"),
                layer_of(end.where), end.where, "gradient_norm", None, int(end.steps[-len(end.late())]),
            )  # fmt: skip


def output_divergence(e: Evidence) -> Iterator[Cause]:
    """log Z more than 5 from log V, with an output matrix that has grown or a loss that has not held (Chowdhery et al.
    2022, 2204.02311; Wortsman et al. 2023, section 3.4)."""
    logz, head = e.get("log_z", "logits"), e.get("weight_norm", "head") or e.get("weight_norm", "embed")
    if logz is None or head is None or len(logz.steps) < 2:
        return
    level = math.log(e.config.vocab_size) if e.config else float(logz.values[0, 0])
    late = max(1, min(2, len(logz.since(e.onset - 1)) if e.onset is not None else 2))
    away = np.abs(logz.values[:, 0] - level) > 5
    grown = float(head.values[-1, 0]) / max(float(np.median(head.values[: len(head.steps) // 2 + 1, 0])), 1e-30)
    trouble = e.diverged is not None or e.not_finite is not None or len(e.spikes) >= 3
    if not (share(away[-late:]) == 1 and (grown > 2 or trouble)) and not (grown > 10 and trouble):
        return
    first = int(np.flatnonzero(away)[0]) if away.any() else len(away) - 1
    yield Cause(
        "output-logit divergence", 0.8 if grown > 2 else 0.65,
        f"log Z is {logz.values[-1, 0]:.3g}, where log V is {level:.3g}, and the norm of the output matrix is {grown:.3g} "
        f"times its median in the first half",
        ("z_loss=1e-4", f"recipe.weight_decay={e.recipe.get('weight_decay') or 0.1}",
         f"recipe.learning_rate={_rounded(_peak(e) / 3)}"),
        None, "logits", "log_z", None, int(logz.steps[first]), logz.sigmas(first),
    )  # fmt: skip


def eps_too_large(e: Evidence) -> Iterator[Cause]:
    """Gradients (clipped, as Adam sees them) within 10 times its eps, and updates of less than a tenth of the learning
    rate, which Adam's would be near (Wortsman et al. 2023, section 3.4), in most matrices."""
    eps, clip = _eps(e), e.recipe.get("clip")
    swallowed, sizes, places, first = [], [], [], None
    for rms in e.of("gradient_rms"):
        moved, norm, gradient = (e.get(name, rms.where) for name in ("update_ratio", "weight_norm", "gradient_norm"))
        if moved is None or norm is None or gradient is None or len(moved.late()) < 3:
            continue
        held = []
        for row, step in enumerate(moved.steps[-len(moved.late()) :], len(moved.steps) - len(moved.late())):
            at, rate, total = int(np.searchsorted(rms.steps, step)), e.at(int(step), "learning_rate"), e.at(int(step), "grad_norm")
            if not rate or total is None or not np.all(rms.values[at] > 0):
                continue
            seen = rms.values[at] * min(1.0, clip / total if clip and total else 1.0)
            size = moved.values[row] * norm.values[at] * rms.values[at] / gradient.values[at] / rate
            held.append((seen < 10 * eps) & (size < 0.1))
            sizes.append(median(size))
        if held:
            swallowed.append(share(np.array(held)))
            places.append(rms)
    if not swallowed or share(np.array(swallowed) >= MOST) < 0.5:
        return
    worst = places[int(np.argmax(swallowed))]
    large = eps > 1e-6
    yield Cause(
        "Adam's eps too large" if large else "gradient RMS near Adam's eps",
        (0.65 if large else 0.6) + (0.25 if median(sizes) < 0.03 else 0.0),
        f"in {share(np.array(swallowed) >= MOST):.0%} of the matrices the gradient's RMS is within ten times eps={eps:g}, "
        f"and updates are {median(sizes):.2g} of the learning rate",
        ("recipe.adam_eps=1e-8" if large else "recipe.adam_eps=1e-15",) + (() if large else ("+pre",)),
        None if large else worst.layer, worst.where, "gradient_rms", None,
        int(worst.steps[0]) if large else int(worst.steps[-len(worst.late())]),
    )  # fmt: skip


def rate_too_large(e: Evidence) -> Iterator[Cause]:
    """The learning rate above the stable edge: at its peak a step would replace the first weights, updates stay above
    1e-2, and something shows for it. Without statistics: a loss that rose, at a rate ten times the rule by size."""
    shown = _consequences(e)
    if not shown:
        return
    peak, tries = _peak(e), [f"recipe.learning_rate={_rounded(_peak(e) / 10)}", "recipe.warmup=0.1", "+qknorm"]
    if not e.watched:
        times = peak / _usual_rate(e.config) if e.config else 1.0
        if times >= 10 or e.hump > NATS_ABOVE or e.diverged is not None:
            yield Cause(
                "learning rate above the stable edge", 0.5 if times >= 10 else 0.35,
                f"{shown[0]}; the rate, {peak:.3g}, is {times:.3g} times the rule by size",
                tuple(tries), None, None, "loss", None, e.onset,
            )  # fmt: skip
        return
    first, kept, worst = [], [], None
    for track in e.of("update_ratio"):
        rate = e.at(int(track.steps[0]), "learning_rate")
        if track.steps[0] <= 2 and rate and track.layer is not None:
            first.append(median(track.values[0]) * peak / rate)
        high = np.array([(e.at(int(step), "learning_rate") or 0) >= peak / 2 for step in track.steps])
        if high.any():
            kept.append(median(track.values[high].ravel()))
            worst = track if worst is None or kept[-1] == max(kept) else worst
    if not kept or worst is None or median(kept) < 1e-2 or (first and median(first) < 1):
        return
    replaced = f"at its peak, {peak:.3g}, one step would move the first weights by {median(first):.2g} of themselves, " if first else ""
    row = int(np.argmax(np.nanmean(worst.values, axis=1)))
    yield Cause(
        "learning rate above the stable edge", min(0.95, (0.6 if first else 0.45) + 0.12 * len(shown)),
        f"{replaced}updates stay at {median(kept):.2g} of the weights, and {' and '.join(shown[:3])}",
        tuple(tries), worst.layer, worst.where, "update_ratio", None, int(worst.steps[row]), worst.sigmas(row),
    )  # fmt: skip


def warmup_missing(e: Evidence) -> Iterator[Cause]:
    """Norms after the residual sum, no rise of the learning rate, and a run that stalls from the beginning (Xiong et
    al. 2020, 2002.04745)."""
    if e.config is None or len(e.rates) < 10 or not any(isinstance(b.residual, PostConfig) for b in e.config.layers()):
        return
    rise = int(np.argmax(e.rates >= 0.99 * e.rates.max()))
    if e.rates[0] < 0.5 * e.rates.max() or rise > max(2, 0.005 * len(e.rates)):
        return
    shown = [*_consequences(e)]
    shown += [cause.cause for rule in (rank_collapse, vanishing_gradient) for cause in rule(e)]
    if not shown:
        return
    top = e.layers[-1] if e.layers else e.config.n_layers - 1
    gradient = e.layer_gradient(top)
    yield Cause(
        "warm-up missing", min(0.9, 0.6 + 0.1 * len(shown)),
        f"norms stand after the residual sum, the learning rate is at its peak from step {e.steps[rise]}, and "
        f"{' and '.join(shown[:2])} from the beginning",
        ("recipe.warmup=0.1", "+pre", "+deepnorm", f"recipe.learning_rate={_rounded(_peak(e) / 3)}"),
        top, f"layers.{top}", "gradient_norm", None, int(gradient.steps[0]) if gradient else int(e.steps[0]),
    )  # fmt: skip


def bad_batch(e: Evidence) -> Iterator[Cause]:
    """A spike that stands alone and that nothing led up to: weights as before, the loss back within ten steps. Small
    ones are the text's own (an odd document); twelve sigma, or a loss as if nothing had been learned, are not."""
    for spike in e.spikes:
        untaught = spike.loss >= e.losses[0] or spike.loss - spike.before > 5
        alone = not any(0 < abs(other.step - spike.step) <= WINDOW for other in e.spikes)
        calm = e.diverged is None or spike.step < e.diverged - WINDOW
        if not (spike.passed and alone and calm and (spike.sigmas > 12 or untaught)) or _weights_jumped(e, spike.step):
            continue
        event = next((x for x in e.events if x["step"] == spike.step and x.get("batch")), {})
        texts = tuple(event.get("batch", ()))
        odd = _odd(texts)
        yield Cause(
            "bad batch", min(0.95, 0.6 + 0.15 * (spike.sigmas > 12) + 0.1 * untaught + 0.1 * bool(odd)),
            f"the loss rose from {spike.before:.3g} to {spike.loss:.3g} in one step ({spike.sigmas:.1f} sigma), with weights "
            f"as before, and was back within {BACK} steps" + (f"; its text {odd}" if odd else ""),
            ("recipe.on_spike=skip", "recipe.clip=1.0"),
            None, None, "loss", None, spike.step, spike.sigmas, texts,
        )  # fmt: skip


def moved_alone(e: Evidence) -> Iterator[Cause]:
    """A matrix or head whose norm jumped as no update could have moved it, while the others stayed: edited, or
    corrupted."""
    tracks = [track for track in e.of("weight_norm") if len(track.steps) >= 2]
    jumps = {id(track): _jumps(track) for track in tracks}
    others: dict[tuple[int, int], list[float]] = {}
    for track in tracks:
        for row, (a, b) in enumerate(pairwise(track.steps.tolist())):
            others.setdefault((a, b), []).extend(np.abs(jumps[id(track)][row]).tolist())
    usual = {stretch: median(values) for stretch, values in others.items()}
    for track in tracks:
        ratio = e.get("update_ratio", track.where)
        for row, (a, b) in enumerate(pairwise(track.steps.tolist())):
            known = ratio.values[ratio.steps <= a] if ratio is not None else np.zeros((0, 1))
            most = np.nanmax(known[-3:], axis=0) if len(known) else np.full(track.values.shape[1], 0.1)
            allowed = np.log1p(3 * most * (b - a)) + 0.1
            jump = jumps[id(track)][row]
            for head in np.flatnonzero(np.abs(jump) > np.maximum(allowed + math.log(1.5), 4 * usual[a, b])).tolist():
                times = math.exp(min(700.0, jump[head]))
                heads = track.values.shape[1]
                what = f"head {head} of {track.where}" if heads > 1 else track.where
                yield Cause(
                    "one head's weights moved alone" if heads > 1 else "one matrix moved alone",
                    min(0.95, 0.7 + 0.05 * abs(jump[head])),
                    f"the norm of {what} became {times:.3g} times as large between steps {a} and {b}, where its updates "
                    f"allow {math.exp(allowed[head]):.3g}: the weights were edited or corrupted",
                    ("--resume from a checkpoint before it", "recipe.on_spike=roll_back"),
                    track.layer, track.where, "weight_norm", head if heads > 1 else None, b,
                    track.sigmas(row + 1, head),
                )  # fmt: skip


def dead_layer(e: Evidence) -> Iterator[Cause]:
    """A layer that gets no gradient, next to layers that do: less than 1e-5 of theirs, or less than a tenth while the
    residual stream leaves it as it came. It is zero, or cut off."""
    for layer in e.layers:
        own = e.layer_gradient(layer)
        beside = [t for n in (layer - 1, layer + 1) if n in e.layers and (t := e.layer_gradient(n)) is not None]
        if own is None or not beside or len(own.steps) < 3:
            continue
        if any(not np.array_equal(track.steps, own.steps) for track in beside):
            continue
        near = np.min([track.values for track in beside], axis=0)
        dead = ((own.values < 1e-5 * near) | ((own.values < 0.1 * near) & _unchanged(e, layer, own.steps)))[:, 0]
        known = np.isin(own.steps, _full_steps(e))
        dead, steps = dead[known], own.steps[known]
        if len(dead) < 3 or share(dead[-2:]) < 1 or not np.all(near[-2:] > 0):
            continue
        first = len(dead) - int(np.argmin(dead[::-1])) if not dead.all() else 0
        yield Cause(
            "dead layer", 0.95,
            f"since step {steps[first]} the matrices of layer {layer} get {_times(own.values[known][-1, 0], near[known][-1, 0])} "
            f"of the gradient of the layers beside it, and the stream passes as it came: its weights are zero, or what it "
            f"computes is cut off",
            ("--resume from a checkpoint before it", "another seed"),
            layer, f"layers.{layer}", "gradient_norm", None, int(steps[first]),
            own.sigmas(int(np.searchsorted(own.steps, steps[first]))),
        )  # fmt: skip


def _unchanged(e: Evidence, layer: int, steps: np.ndarray) -> np.ndarray:
    """Whether the stream's statistics after a layer are those before it, to a thousandth, at each of `steps`, (r, 1)."""
    same = np.zeros((len(steps), 1), dtype=bool)
    pairs = [
        (e.get(name, f"layers.{layer - 1}.resid_post"), e.get(name, f"layers.{layer}.resid_post"))
        for name in ("residual_rms", "token_cosine", "relative_residual", "activation_effective_rank")
    ]
    if any(a is None or b is None or not np.array_equal(a.steps, b.steps) for a, b in pairs):
        return same
    alike = np.all([np.isclose(a.values[:, 0], b.values[:, 0], rtol=1e-3) for a, b in pairs if a and b], axis=0)
    at = np.isin(steps, pairs[0][0].steps)  # type: ignore[union-attr]
    same[at, 0] = alike[np.isin(pairs[0][0].steps, steps)]  # type: ignore[union-attr]
    return same


def _full_steps(e: Evidence) -> np.ndarray:
    """Steps at which all was looked at, not the norms alone."""
    return np.unique(np.concatenate([track.steps for track in e.of("update_ratio")] or [np.zeros(0, dtype=np.int64)]))


def dead_units(e: Evidence) -> Iterator[Cause]:
    """More than nine in ten units silent for every token, and their matrix without gradient."""
    for dead in e.of("dead_units"):
        inner = _gradients(e, dead.layer, ("up", "gate"), "ffn")
        outer = _gradients(e, dead.layer, ("v", "out"))
        if inner is None or outer is None or len(dead.steps) < 3 or dead.layer is None:
            continue
        mask = dead.values[:, 0] > 0.9
        rows = np.isin(inner.steps, dead.steps[-3:])
        with np.errstate(divide="ignore", invalid="ignore"):
            starved = inner.values[rows] < 1e-3 * outer.values[np.isin(outer.steps, dead.steps[-3:])]
        if share(mask[-3:]) < 1 or share(starved) < 1:
            continue
        first = len(mask) - int(np.argmin(mask[::-1])) if not mask.all() else 0
        yield Cause(
            "dead units", 0.85,
            f"{dead.values[-1, 0]:.0%} of the hidden units of layer {dead.layer} are silent for every token since step "
            f"{dead.steps[first]}, and their weights get no gradient",
            ("+swiglu", "+gelu", f"recipe.learning_rate={_rounded(_peak(e) / 3)}", "recipe.warmup=0.1"),
            dead.layer, dead.where, "dead_units", None, int(dead.steps[first]), dead.sigmas(first),
        )  # fmt: skip


RULES: tuple[Callable[[Evidence], Iterator[Cause]], ...] = (
    value_not_finite, moved_alone, dead_layer, dead_units, rate_too_large, warmup_missing, entropy_collapse,
    logit_growth, rank_collapse, vanishing_gradient, output_divergence, eps_too_large, bad_batch,
)  # fmt: skip


# What several rules ask

NATS_ABOVE = 0.3
"""A loss that stood so much above its beginning did not merely fluctuate."""


def _consequences(e: Evidence) -> list[str]:
    """What shows that training is beside itself, each a clause."""
    shown = []
    if e.not_finite:
        shown.append(f"the run ended in {e.not_finite.get('value', 'nan')}")
    if e.diverged is not None:
        shown.append(f"the loss diverged from step {e.diverged}")
    if e.hump > NATS_ABOVE:
        shown.append(f"the loss rose {e.hump:.2g} nats above its beginning")
    lasting = [spike for spike in e.spikes if not spike.passed or spike.sigmas > 12]
    if len(lasting) >= 3:
        shown.append(f"the loss spiked {len(lasting)} times")
    if cause := next(logit_growth(e), None):
        shown.append(cause.why)
    streams = [track for track in e.of("residual_rms") if len(track.steps) >= 3 and track.values[0, 0] > 0]
    blown = [track for track in streams if track.values[-1, 0] > max(100.0, 1000 * track.values[0, 0])]
    if blown:
        shown.append(f"the residual stream has grown {blown[-1].values[-1, 0] / blown[-1].values[0, 0]:.2g} times")
    if cause := next(rank_collapse(e), None):
        shown.append(cause.why)
    return shown


def _gradients(e: Evidence, layer: int | None, names: Sequence[str], part: str = "mixer") -> Track | None:
    """||dL/dW|| over the named matrices of a layer."""
    found = [t for name in names if (t := e.get("gradient_norm", f"layers.{layer}.{part}.{name}")) is not None]
    if not found or any(not np.array_equal(track.steps, found[0].steps) for track in found):
        return None
    total = np.sqrt(sum((track.values**2).sum(1) for track in found))
    return replace(found[0], values=np.asarray(total)[:, None])


def _jumps(track: Track) -> np.ndarray:
    """log(norm / norm before) of every two rows, (r - 1, n); 0 from a matrix of zeros, which may go anywhere."""
    norms = np.abs(track.values)
    logs = np.log(np.maximum(norms, 1e-30))
    return np.where(norms[:-1] > 1e-12, np.diff(logs, axis=0), 0.0)


def _weights_jumped(e: Evidence, step: int) -> bool:
    """Whether a matrix moved between the rows around a step as none does in a step."""
    for track in e.of("weight_norm"):
        rows = np.flatnonzero((track.steps >= step - 1) & (track.steps <= step + 1))
        if len(rows) >= 2 and np.abs(_jumps(track)[rows[:-1]]).max() > math.log(1.5):
            return True
    return False


def _odd(texts: Sequence[str]) -> str:
    """What is strange about a text, by how far it can be compressed; an empty string of ordinary ones."""
    raw = "".join(texts).encode()
    if len(raw) < 64:
        return ""
    kept = len(zlib.compress(raw, 9)) / len(raw)
    return "repeats itself" if kept < 0.1 else "reads like noise" if kept > 0.85 else ""


def _unknown(e: Evidence, movers: Sequence[tuple[Track, int, int, float]]) -> Cause:
    tries = (f"recipe.learning_rate={_rounded(_peak(e) / 3)}", "recipe.warmup=0.1", "recipe.clip=1.0")
    if not movers:
        return Cause("cause unknown", 0.2, "no statistic moved before the loss did", tries, step=e.onset)
    track, row, head, sigmas = movers[0]
    of_heads = track.values.shape[1] > 1
    return Cause(
        "cause unknown", 0.3, f"{_named(track, head)} moved first, and that matches no known failure", tries,
        track.layer, track.where, track.statistic, head if of_heads else None, int(track.steps[row]), sigmas,
    )  # fmt: skip


def _peak(e: Evidence) -> float:
    return float(e.rates.max()) if len(e.rates) else float(e.recipe.get("learning_rate") or 1e-3)


def _eps(e: Evidence) -> float:
    return float(e.recipe.get("adam_eps") or 1e-8)


def _usual_rate(config: ModelConfig) -> float:
    """0.003239 - 0.0001395 ln N (Kaplan et al. 2020, 2001.08361, eq. D.1), at least 1e-4."""
    return max(1e-4, 0.003239 - 0.0001395 * math.log(max(1, config.num_params(embeddings=False))))


def _times(small: float, large: float) -> str:
    return f"{small / large:.1g}" if small > 0 else "nothing"


def _rounded(value: float) -> str:
    return f"{value:.1g}" if value > 0 and math.isfinite(value) else "3e-4"


# The story


def _happened(e: Evidence) -> str:
    """What one saw, in a clause."""
    if e.not_finite:
        what = "gradient norm" if e.not_finite.get("what") == "grad_norm" else "loss"
        return f"the {what} became {e.not_finite.get('value', math.nan)} at step {e.not_finite['step']}"
    if e.diverged is not None:
        return f"the loss diverged from step {e.onset}"
    if large := [spike for spike in e.spikes if spike.sigmas > 12]:
        worst = max(large, key=lambda spike: spike.sigmas)
        return f"the loss spiked at step {worst.step}, by {worst.sigmas:.0f} sigma"
    if e.hump > NATS_ABOVE:
        return f"the loss rose {e.hump:.2g} nats above its beginning"
    return "the loss neither spiked nor diverged, yet something is wrong"


def _story(
    e: Evidence, happened: str, causes: Sequence[Cause], movers: Sequence[tuple[Track, int, int, float]]
) -> Iterator[str]:
    if not causes:
        fell = f", and the loss fell from {e.losses[0]:.3g} to {np.mean(e.losses[-10:]):.3g}" if len(e.losses) else ""
        yield f"Nothing wrong was found in {e.last_step:,} steps{fell}."
    else:
        yield f"{_capital(happened)}."
        if movers:
            track, row, head, sigmas = movers[0]
            yield f"The first to move was {_named(track, head)}, at step {track.steps[row]} ({sigmas:+.1f} sigma)."
        yield f"{_capital(_sure(causes[0].confidence))} ({causes[0].confidence:.0%}) this is {causes[0].cause}: {causes[0].why}."
        if causes[0].tries:
            yield f"Try {', '.join(causes[0].tries)}."
        if len(causes) > 1:
            rest = ", ".join(f"{cause.cause} ({cause.confidence:.0%})" for cause in causes[1:3])
            yield f"Less likely, or with it: {rest}."
    passed = [spike for spike in e.spikes if spike.passed and not _is_named(spike, causes)]
    if passed:
        worst = max(passed, key=lambda spike: spike.sigmas)
        several = f"{len(passed)} spikes" if len(passed) > 1 else "A spike"
        yield f"{several} of the loss (the largest {worst.sigmas:.1f} sigma, at step {worst.step}) passed without a trace."
    if not e.watched:
        yield "The run has no statistics, so the loss alone was judged; train with --watch to see inside."


def _is_named(spike: Spike, causes: Sequence[Cause]) -> bool:
    return any(cause.step == spike.step for cause in causes)


def _named(track: Track, head: int) -> str:
    return f"{track.statistic} of {track.where}" + (f", head {head}" if track.values.shape[1] > 1 else "")


def _sure(confidence: float) -> str:
    words = ((0.85, "almost certainly"), (0.6, "probably"), (0.35, "possibly"), (0.0, "perhaps"))
    return next(word for least, word in words if confidence >= least)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
