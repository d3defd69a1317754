"""Counts of a server in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from glassformer.generation.session import Reply

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds, in seconds, of the buckets of a histogram of durations."""
TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the answer of GET /metrics."""


class Histogram:
    """Histogram of durations with `BUCKETS`."""

    def __init__(self) -> None:
        self.counts, self.sum, self.count = [0] * len(BUCKETS), 0.0, 0

    def add(self, seconds: float) -> None:
        """Adds a duration to every bucket whose bound it does not exceed."""
        self.sum += seconds
        self.count += 1
        for i, bound in enumerate(BUCKETS):
            self.counts[i] += seconds <= bound

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yields the histogram's lines for metric `name` with `labels`."""
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], [*self.counts, self.count], strict=True):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
        yield f"{name}_sum{{{labels}}} {self.sum:.6f}"
        yield f"{name}_count{{{labels}}} {self.count}"


class Metrics:
    """Counts of answers, tokens and durations since the server started."""

    def __init__(self) -> None:
        self.routes: frozenset[str] = frozenset()
        """Paths that are counted separately; all others count as "other"."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """Number of answers by (path, HTTP status)."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Number of tokens by (model, kind), where the kind is prompt or completion."""
        self.first: dict[str, Histogram] = {}
        """Histogram of the seconds to the first token, by model."""

    def count(self, path: str, status: int) -> None:
        """Adds an answer to the counts by path and status; a path that is not a route counts as "other"."""
        known = "/v1/models/NAME" if path.startswith("/v1/models/") else path if path in self.routes else "other"
        self.answers[known, status] += 1

    def ended(self, model: str, reply: Reply) -> None:
        """Adds the tokens of a complete text of a model, and the time to its first token."""
        self.tokens[model, "prompt"] += len(reply.prompt)
        self.tokens[model, "completion"] += len(reply.so_far().tokens)
        if reply.first_token_time is not None:
            self.first.setdefault(model, Histogram()).add(reply.first_token_time - reply.time)

    def lines(self, running: Iterable[tuple[str, int]], waiting: int) -> Iterator[str]:
        """Yields the lines of GET /metrics. `running` has (model, number of running texts), `waiting` is that of
        calls."""
        yield from self._head("requests", "counter", "Answers by route and status.")
        for (route, status), count in sorted(self.answers.items()):
            yield f'glassformer_requests_total{{route="{escaped(route)}",status="{status}"}} {count}'
        yield from self._head("tokens", "counter", "Tokens of prompts and answers.")
        for (model, kind), count in sorted(self.tokens.items()):
            yield f'glassformer_tokens_total{{model="{escaped(model)}",kind="{kind}"}} {count}'
        yield from self._head("texts", "gauge", "Texts that are computed or wait for a row.")
        for model, count in running:
            yield f'glassformer_texts{{model="{escaped(model)}"}} {count}'
        yield from self._head("calls", "gauge", "Computations that wait, such as embeddings.")
        yield f"glassformer_calls {waiting}"
        yield from self._head("first_token_seconds", "histogram", "Time from a request to its first token.")
        for model, found in sorted(self.first.items()):
            yield from found.lines("glassformer_first_token_seconds", f'model="{escaped(model)}"')

    @staticmethod
    def _head(name: str, kind: str, words: str) -> Iterator[str]:
        name = f"glassformer_{name}" + ("_total" if kind == "counter" else "")
        yield f"# HELP {name} {words}"
        yield f"# TYPE {name} {kind}"


def escaped(label: str) -> str:
    """Returns the value of a label with backslashes, quotes and newlines escaped."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
