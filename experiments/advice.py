"""python -m experiments.advice: docs/advice.md, what `advise` answers from the results that come with the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glassformer.figures.terminal import size
from glassformer.laboratory.advice import MODEL, AdviceQuestion, advise, share_words
from glassformer.laboratory.composed import AdvisedModel

PAGE = Path(__file__).parents[1] / "docs" / "advice.md"
MEASURED = "../src/glassformer/laboratory/measured"
CONTEXT, MEMORY = 8192, 16e9
BEGIN = f"""\
# What to choose

`glassformer advise --goal chat --context 8k --memory 16GB` answers what the guides ask, from arithmetic and from
[measured claims](claims.md), and says what is not known. This page is what it says of `{MODEL}` with {CONTEXT:,} tokens
and {size(MEMORY)} of memory for its six goals, chat, long, train, fast, simple and balanced; `python -m
experiments.advice` writes it. What speaks for an option are claims that were measured and came out that way, at the
size that each states; nothing else. The last section has the model in which each goal ends.
"""
ENDS = """\
## The model of each goal

A goal counts claims about its needs: chat memory, speed and loss; long texts longer than those of training, memory and
loss; train loss, speed and stability; fast speed and memory; balanced all of them. The option with most claims is
taken, and the model keeps its own if no other has more. simple takes plain parts, unless a claim about loss or
stability speaks for another. Choices are ranked by the measured change of the loss, then by what they save against the
simplest option of their question; *fields* counts the fields of the config in which they differ.
"""


def page() -> str:
    """Returns the page, with every question once."""
    told, asked, ends = [BEGIN], set[str](), [ENDS]
    for goal in ("chat", "long", "train", "fast", "simple", "balanced"):
        found = advise(goal=goal, context=CONTEXT, memory=MEMORY)
        ends += _end(goal, found.advised)
        for question in found.questions:
            if question.asks not in asked:
                asked.add(question.asks)
                told += _answer(question)
    return "\n".join([*told, *ends])


def _end(goal: str, made: AdvisedModel) -> Iterator[str]:
    yield f"### {goal}: `{made.expression}`\n"
    yield "| | parameters | weights, bf16 | state | FLOPs of a token | fits with weights in |"
    yield "|---|--:|--:|--:|--:|---|"
    for name, one in (("as it is", made.before), ("as advised", made.after)):
        sizes = f"{size(one.weight_bytes['bfloat16'])} | {size(one.state_bytes)} | {one.flops:.4g}"
        yield f"| {name} | {one.parameters:,} | {sizes} | {', '.join(one.fits) or 'none'} |"
    yield "\n| | choice | change | loss | weights | state | FLOPs | fields | here | evidence |"
    yield "|--:|---|---|--:|--:|--:|--:|--:|---|---|"
    for rank, of in enumerate(made.priorities, 1):
        shares = " | ".join(map(share_words, (of.loss, of.weights, of.state, of.flops)))
        evidence = ", ".join(f"[{name}]({MEASURED}/{name}.json)" for name in of.supported_by)
        here = "has it" if of.present else "to change"
        yield f"| {rank} | {of.option} | `{of.change}` | {shares} | {of.fields} | {here} | {evidence} |"
    yield ""


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
