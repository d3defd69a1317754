"""Tutorials: examples/tutorials/*.py, in jupytext's percent format, run with their outputs into docs/tutorials/*.md.

>>> python -m experiments.docs tutorials                          # all of them
>>> python -m experiments.docs tutorials 01-attention-by-hand     # one
>>> python -m experiments.docs --words tutorials                  # new words, the outputs of before

A cell of a source is Markdown or code. Outputs are text and figures; `# %% alt="..."` describes a cell's figure.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.docs import DOCS

NAME = "tutorials"
SOURCES = DOCS.parent / "examples" / "tutorials"
PAGES = DOCS / "tutorials"
FIGURES = DOCS / "figures" / "tutorials"
SECONDS = 600
"""Longest time of one cell."""
OUTPUT = re.compile(r"^```text\n.*?^```\n\n|^!\[[^\n]*\]\(\.\./figures/tutorials/[^\n]*\n\n", re.DOTALL | re.MULTILINE)
"""Blocks of text and pictures, which only a run adds to a page."""
NEEDED = "> The pictures need matplotlib: `pip install '.[figures]'`."
"""First line of a page that draws."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Tutorial:
    """One source file.

    Attributes
    ----------
    source : Path
        The file, NN_some_name.py.
    """

    source: Path

    @property
    def name(self) -> str:
        """Name of the page, NN-some-name."""
        return self.source.stem.replace("_", "-")

    @property
    def page(self) -> Path:
        """The generated file."""
        return PAGES / f"{self.name}.md"

    def figure(self, number: int) -> Path:
        """Returns the file of the figure with this number, from 1."""
        return FIGURES / f"{self.name}-{number}.png"


def tutorials() -> dict[str, Tutorial]:
    """Returns all tutorials by name, in order."""
    found = [Tutorial(source) for source in sorted(SOURCES.glob("[0-9][0-9]_*.py"))]
    return {one.name: one for one in found}


def notebook(tutorial: Tutorial) -> Any:
    """Returns the source as a notebook without outputs."""
    import jupytext

    return jupytext.read(tutorial.source)


def executed(tutorial: Tutorial) -> Any:
    """Returns the notebook after a run in an empty folder. Raises CellExecutionError for a cell that fails."""
    from nbclient import NotebookClient

    made = notebook(tutorial)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            made,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore", "COLUMNS": "100"})
    return made


def outputs(tutorial: Tutorial, made: Any) -> tuple[list[list[str]], list[bytes]]:
    """Returns the outputs of each code cell as pieces of Markdown, and the PNG files of all figures in their order."""
    shown: list[list[str]] = []
    figures: list[bytes] = []
    for cell in code_cells(made):
        pictures, printed = [], ""
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "stream":
                printed += output.text if output.name == "stdout" else ""
            elif drawn := picture_of(data):
                figures.append(base64.b64decode(drawn))
                file = tutorial.figure(len(figures)).name
                pictures.append(f"![{cell.metadata['alt']}](../figures/{NAME}/{file})")
            elif "text/plain" in data and not re.match(r"\[?<matplotlib|Text\(", data["text/plain"]):
                printed += data["text/plain"] + "\n"
        lines = [line.rstrip() for line in COLOURS.sub("", printed).strip("\n").splitlines()]
        text = "\n".join(lines)
        shown.append([*([f"```text\n{text}\n```"] if text else []), *pictures])
    return shown, figures


def picture_of(data: dict[str, str]) -> str:
    """Returns the PNG of an output in base64, of a figure or of a reading; empty without one."""
    inside = re.search(r'src="data:image/png;base64,([^"]+)"', data.get("text/html", ""))
    return data.get("image/png") or (inside[1] if inside else "")


def outputs_before(tutorial: Tutorial, made: Any) -> list[list[str]]:
    """Returns the outputs in the present page. Raises ValueError if its code differs from the source."""
    blocks = re.split(r"^```python\n", tutorial.page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if [one.partition("\n```\n")[0] for one in blocks] != [cell.source.strip() for cell in code_cells(made)]:
        raise ValueError(f"the code of {tutorial.name} has changed: run it, without --words")
    words = [cell.metadata.get("alt", "") for cell in code_cells(made)]
    return [
        [re.sub(r"^!\[.*?\]\(", f"![{alt}](", found[0].strip()) for found in OUTPUT.finditer(block)]
        for alt, block in zip(words, blocks, strict=True)
    ]


def code_cells(made: Any) -> list[Any]:
    """Returns the cells of code of a notebook."""
    return [cell for cell in made.cells if cell.cell_type == "code"]


def written(tutorial: Tutorial, made: Any, shown: list[list[str]] | None = None) -> str:
    """Returns the page of a notebook, with the outputs of each code cell if they are given."""
    source = tutorial.source.relative_to(DOCS.parent)
    later = iter(shown or [[] for _ in made.cells])
    pieces = [f"<!-- `python -m experiments.docs {NAME}` writes this page from {source}. -->"]
    for cell in made.cells:
        text = cell.source.strip()
        if cell.cell_type == "code":
            pieces += [f"```python\n{text}\n```", *next(later)]
        elif text:
            heading, _, rest = text.partition("\n\n") if text.startswith("# ") else (text, "", "")
            draws = heading != text and any("alt" in one.metadata for one in code_cells(made))
            pieces += [heading, NEEDED, rest.strip()] if draws else [text]
    names = [one.name for one in tutorials().values() if one.page.exists() or one == tutorial]
    at = names.index(tutorial.name)
    around = [f"Before: [{title(names[at - 1])}]({names[at - 1]}.md)."] if at else []
    around += [f"Next: [{title(names[at + 1])}]({names[at + 1]}.md)."] if at + 1 < len(names) else []
    code = f"The code of this page is [{source.name}](../../{source}), a script that jupytext opens as a notebook."
    return "\n\n".join([*pieces, " ".join([*around, code])]) + "\n"


def title(name: str) -> str:
    """Returns the first heading of a tutorial."""
    found = re.search(r"^# # (.+)$", tutorials()[name].source.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else name


def without_outputs(text: str) -> str:
    """Returns a page as it is before its code has run."""
    return OUTPUT.sub("", text)


def write(names: list[str], shrink: Callable[[Path], int], words: bool = False) -> None:
    """Runs tutorials, all without names, and writes their pages and figures; with `words` keeps the outputs."""
    PAGES.mkdir(exist_ok=True)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, tutorial in tutorials().items():
        if names and name not in names:
            continue
        if words:
            made = notebook(tutorial)
            tutorial.page.write_text(written(tutorial, made, outputs_before(tutorial, made)), encoding="utf-8")
            continue
        start = time.monotonic()
        made = executed(tutorial)
        shown, figures = outputs(tutorial, made)
        for old in FIGURES.glob(f"{name}-*.png"):
            old.unlink()
        for number, data in enumerate(figures, 1):
            tutorial.figure(number).write_bytes(data)
            shrink(tutorial.figure(number))
        tutorial.page.write_text(written(tutorial, made, shown), encoding="utf-8")
        print(f"docs/{NAME}/{name}.md  {time.monotonic() - start:.0f} s, {len(figures)} figures", flush=True)
