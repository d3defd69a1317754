"""python -m experiments.advice: docs/advice.md, what `advise` answers from the results that come with the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glassformer.figures.terminal import size
from glassformer.laboratory.advice import MODEL, AdviceQuestion, advise

PAGE = Path(__file__).parents[1] / "docs" / "advice.md"
MEASURED = "../src/glassformer/laboratory/measured"
CONTEXT, MEMORY = 8192, 16e9
BEGIN = f"""\
# What to choose

`glassformer advise --goal chat --context 8k --memory 16GB` answers what the guides ask, from arithmetic and from
[measured claims](claims.md), and says what is not known. This page is what it says of `{MODEL}` with {CONTEXT:,} tokens
and {size(MEMORY)} of memory for its three goals, chat, long and train; `python -m experiments.advice` writes it. What
speaks for an option are claims that were measured and came out that way, at the size that each states; nothing else.
"""


def page() -> str:
    """The document: every question once."""
    told, asked = [BEGIN], set[str]()
    for goal in ("chat", "long", "train"):
        for question in advise(goal=goal, context=CONTEXT, memory=MEMORY).questions:
            if question.asks not in asked:
                asked.add(question.asks)
                told += _answer(question)
    return "\n".join(told)


def _answer(question: AdviceQuestion) -> Iterator[str]:
    yield f"## {question.asks}\n"
    yield "| option | change | weights, bf16 | state | fits with weights in | what speaks for it |"
    yield "|---|---|--:|--:|---|---|"
    for one in question.options:
        speaks = (
            ", ".join(f"[{name}]({MEASURED}/{name}.json)" for name in one.supported_by) or "nothing that is measured"
        )
        weights, state, fits = size(one.weight_bytes["bfloat16"]), size(one.state_bytes), ", ".join(one.fits)
        yield f"| {one.name} | `{one.change}` | {weights} | {state} | {fits or 'none'} | {speaks} |"
    yield ""
    for held in question.evidence:
        link = f"[{held.claim}]({MEASURED}/{held.claim}.json)"
        yield f"- {link}: {held.statement} **{held.words}** ({held.sure}; {held.measured}, {held.processor})"
    yield from (f"- Not known: {words}" for words in question.undecided)
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page().rstrip("\n") + "\n", encoding="utf-8")
