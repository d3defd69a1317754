"""216 published training runs: their MFU from their throughput, and the factors of the time model fitted on them.

>>> python -m experiments.plan.mpt          # the fields `measured` of machines.yaml, and the errors
"""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

import glassformer as gf
from glassformer.parallel.layout import Layout
from glassformer.planning.machines import Cluster, TimeFactors, machines
from glassformer.planning.time import FACTOR_OF, StepTime, Work, step_time, workload

ROWS = Path(__file__).with_name("mpt_runs.csv")
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers, heads."""
FITTED = ("products", "scores", "elementwise", "links")
NODE = 8
SOURCE = "mosaicml/llm-foundry scripts/train/benchmarking at 8c8dd48"
LEAST = 1.1
"""Lower bound of the factor of large matmuls over the roofline's time, for all accelerators: without it the fit gives
an A100 99 % of its peak, and the rest of the time to elementwise work, which is wrong once tensors are divided."""


@cache
def config_of(model: str, context: int = 2048) -> gf.ModelConfig:
    if context != 2048:
        return config_of(model).replace(context=context)
    d, layers, heads = SIZES[model]
    return gf.preset(f"gpt2+d_model={d}+layers={layers}+heads={heads}+vocab_size=50368+context={context}")


@dataclass(frozen=True)
class Row:
    """A published training run."""

    model: str
    context: int
    gpus: int
    gpu: str
    mfu: float
    hfu: float
    micro: int
    accumulated: int
    tps: float
    dtype: str
    pure: bool
    zero: int
    recompute: str
    parameters: int

    @property
    def config(self) -> gf.ModelConfig:
        return config_of(self.model, self.context)

    @cached_property
    def planned(self) -> StepTime:
        """Planned time of a step in bf16, the dtype of the machine's factors."""
        layout = Layout(dp=self.gpus, zero=self.zero, micro=self.micro, recompute=self.recompute)
        cluster = Cluster(self.gpu, machines()[self.gpu], self.gpus, NODE)
        work = workload(self.config, self.context, torch.bfloat16)
        return step_time(work, self.gpus * self.micro * self.accumulated, layout, cluster)

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return self.micro * self.accumulated * self.context / self.tps

    @property
    def mfu_of_throughput(self) -> float:
        """MFU in per cent, from the published tokens per second and 6 N + 12 L d s FLOPs per token. Our FLOPs leave out
        learned positions, which are in no matmul: 128 k of them are 17 % of the smallest model."""
        work = self.planned.work
        flops = 6 * self.parameters + work.model_flops - work.products
        return 100 * flops * self.tps / machines()[self.gpu].peak_of(self.dtype)


@cache
def rows() -> tuple[Row, ...]:
    lines = [line for line in ROWS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(
        Row(
            row["model"], int(row["context"]), int(row["gpus"]), row["gpu"], float(row["mfu"]), float(row["hfu"]),
            int(row["micro"]), int(row["accumulated"]), float(row["tps"]), row["dtype"], row["pure"] == "1",
            int(row["zero"]), row["recompute"], int(row["parameters"]),
        )
        for row in csv.DictReader(lines)
    )  # fmt: skip


def least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns x >= 0 with the least |a x - b|, by trying all subsets of the few columns."""
    best, least = np.zeros(a.shape[1]), float("inf")
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            error = float(np.square(a[:, columns] @ x - b).sum())
            if (x >= 0).all() and error < least:
                best, least = np.zeros(a.shape[1]), error
                best[list(columns)] = x
    return best


def factors_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns `least_squares` with the first factor at least `LEAST`."""
    free = least_squares(a, b)
    return free if free[0] >= LEAST else np.array([LEAST, *least_squares(a[:, 1:], b - LEAST * a[:, 0])])


def features(kinds: tuple[Work, ...]) -> tuple[list[float], float]:
    """Returns the seconds at the roofline by factor, and the seconds of work without a factor."""
    by = dict.fromkeys(FITTED, 0.0)
    for one in kinds:
        if one.kind in FACTOR_OF:
            by[FACTOR_OF[one.kind]] += one.roof
    return list(by.values()), sum(one.roof for one in kinds if one.kind not in FACTOR_OF)


@dataclass(frozen=True)
class Fit:
    factors: tuple[float, ...]
    errors: tuple[float, ...]
    """predicted / measured - 1 of every run, by the factors of the other sizes."""
    sizes: int

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.errors, share))

    def absolute(self, share: float) -> float:
        return float(np.quantile(np.abs(self.errors), share))


@cache
def fit(gpu: str) -> Fit:
    """Fits the factors by least squares on relative errors; errors are of each size, left out in turn."""
    runs = [row for row in rows() if row.gpu == gpu and row.dtype == "bfloat16"]
    made = [features(row.planned.kinds) for row in runs]
    seconds = np.array([row.seconds for row in runs])
    a = np.array([roof for roof, _ in made]) / seconds[:, None]
    rest = np.array([other for _, other in made]) / seconds
    names = [row.model for row in runs]
    errors: list[float] = []
    for size in dict.fromkeys(names):
        out = np.array([name == size for name in names])
        x = factors_of(a[~out], 1 - rest[~out])
        errors.extend(a[out] @ x + rest[out] - 1)
    return Fit(tuple(factors_of(a, 1 - rest).tolist()), tuple(float(e) for e in errors), len(set(names)))


@cache
def elsewhere() -> tuple[tuple[float, float], dict[str, float]]:
    """Returns ((low, high), {machine: share}): the factors that widen the range of a machine without own factors, and
    the share of each machine's runs within the widened range. Each machine is left out in turn and planned with the
    factors of the others: `low` is the smallest 5th percentile of measured time over the low end, `high` the largest
    95th percentile over the high end."""
    gpus = list(dict.fromkeys(row.gpu for row in rows()))
    ends = {gpu: _over_range(gpu, [written(other) for other in gpus if other != gpu]) for gpu in gpus}
    low = min(float(np.quantile(lows, 0.05)) for lows, _ in ends.values())
    high = max(float(np.quantile(highs, 0.95)) for _, highs in ends.values())
    within = {gpu: float(np.mean((lows >= low) & (highs <= high))) for gpu, (lows, highs) in ends.items()}
    return (low, high), within


def _over_range(gpu: str, others: list[TimeFactors]) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for every run, its measured seconds over the least, and over the most, that these factors allow."""
    found = []
    for row in rows():
        if row.gpu == gpu and row.dtype == "bfloat16":
            roofs, rest = features(row.planned.kinds)
            each = [sum(getattr(one, name) * x for name, x in zip(FITTED, roofs, strict=True)) + rest for one in others]
            least = min(seconds / (1 + one.error[1]) for seconds, one in zip(each, others, strict=True))
            most = max(seconds / (1 + one.error[0]) for seconds, one in zip(each, others, strict=True))
            found.append((row.seconds / least, row.seconds / most))
    lows, highs = np.array(found).T
    return lows, highs


def written(gpu: str) -> TimeFactors:
    """Returns the factors as machines.yaml has them: rounded, with errors and source."""
    found = fit(gpu)
    named = {name: round(value, 3) for name, value in zip(FITTED, found.factors, strict=True)}
    error = (round(found.quantile(0.05), 3), round(found.quantile(0.95), 3))
    source = (
        f"{len(found.errors)} runs of {found.sizes} sizes, mosaicml/llm-foundry scripts/train/benchmarking at 8c8dd48"
    )
    return TimeFactors(**named, error=error, source=source)


if __name__ == "__main__":
    for gpu in dict.fromkeys(row.gpu for row in rows()):
        print(gpu, written(gpu).model_dump())
        print(
            f"   one size left out: median {fit(gpu).absolute(0.5):.1%}, 90th percentile {fit(gpu).absolute(0.9):.1%}"
        )
    print("one machine left out:", elsewhere())
