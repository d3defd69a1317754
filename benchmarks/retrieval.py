"""How often a question finds its relevant text: `glassformer index` with MiniLM against BM25 and a random order.

The pairs are made of Python's standard library. *docstring, body*: the question is the first line of a function's
docstring, the relevant text the statements of its body, without signature and docstring; 1,000 functions. *topic,
paragraph*: the question is the heading of a topic of the language reference (`pydoc_data`), the relevant texts are the
paragraphs below it; the first of them to be found counts.

recall@k is the share of questions with a relevant text among the k best; MRR the mean of 1 / rank of the first relevant
text, 0 beyond rank 100. Ours is all-MiniLM-L6-v2 and exact search for the largest cosine; a text longer than the
encoder's context is indexed in pieces, and its best piece counts. BM25 is `bm25s` (k1 = 1.5, b = 0.75) over words in
lower case, English stop words left out, identifiers split at their underscores. Scores of a random order are expected
values, computed and not sampled. The figures hold for texts like these, whose questions and answers have one author.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import glassformer as gf
from glassformer import machine
from glassformer.text.embedded import _topics, sources, standard_library

PAIRS, QUICK = 1000, 40
DEEP = 100
"""Number of top ranks that count."""
AT = (1, 5, 10)
LEAST_WORDS, LEAST_STATEMENTS = 5, 3
LEAST_PARAGRAPH = 100
"""Characters; shorter ones are headings and lines that introduce an example."""


@dataclass(frozen=True)
class Task:
    """Questions, texts, and the numbers of the texts that belong to each question."""

    name: str
    questions: list[str]
    texts: list[str]
    relevant: list[set[int]]


Ranking = list[list[int]]
"""Numbers of texts for each question, the best first."""


def docstrings(most: int) -> Task:
    """Returns at most `most` pairs (first line of a docstring, body), each question and each body once; the sample does
    not depend on the order of files."""
    found: dict[str, str] = {}
    for path in sources(standard_library()):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (told := ast.get_docstring(node)):
                continue
            question = " ".join(told.split("\n\n")[0].split())
            if len(question.split()) < LEAST_WORDS or len(node.body) <= LEAST_STATEMENTS:
                continue
            body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
            found.setdefault(question, body)
    by_body = {body: question for question, body in found.items()}
    pairs = sorted(by_body.items(), key=lambda pair: hashlib.sha256(pair[1].encode()).digest())[:most]
    return Task(
        "docstring, body", [question for _, question in pairs], [body for body, _ in pairs],
        [{i} for i in range(len(pairs))],
    )  # fmt: skip


def topics(most: int) -> Task:
    """Returns at most `most` questions, the headings of topics; relevant are the paragraphs below a heading."""
    questions, texts, relevant = list[str](), list[str](), list[set[int]]()
    for _, text in _topics(standard_library() / "pydoc_data" / "topics.py"):
        heading, *paragraphs = re.split(r"\n\s*\n", text.strip())
        own = [" ".join(one.split()) for one in paragraphs if len(one) >= LEAST_PARAGRAPH]
        if not own or len(questions) == most:
            continue
        questions.append(heading.splitlines()[0])
        relevant.append(set(range(len(texts), len(texts) + len(own))))
        texts += own
    return Task("topic, paragraph", questions, texts, relevant)


def by_index(task: Task) -> Ranking:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in task.texts), encoding="utf-8")
        index = gf.index(data, Path(folder) / "index")
        hits = index.search_all(task.questions, 4 * DEEP)  # a text may have several passages
        return [list(dict.fromkeys(int(hit.passage.document.rpartition("#")[2]) - 1 for hit in row)) for row in hits]


def by_words(task: Task) -> Ranking:
    import bm25s

    def tokens(texts: Sequence[str]) -> Any:
        return bm25s.tokenize([text.replace("_", " ") for text in texts], stopwords="en", show_progress=False)

    retriever = bm25s.BM25()
    retriever.index(tokens(task.texts), show_progress=False)
    found, _ = retriever.retrieve(tokens(task.questions), k=min(DEEP, len(task.texts)), show_progress=False)
    return [row.tolist() for row in np.asarray(found)]


SYSTEMS: dict[str, Callable[[Task], Ranking]] = {"index, MiniLM": by_index, "BM25": by_words}


def scores(task: Task, found: Ranking) -> dict[str, float]:
    ranks = []
    for row, relevant in zip(found, task.relevant, strict=True):
        ranks.append(next((i for i, number in enumerate(row[:DEEP], 1) if number in relevant), 0))
    of = np.array(ranks)
    reached = {f"recall@{k}": float(((of > 0) & (of <= k)).mean()) for k in AT}
    return {**reached, "MRR": float(np.where(of > 0, 1 / np.maximum(of, 1), 0).mean())}


def of_chance(task: Task) -> dict[str, float]:
    """Returns the expected scores of a random order. For n texts, r of them relevant, no relevant text precedes
    rank i with probability prod_{j < i} (n - r - j) / (n - j)."""
    n, first = len(task.texts), []
    for relevant in task.relevant:
        ranks = np.arange(min(DEEP, n))
        missed = np.cumprod(np.clip(n - len(relevant) - ranks, 0, None) / (n - ranks))
        first.append(np.diff(-missed, prepend=-1.0))
    at = np.mean([np.pad(one, (0, DEEP - len(one))) for one in first], 0)
    reached = {f"recall@{k}": float(at[:k].sum()) for k in AT}
    return {**reached, "MRR": float((at / np.arange(1, DEEP + 1)).sum())}


def run(rounds: int = 1, threads: int | None = None, quiet: bool = False, quick: bool = False) -> dict[str, Any]:
    """Measures all systems on all tasks; `rounds` has no effect, because the scores are deterministic."""
    if threads is not None:
        torch.set_num_threads(threads)
    rows = []
    for task in (docstrings(QUICK if quick else PAIRS), topics(5 if quick else PAIRS)):
        about = {"task": task.name, "questions": len(task.questions), "texts": len(task.texts)}
        rows += [{**about, "system": name, **scores(task, system(task))} for name, system in SYSTEMS.items()]
        rows.append({**about, "system": "none (random order)", **of_chance(task)})
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


def table(rows: list[dict[str, Any]]) -> str:
    figures = [*(f"recall@{k}" for k in AT), "MRR"]
    heads = ("pairs", "questions", "texts", "retrieval", *figures)
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["task"], f"{row['questions']:,}", f"{row['texts']:,}", row["system"]]
        lines.append("| " + " | ".join([*cells, *(f"{row[name]:.3f}" for name in figures)]) + " |")
    return "\n".join(lines)
