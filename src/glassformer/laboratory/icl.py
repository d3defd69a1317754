"""Learning in context: answers of a model to examples of a linear function, next to those of statistics.

construction     one layer of linear attention with constructed weights: one step of gradient descent, exactly
one_step         the trained layer: its error, and its distance from the step
softmax          an ordinary transformer: the number of examples that it needs to equal ridge regression

>>> one_step(dims=5, examples=10, seed=0).error, one_step_error(5, 10)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import Axis, Markup, Series, line_chart
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.text import prepare
from glassformer.text.tasks import Regression
from glassformer.training import Callback, train
from glassformer.training.objectives.drawn import as_vectors
from glassformer.training.state import Training

if TYPE_CHECKING:
    from glassformer.parts.mixer import LinearAttention

INITIAL = 0.3
"""Initial standard deviation of the layer's weights; with .1 training stays in a saddle for thousands of steps."""
HELD_OUT = 50_000
"""Held-out prompts on which a layer of linear attention is evaluated."""
PROMPTS = 4_000
"""Prompts on which a transformer is evaluated."""
NEIGHBOURS = 3
"""Number of neighbours in the nearest-neighbour answer."""
GROUP = 500
"""Prompts of one forward pass."""


def best_rate(dims: int, examples: int) -> float:
    """Returns the learning rate with which one step of gradient descent, (rate / n) sum_i y_i x_i from w = 0, fits n
    examples of a noiseless linear function with the least error: 1 / (1 + (d + 1) / n)."""
    return 1 / (1 + (dims + 1) / examples)


def step_error(dims: int, examples: int, rate: float) -> float:
    """Returns the expected squared error after one step of gradient descent at this rate, E (w' x - w x)^2 with w, x ~
    N(0, 1): d ((1 - rate)^2 + rate^2 (d + 1) / n).

    By E (x x^T)^2 = (d + 2) I of Gaussian x."""
    return dims * ((1 - rate) ** 2 + rate**2 * (dims + 1) / examples)


def one_step_error(dims: int, examples: int) -> float:
    """Returns the least expected error of one step of gradient descent, the minimum of `step_error` over rates: d (d +
    1) / (n + d + 1), which is that of the best layer of linear attention (Zhang, Frei and Bartlett 2023,
    2306.09927)."""
    return step_error(dims, examples, best_rate(dims, examples))


# One layer of linear attention


def linear_layer(dims: int) -> ModelConfig:
    """Returns the config of one layer and one head of linear attention of width dims + 1, for vectors (x, y) with x
    (dims,) and a number y: no softmax, norm, positions or FFN. The layer reads vectors unchanged, and its answer is the
    last element of its output."""
    return preset(
        f"gpt2+d_model={dims + 1}+layers=1+linear_attention+mixer.feature=identity+bidirectional+mixer.n_heads=1"
        f"+nonorm+embedding.position=null+ffn=none+nobias+vectors:{dims + 1}+embedding.vectors.bias=false+vocab_size=1"
    )


def plain_ends(model: Model) -> None:
    """Makes a model read and answer vectors unchanged: sets its embedding to the identity and its head to the selection
    of the last element, and freezes both."""
    read = model.embedding.vectors
    assert read is not None and model.head.weight is not None
    with torch.no_grad():
        read.projection.weight.copy_(torch.eye(len(read.projection.weight)))
        model.head.weight.zero_()[0, -1] = 1
    for weight in (read.projection.weight, model.head.weight):
        weight.requires_grad_(False)


def mixer_of(model: Model) -> LinearAttention:
    return cast("LinearAttention", model.layers[0].mixer)


def construction(dims: int, examples: int, rate: float) -> Model:
    """Builds the layer of linear attention whose answer is that of one step of gradient descent at this rate (von
    Oswald et al. 2022, 2212.07677, proposition 1), in fp64:

        W_Q = W_K = diag(1, ..., 1, 0)     W_V = diag(0, ..., 0, 1)     W_O = rate (n + 1) / n W_V

    (n + 1) / n, because the layer's mean includes the question, whose y of 0 adds nothing."""
    model = linear_layer(dims).build(seed=0).double().eval()
    plain_ends(model)
    mixer = mixer_of(model)
    of_y = torch.zeros(dims + 1, dims + 1, dtype=torch.float64)
    of_y[-1, -1] = 1
    of_x = torch.eye(dims + 1, dtype=torch.float64) - of_y
    with torch.no_grad():
        mixer.qkv.weight.copy_(torch.cat([of_x, of_x, of_y]))
        mixer.output.weight.copy_(rate * (examples + 1) / examples * of_y)
    return model


def descended(x: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """Returns the answers (b,) of one step of gradient descent from w = 0: the last of x (b, n + 1, d) is the question,
    the others with their y are the examples."""
    n = x.shape[1] - 1
    w = rate / n * np.einsum("bnd,bn->bd", x[:, :-1], y[:, :-1])
    return np.einsum("bd,bd->b", w, x[:, -1])


@dataclass(frozen=True)
class Construction:
    """Distance of the constructed layer from one step of gradient descent."""

    dims: int
    examples: int
    rate: float
    apart: float
    """Largest difference of an answer."""
    size: float
    """Root mean square of the step's answers."""


def exact_step(dims: int = 5, examples: int = 10, rate: float | None = None, prompts: int = 256) -> Construction:
    """Measures the difference between the constructed layer and one step of gradient descent, in fp64; by default at
    the best rate."""
    rate = best_rate(dims, examples) if rate is None else rate
    task = Regression(dims=dims, examples=examples)
    x, _, y = task.functions(prompts, np.random.default_rng(0))
    wanted = descended(x, y, rate)
    found = answered(construction(dims, examples, rate), task, x, y)
    apart = float(np.abs(found - wanted).max())
    return Construction(dims, examples, rate, apart, float(np.sqrt((wanted**2).mean())))


@torch.no_grad()
def answered(model: Model, task: Regression, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the model's answers (b,) to the questions, the last of x (b, n + 1, d), after the n examples before."""
    found = []
    for first in range(0, len(x), GROUP):
        rows = task.laid_out(x[first : first + GROUP], y[first : first + GROUP])
        found.append(model(torch.from_numpy(rows.inputs).to(model.dtype))[:, -1, 0])
    return torch.cat(found).double().numpy()


@dataclass(frozen=True)
class Length:
    """Errors of a trained layer and of a step of gradient descent for a number of examples other than in training."""

    examples: int
    rate: float
    """Rate of the step that the layer takes with that number of examples, because its mean is over n + 1."""
    error: float
    step: float
    """Error of that step, in closed form."""


@dataclass(frozen=True)
class OneStep:
    """Result of training a layer of linear attention: its errors, and those of one step of gradient descent at the best
    rate."""

    dims: int
    examples: int
    seed: int
    steps: int
    error: float
    """Mean squared error on held-out prompts."""
    descent: float
    """Mean squared error of one step of gradient descent on the same prompts."""
    published: float
    """Mean squared error in closed form: d (d + 1) / (n + d + 1)."""
    apart: float
    """Root mean square difference between the layer's answers and the step's, relative to that of the step's."""
    cosine: float
    crossing: float
    """Root mean square of the off-diagonal elements of W_Q^T W_K between x and x, relative to that of the diagonal."""
    lengths: tuple[Length, ...]
    curve: tuple[tuple[int, float], ...]
    seconds: float

    def draw(self) -> Markup:
        """Returns a chart of the layer's error during training, with the error of the best single step of gradient
        descent as a line."""
        last = self.curve[-1][0]
        line = [(1.0, self.published), (float(last), self.published)]
        return line_chart(
            [Series("linear attention", [(float(a), b) for a, b in self.curve]), Series("one step", line, style=1)],
            Axis("step"), Axis("mean squared error", low=0.0, decimals=3),
            f"One layer of linear attention, trained on {self.examples} examples in {self.dims} dimensions",
        )  # fmt: skip


class _Begin(Callback):
    """Callback that sets embedding and head as `plain_ends` does, and the layer's weights to N(0, INITIAL^2)."""

    def __init__(self, seed: int):
        self.seed = seed

    def started(self, run: Training) -> None:
        plain_ends(run.model)
        draw = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for weight in mixer_of(run.model).parameters():
                weight.copy_(torch.randn(weight.shape, generator=draw) * INITIAL)


def one_step(
    dims: int = 5, examples: int = 10, seed: int = 0, steps: int = 3_000, batch: int = 512, prompts: int = HELD_OUT
) -> OneStep:
    """Trains a layer of linear attention from random weights on linear functions without noise, and compares it with
    one step of gradient descent: 11 to 19 seconds of one core with the defaults."""
    task = Regression(dims=dims, examples=examples)
    run = train(
        linear_layer(dims), prepare(str(task)),
        {
            "steps": steps, "batch_size": batch, "context": task.length, "seed": seed, "objective": "regression",
            "learning_rate": 2e-3, "weight_decay": 0.0, "schedule": {"kind": "cosine", "warmup": 0, "floor": 0},
            "optimizer": {"kind": "adamw", "betas": (0.9, 0.999)}, "threads": 1, "dtype": "float32",
            "evaluation_tokens": 1_000 * task.length,
        },
        callbacks=[_Begin(seed)],
    )  # fmt: skip
    model, draw = run.model.eval(), np.random.default_rng((1, seed))
    x, _, y = task.functions(prompts, draw)
    found, step = answered(model, task, x, y), descended(x, y, best_rate(dims, examples))
    truth = y[:, -1]
    score = _scores(model)
    return OneStep(
        dims, examples, seed, steps,
        error=float(((found - truth) ** 2).mean()), descent=float(((step - truth) ** 2).mean()),
        published=one_step_error(dims, examples), apart=_rms(found - step) / _rms(step),
        cosine=float(found @ step / np.linalg.norm(found) / np.linalg.norm(step)),
        crossing=_rms(score - np.diag(np.diag(score))) / _rms(np.diag(score)) * math.sqrt(dims),
        lengths=tuple(_at_length(model, task, n, prompts, draw) for n in (examples // 2, 2 * examples, 4 * examples)),
        curve=tuple((row["step"], row["loss"]) for row in run.metrics if "loss" in row), seconds=run.seconds,
    )  # fmt: skip


def _scores(model: Model) -> np.ndarray:
    """Returns the part of W_Q^T W_K of a layer that acts on the features x, without those of y, (d, d)."""
    q, k, _ = mixer_of(model).qkv.weight.detach().double().chunk(3)
    return (q.T @ k)[:-1, :-1].numpy()


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def _at_length(model: Model, task: Regression, n: int, prompts: int, draw: np.random.Generator) -> Length:
    """Measures the errors of a trained layer with n examples, where the layer divides by n + 1 and its step by n."""
    rate = best_rate(task.dims, task.examples) * (task.examples + 1) / task.examples * n / (n + 1)
    x, _, y = Regression(dims=task.dims, examples=n).functions(prompts, draw)
    error = float(((answered(model, task, x, y) - y[:, -1]) ** 2).mean())
    return Length(n, rate, error, step_error(task.dims, n, rate))


# A transformer, and statistical answers to the same examples

Answer = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Function from x (b, k, d), y (b, k), the question (b, d) and the noise to answers (b,)."""


def _ridge(x: Tensor, y: Tensor, asked: Tensor, noise: float) -> Tensor:
    """Returns the answers (b,) of ridge regression, optimal for w ~ N(0, 1): x^T E[w | examples], w = (X^T X + noise^2
    I)^-1 X^T y."""
    gram = x.mT @ x + max(noise, 1e-6) ** 2 * torch.eye(x.shape[2], dtype=x.dtype)
    return (torch.linalg.solve(gram, x.mT @ y[..., None])[..., 0] * asked).sum(-1)


def _least_squares(x: Tensor, y: Tensor, asked: Tensor, noise: float) -> Tensor:
    """Returns the answers (b,) of the minimum-norm least-squares fit to the examples."""
    return ((torch.linalg.pinv(x) @ y[..., None])[..., 0] * asked).sum(-1)


def _descent(x: Tensor, y: Tensor, asked: Tensor, noise: float) -> Tensor:
    """Returns the answers (b,) of one step of gradient descent on the examples, at the rate that would be best if they
    had no noise. `noise` is ignored: all kinds of answers have equal arguments."""
    return ((x.mT @ y[..., None])[..., 0] / (x.shape[1] + x.shape[2] + 1) * asked).sum(-1)


def _nearest(x: Tensor, y: Tensor, asked: Tensor, noise: float) -> Tensor:
    """Returns the answers (b,) of nearest neighbours: the mean y of the examples whose x is nearest to the question."""
    k = min(NEIGHBOURS, x.shape[1])
    near = (x - asked[:, None]).norm(dim=-1).topk(k, dim=1, largest=False).indices
    return y.gather(1, near).mean(1)


def posterior_mean(x: Tensor, y: Tensor, asked: Tensor, noise: float, functions: Tensor) -> Tensor:
    """Returns the optimal answers (b,), posterior means, if w is one of the functions (m, d), all equally probable a
    priori:

        sum_m p_m w_m x        p_m ~ exp(-sum_i (y_i - w_m x_i)^2 / (2 noise^2))

    The optimal answer (Raventós et al. 2023, 2306.15063, equation 3)."""
    misses = (y[:, None] - torch.einsum("md,bkd->bmk", functions, x)).square().sum(-1)
    return ((-misses / (2 * noise**2)).softmax(-1) * (asked @ functions.mT)).sum(-1)


POSTERIOR = "posterior mean"
"""Name of the answer that a mixture of functions has in addition to `ANSWERS`."""
ANSWERS: dict[str, Answer] = {
    "ridge": _ridge, "least squares": _least_squares, "one step": _descent, "nearest neighbours": _nearest,
}  # fmt: skip


@dataclass(frozen=True)
class Softmax:
    """Errors of a transformer and of statistical methods after each number of examples: mean (answer - w x)^2 / d."""

    expression: str
    dims: int
    noise: float
    seed: int
    steps: int
    parameters: int
    errors: dict[str, tuple[float, ...]]
    """Name of the answer -> error after 0, 1, 2, ... examples; `transformer` among the names."""
    distances: dict[str, tuple[float, ...]]
    """Name of the answer -> mean (transformer's answer - this answer)^2 / d after 0, 1, 2, ... examples."""
    seconds: float

    @property
    def likest(self) -> tuple[str, ...]:
        """Name of the statistical method whose answers are nearest to the transformer's, for 1, 2, ... examples."""
        return tuple(
            min(self.distances, key=lambda who: self.distances[who][k]) for k in range(1, len(self.errors["ridge"]))
        )

    def draw(self) -> Markup:
        """Returns a chart of the errors by the number of examples."""
        series = [
            Series(who, [(float(k), error) for k, error in enumerate(errors)], style=style)
            for style, (who, errors) in enumerate(self.errors.items())
        ]
        return line_chart(
            series, Axis("examples"), Axis("squared error / d", low=0.0, high=1.5, decimals=3),
            f"Answers from examples in {self.dims} dimensions, noise {self.noise:g}",
        )  # fmt: skip


def softmax(
    dims: int = 5,
    noise: float = 0.5,
    seed: int = 0,
    steps: int = 8_000,
    expression: str = "gpt2+layers=4+d_model=64+heads=4",
    batch: int = 64,
    prompts: int = PROMPTS,
    mixture: int = 0,
    **how: Any,
) -> Softmax:
    """Trains a transformer on prompts of 2 d examples and a question, each y predicted from the preceding examples
    (Garg et al. 2022, 2208.01066), and compares it with statistical methods: about seven minutes of one core with
    the defaults. With fewer steps or layers it stays at the error 1 of a model that has learned nothing. With a
    mixture of `mixture` functions, the posterior mean answers too. `how`: further arguments of `training.train`,
    such as `out` and `callbacks`."""
    task = Regression(dims=dims, examples=2 * dims, noise=noise, layout="apart", mixture=mixture)
    config = preset(f"{expression}+vectors:{task.size}+vocab_size=1")
    run = train(
        config, prepare(str(task)),
        {
            "steps": steps, "batch_size": batch, "context": task.length, "seed": seed, "objective": "regression",
            "learning_rate": 1e-3, "weight_decay": 0.0, "threads": 1, "dtype": "float32", "compile": False,
            "schedule": {"kind": "cosine", "warmup": min(200, steps // 4), "floor": 0.05},
            "optimizer": {"kind": "adamw", "betas": (0.9, 0.999)},
        },
        **how,
    )  # fmt: skip
    errors, distances = compared(run.model.eval(), task, prompts, np.random.default_rng((2, seed)))
    return Softmax(expression, dims, noise, seed, steps, run.config.num_params(), errors, distances, run.seconds)


@torch.no_grad()
def compared(
    model: Model, task: Regression, prompts: int, draw: np.random.Generator
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """Evaluates a model and the statistical methods on `prompts` prompts; returns the fields `errors` and `distances`
    of a `Softmax`."""
    if task.layout != "apart":
        raise RequestError(
            f"layout={task.layout} asks one question a prompt; use layout=apart",
            code="conflict", field="layout", value=task.layout, expected="apart",
        )  # fmt: skip
    x, exact, y = task.functions(prompts, draw)
    rows = as_vectors(task.laid_out(x, y))
    own = torch.cat([model(part)[:, 0::2, 0] for part in rows.inputs.split(GROUP)]).double()
    given, truth, told = (torch.from_numpy(values) for values in (x, exact, y))
    mixed = torch.from_numpy(task.mixed)
    errors, distances = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for k in range(task.examples + 1):
        theirs = {
            name: answer(given[:, :k], told[:, :k], given[:, k], task.noise) if k else torch.zeros(prompts)
            for name, answer in ANSWERS.items()
        }
        if len(mixed):
            theirs[POSTERIOR] = posterior_mean(given[:, :k], told[:, :k], given[:, k], task.noise, mixed)
        for name, found in {"transformer": own[:, k], **theirs}.items():
            errors[name].append(float((found - truth[:, k]).square().mean()) / task.dims)
        for name, found in theirs.items():
            distances[name].append(float((found - own[:, k]).square().mean()) / task.dims)
    return {name: tuple(some) for name, some in errors.items()}, {name: tuple(some) for name, some in distances.items()}
