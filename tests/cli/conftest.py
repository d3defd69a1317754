"""A small model of bytes on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.naming import preset
from glassformer.text import ByteTokenizer

SMALL = "layers=2+d_model=32+heads=4+vocab_size=257+context=256+init=gpt2+init.std=0.2"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def saved(folder: Path, expression: str, seed: int = 1) -> str:
    name, _, changes = expression.partition("+")
    model = preset(f"{name}@1m+{SMALL}{'+' + changes if changes else ''}").build(seed=seed).eval()
    gf.save(model, ByteTokenizer(), folder)
    return str(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model") / "draft", "llama", seed=2)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """No position after 40."""
    return saved(tmp_path_factory.mktemp("model") / "gpt2", "gpt2+context=40")


def with_template(folder: str, to: Path) -> str:
    """Copies a folder and adds a chat template; leaves out our tokenizer file, which has no template."""
    shutil.copytree(folder, to)
    (to / "glassformer_tokenizer.json").unlink()
    settings = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return str(to)


@pytest.fixture(scope="session")
def talker(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_template(model, tmp_path_factory.mktemp("model") / "talker")


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return with_template(saved(folder / "plain", "mistral+window:12"), folder / "talker")
