"""python -m experiments.docs [NAME...]: writes the pages, their figures, and the index."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from experiments.docs import (
    DOCS,
    OWN_PARTS,
    axes,
    courses,
    glossary_page,
    guides,
    index,
    measured_before,
    pages,
    papers,
    parts,
    public,
    readings,
    reference,
    statistics,
    translated,
    tutorials,
    with_files,
    written,
)

LARGEST = 150_000
DRAW = {"readings": readings.draw, "statistics": statistics.draw}


def keep(figure: Figure, path: Path) -> int:
    """Saves a figure as PNG, a large one with 256 colours. Returns its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return shrink(path)


def shrink(path: Path) -> int:
    """Rewrites a PNG without its alpha channel, a large one with 256 colours. Returns its size in bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        whole = picture.convert("RGB")
    whole.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        whole.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
    return path.stat().st_size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.docs", description=__doc__)
    parser.add_argument("name", nargs="*", help="pages; by default all")
    parser.add_argument("--words", action="store_true", help="write only the words: measure and draw nothing")
    given = parser.parse_args(arguments)
    known = {**pages(), **parts.part_pages(), **axes.axis_pages(), guides.NAME: guides.PAGE, papers.NAME: papers.PAGE,
             courses.NAME: courses.PAGE, tutorials.NAME: tutorials.PAGES, **tutorials.tutorials(),
             reference.NAME: reference.FOLDER}  # fmt: skip
    if unknown := set(given.name) - set(known):
        parser.error(f"unknown page {sorted(unknown)[0]!r}; known: {', '.join(known)}")
    torch.set_num_threads(1)
    too_large = []
    of_parts = [name for name in given.name if name in parts.part_pages()]
    if of_parts or not given.name:
        parts.write(of_parts, keep, given.words)
    of_axes = [name for name in given.name if name in axes.axis_pages()]
    if of_axes or not given.name:
        axes.write(of_axes, keep, given.words)
    if not given.name or guides.NAME in given.name:
        guides.write()
    if not given.name or papers.NAME in given.name:
        papers.PAGE.write_text(papers.papers_page(), encoding="utf-8")
    if not given.name or reference.NAME in given.name:
        reference.write()
    if not given.name or courses.NAME in given.name:
        courses.write()
    of_tutorials = [name for name in given.name if name in tutorials.tutorials()]
    if of_tutorials or not given.name or tutorials.NAME in given.name:
        tutorials.write(of_tutorials, shrink, given.words)
    for page in pages().values():
        if given.name and page.name not in given.name:
            continue
        if given.words:
            page.path.write_text(written(page, measured_before(page)), encoding="utf-8")
            continue
        figure, measured = DRAW[page.room](page.name, public(page.room)[page.name])
        size = keep(figure, page.figure)
        page.path.parent.mkdir(parents=True, exist_ok=True)
        page.path.write_text(written(page, measured), encoding="utf-8")
        print(f"{page.path.relative_to(DOCS.parent)}  {size / 1000:.0f} kB", flush=True)
        too_large += [page.name] if size > LARGEST else []
    OWN_PARTS.write_text(with_files(OWN_PARTS.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "under_glass.md").write_text(index(), encoding="utf-8")
    (DOCS / "glossary.md").write_text(glossary_page(), encoding="utf-8")
    translated.write()
    if too_large:
        print(f"figures of more than {LARGEST:,} bytes: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
