"""Tasks: data drawn from a seed, row by row, without an end. Held-out rows are drawn with other keys.

    induction        a repeated block of random symbols: Olsson et al. 2022, 2209.11895
    selective-copy   a few symbols among noise, to be copied in order: Gu & Dao 2023, 2312.00752, 4.1.1
    icl-regression   examples (x, w x) of a linear function, and an x to answer: Garg et al. 2022, 2208.01066

`NAME:field=value,field=value` sets fields, such as `induction:symbols=32,row=128`. A task opened as a text has a fixed
number of its rows, a document each; the objectives `task` and `regression` draw the rows that a run needs.
"""

from __future__ import annotations

import hashlib
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, get_args, get_type_hints

import numpy as np

from glassformer.errors import RequestError, did_you_mean
from glassformer.text.documents import BETWEEN, Corpus, Document
from glassformer.text.permutation import keyed

SYMBOLS = string.ascii_letters + string.digits + "+/"
NOISE = "."
"""Character of selective-copy's noise; a tab marks a position at which a symbol is to be copied."""
COUNT = 20_000
"""Most rows in the text of a task of symbols."""
PLACES = 4_000_000
"""Most positions of all rows in the text of a task of symbols."""
SHOWN = 256
"""Number of rows, written out, in the text of a task of vectors."""
VERSION = 1  # version of the content of tasks
LONGEST = 1 << 16
"""Most positions of a row."""

Layout = Literal["joined", "apart"]


class Rows(NamedTuple):
    """Rows drawn from a task: inputs, targets, and the positions that are scored.

    inputs    (b, s) symbol ids, or (b, s, size) vectors
    targets   (b, s) symbol ids, or real numbers
    asked     (b, s) True if the target is scored
    """

    inputs: np.ndarray
    targets: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True)
class Task(ABC):
    """Base of tasks; rows are a pure function of the task's fields and a key."""

    kind: ClassVar[str]
    seed: int = 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of positions of a row."""

    @abstractmethod
    def draw(self, rows: int, draw: np.random.Generator) -> Rows: ...

    @abstractmethod
    def texts(self, rows: Rows) -> Iterator[str]:
        """Yields the text of each row, a document."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError with `field=value: why` if the task's fields are out of range or contradict each other."""

    def rows(self, count: int, *key: object) -> Rows:
        """Returns `count` rows; `key` is the seed of a run and its step, or a name for held-out rows."""
        return self.draw(count, np.random.default_rng(keyed("task", VERSION, str(self), *key)))

    def __str__(self) -> str:
        """Returns the task's name as DATA: its kind, and the fields that are not the default."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.kind}:{','.join(changed)}" if changed else self.kind


@dataclass(frozen=True)
class TokenTask(Task):
    """Base of tasks whose rows are symbols."""

    @property
    @abstractmethod
    def alphabet(self) -> str:
        """Characters that write the symbols in a text, by symbol id."""

    def written(self, symbols: np.ndarray) -> list[str]:
        """Returns rows of symbol ids (b, s) as texts of s characters."""
        characters = np.array(list(self.alphabet))[symbols]
        return characters.view(f"<U{symbols.shape[1]}")[:, 0].tolist()


@dataclass(frozen=True)
class Induction(TokenTask):
    """Task of predicting a repeated block of `least` to `most` random symbols; each next symbol is scored.

    The first block is unpredictable, so the least mean loss is ln(symbols) times its share of the row, and later
    symbols follow only from the repetition. The length of the block is drawn for each row: with one length for all, the
    position would suffice."""

    kind: ClassVar[str] = "induction"
    symbols: int = 64
    row: int = 64
    """Number of positions of a row."""
    least: int = 8
    most: int = 32

    @property
    def length(self) -> int:
        return self.row

    @property
    def alphabet(self) -> str:
        return SYMBOLS[: self.symbols]

    def check(self) -> None:
        if not 2 <= self.symbols <= len(SYMBOLS):
            raise ValueError(f"symbols={self.symbols}: expected 2 to {len(SYMBOLS)}")
        if not 1 <= self.least <= self.most <= self.row <= LONGEST:
            raise ValueError(f"least={self.least}: expected 1 <= least <= most={self.most} <= row={self.row}")

    def draw(self, rows: int, draw: np.random.Generator) -> Rows:
        period = draw.integers(self.least, self.most + 1, (rows, 1))
        block = draw.integers(self.symbols, size=(rows, self.most))
        text = np.take_along_axis(block, np.arange(self.row + 1) % period, axis=1)
        return Rows(text[:, :-1], text[:, 1:], np.ones((rows, self.row), bool))

    def texts(self, rows: Rows) -> Iterator[str]:
        yield from self.written(np.concatenate([rows.inputs, rows.targets[:, -1:]], axis=1))


@dataclass(frozen=True)
class SelectiveCopy(TokenTask):
    """Task of copying `kept` symbols, at random positions among noise, in order; they are scored at marks after the
    row.

    A mixer whose weights do not depend on its input cannot ignore the noise, as its positions differ in each row. As a
    text a row is a pair: the inputs before the marks, a tab, and the answer."""

    kind: ClassVar[str] = "selective-copy"
    symbols: int = 8
    row: int = 64
    """Number of positions before the marks."""
    kept: int = 8

    @property
    def length(self) -> int:
        return self.row + self.kept

    @property
    def alphabet(self) -> str:
        return SYMBOLS[: self.symbols] + NOISE + BETWEEN

    def check(self) -> None:
        if not 2 <= self.symbols <= len(SYMBOLS):
            raise ValueError(f"symbols={self.symbols}: expected 2 to {len(SYMBOLS)}")
        if not 1 <= self.kept <= self.row <= LONGEST:
            raise ValueError(f"kept={self.kept}: expected 1 <= kept <= row={self.row}")

    def draw(self, rows: int, draw: np.random.Generator) -> Rows:
        noise, mark = self.symbols, self.symbols + 1
        symbols = draw.integers(self.symbols, size=(rows, self.kept))
        places = np.sort(draw.random((rows, self.row)).argsort(axis=1)[:, : self.kept], axis=1)
        inputs = np.full((rows, self.length), noise)
        np.put_along_axis(inputs, places, symbols, axis=1)
        inputs[:, self.row :] = mark
        targets = np.full_like(inputs, noise)
        targets[:, self.row :] = symbols
        asked = np.broadcast_to(np.arange(self.length) >= self.row, inputs.shape).copy()
        return Rows(inputs, targets, asked)

    def texts(self, rows: Rows) -> Iterator[str]:
        sources, answers = self.written(rows.inputs[:, : self.row]), self.written(rows.targets[:, self.row :])
        yield from (source + BETWEEN + answer for source, answer in zip(sources, answers, strict=True))


@dataclass(frozen=True)
class Regression(Task):
    """Task of predicting y for an x, given `examples` pairs (x_i, y_i) of a function y = w x + noise, drawn for each
    row.

    w, x ~ N(0, 1) in `dims` dimensions, noise ~ N(0, noise^2). With `mixture=M`, rows share M functions w, drawn once
    by the task's seed: a mixture of tasks (Raventós et al. 2023, 2306.15063). Two layouts:

        joined   (x_1, y_1), ..., (x_n, y_n), (x, 0)      vectors of dims + 1; scored at the last position
        apart    x_1, (y_1, 0...), ..., x_n, (y_n, 0...), x      vectors of dims; scored at each x, from the positions
                 before
    """

    kind: ClassVar[str] = "icl-regression"
    dims: int = 5
    examples: int = 10
    noise: float = 0.0
    layout: Layout = "joined"
    mixture: int = 0
    """Number of functions that rows choose from with equal probability; with 0, each row has a new one."""

    @property
    def length(self) -> int:
        return self.examples + 1 if self.layout == "joined" else 2 * self.examples + 1

    @property
    def size(self) -> int:
        """Number of elements of an input vector."""
        return self.dims + (self.layout == "joined")

    def check(self) -> None:
        if not 1 <= self.dims <= LONGEST:
            raise ValueError(f"dims={self.dims}: expected 1 to {LONGEST:,}")
        if not 1 <= self.examples <= LONGEST // 2:
            raise ValueError(f"examples={self.examples}: expected 1 to {LONGEST // 2:,}")
        if not 0 <= self.noise <= 1e6:
            raise ValueError(f"noise={self.noise}: expected a number from 0 up")
        if not 0 <= self.mixture <= LONGEST:
            raise ValueError(f"mixture={self.mixture} must be 0 to {LONGEST:,}")

    @property
    def mixed(self) -> np.ndarray:
        """Functions w of the mixture, (mixture, dims)."""
        draw = np.random.default_rng(keyed("mixture", VERSION, self.seed, self.dims))
        return draw.standard_normal((self.mixture, self.dims))

    def functions(self, rows: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws a function w for each of b rows; returns x (b, examples + 1, dims), w x without noise and y with it,
        (b, examples + 1) each."""
        if self.mixture:
            w = self.mixed[draw.integers(self.mixture, size=rows), :, None]
        else:
            w = draw.standard_normal((rows, self.dims, 1))
        x = draw.standard_normal((rows, self.examples + 1, self.dims))
        exact = (x @ w)[..., 0]
        return x, exact, exact + self.noise * draw.standard_normal(exact.shape)

    def draw(self, rows: int, draw: np.random.Generator) -> Rows:
        x, _, y = self.functions(rows, draw)
        return self.laid_out(x, y)

    def laid_out(self, x: np.ndarray, y: np.ndarray) -> Rows:
        """Returns rows with x (b, n + 1, dims) and y (b, n + 1) in the task's layout, for any number n of examples."""
        rows, n = x.shape[0], x.shape[1] - 1
        if self.layout == "joined":
            inputs = np.concatenate([x, y[..., None]], axis=2)
            inputs[:, -1, -1] = 0
            asked = np.broadcast_to(np.arange(n + 1) == n, y.shape).copy()
            return Rows(inputs, y, asked)
        inputs, targets = np.zeros((rows, 2 * n + 1, self.dims)), np.zeros((rows, 2 * n + 1))
        inputs[:, 0::2], inputs[:, 1::2, 0], targets[:, 0::2] = x, y[:, :-1], y
        asked = np.broadcast_to(np.arange(2 * n + 1) % 2 == 0, targets.shape).copy()
        return Rows(inputs, targets, asked)

    def texts(self, rows: Rows) -> Iterator[str]:
        for vectors, answers, asked in zip(*rows, strict=True):
            lines = [" ".join(f"{number:.3f}" for number in vector) for vector in vectors]
            told = zip(lines, answers, asked, strict=True)
            yield "\n".join(f"{line} | {y:.3f}" if one else line for line, y, one in told)


TASKS: dict[str, type[Task]] = {task.kind: task for task in (Induction, SelectiveCopy, Regression)}


def is_task(data: str) -> bool:
    """Returns True if DATA names a task."""
    return data.partition(":")[0] in TASKS


def task_of(data: str) -> Task:
    """Returns the task that DATA names. Raises RequestError for an unknown task, and for unknown or invalid fields."""
    kind, _, given = data.partition(":")
    if kind not in TASKS:
        raise RequestError(
            f"data={data!r}: known tasks are {', '.join(TASKS)}{did_you_mean(kind, TASKS)}",
            code="unknown", field="data", value=data, expected=", ".join(TASKS),
        )  # fmt: skip
    known, values = get_type_hints(TASKS[kind]), dict[str, object]()
    names = [f.name for f in fields(TASKS[kind])]
    for item in given.split(",") if given else []:
        name, equals, text = (part.strip() for part in item.partition("="))
        if not equals or name not in names:
            raise RequestError(
                f"data={data!r}: {item!r} is not a field of {kind}; write {kind}:FIELD=VALUE with "
                f"{', '.join(names)}{did_you_mean(name, names)}",
                code="unknown", field="data", value=data, expected=", ".join(names),
            )  # fmt: skip
        values[name] = _read(data, name, text, known[name])
    task = TASKS[kind](**values)  # type: ignore[arg-type]
    try:
        task.check()
    except ValueError as problem:
        raise RequestError(f"data={data!r}: {problem}", code="range", field="data", value=data) from None
    return task


def _read(data: str, name: str, text: str, wanted: type) -> object:
    if choices := get_args(wanted):
        if text not in choices:
            raise RequestError(
                f"data={data!r}: {name}={text} is unknown; use {' or '.join(choices)}",
                code="unknown", field="data", value=data, expected=" or ".join(choices),
            )  # fmt: skip
        return text
    try:
        return wanted(text)
    except ValueError:
        kind = "a whole number" if wanted is int else "a number"
        raise RequestError(
            f"data={data!r}: {name}={text} is not {kind}", code="type", field="data", value=data, expected=kind
        ) from None


def open_task(data: str) -> Corpus:
    """Opens a corpus of rows of a task, a document each; the corpus names the task, so that further rows can be
    drawn."""
    task = task_of(data)
    count = min(COUNT, max(1, PLACES // task.length)) if isinstance(task, TokenTask) else SHOWN

    def documents() -> Iterator[Document]:
        for number, text in enumerate(task.texts(task.rows(count, "text"))):
            yield Document(f"{task.kind} {number}", text)

    made = hashlib.sha256(f"{task} {count} {VERSION}".encode()).hexdigest()
    return Corpus(str(task), made, documents, task=str(task))
