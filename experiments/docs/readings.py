"""The figures of docs/readings: each reading of SmolLM2-135M-Instruct, asked as its page says."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure

import glassformer as gf
from experiments.docs import call
from experiments.docs.common import PASSAGE, smollm2
from experiments.docs.statistics import run
from glassformer import lens
from glassformer.introspection import edit
from glassformer.lens import style
from glassformer.lens.positions import draw_plot
from glassformer.lens.reading import blank
from glassformer.model import Model

STORE = "When Mary and John went to the store, John gave a drink to"
MIXTURE, MIXTURE_TOKENS = "llama@1m+moe:8:2", 400_000
TWICE = "Two green owls sat near a pond. Two green owls sat near a"


@dataclass(frozen=True)
class Asked:
    """Arguments of a reading after the model: a text (if None, PASSAGE), and others by name: `given` has their values,
    `written` their source code."""

    text: str | None = STORE
    given: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    before: str = ""
    """Line of code that defines the names in `written`."""


def asked(name: str) -> Asked:
    smol = smollm2()
    if name == "activation_patching":
        task = lens.indirect_object(smol.tokenizer, n=2)
        parts = {name: getattr(task, name) for name in ("clean", "corrupt", "metric", "labels")}
        return Asked(
            given=parts | {"sites": ("resid_pre", "mixer.out")},
            written={name: f"task.{name}" for name in parts},
            before="task = gf.lens.indirect_object(loaded.tokenizer, n=2)\n",
        )
    if name == "logit_attribution":
        words = {"token": " Mary", "against": " John"}
        return Asked(given={key: smol.token(word) for key, word in words.items()},
                     written={key: f'encode("{word}")[0]' for key, word in words.items()},
                     before="encode = loaded.tokenizer.encode\n")  # fmt: skip
    return ASKED.get(name, Asked())


ASKED = {
    "attention_map": Asked(TWICE, {"layer": 17, "head": 5}),
    "attention_maps": Asked(TWICE, {"layer": 17}),
    "side_by_side": Asked(STORE, {"layer": 16, "head": 0}),
    "attention_distance": Asked(None),
    "attention_sinks": Asked(None),
    "massive_activations": Asked(None),
    "token_similarity": Asked(None),
    "head_ablation": Asked(TWICE),
    "embedding_neighbours": Asked(" king Monday seven red quickly Paris", {"k": 8}),
}


def draw(name: str, function: Callable[..., Any]) -> tuple[Figure, str]:
    """Returns the figure of a reading, and its call and printed output as Markdown."""
    if name in OWN:
        return OWN[name]()
    smol, ask = smollm2(), asked(name)
    known = inspect.signature(function).parameters
    given, before = dict(ask.given), ask.before
    said = [f"{key}={ask.written.get(key, repr(value))}".replace("'", '"') for key, value in given.items()]
    if "tokens" in known:
        text, shown = (PASSAGE, "text") if ask.text is None else (ask.text, f'"{ask.text}"')
        given["tokens"] = smol.tokens(text)
        said.insert(0, "tokens")
        before += "" if ask.text else f"text = {json.dumps(text, ensure_ascii=False)}\n"
        before += f"tokens = torch.tensor([loaded.tokenizer.encode({shown})])\n"
    if "tokenizer" in known:
        given["tokenizer"] = smol.tokenizer
        said.append("tokenizer=loaded.tokenizer")
    reading = function(smol.model, **given)
    written = call(f"reading = gf.lens.{name}", ["loaded.model", *said])
    printed = "\n".join(line[:160] for line in str(reading).splitlines())
    return reading.figure(), f"```python\n{before}{written}\nprint(reading)\n```\n\n```\n{printed}\n```"


def position_picture() -> tuple[Figure, str]:
    """Returns the figure and text of the positions of SmolLM2, and of one model of each other kind."""
    kinds: dict[str, Model | gf.ModelConfig] = {
        "SmolLM2": smollm2().model,
        "yarn x 8": scaled("yarn", 8.0),
        "ALiBi": gf.preset("bloom@1m"),
        "sinusoidal": gf.preset("gpt2@1m+sinusoidal").replace(context=256),
        "learned": run("healthy").last,
    }
    figure = blank(10.4, 11.6)
    readings = {name: lens.position_picture(model) for name, model in kinds.items()}
    for row, (name, reading) in zip(style.axes(figure, len(kinds), 3), readings.items(), strict=True):
        for ax, (title, plot) in zip(row, next(iter(reading.plots.values())).items(), strict=True):
            draw_plot(ax, plot)
            ax.set_title(f"{name}: {title}", loc="left", fontsize=9, color=style.INK)
    told = "\n".join(f"{name}: {reading}, {reading.length:,} tokens" for name, reading in readings.items())
    return figure, (
        f"```python\nprint(gf.lens.position_picture(loaded.model))  # a config will do\n```\n\n```\n{told}\n```\n\n"
        "The learned table is that of the healthy run of the [statistics](../statistics/attention_entropy.md), whose "
        "texts are 32 tokens given twice."
    )


def scaled(kind: str, factor: float) -> gf.ModelConfig:
    tree = gf.preset("llama@1m").to_dict()
    tree["context"] = int(factor * tree["context"])
    tree["stack"][0]["blocks"][0]["mixer"]["position"]["scaling"] = {
        "kind": kind, "factor": factor, "original_context": tree["context"] // int(factor),
    }  # fmt: skip
    return gf.ModelConfig.from_dict(tree)


def edits() -> tuple[Figure, str]:
    """Returns the figure and text of the loss of PASSAGE without each layer's mixer, and without its FFN."""
    smol = smollm2()
    tokens = smol.tokens(PASSAGE)

    def loss(*given: Any) -> float:
        with edit(smol.model, *given), torch.no_grad():
            return float(smol.model.loss(tokens[:, :-1], tokens[:, 1:]))

    figure = blank(9.0, 3.4)
    ax = style.axes(figure, x="layer", y="loss [nats per token]", title="Loss without one part of a layer")
    whole, layers = loss(), range(len(smol.model.layers))
    table = ["| | least, at layer | most, at layer |", "|---|---|---|"]
    for i, (name, make) in enumerate({"mixer": lens.ablate_mixer, "ffn": lens.ablate_ffn}.items()):
        values = [loss(make(layer)) for layer in layers]
        ax.bar(
            [layer + 0.4 * i - 0.2 for layer in layers],
            values,
            width=0.38,
            color=style.COLOURS[i],
            label=f"without the {name}",
        )
        low, high = min(layers, key=values.__getitem__), max(layers, key=values.__getitem__)
        table.append(f"| without the {name} | {values[low]:.2f}, {low} | {values[high]:.2f}, {high} |")
    style.line(ax, whole, "whole model")
    style.legend(ax)
    example = "with gf.edit(loaded.model, gf.lens.ablate_mixer(3)):\n    logits = loaded.model(tokens)"
    return figure, f"```python\n{example}\n```\n\nThe whole model's loss is {whole:.2f}.\n\n" + "\n".join(table)


def inspection() -> tuple[Figure, str]:
    """Returns the figure and text of the loss of each token, and of the logit lens's loss at each depth."""
    smol = smollm2()
    seen = lens.inspect(smol.model, smol.tokens(PASSAGE), smol.tokenizer, name="smollm2")
    figure = blank(10.4, 3.6)
    left, right = style.axes(figure, 1, 2, width_ratios=(2.4, 1)).flat
    shown = 32
    left.bar(range(shown), seen.loss[1 : shown + 1].numpy(), color=style.COLOURS[0], width=0.8)
    style.words(left, seen.words[1 : shown + 1], "x")
    left.set_xlim(-0.7, shown - 0.3)
    left.set_ylabel("loss [nats]")
    left.set_title("what the first tokens cost, given those before", loc="left", fontsize=9, color=style.INK)
    right.plot(range(seen.layers + 1), seen.depth_loss.nanmean(1), linewidth=1.6)
    right.set(xlabel="depth (0: embedding)", ylabel="mean loss [nats]")
    right.set_yscale("log")
    right.set_title("what each depth would pay", loc="left", fontsize=9, color=style.INK)
    heads = "\n".join(
        f"{kind}: " + ", ".join(f"layer {head.layer} head {head.head}" for head in found)
        for kind, found in seen.notable(3).items()
    )
    example = (
        'seen = gf.lens.inspect(loaded.model, tokens, loaded.tokenizer)\nprint(repr(seen))\nseen.report("inspect.html")'
    )
    shell = 'glassformer inspect smollm2 --text "..." --out DIR     # writes DIR/inspect.html'
    return figure, f"```python\n{example}\n```\n\n```\n{shell}\n```\n\n```\n{seen!r}\n{heads}\n```"


def routing() -> tuple[Figure, str]:
    """Returns the figure and text of a small mixture of experts, because SmolLM2 is dense."""
    run = gf.train(gf.preset(MIXTURE), "python-docs", {"tokens": MIXTURE_TOKENS, "threads": 1})
    assert run.validation is not None
    line = "The list is sorted in place, and the method returns None.\n"
    reading = lens.expert_routing(run.model, torch.tensor([list(run.tokenizer.encode(line))]), tokenizer=run.tokenizer)
    command = f"glassformer train {MIXTURE} --data python-docs --tokens {MIXTURE_TOKENS // 1000}k --out run"
    example = (
        f'loaded = gf.load("run")\ntokens = torch.tensor([loaded.tokenizer.encode({line!r})])\n'
        "reading = gf.lens.expert_routing(loaded.model, tokens, tokenizer=loaded.tokenizer)\nprint(reading)"
    ).replace("'", '"')
    return reading.figure(height=6.4), (
        f"```\n{command}\n```\n\n```python\n{example}\n```\n\n```\n{reading}\n```\n\n"
        f"Its tokens are characters; held-out loss {run.validation['loss']:.3f}."
    )


OWN: dict[str, Callable[[], tuple[Figure, str]]] = {
    "position_picture": position_picture,
    "ablate_heads": edits,
    "inspect": inspection,
    "expert_routing": routing,
}
