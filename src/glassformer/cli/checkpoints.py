"""Checkpoints in the terminal: what can hold a model, and turning one into another."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from glassformer.cli.show import size
from glassformer.config import ModelConfig
from glassformer.convert import save
from glassformer.convert.doors import doors
from glassformer.convert.gguf import write as write_gguf
from glassformer.convert.programs import runs_in
from glassformer.errors import RequestError
from glassformer.expression import load


def show_doors(name: str, config: ModelConfig, as_json: bool) -> None:
    """Open doors first, then the nearest closed ones with the parts that close them."""
    seen = doors(config)
    if as_json:
        found = [
            {"model_type": d.family.model_type, "class": d.family.architecture, "open": d.open,
             "runs_in": runs_in(config, d.family) if d.open else [],
             "closed_by": {path: list(both) for path, both in d.closers.items()}}
            for d in seen
        ]  # fmt: skip
        print(json.dumps({"name": name, "doors": found}))
        return
    first = [door for door in seen if door.open]
    if not first:
        print(f"no Hugging Face class holds {name}; it loads through the glassformer package:")
        print("gf.save writes a folder that AutoModelForCausalLM.from_pretrained loads after `import glassformer`")
    for door in first:
        print(f"exports as {door.family.architecture}; runs in {', '.join(runs_in(config, door.family))}: yes")
    for door in [door for door in seen if not door.open][: 0 if first else 5]:
        parts = [
            f"{path}={mine}" + ("" if theirs is None else f" ({theirs} would open it)")
            for path, (mine, theirs) in list(door.closers.items())[:4]
        ]
        more = len(door.closers) - len(parts)
        print(f"  {door.family.architecture} is closed by {'; '.join(parts)}{f'; and {more} more' if more > 0 else ''}")


def convert_checkpoint(source: str, out: str, to: str | None, dtype: str | None, as_json: bool) -> None:
    kind = to or ("gguf" if out.endswith(".gguf") else "hf")
    if kind == "hf" and dtype == "q8_0":
        raise RequestError("dtype=q8_0 is for gguf; a Hugging Face folder takes float32, float16 or bfloat16")
    loaded = load(source)
    if kind == "gguf":
        file_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype or "float16"]
        family = write_gguf(loaded.model, loaded.tokenizer, Path(out), file_type)
    else:
        family = save(loaded.model, loaded.tokenizer, out, dtype=getattr(torch, dtype) if dtype else None)
    written = [Path(out)] if kind == "gguf" else [path for path in sorted(Path(out).iterdir()) if path.is_file()]
    total = sum(path.stat().st_size for path in written)
    if as_json:
        print(json.dumps({"out": out, "format": kind, "family": family.model_type, "class": family.architecture,
                          "bytes": total, "new_parameters": list(loaded.fresh)}))  # fmt: skip
        return
    if loaded.fresh:
        print(f"{len(loaded.fresh)} parameters begin anew, the checkpoint has none: {', '.join(loaded.fresh[:4])} ...")
    print(f"{out}: {family.architecture}, {size(total)}; runs in {', '.join(runs_in(loaded.config, family))}")
