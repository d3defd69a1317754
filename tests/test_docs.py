"""Every reading and every statistic has a page, and pages say what is."""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import glassformer as gf
from experiments.docs import (
    DOCS,
    OWN_PARTS,
    ROOMS,
    Page,
    axes,
    call,
    courses,
    escaped,
    glossary_page,
    index,
    markdown_of,
    pages,
    public,
    with_files,
    written,
)
from experiments.docs.axes import AxisPage, KindPage, axis_pages, written_axis, written_index, written_kind
from experiments.docs.guides import PAGE, guides_page
from experiments.docs.kinds import FOLDER, KINDS, picture
from experiments.docs.papers import PAGE as PAPERS
from experiments.docs.papers import SOURCE, papers_page
from experiments.docs.parts import PartPage, index_of_parts, influence, part_pages, with_word, written_part
from experiments.docs.sections import docstring_classes, registered, sentences
from glassformer import dynamics, lens
from glassformer.dynamics.watch import Moment, Watch
from glassformer.names.papers import NUMBER, papers
from glassformer.parts.ffn import FFNConfig
from glassformer.parts.mixer import MixerConfig
from glassformer.parts.visibility import VisibilityConfig

PAGES = list(pages().values())
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.room}.{page.name}")
LARGEST = 150_000


def test_the_glossary_is_made_of_its_terms():
    assert (DOCS / "glossary.md").read_text(encoding="utf-8") == glossary_page(), "python -m experiments.docs"


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_function_is_documented_once(room: str):
    told = Counter(name for page in PAGES if page.room == room for name in (page.name, *page.also))
    assert set(public(room)) - set(told) == set(), "give it a heading in experiments/docs/pages.md, or an `also:`"
    assert set(told) - set(public(room)) == set(), "pages.md names what does not exist"
    assert max(told.values()) == 1


def test_public_functions_are_the_packages_exports():
    assert {"attention_map", "logit_lens", "position_picture"} <= set(public("readings"))
    assert {"attention_entropy", "effective_rank"} <= set(public("statistics"))
    for room, module in {"readings": lens, "statistics": dynamics}.items():
        for name, function in public(room).items():
            assert isinstance(function, FunctionType) and getattr(module, name) is function and function.__doc__, name


@every_page
def test_the_page_is_there_and_fresh(page: Page):
    """But for what was measured, the file is what would be written now."""
    text = page.path.read_text(encoding="utf-8")
    before, after = written(page, "MEASURED").split("MEASURED")
    assert text.startswith(before) and text.endswith(after), "run `make docs`, or python -m experiments.docs NAME"
    measured = text[len(before) : -len(after)]
    assert re.search(r"\d", measured), "a figure without numbers"


def test_the_page_of_own_parts_has_the_files_of_the_examples():
    text = OWN_PARTS.read_text(encoding="utf-8")
    files = {str(file.relative_to(DOCS.parent)) for file in (DOCS.parent / "examples" / "parts").glob("*.py")}
    assert set(re.findall(r"<!-- (\S+\.py) -->", text)) == files
    assert with_files(text) == text, "run python -m experiments.docs --words"


@pytest.mark.parametrize("page", [page for page in PAGES if page.room == "readings"], ids=lambda page: page.name)
def test_a_reading_has_a_source(page: Page):
    """A paper by its number, or the one who described it first."""
    text = page.path.read_text(encoding="utf-8")
    assert re.search(r"\b\d{4}\.\d{5}\b|nostalgebraist 2020", text), "name the paper that it is from"


@pytest.mark.parametrize("name", ["expert_routing", "side_by_side", "attention_rollout", "attention_sinks"])
def test_a_reading_has_its_formula(name: str):
    text = pages()[name].path.read_text(encoding="utf-8")
    told = text[text.index(f"gf.lens.{name}(\n" if f"gf.lens.{name}(\n" in text else f"gf.lens.{name}(") :]
    assert re.search(r"[A-Za-z_)] = .*[/Σ+(]|Σ.* / ", told.partition("## How")[0]), "say what is computed"


@every_page
def test_the_figure_is_there(page: Page):
    data = page.figure.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) <= LARGEST
    width, height = struct.unpack(">II", data[16:24])
    assert 400 <= width <= 1700 and 200 <= height <= 1500
    assert f"(../figures/{page.room}/{page.name}.png)" in page.path.read_text(encoding="utf-8")
    image = pytest.importorskip("PIL.Image").open(page.figure).convert("RGB")
    assert len(image.resize((60, 40)).getcolors() or range(9999)) > 20, "nothing is drawn"


@every_page
def test_the_hand_written_part_is_whole(page: Page):
    assert page.what and not page.what.endswith(".")
    read, _, trouble = page.words.partition("### What trouble looks like")
    assert read.strip().startswith("### How to read it") and len(read.split()) > 20
    heading, rule, *rows = [line for line in trouble.strip().splitlines() if line]
    assert heading.endswith("| what it says | source |") and set(rule) == {"|", "-"} and rows
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 3 and all(cell.strip() for cell in cells), row


@pytest.mark.parametrize("name", KINDS)
def test_the_picture_of_a_kind_is_fresh_and_its_numbers_are_those_of_presets(name: str):
    drawn = FOLDER / f"{name}.svg"
    assert drawn.read_text(encoding="utf-8") == picture(KINDS[name]), "run python -m experiments.docs.kinds"
    text = (DOCS / "kinds" / f"{name}.md").read_text(encoding="utf-8")
    assert f"(../figures/kinds/{name}.svg)" in text and f"`{KINDS[name]}`" in text
    for row in re.findall(r"(?m)^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*).*?\| ([\d,; ]+) \|", text):
        names = re.findall(r"`([a-z0-9-]+)`", row[0])
        counts = [int(count.replace(",", "")) for count in row[1].split(";")]
        assert [gf.preset(one).num_params() for one in names] == counts


def test_the_page_of_dynamics_and_its_pictures_are_those_of_stored_claims():
    assert courses.PAGE.read_text(encoding="utf-8") == courses.dynamics_page(), "experiments.docs dynamics"
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in courses.FOLDER.glob("*.svg")}
    assert drawn == courses.drawings(), "run python -m experiments.docs dynamics"


def texts() -> dict[str, str]:
    return {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in
            (DOCS / "under_glass.md", *(page.path for page in PAGES), *sorted((DOCS / "kinds").iterdir()),
             *sorted((DOCS / "parts").rglob("*.md")))}  # fmt: skip


def test_names_in_the_text_exist():
    for where, text in texts().items():
        for name in set(re.findall(r"\bgf((?:\.[a-zA-Z_]\w*)+)", text)):
            found: Any = gf
            for step in name[1:].split("."):
                found = getattr(found, step, None)
            assert found is not None, f"{where}: gf{name}"


def test_links_lead_somewhere():
    for where, text in texts().items():
        for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if not target.startswith("http"):
                assert ((DOCS / where).parent / target).resolve().exists(), f"{where}: {target}"


def test_nothing_is_left_over():
    for room in ROOMS:
        names = {page.name for page in PAGES if page.room == room}
        assert {path.stem for path in (DOCS / room).iterdir()} == names
        assert {path.stem for path in (DOCS / "figures" / room).iterdir()} == names


def test_the_index_is_fresh_and_lists_them_all():
    text = (DOCS / "under_glass.md").read_text(encoding="utf-8")
    assert text == index()
    assert all(f"({page.room}/{page.name}.md)" in text for page in PAGES)


def test_all_recorded_statistics_are_documented():
    model = gf.preset(
        "gpt2@1m+moe:4:2+ffn.n_shared=1+ffn.capacity=1+layers=1+d_model=32+heads=2+vocab_size=31+context=16"
    ).build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(30).view(2, 15)
    rows: list[dict[str, Any]] = []
    watch = Watch(model, 1)
    watch._write = lambda *given: rows.extend(given)  # type: ignore[method-assign]
    model.loss(tokens, tokens).backward()
    moment = Moment(1, 1.0, 1.0, 1e-3, tokens, tokens, model, optimizer)
    watch.before_update(moment)
    optimizer.step()
    watch.after_update(moment)
    recorded = {name for row in rows for name in row["statistics"]}
    told = {name for page in PAGES for name in page.recorded}
    assert told == recorded and len(recorded) > 10


def test_words_are_not_markup():
    assert escaped("W_Q |x| <x, y> *a* [b]") == r"W\_Q \|x\| &lt;x, y&gt; \*a\* \[b\]"

    def told() -> None:
        """A_ij of `x_y`.

            a formula_here

        one   a column
        two   another
        """

    assert markdown_of(told) == [r"A\_ij of `x_y`.", "```\na formula_here\n```",
                                 "```\none   a column\ntwo   another\n```"]  # fmt: skip
    assert call("f", ["a", "b"]) == "f(a, b)" and call("f", ["a" * 50, "b" * 50]).count("\n") == 3


def test_pages_are_in_the_indexed_folders():
    assert Path(DOCS).name == "docs" and {page.room for page in PAGES} == set(ROOMS)


every_part = pytest.mark.parametrize("part", list(part_pages().values()), ids=lambda part: part.name)
NO_PAGE = {"bidirectional", "mlp", "glu"}
"""Parts without a page: the visibility of encoders, described in docs/kinds, and the usual FFNs."""


@every_part
def test_the_page_of_a_part_is_fresh(part: PartPage):
    """Words, formula and costs are those written now; the picture is not compared."""
    assert part.path.read_text(encoding="utf-8") == written_part(part), "run python -m experiments.docs " + part.name
    assert part.figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(part.loses.split()) > 30, "say honestly when it loses"


@every_part
def test_the_page_of_a_part_names_its_source(part: PartPage):
    assert NUMBER.search(written_part(part)), "name the paper that it is from"


def test_every_mixer_every_visibility_and_every_network_has_a_page():
    said = [with_word(part.small, part.word).to_dict() for part in part_pages().values()]
    blocks = [block for tree in said for block in tree["stack"][0]["blocks"]]
    mixers, networks = ([block[name] for block in blocks] for name in ("mixer", "ffn"))
    told = {part["kind"] for part in (*mixers, *networks) if part is not None} | {
        mixer["visibility"]["kind"] if isinstance(mixer["visibility"], dict) else mixer["visibility"]
        for mixer in mixers
        if "visibility" in mixer
    }
    ours = {
        kind
        for axis in (MixerConfig, VisibilityConfig, FFNConfig)
        for kind, choice in axis.choices().items()
        if choice.__module__.startswith("glassformer.")
    }
    assert ours - told - NO_PAGE == set(), "give it a heading in experiments/docs/parts.md"


AXES = list(axis_pages().values())
KIND_PAGES = [page for axis in AXES for page in axis.kinds if not page.page]
every_kind = pytest.mark.parametrize("page", KIND_PAGES, ids=lambda page: f"{page.axis}.{page.kind}")


def test_every_kind_of_every_axis_has_a_page():
    """Mixers have theirs by another test."""
    for axis, kinds in registered().items():
        if axis != "mixer":
            assert {page.kind for page in axis_pages()[axis].kinds} == set(kinds), f"experiments/docs/axes/{axis}.md"
            assert all((page.path_of_page.parent / page.link).is_file() for page in axis_pages()[axis].kinds), axis


@every_kind
def test_page_of_a_kind_is_fresh(page: KindPage):
    """All of it but the numbers in its picture."""
    assert page.path_of_page.read_text(encoding="utf-8") == written_kind(page), (
        f"python -m experiments.docs {page.axis}"
    )
    assert page.figure is None or page.figure.stat().st_size > 1000


@every_kind
def test_page_of_a_kind_answers_first_and_is_honest(page: KindPage):
    """Its first sentences say what the part is for; its downside is more than a word."""
    assert 15 < len(sentences(page.explain).split()) < 90, "names/explained.yaml"
    assert len(page.loses.split()) > 30, "say when it loses"
    assert docstring_classes(page.part), "the config or its module has no docstring"


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.axis)
def test_overview_of_an_axis_is_fresh(axis: AxisPage):
    assert axis.path_of_page.read_text(encoding="utf-8") == written_axis(axis), (
        f"python -m experiments.docs {axis.axis}"
    )


def test_overview_of_all_parts_is_fresh():
    assert axes.INDEX.read_text(encoding="utf-8") == written_index(), "python -m experiments.docs norm"


def test_folders_of_axes_hold_their_pages_only():
    for axis in AXES:
        own = [page for page in axis.kinds if not page.page]
        assert {path.stem for path in axis.path_of_page.parent.iterdir()} == {"index", *(page.kind for page in own)}
        drawn = {page.figure.name for page in own if page.figure is not None}
        folder = DOCS / "figures" / "parts" / axis.axis
        assert ({path.name for path in folder.iterdir()} if folder.exists() else set()) == drawn


def test_page_of_the_guides_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == guides_page(), "run python -m experiments.docs guides"


def test_page_of_the_papers_is_fresh():
    assert PAPERS.read_text(encoding="utf-8") == papers_page(), "run python -m experiments.docs papers"


def test_every_number_of_arxiv_in_the_source_has_authors_and_a_title():
    """The package cites every paper of the list."""
    cited = set()
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.yaml")]:
        if path.name != "papers.yaml":
            cited |= set(NUMBER.findall(path.read_text(encoding="utf-8")))
    assert cited == set(papers()), "src/glassformer/names/papers.yaml has the authors and the title of each"
    assert all(re.search(r" (19|20)\d\d$", paper.authors) and paper.title for paper in papers().values())


def test_the_index_of_parts_is_fresh():
    assert (DOCS / "mixers.md").read_text(encoding="utf-8") == index_of_parts()


def test_influence_of_a_window_is_its_reach():
    seen = influence(part_pages()["window"])
    place = torch.arange(len(seen))
    back = place[:, None] - place
    assert torch.equal(seen > 0, (back >= 0) & (back < 12))
