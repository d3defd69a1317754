"""Page of an inspection: the text, its heads, one map enlarged, the predictions by depth."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from glassformer.figures import (
    Axis,
    Markup,
    Series,
    copyable,
    document,
    embedded,
    fixed,
    join,
    line_chart,
    si,
    swatch,
    tag,
)
from glassformer.lens.inspected import Effective, HeadMap, Inspected
from glassformer.lens.page.packed import indices, packed, shares, short_floats
from glassformer.lens.page.words import LONGEST_WORD, likely, visible
from glassformer.units import plural

FINE_WEIGHTS = 1 << 20
"""Largest number of weights of all maps that are written in 16 bits; more are written in 8."""
SHADES = (("at", "attends to"), ("by", "attended to by"), ("surprise", "surprise"))
MEASURES = (
    ("maps", "attention maps"),
    ("attention_entropy", "entropy"),
    ("sink_mass", "on first token"),
    ("previous_mass", "on token before"),
    ("self_mass", "on itself"),
    ("max_attention_logit", "largest logit"),
    ("distance", "mean distance"),
)
KINDS = {
    "first token": ("Rest on the first token", "mean attention weight", "sink_mass"),
    "token before": ("Read the token before", "mean attention weight", "previous_mass"),
    "itself": ("Read the token itself", "mean attention weight", "self_mass"),
    "elsewhere": ("Pick out other tokens", "0 to 1: weight that goes elsewhere, if few tokens get it", "elsewhere"),
}
TITLE = 56
"""Largest number of characters of the text in the page's title."""
NAT = (
    "A nat measures surprise: a token costs minus the natural logarithm of the probability that the model gave it, "
    "0 nats if it was sure of it, 0.69 if it gave it one half."
)
LEAST = 0.005
"""Smallest weight with which a head is listed, because a smaller one would print as 0.00."""
STEEP = 4.0
"""Ratio of a chart's largest value to its smallest above which the axis is logarithmic: the end of a falling curve
would look flat otherwise."""


def render(seen: Inspected) -> str:
    """Returns the page of an inspection as HTML. Words are escaped, and nothing is fetched."""
    parts = (header, bench, heads, pair, one_map, answers, crossing, lens, depths, notes)
    main = tag("main", *(part(seen) for part in parts))
    style, code = _file("inspect.css"), _file("inspect.js")
    values = embedded(data(seen), "inspection"), embedded(Inspected.to_dict(seen), "reading")
    return document(title(seen), main, *values, style=style, code=code)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def title(seen: Inspected) -> str:
    """Returns the title of the page: the model's name, shortened to its end if it is a long path, and the start of the
    text."""
    name = seen.name if len(seen.name) <= LONGEST_WORD or "/" not in seen.name else f"…{seen.name[1 - LONGEST_WORD :]}"
    return f"{visible(name) if name else 'A model'} reads “{opening(seen)}”"


def opening(seen: Inspected, most: int = TITLE) -> str:
    """Returns the first words of the inspected text, at most `most` characters in one line."""
    between = " " if seen.words == tuple(map(str, seen.ids.tolist())) else ""  # without a tokenizer, words are ids
    text = " ".join(between.join(seen.words[: 8 * most]).split())
    shown = visible(text)
    return shown if len(shown) <= most else f"{shown[:most].rsplit(' ', 1)[0][: most - 1]}…"


# Header


def header(seen: Inspected) -> Markup:
    notice = "Its weights are random: the page shows how the model is made, and nothing it has learned."
    still = "Maps and predictions are drawn by a script, and this browser runs none."
    return tag(
        "header",
        tag("p", "Glassformer inspection", class_="kicker"),
        tag("h1", title(seen)),
        tag("p", finding(seen), class_="finding"),
        tag("p", NAT, class_="caption") if math.isfinite(seen.mean_loss) else None,
        None if seen.trained else tag("p", tag("strong", "Not trained. "), notice, class_="notice", role="note"),
        terms(seen),
        source(seen),
        tag("noscript", tag("p", still, class_="notice")),
    )


def source(seen: Inspected) -> Markup:
    """Returns the page's section on how it was made and can be used: the command, the data, a guide to reading."""
    download = tag(
        "a", "Download the numbers (JSON)", href="#reading", download="inspection.json", data_download="reading",
        hidden=True,
    )  # fmt: skip
    two = tag("a", "Which heads look from one token to another", href="#pair") if pair(seen) else None
    links = tag("p", two, tag("a", "How to read this page", href="#notes"), " ", download, class_="links")
    if not seen.command:
        return links
    made = tag("div", tag("span", "Made by"), command(seen.command), class_="made")
    return join([made, links])


def command(words: str) -> Markup:
    """Returns the element that shows a command with a copy button; a long command is folded."""
    code = copyable(words, "The command that made this page")
    return code if len(words) <= 240 else tag("details", tag("summary", f"{words[:120].rstrip()} …"), code)


def finding(seen: Inspected) -> str:
    """Returns the summary at the top of the page: its results in a few sentences."""
    words = [f"{next_word}."] if (next_word := likely(seen)) else []
    count = len(seen.ids)
    if math.isfinite(seen.mean_loss):
        share = seen.mean_loss / math.log(seen.vocab_size) if seen.vocab_size > 1 else 1.0
        words.append(
            f"A token of this text cost {seen.mean_loss:.2f} nats on average, "
            f"{100 * share:.0f}\u00a0% of that of a uniform guess among {seen.vocab_size:,} tokens."
        )
    if seen.heads and count > 1:
        sinks, watchers = (sum(test) for test in zip(*((h.rests, h.watches) for h in seen.heads), strict=True))
        words.append(
            f"Of {len(seen.heads):,} heads, {sinks:,} rest on the first token and {watchers:,} read the token before."
        )
    if seen.layers and seen.settled >= seen.layers:
        words.append("Half of the final predictions are made only by the last layer.")
    elif seen.layers:
        words.append(f"After {seen.settled:g} of {seen.layers} layers, half of the final predictions are already made.")
    return " ".join(words)


def terms(seen: Inspected) -> Markup:
    tiles = sorted({kept.tile for kept in seen.attention.values()})
    exact = "each token by each token" if tiles == [1] else f"{' and '.join(map(str, tiles))} tokens to a cell"
    perplexity = math.exp(min(seen.mean_loss, 700.0)) if math.isfinite(seen.mean_loss) else None
    facts = [
        ("Tokens", f"{len(seen.ids):,}"),
        ("Loss", "" if perplexity is None else f"{seen.mean_loss:.3f} nats per token"),
        ("Perplexity", "" if perplexity is None else si(perplexity)),
        ("Parameters", si(seen.parameters)),
        ("Layers", str(seen.layers)),
        ("Source", f"{len(seen.source):,} tokens" if seen.source else ""),
        ("Mixers", counted(seen.mixers)),
        ("Heads", head_count(seen)),
        ("Attention maps", exact if tiles else "none"),
        ("A token attends to", sight(seen)),
    ]
    return tag("dl", *(tag("div", tag("dt", a), tag("dd", b)) for a, b in facts if b), class_="terms")


def sight(seen: Inspected) -> str:
    """Returns a phrase for the tokens that each token can attend to, such as "itself and what came before"."""
    before = "itself and what came before" if seen.causal else "the whole text"
    return f"{before}, and the first {seen.prefix:,} tokens" if seen.prefix else before


def counted(names: tuple[str, ...]) -> str:
    """Returns the distinct names as text, each with its count if it occurs several times."""
    kinds = dict.fromkeys(names)
    return ", ".join(kinds) if len(kinds) < 2 else "; ".join(f"{names.count(kind)} {kind}" for kind in kinds)


def head_count(seen: Inspected) -> str:
    """Returns a phrase for the number of query heads of a layer and of the KV heads that they share, if all layers are
    alike."""
    sizes = {(len(kept.maps), kept.key_heads) for kept in seen.attention.values()}
    if len(sizes) != 1:
        return f"{len(seen.heads):,}" if seen.heads else ""
    ((queries, keys),) = sizes
    shared = "" if keys == queries else f", on {plural(keys, 'KV head')}"
    return f"{queries:,} in each of {len(seen.attention):,} layers{shared}"


# The text, always visible


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
        choice("shade", "Colour", SHADES),
        class_="controls",
    )
    text = tag("div", *strip(seen), id="strip", class_="strip")
    legend = tag(
        "p",
        tag("span", class_="ramp ramp-shade", aria_hidden="true"), tag("span", " attention ", class_="legend-words"),
        tag("span", class_="ramp ramp-warm", aria_hidden="true"),
        tag("span", " surprisal: 0 to ln(vocab) ", class_="legend-words"),
        tag("output", id="about"),
        class_="legend",
    )  # fmt: skip
    return tag("section", controls, text, legend, class_="bench", aria_label="Text")


def strip(seen: Inspected) -> list[Markup]:
    """Returns the elements of the text's tokens, coloured by surprisal; lines end as in the text."""
    most = math.log(max(seen.vocab_size, 2))
    pieces = []
    for word, loss in zip(seen.words, seen.loss.tolist(), strict=True):
        surprise = round(min(max(loss / most, 0.0), 1.0), 2) if math.isfinite(loss) else 0
        pieces.append(tag("span", visible(word), style=f"--s:{surprise:g}", class_=None if word else "part"))
        if word.endswith("\n"):
            pieces.append(Markup("<br>"))
        elif word.endswith((" ", "\t")):
            pieces.append(Markup("<wbr>"))
    return pieces


def choice(name: str, label: str, options: tuple[tuple[str, str], ...]) -> Markup:
    """Returns a control with which a reader of the page chooses one of a few options, each (value, label)."""
    buttons = [
        tag("label", tag("input", type="radio", name=name, value=value, checked=not i), tag("span", words))
        for i, (value, words) in enumerate(options)
    ]
    return tag("fieldset", tag("legend", label), *buttons, class_="choice")


def section(key: str, title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title, id=key), *children, aria_labelledby=key)


def caption(*children: object) -> Markup:
    return tag("p", *children, class_="caption")


def canvas(key: str) -> Markup:
    """Returns the element in which the page's script draws the picture `key`; a table has the same data."""
    return tag("canvas", id=key, aria_hidden="true")


# Heads


def heads(seen: Inspected) -> Markup:
    if not seen.heads:
        nothing = f"No layer has attention maps: its mixers are {counted(seen.mixers)}."
        return section("heads", "Every head", tag("p", nothing, class_="gf-empty"))
    grid = tag("table", id="head-grid", role="grid", aria_labelledby="heads", class_="cells")
    return section(
        "heads",
        "Every head",
        caption(HEAD),
        tag("p", shared(seen), class_="lead") if shared(seen) else None,
        choice("measure", "Show", MEASURES),
        tag("div", tag("div", canvas("overview"), grid, class_="holder"), class_="scroll"),
        tag("p", tag("span", class_="ramp ramp-look", aria_hidden="true"), " ", tag("span", id="scale"),
            class_="legend"),
        caption("Each cell is a head; choose one to see it below. In a map, a row is a token that attends, a column "
                "one that it attends to.", POOLED if is_pooled(seen) else None,
                HATCHED if len(seen.attention) + len(seen.crossings) < seen.layers else None,
                CROSSING if seen.crossings else None),
        notable(seen),
    )  # fmt: skip


HEAD = (
    "A head is one way in which a layer lets tokens read each other. Each token has a query there and each token it "
    "sees a key; the better they match, the larger the score (logit), and the more weight the head gives: the weights "
    "of a token add up to 100\u00a0%."
)

POOLED = " The text is long, so in a map some tokens share a row and a column: a cell shows their mean."

CROSSING = " A hatched layer may read the source: its maps are below, with the source’s words."

HATCHED = (
    " A hatched layer has no softmax, so that no weights add up to 100\u00a0%; its effective attention, if any, is "
    "below."
)


def shared(seen: Inspected) -> str:
    """Returns the explanation of the brackets around heads that share KV heads; empty if no heads do."""
    groups = sorted({len(kept.maps) // kept.key_heads for kept in seen.attention.values()} - {1})
    if not groups:
        return ""
    count = " or ".join(map(str, groups))
    return f"A bracket joins the {count} query heads that share one KV head: one set of keys and values."


def is_pooled(seen: Inspected) -> bool:
    return any(kept.tile > 1 for kept in seen.attention.values())


def notable(seen: Inspected) -> Markup:
    """Returns the list of notable heads, as buttons that open their maps."""
    lists = [
        tag("div", tag("h3", KINDS[kind][0]), tag("p", KINDS[kind][1], class_="what"),
            tag("ol", *(_head(one, KINDS[kind][2]) for one in found)))
        for kind, heads in seen.notable().items()
        if (found := [one for one in heads if getattr(one, KINDS[kind][2]) >= LEAST])
    ]  # fmt: skip
    return tag("div", *lists, class_="notable")


def _head(one: HeadMap, measure: str) -> Markup:
    value = getattr(one, measure)
    shown = fixed(value, 2) if measure == "elsewhere" else f"{100 * value:.0f}\u00a0%"
    words = tag("button", f"layer {one.layer}, head {one.head}", type="button", class_="pick",
                data_layer=one.layer, data_head=one.head)  # fmt: skip
    return tag("li", words, " ", tag("span", shown, class_="value"))


def pair(seen: Inspected) -> Markup:
    """Returns the page's section on a pair of tokens: a list, filled by the script, of heads by the weight that one
    token gives to the other."""
    if not seen.heads or len(seen.ids) < 2:
        return Markup("")
    order = "The later one looks, as no token sees what follows it. " if seen.causal else "The first one looks. "
    return section(
        "pair",
        "From one token to another",
        tag("p", "Click two tokens of the text above.", id="pair-words", class_="lead", aria_live="polite"),
        tag("ol", id="pair-heads", class_="bars pair"),
        caption(order, "Each line is a head with the weight that it gives, the strongest first; a click opens it. Many "
                "heads attend to a token only because it is the first, or the one before."),
    )  # fmt: skip


def one_map(seen: Inspected) -> Markup:
    if not seen.heads:
        return Markup("")
    power = "power 0.3" if is_pooled(seen) else "square root"
    how = (
        f"Rows attend to columns; the colour grows with the {power} of the weight, so that small ones are "
        "seen. The lists have exact weights."
    )
    panel = tag(
        "div",
        tag("div", tag("h3", "Attends to", id="at-title"), tag("ol", id="at", class_="bars")),
        tag("div", tag("h3", "Attended to by", id="by-title"), tag("ol", id="by", class_="bars")),
        class_="panel",
    )
    values = tag(
        "details",
        tag("summary", "The map as a table"),
        tag("div", tag("table", id="map-table"), class_="scroll", role="region", tabindex=0,
            aria_label="The map as a table"),
        id="map-values",
    )  # fmt: skip
    return tag(
        "section",
        tag("h2", "One head", id="chosen", aria_live="polite"),
        tag("p", id="facts", class_="facts"),
        tag("div", tag("div", canvas("map"), class_="holder"), panel, class_="beside"),
        caption(how),
        values,
        aria_labelledby="chosen",
    )


# Cross-attention


def crossing(seen: Inspected) -> Markup:
    """Returns the page's section on cross-attention, with a map whose rows are the text's tokens and columns the
    source's."""
    if not seen.crossings:
        return Markup("")
    rows, columns = seen.crossings[0].maps.shape[1:]
    cut = rows < len(seen.words) or columns < len(seen.source)
    whose = f" Of the first {rows} tokens and the first {columns} of the source." if cut else ""
    controls = tag(
        "div",
        tag("label", "Layer ", tag("select", id="cross-layer")),
        tag("label", "Head ", tag("select", id="cross-head")),
        class_="controls",
    )
    texts = tag(
        "div",
        tag("p", tag("strong", "Source "), tag("span", *map(_word, seen.source[:columns]), id="cross-source")),
        tag("p", tag("strong", "Text "), tag("span", *map(_word, seen.words[:rows]), id="cross-text")),
        class_="crossing",
    )
    return section(
        "crossing",
        "What is read of the source",
        tag("p", read_words(seen), class_="lead"),
        controls,
        texts,
        tag("div", tag("table", *cross_table(seen), id="cross-map", class_="cross-map"), class_="scroll gf-scroll",
            role="region", tabindex=0, aria_labelledby="crossing"),
        tag("p", tag("span", class_="ramp ramp-look", aria_hidden="true"),
            " weight, 0 to 100 %; the colour grows with its square root", class_="legend"),
        caption("Cross-attention: a row is a token of the text, a column one of the source that the encoder read; a "
                f"row adds up to 100 %.{whose} The row of a token is the one that predicts the next token."),
    )  # fmt: skip


def _word(word: str) -> Markup:
    return tag("span", visible(word), class_=None if word else "part")


def read_words(seen: Inspected) -> str:
    """Returns a sentence on the layers with cross-attention, and on the entropy of the last one of them."""
    layers = [one.layer for one in seen.crossings]
    names = ", ".join(map(str, layers))
    one = seen.crossings[-1]
    strongest = one.mean.amax(-1).mean().item()
    return (
        f"Layer{'s' if len(layers) > 1 else ''} {names} read{'' if len(layers) > 1 else 's'} the source. In layer "
        f"{one.layer} a token gives {100 * strongest:.0f} % of its weight to one token of the source, on average."
    )


def cross_table(seen: Inspected) -> list[Markup]:
    """Returns the rows of a table with the last layer's cross-attention, the mean over heads; for other layers, the
    page's script replaces it."""
    one = seen.crossings[-1]
    head = [tag("th", visible(word), scope="col") for word in seen.source[: one.maps.shape[2]]]
    rows = [
        tag("tr", tag("th", visible(word), scope="row"),
            *(tag("td", style=f"--a:{math.sqrt(w):.2f}", title=f"{100 * w:.1f} %") for w in weights))
        for word, weights in zip(seen.words, one.mean.tolist(), strict=False)
    ]  # fmt: skip
    return [tag("thead", tag("tr", tag("td"), *head)), tag("tbody", *rows)]


# Mixers without softmax


def answers(seen: Inspected) -> Markup:
    """Returns the page's section on mixers without softmax: the influence of each token on each other."""
    if not seen.effective:
        return Markup("")
    tiles = max(kept.tile for kept in seen.effective.values())
    pooled = f" A cell shows the largest weight of {tiles} by {tiles} tokens." if tiles > 1 else ""
    return section(
        "answers",
        "Layers without softmax",
        *(_answers(seen, layer, kept) for layer, kept in seen.effective.items()),
        caption("Written out, such a layer too is a sum over the tokens before: a map shows the size of each token’s "
                "weight in it, row by column, over the largest weight of the map, with the power 0.5. Weights may be "
                "negative, and a row need not add up to anything.", pooled),
    )  # fmt: skip


def _answers(seen: Inspected, layer: int, kept: Effective) -> Markup:
    """Returns the pictures of one layer's effective attention maps, with a heading."""
    shown = "" if len(kept.which) == kept.count else f", {len(kept.which)} of {kept.count:,} {kept.of}s"
    pictures = [
        tag(
            "figure",
            tag("canvas", class_="answer", data_layer=layer, data_map=i, role="img",
                aria_label=f"Effective attention of layer {layer}, {kept.of} {one}, of at most {largest:.3g}"),
            tag("figcaption", f"{kept.of} {one}, up to {si(largest)}"),
        )
        for i, (one, largest) in enumerate(zip(kept.which, kept.largest, strict=True))
    ]  # fmt: skip
    mixer = f": {seen.mixers[layer]}" if seen.mixers else ""
    return tag("div", tag("h3", f"Layer {layer}{mixer}{shown}"), tag("div", *pictures, class_="answers"))


# Depth


def lens(seen: Inspected) -> Markup:
    what = "the token that came next" if seen.causal else "the token itself"
    return section(
        "lens",
        "What each depth would say",
        caption(
            "The logit lens: the stream after each layer (the vector that a token carries), read by the model's own "
            "final norm and output matrix as if it were the last. The depth grows from top to bottom; the last row is "
            "what the model says. Rubbish in the upper rows is normal: a stream is meant for the next layer, and early "
            "ones do not yet hold a prediction."
        ),
        tag("div", canvas("lens-map"), class_="holder"),
        tag("div", tag("table", id="lens-grid", role="grid", aria_labelledby="lens", class_="said-grid"),
            class_="scroll"),
        tag("p", tag("span", class_="ramp ramp-lens", aria_hidden="true"), f" probability of {what}, 0 to 1",
            class_="legend"),
        tag("p", id="after-what", class_="lead"),
        tag("div", tag("table", id="predictions"), class_="scroll gf-scroll", role="region", tabindex=0,
            aria_label="Predictions by depth"),
    )  # fmt: skip


def depths(seen: Inspected) -> Markup:
    loss, median = seen.depth_loss.nanmean(1).tolist(), seen.median_rms.tolist()
    blind = math.log(max(seen.vocab_size, 2))
    charts = [
        _chart(
            "Loss, nats per token",
            [("mean over the text", loss), (f"a uniform guess, {blind:.1f}", [blind] * len(loss))],
        ),
        _chart(
            "Size of the residual stream (RMS)",
            [("the median token", median),
             *((f"token {one.position}, {quoted(seen, one.position)}", seen.residual_rms[:, one.position].tolist())
               for one in seen.outliers[:1])],
        ),
        _chart("Cosine between two tokens", [("mean over pairs", seen.token_cosine.tolist())], high=1.0),
    ]  # fmt: skip
    return section(
        "depth",
        "How the stream changes",
        tag("div", *charts, class_="charts"),
        tag("p", apart(seen), class_="lead"),
        caption(
            "Depth 0 is the embedding, depth 1 the stream after layer 0. Axes with values far apart are logarithmic. A "
            "cosine near 1 means that all tokens point the same way."
        ),
    )


def quoted(seen: Inspected, position: int) -> str:
    return f"‘{visible(seen.words[position]).strip()}’"


def apart(seen: Inspected) -> str:
    """Returns a sentence on the outlier token (of far larger stream than the median) that dominates the mean of the
    streams, and on its depth; or that no token is an outlier."""
    if not seen.outliers:
        return "No token is an outlier: at no depth is one’s stream more than 10 times as large as the median token’s."
    one, *others = seen.outliers
    more = f" {len(others)} more {'are outliers' if len(others) > 1 else 'is an outlier'}, less far." if others else ""
    return (
        f"Token {one.position}, {quoted(seen, one.position)}, is an outlier from {depth_name(one.first)} on: after "
        f"{depth_name(one.depth)} its stream is {si(one.ratio)} times as large as the median token’s.{more}"
    )


def depth_name(depth: int) -> str:
    return f"layer {depth - 1}" if depth else "the embedding"


def _chart(what: str, curves: list[tuple[str, list[float]]], high: float | None = None) -> Markup:
    """Returns a chart of curves over the depth of the model, with a legend."""
    known = [value for _, values in curves for value in values if math.isfinite(value)]
    steep = high is None and bool(known) and min(known) > 0 and max(known) > STEEP * min(known)
    series = [
        Series(label, [(float(depth), value) for depth, value in enumerate(values)], style=style)
        for style, (label, values) in enumerate(curves)
    ]
    told = "; ".join(
        f"{label}: {fixed(values[0], 2)} at the embedding, {fixed(values[-1], 2)} at the end"
        for label, values in curves
    )
    y = Axis(what, kind="log" if steep else "linear", high=high, decimals=2)
    drawn = line_chart(series, Axis("depth"), y, f"{what}. {told}", width=380, height=250, end_labels=False)
    keys = tag("ul", *(tag("li", swatch(one.style), " ", one.label) for one in series), class_="keys")
    return tag("figure", drawn, keys)


def notes(seen: Inspected) -> Markup:
    entries = [
        ("cost, surprise", "minus the logarithm of the probability that the model gave the token, in nats: 0 for a "
                           "token it was sure of, log V for a uniform guess among V tokens"),
        ("weight", "a share of a token's attention: what a head gives to all tokens it sees adds up to 100\u00a0%"),
        ("on first token, on token before, on itself", "the weight that tokens give them, on average"),
        ("entropy", "how widely a head looks: 0 at one token, 1 at all tokens alike (the entropy of its weights over "
                    "the logarithm of how many tokens it sees)"),
        ("largest logit", "the largest score in size before the softmax; past 50 or so, training tends to break"),
        ("mean distance", "how many tokens a head looks back (or ahead) on average, by its weights; a head that rests "
                          "on the first token seems to look far"),
        ("pick out other tokens", "the weight on tokens that are not the first, the one before, the token itself or "
                                  "the most attended one, times 1 − entropy: high for a head that picks out "
                                  "few tokens, and others for each token"),
        ("key, query, value", "what a token is found by, what it looks for, and what it hands over when it is found; "
                              "a KV head is one set of keys and values"),
        ("depth", "0 is the embedding, then one for each layer"),
        ("stream", "the vector that each token carries through the layers, to which every layer adds"),
        ("RMS", "the root mean square of the values of a stream: its size"),
    ]  # fmt: skip
    listed = tag("dl", *(join([tag("dt", a), tag("dd", b)]) for a, b in entries), class_="words")
    trouble = [
        ("A token cost far more than its neighbours", "the model did not expect it: a name, a slip of the pen, or a "
                                                      "token it hardly knows"),
        ("The mean loss is near that of a uniform guess", "the model is not trained, or not on such text, or reads "
                                                        "with a tokenizer that is not its own"),
        ("The depths agree from early on", "later layers change little on this text"),
        ("Many heads rest on the first token", "they do nothing here, which is normal"),
        ("Early depths say rubbish", "their streams do not hold a prediction yet, which is normal"),
    ]  # fmt: skip
    seen_as = tag("dl", *(join([tag("dt", a), tag("dd", b)]) for a, b in trouble), class_="words")
    where = tag(
        "p", "More of the same text, by further options of the command: ", tag("code", "--reading head_scores"),
        " says which heads do a known job, ",
        tag("code", "--reading logit_attribution"), " what each adds to a prediction, ",
        tag("code", "--ablate layers.3.heads.1"), " what is lost without one.", class_="caption",
    )  # fmt: skip
    return section(
        "notes", "How to read this page", tag("h3", "What the words mean"), listed,
        tag("h3", "What trouble looks like"), seen_as, where,
    )  # fmt: skip


# Data


def data(seen: Inspected) -> dict[str, Any]:
    """Returns the data that the page's script reads, as plain JSON."""
    ids, places = seen.top_ids.unique(return_inverse=True)
    fine = sum(kept.maps.numel() for kept in seen.attention.values()) <= FINE_WEIGHTS
    arrays = {
        "top": indices(places, len(ids)),
        "shares": shares(seen.top_probabilities, fine),
        "loss": short_floats(seen.depth_loss),
        "rms": short_floats(seen.residual_rms),
    }
    arrays |= {f"cross{i}": shares(one.maps, fine) for i, one in enumerate(seen.crossings)}
    layers: list[dict[str, int] | None] = []
    for layer in range(seen.layers):
        kept = seen.attention.get(layer)
        if kept is None:
            layers.append(None)
            continue
        count, rows, columns = kept.maps.shape
        arrays |= {
            f"map{layer}": shares(kept.maps, fine),
            f"keys{layer}": indices(kept.keys, 1 << 16),
            f"weights{layer}": shares(kept.weights, True),
            f"rest{layer}": shares(kept.rest, True),
            f"received{layer}": kept.received.numpy(),
            f"seen{layer}": indices(kept.seen_by, 1 << 16),
        }
        layers.append({
            "heads": count, "rows": rows, "columns": columns, "tile": kept.tile,
            "keep": kept.keys.shape[-1], "keyHeads": kept.key_heads,
        })  # fmt: skip
    arrays |= {f"answers{layer}": shares(kept.maps, False) for layer, kept in seen.effective.items()}
    return {
        "causal": seen.causal,
        "answers": {str(layer): list(kept.maps.shape[1:]) for layer, kept in seen.effective.items()},
        "words": [visible(word) for word in seen.words],
        "ids": seen.ids.tolist(),
        "table": [visible(seen.spelled[i]) for i in ids.tolist()],
        "tableIds": ids.tolist(),
        "k": seen.top_ids.shape[-1],
        "layers": layers,
        "mixers": list(seen.mixers) or [""] * seen.layers,
        "heads": [
            [one.layer, one.head, *(_number(getattr(one, name)) for name, _ in MEASURES[1:])] for one in seen.heads
        ],
        "measures": [list(pair) for pair in MEASURES[1:]],
        "start": _start(seen),
        "source": [visible(word) for word in seen.source],
        "crossings": [
            {"layer": one.layer, "heads": len(one.maps), "rows": one.maps.shape[1], "columns": one.maps.shape[2]}
            for one in seen.crossings
        ],
        **packed(arrays),
    }


def _start(seen: Inspected) -> dict[str, int]:
    """Returns the layer and head that the page shows first: the head that depends most on content, if any does."""
    best = max(seen.heads, key=lambda head: head.elsewhere, default=None)
    return {"layer": best.layer if best else 0, "head": best.head if best else 0, "token": len(seen.ids) - 1}


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
