"""`hf:owner/name`: a checkpoint of the Hugging Face Hub, or of its cache on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from glassformer.errors import RequestError

WANTED = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
          "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip
INSTEAD = "pass a folder, a .gguf file, or a run instead"


def snapshot(name: str, weights: bool = True) -> Path:
    """The folder of `hf:owner/name[@revision]`, downloaded where the cache lacks it; without `weights`, its config
    alone. Raises RequestError in one sentence, also offline."""
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if not found or ".." in name:
        raise RequestError(
            f"{name!r} is not a name on the Hub; write hf:owner/name", code="syntax", field="model", value=name
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise RequestError(
            f"{name} needs the package huggingface-hub (pip install 'glassformer[hub]'); or {INSTEAD}",
            code="missing", field="huggingface_hub",
        ) from None  # fmt: skip
    wanted = WANTED if weights else WANTED[:1]
    try:
        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=wanted))
    except Exception as problem:  # the library's own, its network library's, and the system's
        why = (str(problem).splitlines() or [type(problem).__name__])[0][:160]
        raise RequestError(
            f"{name} cannot be had from the Hub ({why}); {INSTEAD}", code="missing", field="model", value=name
        ) from None
