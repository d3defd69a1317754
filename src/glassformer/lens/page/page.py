"""Draws an inspection: the text, its heads, one map large, the predictions by depth."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from glassformer.figures import Axis, Markup, Series, document, embedded, fixed, join, line_chart, si, tag
from glassformer.lens.page.packed import indices, packed, shares, short_floats
from glassformer.lens.page.words import visible

if TYPE_CHECKING:
    from glassformer.lens.inspected import Head, Inspected

FINE_WEIGHTS = 1 << 20
"""So many weights of maps are written in 16 bits, more in 8."""
SHADES = (("at", "looks at"), ("by", "looked at by"), ("surprise", "surprise"))
MEASURES = (
    ("maps", "maps"),
    ("attention_entropy", "entropy"),
    ("sink_mass", "first token"),
    ("previous_mass", "token before"),
    ("self_mass", "itself"),
    ("max_attention_logit", "largest logit"),
)
POOLED = " Maps are pooled into tiles: a tile has the weight that its queries give all of its keys, in the mean."
KINDS = {
    "first token": "Rest on the first token",
    "token before": "Watch the token before",
    "itself": "Watch themselves",
    "elsewhere": "Look for something",
}


def render(seen: Inspected) -> str:
    """The page as text. Words are never taken for markup, and nothing is fetched."""
    main = tag("main", header(seen), bench(seen), heads(seen), one_map(seen), lens(seen), depths(seen), notes(seen))
    style, code = _file("inspect.css"), _file("inspect.js")
    return document(f"{title(seen)}, inspected", main, embedded(data(seen), "inspection"), style=style, code=code)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def title(seen: Inspected) -> str:
    return visible(seen.name) if seen.name else "A model"


# What stands above


def header(seen: Inspected) -> Markup:
    notice = "Its weights are random: the page shows how the model is made, and nothing it has learned."
    still = "Maps and predictions are drawn by a script, and this browser runs none."
    return tag(
        "header",
        tag("p", "Glassformer inspection", class_="kicker"),
        tag("h1", title(seen)),
        tag("p", finding(seen), class_="finding"),
        None if seen.trained else tag("p", tag("strong", "Not trained. "), notice, class_="notice", role="note"),
        terms(seen),
        tag("noscript", tag("p", still, class_="notice")),
    )


def finding(seen: Inspected) -> str:
    """What the page shows, in two or three sentences."""
    words = []
    count = len(seen.ids)
    if math.isfinite(seen.mean_loss):
        share = seen.mean_loss / math.log(seen.vocab_size) if seen.vocab_size > 1 else 1.0
        words.append(
            f"A token of this text cost {seen.mean_loss:.2f} nats in the mean, "
            f"{100 * share:.0f}\u00a0% of what a blind guess among {seen.vocab_size:,} would."
        )
    if seen.heads and count > 1:
        sinks, watchers = (sum(test) for test in zip(*((h.rests, h.watches) for h in seen.heads), strict=True))
        words.append(
            f"Of {len(seen.heads):,} heads, {sinks:,} rest on the first token and {watchers:,} watch the token before."
        )
    if seen.layers and seen.settled >= seen.layers:
        words.append("Half of the final predictions are settled by the last layer alone.")
    elif seen.layers:
        words.append(f"Half of the final predictions stand after {seen.settled:g} of {seen.layers} layers.")
    return " ".join(words)


def terms(seen: Inspected) -> Markup:
    tiles = sorted({kept.tile for kept in seen.attention.values()})
    exact = "exact" if tiles == [1] else f"tiles of {' and '.join(str(tile) for tile in tiles)} tokens"
    perplexity = math.exp(min(seen.mean_loss, 700.0)) if math.isfinite(seen.mean_loss) else None
    facts = [
        ("Tokens", f"{len(seen.ids):,}"),
        ("Loss", "" if perplexity is None else f"{seen.mean_loss:.3f} nats per token"),
        ("Perplexity", "" if perplexity is None else si(perplexity)),
        ("Parameters", si(seen.parameters)),
        ("Layers", str(seen.layers)),
        ("Heads", f"{len(seen.heads):,}"),
        ("Maps", exact if tiles else "none"),
        ("Sees", "what came before" if seen.causal else "both ways"),
    ]
    return tag("dl", *(tag("div", tag("dt", a), tag("dd", b)) for a, b in facts if b), class_="terms")


# The text, which stays in sight


def bench(seen: Inspected) -> Markup:
    step = {"type": "button", "class_": "step"}
    controls = tag(
        "div",
        tag("label", "Layer ", tag("select", id="layer")),
        tag("label", "Head ", tag("select", id="head")),
        tag(
            "span",
            tag("label", "Token ", tag("input", id="token", type="number", min=0, max=len(seen.ids) - 1)),
            tag("button", "‹", id="before", aria_label="Token before", **step),
            tag("button", "›", id="after", aria_label="Token after", **step),
            class_="stepper",
        ),
        choice("shade", "Shade", SHADES),
        class_="controls",
    )
    text = tag("div", *strip(seen), id="strip", class_="strip", aria_label="Tokens of the text")
    legend = tag(
        "p",
        tag("span", class_="ramp ramp-shade", aria_hidden="true"), tag("span", " attention ", class_="legend-words"),
        tag("span", class_="ramp ramp-warm", aria_hidden="true"),
        tag("span", " surprise, up to a blind guess ", class_="legend-words"),
        tag("output", id="about"),
        class_="legend",
    )  # fmt: skip
    return tag("section", controls, text, legend, class_="bench", aria_label="Text")


def strip(seen: Inspected) -> list[Markup]:
    """The tokens, each as far coloured as it surprised; where a token ends a line, so does the strip."""
    most = math.log(max(seen.vocab_size, 2))
    pieces = []
    for word, loss in zip(seen.words, seen.loss.tolist(), strict=True):
        surprise = round(min(max(loss / most, 0.0), 1.0), 2) if math.isfinite(loss) else 0
        pieces.append(tag("span", visible(word), style=f"--s:{surprise:g}", class_=None if word else "part"))
        if word.endswith("\n"):
            pieces.append(Markup("<br>"))
    return pieces


def choice(name: str, label: str, options: tuple[tuple[str, str], ...]) -> Markup:
    """One of a few, side by side."""
    buttons = [
        tag("label", tag("input", type="radio", name=name, value=value, checked=not i), tag("span", words))
        for i, (value, words) in enumerate(options)
    ]
    return tag("fieldset", tag("legend", label), *buttons, class_="choice")


def section(key: str, title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title, id=key), *children, aria_labelledby=key)


def caption(*children: object) -> Markup:
    return tag("p", *children, class_="caption")


def canvas(key: str, label: str, how: str) -> Markup:
    """A picture that the script draws and the arrow keys read."""
    drawing = tag("canvas", id=key, tabindex=0, role="img", aria_label=label, aria_description=how)
    return tag("div", drawing, class_="holder")


# Heads


def heads(seen: Inspected) -> Markup:
    if not seen.heads:
        return section(
            "heads", "Heads", tag("p", "The mixers of this model have no attention maps.", class_="gf-empty")
        )
    return section(
        "heads",
        "Every head",
        choice("measure", "Show", MEASURES),
        tag("div", canvas("overview", "All heads, layers from left to right",
                          "Arrow keys choose a layer and a head."), class_="scroll"),
        tag("p", tag("span", class_="ramp ramp-look", aria_hidden="true"), " ", tag("span", id="scale"),
            class_="legend"),
        notable(seen),
        caption("A column is a layer, a cell one of its heads; a click opens it below. In a map, rows are the tokens "
                "that look and columns those looked at.", POOLED if is_pooled(seen) else None),
    )  # fmt: skip


def is_pooled(seen: Inspected) -> bool:
    return any(kept.tile > 1 for kept in seen.attention.values())


def notable(seen: Inspected) -> Markup:
    """The heads that stand out, as buttons that open them."""
    measures = {
        "first token": "sink_mass", "token before": "previous_mass", "itself": "self_mass", "elsewhere": "elsewhere",
    }  # fmt: skip
    lists = [
        tag("div", tag("h3", KINDS[kind]), tag("ol", *(_head(one, measures[kind]) for one in found)))
        for kind, found in seen.notable().items()
        if found
    ]
    return tag("div", *lists, class_="notable")


def _head(one: Head, measure: str) -> Markup:
    words = tag("button", f"layer {one.layer}, head {one.head}", type="button", class_="pick",
                data_layer=one.layer, data_head=one.head)  # fmt: skip
    return tag("li", words, " ", tag("span", fixed(getattr(one, measure), 2), class_="value"))


def one_map(seen: Inspected) -> Markup:
    if not seen.heads:
        return Markup("")
    how = "The colour grows with the square root of the weight. Rows look, columns are looked at."
    if is_pooled(seen):
        how = (
            "The colour grows with the 0.3rd power of the weight. Rows look, columns are looked at. In the lists, a "
            "single token has its exact weight; ranges are means over all the tokens that share the tile."
        )
    panel = tag(
        "div",
        tag("div", tag("h3", "Looks at", id="at-title"), tag("ol", id="at", class_="bars")),
        tag("div", tag("h3", "Looked at by", id="by-title"), tag("ol", id="by", class_="bars")),
        class_="panel",
    )
    picture = canvas("map", "Attention map of the chosen head",
                     "Arrow keys read the weights; Enter chooses the token of the row.")  # fmt: skip
    return tag(
        "section",
        tag("h2", "One head", id="chosen", aria_live="polite"),
        tag("p", id="facts", class_="facts"),
        tag("div", picture, panel, class_="beside"),
        caption(how),
        aria_labelledby="chosen",
    )


# Depth


def lens(seen: Inspected) -> Markup:
    what = "the token that came next" if seen.causal else "the token itself"
    return section(
        "lens",
        "What each depth would say",
        canvas("lens-map", f"Probability of {what}, by depth and position",
               "Left and right choose a token, up and down read its depths."),
        tag("p", tag("span", class_="ramp ramp-lens", aria_hidden="true"), f" probability of {what}, 0 to 1",
            class_="legend"),
        tag("p", id="after-what", class_="lead"),
        tag("div", tag("table", id="predictions"), class_="scroll", role="region", tabindex=0,
            aria_label="Predictions by depth"),
        caption(
            "The logit lens: the stream after each layer, read by the model's own final norm and head. From top to "
            "bottom the depth grows; the last row is what the model says."
        ),
    )  # fmt: skip


def depths(seen: Inspected) -> Markup:
    charts = [
        _chart(seen.depth_loss.nanmean(1).tolist(), Axis("Loss by depth, nats")),
        _chart(seen.residual_rms.mean(1).tolist(), Axis("RMS of the residual stream", kind="log")),
        _chart(seen.token_cosine.tolist(), Axis("Cosine between tokens", high=1.0)),
    ]
    return section(
        "depth",
        "How the stream changes",
        tag("div", *charts, class_="charts"),
        caption(
            "Means over the text; depth 0 is the embedding. A cosine near 1 means that all tokens point the same way."
        ),
    )


def _chart(values: list[float], y: Axis) -> Markup:
    points = [(float(depth), value) for depth, value in enumerate(values)]
    told = f"{y.label}: {fixed(values[0], 2)} at the embedding, {fixed(values[-1], 2)} at the end"
    curve = Series(y.label, points)
    return tag("figure", line_chart([curve], Axis("depth"), y, told, width=380, height=250, end_labels=False))


def notes(seen: Inspected) -> Markup:
    entries = [
        ("entropy", "of a row of the map, over the log of the keys that its query sees, in the mean: 0 looks at one "
                    "token, 1 at all alike"),
        ("first token, token before, itself", "the weight that queries give to them, in the mean"),
        ("largest logit", "in size, before the softmax"),
        ("surprise", "minus the logarithm of the probability that the model gave the token, in nats"),
        ("look for something", "the weight on none of these, nor on the one other token that gets most, "
                               "times 1 − entropy"),
    ]  # fmt: skip
    listed = tag("dl", *(join([tag("dt", a), tag("dd", b)]) for a, b in entries), class_="words")
    return section("notes", "What the words mean", listed)


# Data


def data(seen: Inspected) -> dict[str, Any]:
    """What the script draws from."""
    ids, places = seen.top_ids.unique(return_inverse=True)
    fine = sum(kept.maps.numel() for kept in seen.attention.values()) <= FINE_WEIGHTS
    arrays = {
        "top": indices(places, len(ids)),
        "shares": shares(seen.top_probabilities, fine),
        "loss": short_floats(seen.depth_loss),
        "rms": short_floats(seen.residual_rms),
    }
    layers: list[dict[str, int] | None] = []
    for layer in range(seen.layers):
        kept = seen.attention.get(layer)
        if kept is None:
            layers.append(None)
            continue
        count, rows, columns = kept.maps.shape
        arrays[f"map{layer}"] = shares(kept.maps, fine)
        if kept.keys is not None and kept.weights is not None:
            arrays[f"keys{layer}"] = indices(kept.keys, 1 << 16)
            arrays[f"weights{layer}"] = shares(kept.weights, fine)
        keep = 0 if kept.keys is None else kept.keys.shape[-1]
        layers.append({"heads": count, "rows": rows, "columns": columns, "tile": kept.tile, "keep": keep})
    return {
        "causal": seen.causal,
        "words": [visible(word) for word in seen.words],
        "ids": seen.ids.tolist(),
        "table": [visible(seen.spelled[i]) for i in ids.tolist()],
        "tableIds": ids.tolist(),
        "k": seen.top_ids.shape[-1],
        "layers": layers,
        "heads": [
            [one.layer, one.head, *(_number(getattr(one, name)) for name, _ in MEASURES[1:])] for one in seen.heads
        ],
        "measures": [list(pair) for pair in MEASURES[1:]],
        "start": _start(seen),
        **packed(arrays),
    }


def _start(seen: Inspected) -> dict[str, int]:
    """The head that is shown first: one that looks for something, if there is any."""
    best = max(seen.heads, key=lambda head: head.elsewhere, default=None)
    return {"layer": best.layer if best else 0, "head": best.head if best else 0, "token": len(seen.ids) - 1}


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
