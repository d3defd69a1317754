"""Reference pages equal their sources, and the site lists every page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from cyclopts import MissingArgumentError
from docutils import nodes

from experiments.docs import DOCS, reference, site
from glassformer.cli.program import VERBS, app


def test_reference_pages_equal_their_sources():
    stale = [path for path, text in reference.pages().items() if not path.exists() or path.read_text("utf-8") != text]
    assert not stale, "python -m experiments.docs reference"


def test_each_page_of_a_folder_is_generated():
    kept = set(reference.FOLDER.rglob("*.md"))
    written = {reference.FOLDER / "examples.md"}
    assert kept - written == {path for path in reference.pages() if path.is_relative_to(reference.FOLDER)}


@pytest.mark.parametrize("verb", VERBS)
def test_example_of_a_verb_has_output_and_is_accepted_by_the_parser(verb: str):
    assert reference.output_before(verb), f"python -m experiments.docs.reference {verb}"
    for line in reference.EXAMPLES.get(verb, [VERBS[verb].example]):
        app.parse_args(shlex.split(line.partition(" | ")[0]), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("verb", VERBS)
def test_output_of_an_example_names_no_folder_of_a_machine(verb: str):
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users|var)/", reference.output_before(verb))


def commands() -> list[str]:
    """Commands in the running text and the tables of hand-written pages, complete ones only."""
    pages = [DOCS.parent / "README.md", DOCS / "index.md", *DOCS.glob("start/*.md"), *DOCS.glob("howto/*.md")]
    found = {line for page in pages for line in re.findall(r"`glassformer ([a-z]+ [^`]*)`", page.read_text("utf-8"))}
    found = {re.sub(r"\s--import \S+| [>|] .*", "", line) for line in found}  # the parser sees neither
    return sorted(
        line for line in found if not re.search(r"\.\.\.|\b[A-Z]{3,}\b|^help ", line) and line.split()[0] in VERBS
    )


@pytest.mark.parametrize("line", commands())
def test_command_in_running_text_is_accepted_by_the_parser(line: str):
    with suppress(MissingArgumentError):  # a sentence may name an option without the rest of the command
        app.parse_args(shlex.split(line), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("language", ["", "zh"])
def test_site_map_reaches_every_page(language: str):
    root = DOCS / language
    reached, waiting = {"index"}, ["index"]
    while waiting:
        new = set(site.children(root, waiting.pop())) - reached
        reached |= new
        waiting += new
    pages = {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.md")}
    left = {page for page in pages - reached if not page.startswith(("_build", *([] if language else ["zh/"])))}
    assert not left, "name it in MAP of experiments/docs/site.py"


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path):
    pytest.importorskip("furo", reason="pip install 'glassformer[docs]'")
    pytest.importorskip("myst_parser", reason="pip install 'glassformer[docs]'")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path]
    done = subprocess.run(build, capture_output=True, text=True, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "llms.txt").exists() and (tmp_path / "index.md").exists()


def test_unknown_formula_is_a_warning_and_stays_tex():
    node, writer = nodes.math("", r"\nosuchcommand"), SimpleNamespace(body=[], encode=str, starttag=lambda *_: "<code>")
    with pytest.raises(nodes.SkipNode):
        site.formula(writer, node)
    assert writer.body == ["<code>" + r"\nosuchcommand" + "</code>"]
    writer.body.clear()
    with pytest.raises(nodes.SkipNode):
        site.formula(writer, nodes.math("", r"x^2"))
    assert "<msup>" in writer.body[0]


def test_first_sentence_has_no_links_and_no_emphasis():
    page = "# Title\n\nA *site* and `layers.*.q` at [a **place**](a.md). More.\n"
    assert site.first_sentence(page) == "A site and `layers.*.q` at a place."
    assert site.first_sentence("*狗咬人*和*人咬狗*。后文。\n") == "狗咬人和人咬狗。"
    assert site.first_sentence("“损失更低。”也许吧。\n") == "“损失更低。”"
    assert site.first_sentence("On 1, 2, 4, ... processes. More.\n") == "On 1, 2, 4, ... processes."
