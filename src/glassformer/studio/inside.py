"""States of mixers without attention, and the experts of each token, while a model reads a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, sites
from glassformer.lens.page.words import spelled_text, visible
from glassformer.lens.routing import expert_routing
from glassformer.serving.computing import Served
from glassformer.studio.look import command
from glassformer.studio.numbers import number_table

MOST = 64
"""Largest number of tokens of a text whose states are read."""
SHOWN = 12
"""Largest number of rows and of columns of a state that are shown."""


def read_tokens(served: Served, text: str, most: int) -> tuple[list[int], list[str]]:
    """Returns the ids and the words of a text. Raises RequestError for a model without a tokenizer, and a text that is
    empty or longer than `most` tokens."""
    tokenizer = served.loaded.tokenizer
    if tokenizer is None:
        raise RequestError(f"{served.name} has no tokenizer", code="missing", field="model", value=served.name)
    ids = tokenizer.encode_prompt(text).tolist()
    if not 1 <= len(ids) <= most:
        raise RequestError(
            f"the text has {len(ids):,} tokens; this panel reads 1 to {most}",
            code="range", field="text", value=len(ids), expected=f"1 to {most} tokens",
        )  # fmt: skip
    return ids, [visible(word) for word in spelled_text(ids, tokenizer)]


def kept(served: Served, text: str, layer: int | None = None) -> dict[str, Any]:
    """Returns the sizes of all states after each token, the state of one layer after the last token, and the experts of
    each token; layers that have neither are left out. Raises RequestError for a text that cannot be read, and for a
    layer that the model lacks."""
    ids, words = read_tokens(served, text, MOST)
    model = served.loaded.model
    known = sites(model)
    blocks = list(served.loaded.config.layers())
    stateful = [i for i in range(len(blocks)) if f"layers.{i}.mixer.pattern" not in known] if model.writes else []
    routed = [i for i in range(len(blocks)) if f"layers.{i}.ffn.router" in known]
    if layer is not None and layer >= len(blocks):
        raise RequestError(
            f"layer {layer} is out of range: {served.name} has {len(blocks)}", code="range", field="layer", value=layer
        )
    tokens = torch.tensor([ids], device=model.device)
    states = _states(model, tokens, words, stateful, blocks, layer) if stateful else None
    experts = _experts(model, tokens, words, routed, layer) if routed else None
    python = ["import torch", f"llm = gf.load({served.name!r})",
              f"tokens = torch.tensor([{ids}], device=llm.model.device)"]  # fmt: skip
    if experts is not None:
        python.append(f"gf.lens.expert_routing(llm.model, tokens, {experts['layer']})")
    if states is not None:
        python += [f"state = llm.model.init_state(1, {len(ids)})", "llm.model.hidden_states(tokens, state)",
                   f"state.layers[{states['layer']}].tensors()"]  # fmt: skip
    return {
        "states": states,
        "experts": experts,
        "commands": [f"{command(served.name, text, ())} --reading expert_routing --out read"] if routed else [],
        "python": python,
    }


def _states(
    model: Any, tokens: Tensor, words: list[str], layers: list[int], blocks: list[Any], layer: int | None
) -> dict[str, Any]:
    """Returns the root mean square of the decoding state of each of `layers` after each token, and the first rows and
    columns of the state tensors of one layer (`layer`, otherwise the first of `layers`) after the last token."""
    shown = layer if layer in layers else layers[0]
    state = model.init_state(1, tokens.shape[1])
    sizes: list[list[float]] = []
    with torch.no_grad(), at_rest(model):
        for at in range(tokens.shape[1]):
            model.hidden_states(tokens[:, at : at + 1], state)
            sizes.append([_size(state.layers[one]) for one in layers])
    tensors = {} if state.layers[shown] is None else state.layers[shown].tensors()
    corners = [
        {"name": name, "shape": str(tuple(one.shape[1:])), **_corner(one[0])} for name, one in tensors.items()
    ]  # fmt: skip
    return {
        "layer": shown, "layers": layers, "mixer": blocks[shown].mixer.kind,
        "sizes": number_table(torch.tensor(sizes), words, [str(one) for one in layers]),
        "tensors": corners,
    }  # fmt: skip


def _size(state: Any) -> float:
    values = [] if state is None else [one.float().flatten() for one in state.tensors().values()]
    return float(torch.cat(values).square().mean().sqrt()) if values else 0.0


def _corner(x: Tensor) -> dict[str, Any]:
    """Returns the first rows and columns of a state, as a table; leading axes are flattened into rows."""
    flat = x.float().reshape(1, -1) if x.dim() < 2 else x.float().reshape(-1, x.shape[-1])
    part = flat[:SHOWN, :SHOWN]
    rows, columns = ([str(i) for i in range(size)] for size in part.shape)
    return number_table(part, list(rows), list(columns)) | {"left_out": flat.shape[1] - part.shape[1]}


def _experts(model: Any, tokens: Tensor, words: list[str], layers: list[int], layer: int | None) -> dict[str, Any]:
    """Returns the weights of the experts of one layer for each token, and the load of every layer."""
    found = expert_routing(model, tokens, layer if layer in layers else None)
    names = [str(i) for i in range(found.weights.shape[1])]
    load = found.load[layers]
    return {
        "layer": found.layer, "layers": layers,
        "weights": number_table(found.weights, words, names),
        "load": number_table(load, [str(one) for one in layers], names),
        "told": str(found).splitlines(),
    }  # fmt: skip
