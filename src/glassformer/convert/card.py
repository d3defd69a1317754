"""The README.md of a folder that leaves the house: what the model is, how it was trained, how to load it."""

from __future__ import annotations

from typing import Any

import yaml

from glassformer.config import ModelConfig
from glassformer.convert.families.own import OWN
from glassformer.convert.family import Family


def card(config: ModelConfig, family: Family, name: str, trained: dict[str, Any] | None = None) -> str:
    """Markdown with the front matter that hubs read. `trained` is a plain tree, shown as it is."""
    own = family is OWN
    auto, task = auto_class(config)
    front = {"library_name": "glassformer" if own else "transformers", "pipeline_tag": task,
             "tags": ["glassformer"] if own else ["glassformer", family.model_type]}  # fmt: skip
    load = f"{auto}.from_pretrained(folder)"
    how = f"import glassformer  # registers the class\n{load}" if own else load
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"{config.num_params():,} parameters, {config.n_layers} layers, d_model {config.d_model}, context "
        f"{config.context:,}; stored as `{family.architecture_of(config)}`.",
        f'```python\nfrom transformers import {auto}\n\nfolder = "."  # where this file lies\n{how}\n\n'
        "import glassformer as gf\ngf.load(folder)\n```",
    ]
    if trained:
        parts.append(f"## Training\n\n```yaml\n{yaml.safe_dump(trained, sort_keys=False)}```")
    parts.append(f"## Config\n\n```yaml\n{config.to_yaml()}```")
    return "\n\n".join(parts) + "\n"


def auto_class(config: ModelConfig) -> tuple[str, str]:
    """The class of `transformers` that loads such a model, and what hubs call its task."""
    if config.encoder is not None:
        return "AutoModelForSeq2SeqLM", "text2text-generation"
    if config.head.predicts_tokens:
        return ("AutoModelForCausalLM", "text-generation") if config.writes else ("AutoModelForMaskedLM", "fill-mask")
    if not config.head.classes:
        return "AutoModel", "feature-extraction"
    if config.embedding.patches is not None:
        return "AutoModelForImageClassification", "image-classification"
    return "AutoModelForSequenceClassification", "text-classification"
