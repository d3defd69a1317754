"""Assignment of one field of a config by its path: path=value."""

from __future__ import annotations

from typing import Any

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.names.grammar import RECIPE
from glassformer.parts.core.tree import read_value, set_value

ALIASES = {
    "layers": "layers",
    "heads": "mixer.n_heads",
    "kv_heads": "mixer.n_kv_heads",
    "n_heads": "mixer.n_heads",
    "n_kv_heads": "mixer.n_kv_heads",
    "head_dim": "mixer.head_dim",
    "hidden": "ffn.hidden",
    "z_loss": "head.z_loss",
}
OF_BLOCK = ("mixer", "ffn", "norm", "residual")
OF_MIXER = ("position", "visibility", "kernel", "qk_norm")


def assign(config: ModelConfig, path: str, value: str) -> ModelConfig:
    """Returns the config with `value` at a dotted path. A path that starts at a part of a block (norm.eps,
    position.base) sets the field in every block that has it, in an encoder too (except visibility); norm also sets the
    final norm and the embedding's. Raises RequestError."""
    tree = config.to_dict()
    first, *rest = steps = ALIASES.get(path, path).split(".")
    if first == RECIPE:
        raise RequestError(
            f"+{path}={value} is about training, not about the model; train and compare take it",
            code="unsupported", field=path, value=value,
        )  # fmt: skip
    towers = [tree, *([tree["encoder"]] if tree["encoder"] else [])]
    own = [tree] if first == "visibility" else towers
    blocks = [block for tower in own for stage in tower["stack"] for block in stage["blocks"]]
    if first == "layers":
        if rest:
            raise RequestError(
                f"{path}={value}: layers is a number and has no fields; use layers={value}",
                code="type", field=path, value=value,
            )  # fmt: skip
        if any(len(tower["stack"]) != 1 for tower in towers) or len(blocks) != 2 * len(towers) - 1:
            raise RequestError(
                "layers= is for a stack of equal blocks; set stack.0.repeat and so on",
                code="unsupported", field="layers", value=value,
            )  # fmt: skip
        for tower in towers:
            tower["stack"][0]["repeat"] = read_value(value)
    elif first in OF_MIXER:
        for block in _having(blocks, "mixer", first):
            set_value(block["mixer"], steps, value, path)
    elif first in OF_BLOCK:
        for block in _having(blocks, *steps[:2]) if rest else blocks:
            set_value(block, steps, value, path)
        ends = [end for tower in towers for end in ((tower, "final_norm"), (tower["embedding"], "norm"))]
        for holder, name in ends:
            if first == "norm" and holder[name] is not None:
                set_value(holder, [name, *steps[1:]], value, path)
    else:
        set_value(tree, steps, value, path, also=(*ALIASES, *OF_BLOCK, *OF_MIXER))
    return ModelConfig.from_dict(tree)


def _having(blocks: list[Any], part: str, field: str) -> list[Any]:
    """Returns the blocks whose `part` has the field; all blocks if none does, so that the error names the field."""
    return [block for block in blocks if block[part] is not None and field in block[part]] or blocks
