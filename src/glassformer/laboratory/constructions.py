"""Transformers with constructed weights, each next to the function that it computes.

sparse_function   one layer of attention that selects some positions by scores, and an FFN: any function of them
ridge_layers      layers of linear attention: ridge regression on the examples of a prompt
counter_machine   two layers of hard attention that run a machine of two counters, a token for each step

All consist of parts of the package, without norms, in fp64; weights that are not set are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from glassformer.model import Model
from glassformer.naming import preset

if TYPE_CHECKING:
    from glassformer.parts.ffn import Mlp
    from glassformer.parts.mixer import Attention, LinearAttention

BARE = "+nonorm+nobias+embedding.position=null"
"""Change of GPT-2 to a model without norms, biases and positions."""


def blank(expression: str) -> Model:
    """Builds a model in fp64 all of whose weights are zero, to be set by a construction."""
    model = preset(expression).build(seed=0).double().eval().requires_grad_(False)
    for weight in model.parameters():
        weight.zero_()
    return model


def weights(mixer: object) -> tuple[Tensor, Tensor]:
    """Returns the weights W_QKV and W_O of an attention mixer."""
    attention = cast("Attention", mixer)
    fused, output = cast("torch.nn.Linear", attention.qkv), cast("torch.nn.Linear", attention.output)
    return fused.weight, output.weight


def matrices(ffn: object) -> tuple[Tensor, Tensor]:
    """Returns the weights W_up (hidden, width) and W_down (width, hidden) of an FFN."""
    maps = cast("Mlp", ffn).matrices()
    return maps["up"].parameter, maps["down"].parameter


def head_of(model: Model) -> Tensor:
    """Returns the weight of a model's head, (vocabulary, width), which makes the logits."""
    assert model.head.weight is not None
    return model.head.weight


# A function of a few positions


@dataclass(frozen=True)
class Sparse:
    """A Boolean function of n bits that depends on only some of them: {0, 1}^n -> {0, 1}.

    bits        n
    positions   positions that it depends on
    table       values by the binary number of the bits at these positions, the first the lowest
    """

    bits: int
    positions: tuple[int, ...]
    table: tuple[int, ...]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns the function's values (b,) at x (b, n)."""
        return np.array(self.table)[x[:, self.positions] @ (1 << np.arange(len(self.positions)))]


def every_input(bits: int) -> np.ndarray:
    """Returns all rows of n = `bits` bits, (2^n, n) of 0 and 1, in the order of binary numbers."""
    return np.array(list(product((0, 1), repeat=bits)))


def sparse_function(function: Sparse, sharpness: float) -> Model:
    """Builds a transformer of one layer that computes a Boolean function: it reads n bits and then a query token, "?",
    at which it predicts the function's value.

    Head h has the score `sharpness` at position i_h and 0 elsewhere, so that it reads bit i_h up to a share n
    e^-sharpness of others. W_O adds the bits up as m = sum_h 2^h x_{i_h}. The FFN is the function of m: piecewise
    linear between integers, 2^k ReLUs. Width: one feature for each position, a constant, a bit, m and the answer."""
    n, k = function.bits, len(function.positions)
    one, bit, m, answer = n, n + 1, n + 2, n + 3
    model = blank(
        f"gpt2+d_model={n + 4}+layers=1+heads={k}+mixer.head_dim=1+relu:{1 + 2**k}+nonorm+nobias+untied"
        f"+vocab_size=3+context={n + 1}"
    )
    layer, position = model.layers[0], model.embedding.position
    (qkv, output), (up, down) = weights(layer.mixer), matrices(layer.ffn)
    model.embedding.weight[1, bit] = 1
    table = cast("Tensor", cast("torch.nn.Module", position).weight)
    table[:n, :n].fill_diagonal_(1)
    table[:, one] = 1
    for h, place in enumerate(function.positions):
        qkv[h, one] = 1
        qkv[k + h, place] = sharpness
        qkv[2 * k + h, bit] = 1
        output[m, h] = 2**h
    values = np.array(function.table, float)
    slopes = np.diff(values)
    up[0, one] = 1
    down[answer, 0] = values[0]
    for j, bend in enumerate(np.diff(slopes, prepend=0.0)):
        up[1 + j, m], up[1 + j, one] = 1, -j
        down[answer, 1 + j] = bend
    head_of(model)[1, answer] = 1
    head_of(model)[0, one] = 0.5
    head_of(model)[2, one] = -1
    return model


def asked(model: Model, x: np.ndarray) -> Tensor:
    """Returns the logits (b, 3) that a model made by `sparse_function` predicts at the query token, "?", which follows
    the bits x (b, n)."""
    return model(torch.from_numpy(np.pad(x, ((0, 0), (0, 1)), constant_values=2)))[:, -1]


# Ridge regression


def ridge_layers(dims: int, examples: int, ridge: float, layers: int) -> Model:
    """Builds layers of linear attention that answer a prompt (`ridge_prompt`) as ridge regression does.

    A token has keys k and queries q, equal but for the question, whose k is 0, then y and the answer. Each layer but
    the last is a step of Newton and Schulz towards the orthogonal factor of K, which doubles the correct digits:

        k_j <- k_j - c^2 / 3 sum_i k_i (k_i . k_j)        q_j <- q_j - c^2 / 3 sum_i k_i (k_i . q_j)        c <- 1.5 c

    so that c q tends to (K^T K)^(-1/2) q and c^2 sum_i y_i (k_i . q), which the last layer answers, to ridge
    regression. It converges if no singular value of K exceeds sqrt(3) / c; 1 / c is what Gaussian x has at most on
    average, sqrt(n) + sqrt(d), with the ridge."""
    width, h, tokens = 2 * dims + 2, dims, dims + examples + 1
    model = blank(
        f"gpt2+d_model={width}+layers={layers}+linear_attention+mixer.feature=identity+bidirectional+mixer.n_heads=2"
        f"+mixer.head_dim={h}{BARE}+ffn=none+vectors:{width}+embedding.vectors.bias=false+vocab_size=1"
    )
    read = model.embedding.vectors
    assert read is not None
    read.projection.weight.fill_diagonal_(1)
    head_of(model)[0, -1] = 1
    keys, queries, same = slice(0, h), slice(h, 2 * h), torch.eye(h, dtype=torch.float64)
    square = 1 / ((examples**0.5 + dims**0.5) ** 2 + ridge)
    for depth, layer in enumerate(model.layers):
        mixer = cast("LinearAttention", layer.mixer)
        into = mixer.qkv.weight.view(3, 2, h, width)  # rows of W_Q, W_K, W_V by head
        into[0, 0, :, keys] = into[1, 0, :, keys] = into[1, 1, :, keys] = into[0, 1, :, queries] = same
        if depth == layers - 1:
            into[2, 1, 0, -2] = 1
            mixer.output.weight[-1, h] = square * tokens  # the layer's mean is over all tokens
        else:
            into[2, 0, :, keys] = into[2, 1, :, keys] = same
            mixer.output.weight[keys, :h] = mixer.output.weight[queries, h:] = -square * tokens / 3 * same
        square *= 1.5**2
    return model


def ridge_prompt(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Returns the prompts of vectors (b, d + n + 1, 2 d + 2) that a model made by `ridge_layers` reads, for the
    examples and question x (b, n + 1, d), y (b, n + 1).

    The first d are sqrt(ridge) e_i with y = 0, the same for all prompts: with them least squares is ridge
    regression. The last is the question."""
    rows, _, dims = x.shape
    given = np.concatenate([np.broadcast_to(ridge**0.5 * np.eye(dims), (rows, dims, dims)), x], axis=1)
    prompt = np.concatenate([given, given, np.zeros((*given.shape[:2], 2))], axis=2)
    prompt[:, dims:, -2] = y
    prompt[:, -1, :dims] = prompt[:, -1, -2] = 0
    return prompt


def ridge_answers(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Returns the answers (b,) of ridge regression in closed form: x_(n+1) (X^T X + ridge I)^-1 X^T y."""
    given, told = x[:, :-1], y[:, :-1, None]
    gram = given.swapaxes(1, 2) @ given + ridge * np.eye(x.shape[2])
    return (x[:, -1:] @ np.linalg.solve(gram, given.swapaxes(1, 2) @ told))[:, 0, 0]


# A machine of two counters

Step = tuple[int, int, int]
"""State after a step, and what the step adds to each counter: -1, 0 or 1."""


@dataclass(frozen=True)
class CounterProgram:
    """Program of a machine with two counters (Minsky 1967), a kind of machine that is Turing complete.

    rules   the step by 4 state + 2 (first counter is 0) + (second is 0). No rule lowers a counter that is 0. The
            machine starts in state 0 with counters of 0
    """

    rules: tuple[Step, ...]

    @property
    def states(self) -> int:
        return len(self.rules) // 4

    def run(self, steps: int) -> tuple[list[Step], tuple[int, int]]:
        """Runs the program; returns its first `steps` steps, and the largest value of each counter."""
        done, state, counters, largest = list[Step](), 0, (0, 0), (0, 0)
        for _ in range(steps):
            step = self.rules[4 * state + 2 * (counters[0] == 0) + (counters[1] == 0)]
            state, counters = step[0], (counters[0] + step[1], counters[1] + step[2])
            largest = (max(largest[0], counters[0]), max(largest[1], counters[1]))
            done.append(step)
        return done, largest


def random_machine(states: int, draw: np.random.Generator) -> CounterProgram:
    """Returns a program of a two-counter machine with `states` states and random rules."""
    rules = []
    for first, second in [(0, 0), (0, 1), (1, 0), (1, 1)] * states:
        changes = (int(draw.integers(-1 + first, 2)), int(draw.integers(-1 + second, 2)))
        rules.append((int(draw.integers(states)), *changes))
    return CounterProgram(tuple(rules))


def doubling() -> CounterProgram:
    """Returns a program of a two-counter machine that doubles its first counter repeatedly, 1, 2, 4, ..., by way of the
    second."""
    start, move, twice, back = range(4)
    rules: list[Step] = []
    for state, empty, zero in product(range(4), (False, True), (False, True)):
        if state == start:
            rules.append((move, 1, 0))
        elif state == move:
            rules.append((back, 0, 0) if empty else (twice, -1, 1))
        elif state == twice:
            rules.append((move, 0, 1))
        else:
            rules.append((move, 0, 0) if zero else (back, 1, -1))
    return CounterProgram(tuple(rules))


def token_of(step: Step) -> int:
    """Returns the token that encodes a step of a two-counter machine; token 0 starts the text."""
    return 1 + 9 * step[0] + 3 * (step[1] + 1) + step[2] + 1


def counter_machine(machine: CounterProgram, hardness: float) -> Model:
    """Builds a decoder that simulates a two-counter machine: after the token 0 it predicts the machine's steps, a token
    for each.

    First layer: a head without scores, whose mean over the t tokens so far is u = counter / t for both counters and v =
    1 / t of the first token. Second layer: for each counter, a head with the score `hardness` v / 2 at the first token
    and `hardness` u at every other. Hard attention then falls on the first token exactly if the counter is 0, for any
    number of steps; softmax attention is hard as `hardness` grows. The FFN has a ReLU for each rule, which is 1 if
    state and zeros are those of the rule, and the head writes the rule's step.

    Pérez et al. 2019, 1901.03429, run a Turing machine likewise, by means over all steps and hard attention."""
    n = machine.states
    width, rules = n + 9 + 4 * n, 4 * n
    first_change, start, one, u, v, z = n, n + 2, n + 3, n + 4, n + 6, n + 7
    rule = n + 9
    model = blank(
        f"gpt2+d_model={width}+layers=2+heads=2+mixer.head_dim=3{BARE}+relu:{rules}+untied"
        f"+vocab_size={1 + 9 * n}+mixer.scale=1"
    )
    table = model.embedding.weight
    table[:, one] = 1
    table[0, 0] = table[0, start] = 1
    for step in product(range(n), (-1, 0, 1), (-1, 0, 1)):
        row = table[token_of(step)]
        row[step[0]], row[first_change], row[first_change + 1] = 1, step[1], step[2]
    (means, means_out), (tests, tests_out) = (weights(layer.mixer) for layer in model.layers)
    q, k, value = range(3)
    into = means.view(3, 2, 3, width)
    for number, (read, write) in enumerate(((first_change, u), (first_change + 1, u + 1), (start, v))):
        into[value, 0, number, read] = 1
        means_out[write, number] = 1
    into = tests.view(3, 2, 3, width)
    for counter in range(2):
        into[q, counter, 0, u + counter] = into[q, counter, 1, v] = hardness
        into[k, counter, 0, one], into[k, counter, 0, start] = 1, -1
        into[k, counter, 1, start] = 0.5
        into[value, counter, 0, start] = 1
        tests_out[z + counter, 3 * counter] = 1
    up, down = matrices(model.layers[1].ffn)
    for number, (state, *zeros) in enumerate(product(range(n), (0, 1), (0, 1))):
        row = up[number]
        row[state], row[one] = 1, -sum(zeros)
        row[z], row[z + 1] = (2 * zero - 1 for zero in zeros)
        down[rule + number, number] = 1
        head_of(model)[token_of(machine.rules[number]), rule + number] = 1
    return model


def predicted(model: Model, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens that the model predicts as most likely after each prefix of `tokens`."""
    return model(torch.tensor([list(tokens)]))[0].argmax(-1).tolist()
