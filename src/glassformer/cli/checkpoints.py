"""Checkpoints in the terminal: what can hold a model, and turning one into another."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from glassformer.config import ModelConfig
from glassformer.conversion import is_checkpoint, save
from glassformer.conversion.checkpoints import Format, runs_in
from glassformer.conversion.exports import export_targets
from glassformer.conversion.folder import auto_class
from glassformer.conversion.gguf import write as write_gguf
from glassformer.conversion.storage import writable
from glassformer.errors import RequestError, WorkError
from glassformer.figures.terminal import output, ruled, size
from glassformer.laboratory.check import CheckReport, Row, checks
from glassformer.laboratory.quality import TOKENS, Quality, qualities
from glassformer.machine import dtype_of
from glassformer.naming import preset
from glassformer.naming.loading import load
from glassformer.runs.live import View, decimals
from glassformer.training import training_of


def show_exports(name: str, config: ModelConfig, as_json: bool) -> None:
    """Prints the supported export targets, or the nearest others with their blockers."""
    seen = export_targets(config)
    if as_json:
        found = [
            {"model_type": d.family.model_type, "class": d.family.architecture, "supported": d.supported,
             "runs_in": runs_in(config, d.family) if d.supported else [],
             "blocked_by": {path: list(both) for path, both in d.blockers.items()}}
            for d in seen
        ]  # fmt: skip
        print(json.dumps({"name": name, "exports": found}))
        return
    first = [target for target in seen if target.supported]
    if not first:
        print(f"no Hugging Face class holds {name}; it loads through the glassformer package:")
        print(f"gf.save writes a folder that {auto_class(config)[0]}.from_pretrained loads after `import glassformer`")
    for target in first:
        tools = ", ".join(runs_in(config, target.family))
        print(f"exports as {target.family.architecture_of(config)}; runs in {tools}: yes")
    for target in [target for target in seen if not target.supported][: 0 if first else 5]:
        parts = [
            f"{path}={mine}" + ("" if theirs is None else f" ({theirs} would be supported)")
            for path, (mine, theirs) in list(target.blockers.items())[:4]
        ]
        more = len(target.blockers) - len(parts)
        print(
            f"  {target.family.architecture} is blocked by {'; '.join(parts)}{f'; and {more} more' if more > 0 else ''}"
        )


def convert_checkpoint(source: str, out: str, to: Format | None, dtype: str | None, as_json: bool) -> None:
    kind: Format = to or ("gguf" if out.endswith(".gguf") else "hf")
    if kind == "hf" and dtype == "q8_0":
        raise RequestError(
            "dtype=q8_0 is for gguf; a Hugging Face folder takes float32, float16 or bfloat16",
            code="conflict", field="dtype", value=dtype,
        )  # fmt: skip
    writable(out, file=kind == "gguf")
    loaded = load(source)
    if kind == "gguf":
        file_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype or "float16"]
        family = write_gguf(loaded.model, loaded.tokenizer, Path(out), file_type, ends=loaded.ends)
    else:
        kept = dtype_of(dtype) if dtype else None
        family = save(
            loaded.model, loaded.tokenizer, out, dtype=kept, trained=training_of(source),
            ends=loaded.ends, generation=loaded.generation, pooling=loaded.pooling,
        )  # fmt: skip
    written_class = family.architecture_of(loaded.config)
    written = [Path(out)] if kind == "gguf" else [path for path in sorted(Path(out).iterdir()) if path.is_file()]
    total = sum(path.stat().st_size for path in written)
    if as_json:
        print(json.dumps({"out": out, "format": kind, "family": family.model_type, "class": written_class,
                          "bytes": total, "new_parameters": list(loaded.fresh),
                          "regrouped_parameters": list(loaded.regrouped)}))  # fmt: skip
        return
    for words in loaded.adapted:
        print(words)
    print(f"{out}: {written_class}, {size(total)}; runs in {', '.join(runs_in(loaded.config, family, kind))}")


SHOWN = 12
"""Rows of the reference that are shown where all are well: the first and the last of the model."""


def show_check(name: str, as_json: bool, seed: int, **options: Any) -> None:
    """`options` are those of `checks`. Raises WorkError where something is wrong."""
    model = name if is_checkpoint(name) else preset(name).build(seed)
    console, rows = Console(stderr=True, quiet=as_json), []
    with console.status("loading") as status:
        for row in checks(model, seed=seed, **options):
            rows.append(row)
            status.update(f"{row.check}: {row.site}")
    report = CheckReport(tuple(rows))
    if as_json:
        print(json.dumps({"name": name, **report.to_dict()}))
    else:
        output().print(check_table(report))
    if not report.ok:
        raise WorkError(f"{name}: wrong at {', '.join(row.site for row in report.wrong[:6])}", code="failed")
    if not as_json:
        skipped = sum(row.verdict == "skipped" for row in rows)
        print(f"{name}: {len(rows) - skipped} comparisons, all well" + (f"; {skipped} skipped" if skipped else ""))


def check_table(report: CheckReport) -> Table:
    """Everything that is wrong, and around it enough to see where it began."""
    table = ruled()
    for heading in ("check", "site", "", "error", "relative", "alone", "note"):
        table.add_column(heading, justify="right" if heading in ("error", "relative", "alone") else "left")
    worst = sorted(report.rows, key=lambda row: -(row.relative or 0.0))[:SHOWN]
    kept = [
        row for row in report.rows if row.verdict in ("wrong", "skipped") or row.check != "reference" or row in worst
    ]
    for row in kept:
        numbers = ("" if value is None else f"{value:.1e}" for value in (row.error, row.relative, row.alone))
        table.add_row(row.check, row.site, _mark(row), *numbers, row.note or row.theirs)
    if (left := len(report.rows) - len(kept)) > 0:
        table.caption = f"and {left} more with smaller errors"
    return table


def _mark(row: Row) -> str:
    style = {"wrong": "bold red", "ok": "green"}.get(row.verdict)
    return f"[{style}]{row.verdict}[/]" if style else row.verdict


def show_quality(name: str, data: str | None, tokens: int | None, as_json: bool) -> None:
    data, rows = data or "python-docs", []
    with View(quiet=as_json) as view:
        for row in qualities(partial(load, name), data, TOKENS if tokens is None else tokens, view.progress):
            rows.append(row)
            view.say(f"{row.weights}, head {row.head}: perplexity {row.perplexity:.4f}")
    if as_json:
        print(json.dumps({"name": name, "data": data, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{name} on the held-out part of {data}, {rows[0].tokens:,} tokens in windows of {rows[0].context}")
    output().print(quality_table(rows))


def quality_table(rows: list[Quality]) -> Table:
    table = ruled()
    for heading in ("weights", "head", "bytes", "read per token", "perplexity", "bits/byte", "loss in %"):
        table.add_column(heading, justify="left" if heading in ("weights", "head") else "right")
    for row in rows:
        table.add_row(
            row.weights, row.head, size(row.bytes), size(row.bytes_per_token), f"{row.perplexity:.4f}",
            decimals(row.bits_per_byte), f"{100 * row.change:+.3f}",
        )  # fmt: skip
    return table
