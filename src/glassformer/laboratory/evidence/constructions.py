"""Claims about functions and algorithms that transformers with constructed weights compute."""

import math

import numpy as np
import torch

from glassformer.laboratory.constructions import (
    CounterProgram,
    Sparse,
    asked,
    counter_machine,
    doubling,
    every_input,
    predicted,
    random_machine,
    ridge_answers,
    ridge_layers,
    ridge_prompt,
    sparse_function,
    token_of,
)
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim, credit
from glassformer.laboratory.evidence.figure import Outcome, exact
from glassformer.text.tasks import Regression

FP16 = torch.finfo(torch.float16).max


def sparse_by_scores(bench: Bench) -> Outcome:
    bits, chosen, near, sharp = 10, 3, 10.0, 40.0
    draw, x = np.random.default_rng(0), every_input(bits)
    errors: dict[float, list[float]] = {0.0: [], near: [], sharp: []}
    wrong = dict.fromkeys(errors, 0)
    for _ in range(count := bench.scaled(8, 2)):
        places = tuple(int(place) for place in draw.choice(bits, chosen, replace=False))
        function = Sparse(bits, places, tuple(int(value) for value in draw.integers(2, size=2**chosen)))
        wanted = function(x)
        for sharpness, found in errors.items():
            logits = asked(sparse_function(function, sharpness), x)
            found.append(float(np.abs(logits[:, 1].numpy() - wanted).max()))
            wrong[sharpness] += int((logits.argmax(-1).numpy() != wanted).sum())
    bound = (2**chosen - 1) * bits * math.exp(-near)
    figures = (
        exact(f"wrong answers, scores of {sharp:g}", wrong[sharp], most=0),
        exact(f"largest error, scores of {sharp:g}", max(errors[sharp]), most=1e-12),
        exact(f"largest error over its bound (2^k - 1) n e^-s, scores of s = {near:g}", max(errors[near]) / bound,
              most=1),
        exact("share of wrong answers without scores", wrong[0.0] / count / len(x)),
    )  # fmt: skip
    return Outcome(
        figures=figures, size=f"{count} functions of {chosen} of {bits} bits, all {len(x):,} inputs, fp64",
        sure="counted over every input",
        notes=("One layer: a head for each position that matters, an FFN with a ReLU for each value of the function.",),
    )  # fmt: skip


def ridge_by_layers(bench: Bench) -> Outcome:
    depths, noise, figures = (2, 4, 8, 12), 0.5, []
    for dims, examples in ((5, 10), (10, 20), (10, 5)):
        task = Regression(dims=dims, examples=examples, noise=noise)
        x, _, y = task.functions(256, np.random.default_rng(0))
        wanted = ridge_answers(x, y, noise**2)
        for layers in depths:
            model = ridge_layers(dims, examples, noise**2, layers)
            found = model(torch.from_numpy(ridge_prompt(x, y, noise**2)))[:, -1, 0].numpy()
            apart = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
            bound = 1e-12 if layers == depths[-1] else None
            name = f"distance over size, {layers} layers, {examples} examples in {dims} dimensions"
            figures.append(exact(name, apart, most=bound))
    return Outcome(
        figures=tuple(figures), size=f"256 prompts of each size, noise {noise}, fp64",
        sure="next to the closed form of ridge regression",
        notes=("Each layer is a step of Newton and Schulz, which squares the error once it is small. Ridge enters by d "
               "tokens at the start of each prompt, the same for all.",),
    )  # fmt: skip


def wrong_steps(machine: CounterProgram, steps: int, hardness: float) -> list[int]:
    """Returns the indices, from 1, of a machine's steps that the constructed decoder predicts otherwise than a
    simulator."""
    text = [0, *map(token_of, machine.run(steps)[0])]
    found = predicted(counter_machine(machine, hardness), text[:-1])
    return [step for step, (a, b) in enumerate(zip(found, text[1:], strict=True), 1) if a != b]


def longest_run(hardness: float) -> int:
    """Returns the number of tokens after which softmax attention gives the first token less than half of its weight:
    the largest t with (t - 1) e^(-hardness / (2 t)) < 1."""
    t = 2
    while math.log(t) < hardness / (2 * (t + 1)):
        t += 1
    return t


def counter_machine_runs(bench: Bench) -> Outcome:
    states, machines, steps, long, hard, soft = 6, bench.scaled(20, 3), 200, 2_000, 1e7, 5_000.0
    draw = np.random.default_rng(0)
    wrong = sum(len(wrong_steps(random_machine(states, draw), steps, hard)) for _ in range(machines))
    idle = CounterProgram(((0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 0, 0)))
    lasts = longest_run(soft)
    first = wrong_steps(idle, 2 * lasts, soft)[0]
    figures = (
        exact(f"wrong steps of {machines} random machines, {steps} steps each", wrong, most=0),
        exact(f"wrong steps of a machine that doubles a counter, {long:,} steps",
              len(wrong_steps(doubling(), long, hard)), most=0),
        exact("largest counter of that machine", max(doubling().run(long)[1])),
        exact(f"right steps with softmax attention and scores of {soft:,.0f}, less those of the closed form",
              first - 1 - lasts, least=0, most=0),
        exact(f"steps with scores of {FP16:,.0f}, the largest number of fp16, by the closed form", longest_run(FP16)),
    )  # fmt: skip
    return Outcome(
        figures=figures, size=f"{states} states and 2 counters, 2 layers, fp64", sure="counted over every step",
        notes=("A step is a token. Scores of counters 0 and 1 differ by s / (2 t) after t tokens: with exact numbers "
               "hard attention tells them apart for ever, with numbers of finite precision for a bounded text.",),
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="sparse-by-scores", kind="exact", minutes=0.1,
        statement="One layer of attention and an FFN compute any function of a few positions: scores select the "
        "positions, and the error falls exponentially in them.",
        source=credit("mathematics") + "; sparse averages: 2306.02896", published="any error above 0", size="any",
        measure=sparse_by_scores,
    ),
    Claim(
        name="ridge-by-layers", kind="exact", minutes=0.2,
        statement="The weights of a few layers of linear attention can be written down so that they answer a prompt of "
        "examples as ridge regression does.",
        source="2211.15661; steps of Newton: 2310.17086", published="equal", size="any",
        measure=ridge_by_layers,
    ),
    Claim(
        name="counter-machine", kind="exact", minutes=0.2,
        statement="A decoder with hard attention, whose weights are written down, runs machines of two counters step "
        "by step, which compute whatever Turing machines do.",
        source="1901.03429", published="equal, with numbers of unbounded precision", size="any",
        measure=counter_machine_runs,
    ),
]  # fmt: skip
