"""The pictures of docs/kinds: the wiring of a published model of each kind, drawn from its config.

python -m experiments.docs.kinds writes them."""

from __future__ import annotations

from typing import Any

from experiments.docs import DOCS
from experiments.svg import HEAD, PAPER, style_of
from glassformer.config import BlockConfig, ModelConfig, Stage, TowerConfig
from glassformer.figures import tag, wiring_drawing
from glassformer.naming import preset
from glassformer.parts.ffn import GluConfig
from glassformer.parts.mixer import AttentionConfig, CrossAttentionConfig
from glassformer.parts.norm import RMSNormConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.residual import PreConfig
from glassformer.parts.visibility import BidirectionalConfig
from glassformer.report.sketch import describe, sketch

KINDS = {
    "decoder": "llama-3-8b", "encoder": "bert-base-mlm", "encoder-decoder": "bart-base", "vision-encoder": "vit-base",
    "prefix-decoder": "llama-3-8b+prefix", "retrieval": "retro",
}  # fmt: skip
"""Page -> the model in its picture: an expression, or a name in `MADE`."""
FOLDER = DOCS / "figures" / "kinds"


def retro() -> ModelConfig:
    """Returns the config of the RETRO that docs/retro.md was measured with."""
    shared: dict[str, Any] = {"norm": RMSNormConfig(), "residual": PreConfig()}
    own = AttentionConfig(n_heads=4, position=RotaryConfig())
    both = AttentionConfig(n_heads=2, position=RotaryConfig(), visibility=BidirectionalConfig())
    cross = CrossAttentionConfig(n_heads=4, chunks={"chunk": 32, "width": 2 * 64})
    plain = BlockConfig(mixer=own, ffn=GluConfig(), **shared)
    reads = BlockConfig(mixer=own, ffn=None, **shared), BlockConfig(mixer=cross, ffn=GluConfig(), **shared)
    encoder = BlockConfig(mixer=both, ffn=GluConfig(), **shared)
    return ModelConfig(
        vocab_size=1024, d_model=96, context=256, final_norm=RMSNormConfig(),
        stack=(Stage(repeat=2, blocks=(plain, *reads)),),
        encoder=TowerConfig(d_model=48, context=64, stack=(Stage(repeat=1, blocks=(encoder,)),),
                            final_norm=RMSNormConfig()),
    )  # fmt: skip


MADE = {"retro": retro}
"""Name -> function that builds a pictured model without a preset."""


def picture(expression: str) -> str:
    """Returns the wiring of a model as the text of an SVG file."""
    return wiring(MADE[expression]() if expression in MADE else preset(expression), expression)


def wiring(config: ModelConfig, name: str) -> str:
    """Returns the wiring of a model, which has this name, as the text of an SVG file in the colours of paper."""
    drawing = sketch(config.to_dict())
    inner = str(wiring_drawing(drawing, describe(name, drawing)))
    paper = tag("rect", width="100%", height="100%", fill=PAPER)
    opening, rest = inner.split(">", 1)
    return f"{opening.replace('<svg ', f'<svg {HEAD}', 1)}>{style_of(inner)}{paper}{rest}\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, expression in KINDS.items():
        (FOLDER / f"{name}.svg").write_text(picture(expression), encoding="utf-8")


if __name__ == "__main__":
    main()
