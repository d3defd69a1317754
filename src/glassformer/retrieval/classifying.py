"""Classification of texts from a list or a file, by any model with a classification head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glassformer.figures.terminal import Printed
from glassformer.generation.vectors import Classified, Classifier
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.retrieval.embedding import read_texts
from glassformer.runs.events import Notify, reading
from glassformer.runs.live import shown
from glassformer.typed import typed


@dataclass(repr=False)
class Classes(Printed):
    """Classes of texts, in the order of the texts."""

    texts: list[str]
    """Classified texts"""
    found: list[Classified]
    """Class of each text"""

    def lines(self) -> Iterator[str]:
        """Yields one line for each text: label, probability and text."""
        width = max(len(one.label) for one in self.found)
        for text, one in zip(self.texts, self.found, strict=True):
            yield f"{one.label:{width}} {one.probability:.3f}  {text}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the `--json` output."""
        return {"texts": [{"text": text, **asdict(one)} for text, one in zip(self.texts, self.found, strict=True)]}


@typed
def classify(
    model: ModelLike,
    texts: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    progress: bool | Notify = True,
) -> Classes:
    """Returns the class of each text.

    Parameters
    ----------
    model
        A model with a head of classes and weights: a run on labels, or a published classifier, as `gf.load` takes it.
    texts
        Texts; longer ones than the model's context are cut.
    file
        File with further texts: one per line, or a .jsonl file with a field `text`.
    progress
        False for silence, or a function that receives events; by default bars in a terminal or notebook.

    Returns
    -------
    Classes
        Label and probabilities of each text, in the order of the texts.

    Raises
    ------
    RequestError
        For no texts, a text without tokens, a model without a tokenizer or a head of classes, and a file that cannot be
        read.

    Examples
    --------
    >>> import glassformer as gf
    >>> print(gf.classify("reviews_run", ["What a lovely film"]))  # doctest: +SKIP
    pos 0.982  What a lovely film
    """
    if not isinstance(texts, str):
        texts = [*texts, *(read_texts(file) if file else ())]
    classifier = Classifier(resolve(model, weights=True))
    with shown(progress) as notify:
        return Classes(list(texts), classifier.classified(texts, reading(notify)))
