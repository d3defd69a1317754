"""Extension of Sphinx: formulas as MathML, pages of linked source files, the Markdown of each page, and llms.txt.

Formulas become MathML when the site is built, which browsers draw by themselves, so that no script and no font is
shipped for them. A link to a file outside of the docs leads to a page that shows the file."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FILES = "files"
"""Folder of the site that holds the pages of source files."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".cpp": "cpp"}
LARGEST = 400_000
"""Characters of a file that its page shows at most."""
MAP: dict[str, dict[str, list[str]]] = {
    "index": {
        "Start": ["start/install", "start/first-hour", "start/first-comparison", "start/first-checkpoint"],
        "Learn": ["learn/a-transformer", "tutorials/index", "parts/index", "learn/kinds", "under_glass", "guides"],
        "How to": ["howto/index"],
        "Reference": [
            "reference/cli", "reference/expressions", "reference/models", "reference/api", "reference/files",
            "reference/http", "reference/errors", "reference/examples", "data", "shapes", "glossary",
        ],
        "Results": ["claims", "advice", "learn/studies", "benchmarks/index", "papers"],
        "Project": ["architecture", "decisions", "project/roadmap", "project/contributing", "project/changes", "log"],
    },
    "tutorials/index": {"": ["tutorials/*"]},
    "parts/index": {"": ["mixers", "objectives", "parts/*/index"]},
    "mixers": {"": ["parts/*"]},
    "learn/kinds": {"": ["kinds/*"]},
    "learn/studies": {"": ["dynamics", "in_context", "retro", "uptraining", "weak_scaling", "planning-memory"]},
    "under_glass": {"": ["readings/*", "statistics/*"]},
    "guides": {"": ["guides/*"]},
    "howto/index": {
        "": [
            "howto/*", "honest-comparison", "tuning", "ladders", "scaling", "sweeps", "planning", "clusters", "experts",
            "determinism", "retrieval", "serving", "studio", "own-parts",
        ],
    },
    "reference/cli": {"": ["reference/cli/*"]},
    "reference/api": {"": ["reference/api/*"]},
    "benchmarks/index": {"": ["benchmarks/*"]},
    "log": {"": ["log/*"]},
}  # fmt: skip
"""Pages below each page, by caption; `*` takes the pages of a folder that the table does not name."""


CAPTIONS = {
    "zh_CN": {
        "Start": "入门", "Learn": "学习", "How to": "操作指南", "Reference": "参考", "Results": "结果",
        "Project": "项目",
    }
}  # fmt: skip
"""Captions of the site in other languages."""


def formula(writer: Any, node: nodes.Element) -> None:
    """Writes a formula of TeX as MathML; one that docutils does not know is a warning, and stays TeX."""
    block = isinstance(node, nodes.math_block)
    try:
        writer.body.append(tex2mathml(node.astext(), as_block=block))
    except MathError as problem:
        logging.getLogger(__name__).warning("%s: %s", node.astext(), problem, location=node)
        writer.body.append(writer.starttag(node, "code", "") + writer.encode(node.astext()) + "</code>")
    raise nodes.SkipNode


class Links(SphinxPostTransform):
    """Turns links to files outside of the docs into links to their pages, and keeps links to HTML files."""

    default_priority = 5
    """Before references are resolved."""

    def run(self, **kwargs: Any) -> None:
        name = self.env.docname
        for cross in list(self.document.findall(addnodes.pending_xref)):
            path = Path(f"{cross.get('reftarget')}.md")
            if cross.get("refdomain") == "doc" and path.is_absolute():  # Markdown outside of this language's pages
                docs = Path(self.env.srcdir)
                if not path.is_relative_to(DOCS):
                    linked(self.env).setdefault(name, set()).add(str(path.relative_to(ROOT)))
                uri = uri_of(path, name, docs)
                cross.replace_self(nodes.reference("", "", *cross.children, internal=True, refuri=uri))
        for node in list(self.document.findall(lambda node: isinstance(node, addnodes.download_reference))):
            target = unquote(str(node.get("reftarget", "")))
            path = Path(os.path.normpath(Path(self.env.doc2path(name)).parent / target))
            uri = uri_of(path, name, Path(self.env.srcdir))
            reference = nodes.reference("", "", *node.children, internal=True, refuri=uri)
            for code in reference.findall(nodes.literal):
                code["classes"] = [word for word in code["classes"] if word != "download"]
            node.replace_self(reference)
            if path.is_file() and not path.is_relative_to(DOCS):
                linked(self.env).setdefault(name, set()).add(str(path.relative_to(ROOT)))


def linked(env: Any) -> dict[str, set[str]]:
    """Returns the source files that each page links to."""
    if not hasattr(env, "glassformer_files"):
        env.glassformer_files = {}
    found: dict[str, set[str]] = env.glassformer_files
    return found


def uri_of(path: Path, page: str, docs: Path) -> str:
    """Returns the address of a file's page, relative to `page`."""
    if path.is_relative_to(docs):
        inside = path.relative_to(docs)
    elif path.is_relative_to(DOCS):  # an English page: other languages are folders of its site
        english = path.relative_to(DOCS)
        inside = Path("..", english.with_suffix(".html") if english.suffix == ".md" else english)
    else:
        inside = Path(FILES, f"{path.relative_to(ROOT)}.html")
    return posixpath.relpath(inside.as_posix(), posixpath.dirname(page) or ".")


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each linked source file: its name, its context and its template."""
    for name in sorted(set().union(*linked(app.env).values())):
        text = (ROOT / name).read_text(encoding="utf-8")[:LARGEST]
        highlighter = app.builder.highlighter  # type: ignore[attr-defined]
        body = highlighter.highlight_block(text, LANGUAGES.get(Path(name).suffix, "text"), linenos=False)
        yield (
            f"{FILES}/{name}",
            {"title": name, "body": f"<h1>{Path(name).name}</h1>\n<p>{name}</p>\n{body}"},
            "page.html",
        )


def map_of(name: str) -> dict[str, list[str]]:
    """Returns the entry of a page in MAP; other pages named index list their folder."""
    return MAP.get(name, {"": [f"{posixpath.dirname(name)}/*"]} if name.endswith("/index") else {})


def children(docs: Path, name: str, caption: str | None = None) -> list[str]:
    """Returns the pages below a page that exist in a folder, of one caption or of all."""
    listed = {one for some in MAP.values() for pages in some.values() for one in pages}
    found: list[str] = []
    for heading, pages in map_of(name).items():
        for page in pages if caption in (None, heading) else ():
            if "*" in page:
                names = sorted(path.relative_to(docs).with_suffix("").as_posix() for path in docs.glob(f"{page}.md"))
                found += [one for one in names if one not in listed and one != name]
            elif (docs / f"{page}.md").exists():
                found.append(page)
            else:  # a language without this page has those below it
                found += children(docs, page)
    return found


def add_children(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the lists of MAP to the text of a page, so that the Markdown files need none."""
    for caption in map_of(name):
        if found := children(Path(app.srcdir), name, caption):
            lines = "\n".join(f"/{one}" for one in found)
            heading = f":caption: {CAPTIONS.get(app.config.language, {}).get(caption, caption)}\n" if caption else ""
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n{heading}\n{lines}\n```\n"


def finish(app: Sphinx, error: Exception | None) -> None:
    """Copies the Markdown of each page next to its HTML, copies linked HTML files, and writes llms.txt."""
    if error or app.builder.name != "html":
        return
    docs, out = Path(app.srcdir), Path(app.outdir)
    for page in docs.rglob("*.html"):
        if "_build" not in page.parts:
            target = out / page.relative_to(docs)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)
    lines = ["# Glassformer", "", "> Composes, trains, compares, opens and counts transformers.", ""]
    for name in sorted(app.env.found_docs):
        source = Path(app.env.doc2path(name))
        if source.suffix != ".md":
            continue
        shutil.copyfile(source, out / f"{name}.md")
        about = first_sentence(source.read_text(encoding="utf-8"))
        lines.append(f"- [{app.env.titles[name].astext()}]({name}.md){about and f': {about}'}")
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


EMPHASIS = re.compile(r"(`[^`]*`)|\*+(\S[^*]*)\*+")
"""Words in stars, or code, whose stars stay."""


def first_sentence(text: str) -> str:
    """Returns the first sentence of the first paragraph of a Markdown text without links and emphasis, or ""."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->|```.*?```|!\[[^]]*\]\([^)]*\)", "", text, flags=re.S)
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if words and words[0] not in "#|<:->":
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words)
            plain = EMPHASIS.sub(lambda match: match[1] or match[2], plain)
            return re.split(r"(?<=\.)(?<!\.\.)\s|(?<=。)(?![）”])|(?<=。[）”])", plain)[0]
    return ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.add_post_transform(Links)
    app.connect("source-read", add_children)
    app.connect("html-collect-pages", file_pages)
    app.connect("build-finished", finish)
    app.connect("env-purge-doc", lambda app, env, name: linked(env).pop(name, None))
    return {"parallel_read_safe": False, "parallel_write_safe": False}
