"""Verdicts of several arms: against scipy, printed tables and simulated comparisons."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from glassformer.comparison.terminal import comparison_lines
from glassformer.runs.contrasts import contrasts, residual_variance
from glassformer.runs.looks import constant_level, false_verdicts
from glassformer.runs.power import needed, sd_interval, seeds_for
from glassformer.runs.results import Results, RunResult, Verdict
from glassformer.runs.simultaneous import (
    detectable,
    dunnett_probability,
    dunnett_quantile,
    holm,
    power,
    quantile,
    sidak_quantile,
    student_quantile,
    tukey_quantile,
)
from glassformer.runs.verdicts import verdicts
from glassformer.runs.wording import failures, finding, verdict_sentence

STAR = [(0, arm) for arm in range(1, 12)]


def run(name: str, seed: int, loss: float, status: str = "ok", seconds: float = 60.0) -> RunResult:
    measured = {"loss": loss, "perplexity": 1.0, "bits_per_byte": None, "tokens": 1}
    train = {"steps": 1, "tokens": 1, "seconds": seconds, "tokens_per_second": 1.0, "peak_memory_bytes": None,
             "learning_rate": 1e-3, "curve": [], "curve_seconds": [], "validation_curve": []}  # fmt: skip
    return RunResult.of({
        "name": name, "seed": seed, "status": status, "train": train,
        "validation": measured if status == "ok" else None,
    })  # fmt: skip


def runs_of(losses: dict[str, list[float]]) -> list[RunResult]:
    """Runs with these losses; infinite is a run that diverged."""
    return [
        run(name, seed, loss, "ok" if np.isfinite(loss) else "diverged")
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]


# Quantiles


@pytest.mark.parametrize(
    ("df", "printed"),
    [(5, [2.57, 3.03, 3.29, 3.48, 3.62]), (10, [2.23, 2.57, 2.76, 2.89, 2.99]), (20, [2.09, 2.38, 2.54, 2.65, 2.73])],
)
def test_dunnetts_quantiles_are_those_of_his_table(df: int, printed: list[float]) -> None:
    """Two-sided 5 % for one to five comparisons with a control (Dunnett 1964)."""
    for contrasts_, value in enumerate(printed, start=1):
        assert dunnett_quantile(0.05, contrasts_, df) == pytest.approx(value, abs=0.0075)


@pytest.mark.parametrize(("number", "df"), [(2, 4), (2, 30), (3, 6)])
def test_dunnetts_probability_is_scipys(number: int, df: int) -> None:
    """The probability equals that of the multivariate t with correlations 1/2, which scipy integrates another way."""
    shape = np.full((number, number), 0.5) + 0.5 * np.eye(number)
    theirs = stats.multivariate_t.cdf(
        np.full(number, 2.6), shape=shape, df=df, lower_limit=np.full(number, -2.6), maxpts=200_000 * number,
        random_state=0,
    )  # fmt: skip
    assert dunnett_probability(2.6, number, df) == pytest.approx(float(theirs), abs=1e-6)
    assert dunnett_probability(dunnett_quantile(0.05, number, df), number, df) == pytest.approx(0.95, abs=1e-9)


def test_tukeys_quantiles_are_printed_and_scipys() -> None:
    for arms, df, printed in ((3, 10, 3.877), (4, 20, 3.958), (5, 60, 3.977)):  # studentized range, 5 %
        assert tukey_quantile(0.05, arms, df) * np.sqrt(2) == pytest.approx(printed, abs=0.001)
    samples = np.random.default_rng(3).standard_normal((3, 6))
    low = stats.tukey_hsd(*samples).confidence_interval(0.95).low
    half = tukey_quantile(0.05, 3, 15) * np.sqrt(samples.var(1, ddof=1).mean() * 2 / 6)
    assert samples[0].mean() - samples[1].mean() - low[0, 1] == pytest.approx(half, abs=1e-6)


def test_the_quantile_follows_the_pairs() -> None:
    star, all_pairs, ladder = (
        [(0, 1), (0, 2)],
        list(combinations(range(3), 2)),
        [(0, 1), (0, 2), (1, 2), (2, 3), (0, 3)],
    )
    assert quantile(0.05, [(0, 1)], 8) == student_quantile(0.05, 8) == pytest.approx(stats.t.ppf(0.975, 8), abs=1e-9)
    assert quantile(0.05, star, 8) == dunnett_quantile(0.05, 2, 8)
    assert quantile(0.05, all_pairs, 8) == tukey_quantile(0.05, 3, 8)
    assert quantile(0.05, ladder, 8) == min(tukey_quantile(0.05, 4, 8), sidak_quantile(0.05, 5, 8))
    assert quantile(0.05, star, 8, balanced=False) == sidak_quantile(0.05, 2, 8) > dunnett_quantile(0.05, 2, 8)


def test_holm_as_in_a_worked_example() -> None:
    """Four tests: .005 x 4, .011 x 3, .02 x 2, .04 x 1, none smaller than the one before."""
    assert holm([0.02, 0.04, 0.005, 0.011]) == pytest.approx([0.04, 0.04, 0.02, 0.033])
    assert holm([0.5, 0.6]) == [1.0, 1.0] and holm([]) == []


# Blocks


def test_two_arms_are_the_paired_t_test() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 7))
    made = contrasts(np.stack([a, b], axis=1), [(0, 1)])
    theirs = stats.ttest_rel(b, a)
    low, high = made.intervals(0.05)
    ends = theirs.confidence_interval(0.95)
    assert (made.p[0], low[0], high[0]) == pytest.approx((theirs.pvalue, ends.low, ends.high), abs=1e-9)


def test_the_common_variance_is_that_of_the_linear_model() -> None:
    """Residuals of least squares with a column for each seed and each arm; Levene's p is scipy's."""
    seeds, arms = 6, 4
    losses = np.random.default_rng(1).standard_normal((seeds, arms))
    rows = [(s, a) for s in range(seeds) for a in range(arms)]
    design = np.array([[*(s == i for i in range(seeds)), *(a == i for i in range(arms))] for s, a in rows], dtype=float)
    fitted = design @ np.linalg.lstsq(design, losses.ravel(), rcond=None)[0]
    residuals = (losses.ravel() - fitted).reshape(seeds, arms)
    variance, df, p = residual_variance(losses)
    assert df == losses.size - np.linalg.matrix_rank(design) == (seeds - 1) * (arms - 1)
    assert variance == pytest.approx((residuals**2).sum() / df, abs=1e-12)
    assert p == pytest.approx(stats.levene(*residuals.T, center="mean").pvalue, abs=1e-9)
    made = contrasts(losses, STAR[:3])
    assert made.pooled.all() and made.error == pytest.approx(np.sqrt(2 * variance / seeds))


def test_an_arm_at_the_stable_edge_is_not_pooled() -> None:
    """Its noise is a hundred times that of the others, which keep their narrow intervals."""
    losses = np.random.default_rng(2).standard_normal((8, 5)) * [1, 1, 1, 1, 100]
    made = contrasts(losses, STAR[:4])
    assert made.homogeneity < 0.1 and not made.pooled.any() and set(made.df) == {7}
    assert made.error[3] > 20 * made.error[:3].max()
    assert (made.critical(0.05) == sidak_quantile(0.8 * 0.05, 4, 7)).all()
    assert not contrasts(losses[:2], STAR[:4]).pooled.any()  # two seeds cannot be tested


def test_a_pair_uses_the_seeds_that_others_lack() -> None:
    losses = np.random.default_rng(5).standard_normal((6, 3))
    losses[4:, 2] = np.nan
    made = contrasts(losses, [(0, 1), (0, 2)])
    assert made.seeds.tolist() == [6, 4] and made.difference[0] == pytest.approx((losses[:, 1] - losses[:, 0]).mean())
    assert made.df.tolist() == [6, 6] and made.error**2 * [6, 4] == pytest.approx(2 * residual_variance(losses[:4])[0])
    assert made.pooled.all() and set(made.critical(0.05)) == {sidak_quantile(0.05, 2, 6)}


@pytest.mark.parametrize("seeds", range(3, 11))
def test_coverage_of_ten_thousand_intervals(seeds: int) -> None:
    """95 +- 1 % for two arms, and for the intervals of four arms together; losses include a random effect per seed."""
    random = np.random.default_rng(seeds)
    effects = np.array([0.0, 0.5, -2.0, 1.0])
    losses = random.standard_normal((10_000, seeds, 4)) + 3 * random.standard_normal((10_000, seeds, 1)) + effects
    for arms in (2, 4):
        low, high = contrasts(losses[..., :arms], STAR[: arms - 1]).intervals(0.05)
        truth = effects[1:arms]
        assert ((low <= truth) & (truth <= high)).all(-1).mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("others", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("seeds", [3, 5])
def test_false_verdicts_of_one_to_ten_arms(seeds: int, others: int) -> None:
    """Any of them, at most 5.5 %; without the correction ten arms are wrong a quarter of the time and more."""
    losses = np.random.default_rng(7).standard_normal((40_000, seeds, others + 1), dtype=np.float32)
    made = contrasts(losses, STAR[:others])
    low, high = made.intervals(0.05)
    assert ((low > 0) | (high < 0)).any(-1).mean() <= 0.055
    if others == 10:
        assert (made.p < 0.05).any(-1).mean() > 0.25


def test_false_verdicts_on_a_ladder() -> None:
    """Every rung against base and against the one before."""
    pairs = list(dict.fromkeys([*STAR[:5], *pairwise(range(6))]))
    losses = np.random.default_rng(8).standard_normal((10_000, 3, 6))
    low, high = contrasts(losses, pairs).intervals(0.05)
    assert 0.03 < ((low > 0) | (high < 0)).any(-1).mean() <= 0.055


# Verdicts


def test_an_arm_is_better_exactly_where_its_interval_excludes_zero() -> None:
    random = np.random.default_rng(4)
    seen = set()
    for _ in range(40):
        shifts = random.normal(0, 0.01, 4)
        losses = {
            name: list(2 + shift + random.normal(0, 0.006, 5)) for name, shift in zip("abcd", shifts, strict=True)
        }
        for v in verdicts(runs_of(losses)):
            assert v.low is not None and v.high is not None and v.difference is not None
            wanted = "a better" if v.low > 0 else "b better" if v.high < 0 else None
            assert v.verdict == wanted if wanted else v.verdict in ("equivalent", "no difference shown")
            assert v.low < v.difference < v.high and v.p is not None and v.p_holm is not None and v.p <= v.p_holm
            seen.add(v.verdict)
    assert seen == {"a better", "b better", "equivalent", "no difference shown"}


def test_equivalence_is_two_one_sided_tests() -> None:
    random = np.random.default_rng(6)
    for _ in range(200):
        a = 2 + random.normal(0, 0.008, 6)
        b = a + random.normal(random.choice([0.0, 0.008]), 0.006, 6)
        (v,) = verdicts(runs_of({"a": list(a), "b": list(b)}))
        margin = 0.005 * a.mean()
        p = max(
            stats.ttest_1samp(b - a, -margin, alternative="greater").pvalue,
            stats.ttest_1samp(b - a, margin, alternative="less").pvalue,
        )
        assert v.margin == pytest.approx(margin) and v.equivalent == (p < 0.05)


def test_equivalence_is_not_claimed_at_the_margin() -> None:
    """Arms that differ by just the margin are called equivalent at most 5.5 % of the time, any of four."""
    losses = np.random.default_rng(9).normal(0, 0.01, (10_000, 5, 5)) + 2
    losses[..., 1:] += 0.01
    low, high = contrasts(losses, STAR[:4]).intervals(0.10)
    assert ((low > -0.01) & (high < 0.01)).any(-1).mean() <= 0.055


def test_undecided_verdict_has_its_detectable_difference() -> None:
    """With noise of one and a difference of that size, four of five comparisons show it."""
    random = np.random.default_rng(10)
    (v,) = verdicts(runs_of({"a": list(2 + random.normal(0, 0.1, 6)), "b": list(2 + random.normal(0, 0.1, 6))}))
    assert v.verdict == "no difference shown" and v.detectable is not None and v.high is not None
    assert f"a difference of {v.detectable:.4f} would have been shown 80 % of the time" in verdict_sentence(v)
    assert f"{v.b} against {v.a}: {v.verdict}; {v.difference:+.4f} (" in str(v)
    size = detectable(student_quantile(0.05, 5), 5)
    gaps = random.standard_normal((20_000, 6)) + size / np.sqrt(6)
    assert (np.abs(stats.ttest_1samp(gaps, 0, axis=1).pvalue) < 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_pairs_of_a_ladder() -> None:
    """Every rung against base and the one before, judged together."""
    rungs = ["base", "+rope", "+rope+rmsnorm", "+rope+rmsnorm+swiglu"]
    random = np.random.default_rng(11)
    losses = {name: list(2 - 0.05 * i + random.normal(0, 0.003, 4)) for i, name in enumerate(rungs)}
    pairs = list(dict.fromkeys([*((rungs[0], rung) for rung in rungs[1:]), *pairwise(rungs)]))
    found = verdicts(runs_of(losses), pairs)
    assert [(v.a, v.b) for v in found] == pairs and {v.verdict for v in found} == {"b better"}
    assert {v.degrees_of_freedom for v in found} == {9}
    wider = verdicts(runs_of(losses))[0]
    assert found[0].high - found[0].low > wider.high - wider.low  # type: ignore[operator]


# Runs that diverge


DIVERGED = float("inf")


def test_survivors_are_not_averaged_in_silence() -> None:
    """b has the lower losses in seeds without divergence: no verdict in its favour; the sentence gives both facts."""
    a, b = [2.0, 2.01, 1.99, 2.0, 2.01], [DIVERGED, 1.9, 1.91, 1.92, 1.9]
    (v,) = verdicts(runs_of({"a": a, "b": b}))
    assert v.verdict == "no difference shown" and v.high is not None and v.high < 0 and v.decided_by is None
    assert (v.ended, v.diverged, v.seeds) == ([5, 5], [0, 1], 4)
    assert (
        "b diverged in 1 of 5 seeds, a in 0 of 5 (Fisher's exact p = 1.000); over the 4 seeds both finished b has the "
        "lower loss, which does not make better what diverged more often" in (verdict_sentence(v))
    )
    (v,) = verdicts(runs_of({"a": b, "b": a}))
    assert v.verdict == "no difference shown"
    (v,) = verdicts(runs_of({"a": a, "b": [DIVERGED, 2.1, 2.11, 2.1, 2.12]}))  # more divergences and a higher loss
    assert (v.verdict, v.decided_by) == ("a better", "loss")
    (v,) = verdicts(runs_of({"a": [DIVERGED, *a[1:]], "b": b}))  # as often as the other
    assert (v.verdict, v.diverged) == ("b better", [1, 1])


def test_divergence_decides_where_fishers_test_does() -> None:
    """Four of five against 0 of five: p = .048; three of three against 0: .1."""
    a = [2.0, 2.01, 1.99, 2.0, 2.01]
    (v,) = verdicts(runs_of({"a": a, "b": [1.8, *[DIVERGED] * 4]}))
    theirs = stats.fisher_exact([[0, 5], [4, 1]]).pvalue
    assert (v.verdict, v.decided_by, v.p_diverged) == ("a better", "divergence", pytest.approx(theirs))
    assert v.difference is None and "b diverged in 4 of 5 seeds, a in 0 of 5" in verdict_sentence(v)
    (v,) = verdicts(runs_of({"a": a[:3], "b": [DIVERGED] * 3}))
    assert (v.verdict, v.p_diverged) == ("no verdict", pytest.approx(0.1))
    assert "b against a: no verdict; b diverged in 3 of 3 seeds, a in 0 of 3" in verdict_sentence(v)
    losses = {"a": a, "b": [1.8, *[DIVERGED] * 4], "c": a, "d": a}  # one of three tests: .048 is not enough
    assert [one.decided_by for one in verdicts(runs_of(losses))] == [None, None, None]
    (v,) = verdicts(runs_of({"a": [DIVERGED] * 3, "b": [DIVERGED] * 3}))
    assert (v.verdict, v.p_diverged) == ("no verdict", 1.0)
    (v,) = verdicts(runs_of({"a": a, "b": [1.8, 1.8, *[DIVERGED] * 2]}))  # two seeds are enough to compare losses
    assert (v.verdict, v.seeds) == ("no difference shown", 2)


def test_false_verdicts_where_runs_diverge() -> None:
    """One run in five, whatever its arm: at most 5.5 % false verdicts."""
    random = np.random.default_rng(12)
    wrong = 0
    for _ in range(600):
        losses = np.where(random.random((2, 6)) < 0.2, DIVERGED, random.normal(2, 0.01, (2, 6)))
        found = verdicts(runs_of({"a": losses[0].tolist(), "b": losses[1].tolist()}))
        wrong += any(v.verdict.endswith("better") for v in found)
    assert wrong / 600 <= 0.055


# Looks


@pytest.mark.parametrize(("looks", "level"), [((4, 8), 0.0275), ((3, 5, 8), 0.0196), ((3, 4, 5, 6, 7, 8), 0.0146)])
def test_looks_keep_five_percent(looks: tuple[int, ...], level: float) -> None:
    """By other draws and scipy's t test; without the level they are wrong far more often."""
    found = constant_level(looks)
    assert found == pytest.approx(level, rel=0.03)
    gaps = np.random.default_rng(13).standard_normal((40_000, looks[-1]))
    p = np.stack([stats.ttest_1samp(gaps[:, :n], 0, axis=1).pvalue for n in looks], axis=1)
    assert (p < found).any(1).mean() == pytest.approx(0.05, abs=0.004)
    assert (p < 0.05).any(1).mean() > 0.08


def test_adding_seeds_until_it_is_significant_is_wrong() -> None:
    """13 % with looks after 2 to 5 seeds."""
    assert false_verdicts(range(2, 6), [0.05] * 4) == pytest.approx(0.13, abs=0.01)
    assert constant_level([]) == constant_level([5, 5]) == constant_level([1, 5]) == 0.05


def test_looks_of_several_arms() -> None:
    level = constant_level((3, 6), tuple(STAR[:3]))
    losses = np.random.default_rng(14).standard_normal((10_000, 6, 4))
    wrong = np.zeros(10_000, dtype=bool)
    for n in (3, 6):
        low, high = contrasts(losses[:, :n], STAR[:3]).intervals(level)
        wrong |= ((low > 0) | (high < 0)).any(-1)
    assert wrong.mean() <= 0.055


def test_a_verdict_after_a_look_is_wider() -> None:
    random = np.random.default_rng(15)
    runs = runs_of({"a": list(2 + random.normal(0, 0.01, 8)), "b": list(2.01 + random.normal(0, 0.01, 8))})
    (once,), (twice,) = verdicts(runs, looks=[8]), verdicts(runs, looks=[4, 8])
    assert once.level == pytest.approx(0.05) and twice.level == constant_level([4, 8])
    ratio = student_quantile(constant_level([4, 8]), 7) / student_quantile(0.05, 7)
    assert (twice.high - twice.low) / (once.high - once.low) == pytest.approx(ratio)  # type: ignore[operator]


# Power


def test_seeds_by_effect() -> None:
    table = {0.5: 34, 0.75: 16, 1: 10, 1.25: 8, 1.5: 6, 2: 5, 3: 4, 4: 3}
    assert {effect: seeds_for(effect, 1.0) for effect in table} == table
    assert seeds_for(1e-6, 1.0) is None and seeds_for(1.0, 0.0) == 2


def test_the_smallest_effect_by_seeds() -> None:
    table = {3: 3.26, 4: 2.13, 5: 1.68, 6: 1.43, 8: 1.16, 10: 1.00}
    for seeds, effect in table.items():
        df = seeds - 1
        assert detectable(student_quantile(0.05, df), df) / np.sqrt(seeds) == pytest.approx(effect, abs=0.006)


@pytest.mark.parametrize(("seeds", "effect"), [(2, 6), (4, 4), (6, 4), (3, 2), (10, 0.5), (30, 0.5)])
def test_power_is_a_number_everywhere(seeds: int, effect: float) -> None:
    """The power equals a simulation, and scipy's noncentral t if that is not NaN."""
    c, df = student_quantile(0.05, seeds - 1), seeds - 1
    found = power(effect * np.sqrt(seeds), c, df)
    theirs = stats.nct.sf(c, df, effect * np.sqrt(seeds)) + stats.nct.cdf(-c, df, effect * np.sqrt(seeds))
    if np.isfinite(theirs):
        assert found == pytest.approx(theirs, abs=1e-6)
    gaps = np.random.default_rng(16).standard_normal((40_000, seeds)) + effect
    assert found == pytest.approx((stats.ttest_1samp(gaps, 0, axis=1).pvalue < 0.05).mean(), abs=0.01)


def test_power_of_no_difference_is_the_level() -> None:
    for df in (1, 4, 100):
        assert power(0.0, student_quantile(0.05, df), df) == pytest.approx(0.05, abs=1e-6)


def test_the_interval_of_a_standard_deviation() -> None:
    assert sd_interval(1.0, 2) == pytest.approx((0.52, 6.28), abs=0.01)  # of three seeds
    draws = np.random.default_rng(17).standard_normal((10_000, 5)).std(1, ddof=1)
    low, high = sd_interval(1.0, 4)
    assert ((draws * low <= 1) & (draws * high >= 1)).mean() == pytest.approx(0.95, abs=0.01)


def test_a_pilot_plans_seeds_and_hours() -> None:
    gaps, minutes = [0.01, 0.03, 0.02], {"a": 60.0, "b": 120.0}
    runs = [
        run(name, seed, 2 + gap * (name == "b"), seconds=minutes[name])
        for name in "ab"
        for seed, gap in enumerate(gaps)
    ]
    plan = needed(runs, 0.01)
    assert plan is not None and plan.pilot == 3 and plan.difference == pytest.approx(0.02)
    (pair,) = plan.pairs
    assert pair.sd == pytest.approx(0.01) and (pair.sd_low, pair.sd_high) == pytest.approx(sd_interval(0.01, 2))
    assert pair.seeds == plan.seeds == 5  # twice the sd, in the table above
    assert (pair.seeds_low or 0) < 5 < (pair.seeds_high or 0)
    assert plan.hours == pytest.approx(5 * 180 / 3600)
    assert needed([one for one in runs if one.name == "a"], 0.01) is None


def test_seeds_of_the_pilot_do_not_count() -> None:
    """Three seeds plan for a difference of one sd, without one: with fresh seeds 5 % false verdicts, with those of the
    pilot among them 9 %."""
    sds = np.geomspace(0.02, 4, 120)
    seeds = np.array([seeds_for(1.0, sd) or 100 for sd in sds])
    noise = np.random.default_rng(18).standard_normal((10_000, 103))
    planned = seeds[np.searchsorted(sds, noise[:, :3].std(1, ddof=1)).clip(0, 119)]
    wrong = {}
    for first, name in ((3, "fresh"), (0, "same")):
        p = np.empty(10_000)
        for n in np.unique(planned):
            rows = planned == n
            p[rows] = stats.ttest_1samp(noise[rows, first : first + max(n, 3 - first)], 0, axis=1).pvalue
        wrong[name] = (p < 0.05).mean()
    assert wrong["fresh"] == pytest.approx(0.05, abs=0.007) and wrong["same"] > 0.08


# In words


def test_a_verdict_in_words() -> None:
    v = Verdict(
        a="gpt2@1m", b="gpt2@1m+swiglu", metric="validation.loss", difference=0.038, low=0.019, high=0.057,
        confidence=0.95, seeds=6, verdict="a better", p=0.004, p_holm=0.008,
        terms="at 793k parameters in layers, 200k tokens of python-docs, lr 1.3e-3",
    )  # fmt: skip
    assert verdict_sentence(v) == (
        "gpt2@1m+swiglu against gpt2@1m: gpt2@1m better; loss differs by +0.0380 nats per token, 95% interval +0.0190 "
        "to +0.0570 (6 seeds, p = 0.008 after Holm), at 793k parameters in layers, 200k tokens of python-docs, "
        "lr 1.3e-3"
    )
    assert finding(v.changed(verdict="equivalent", margin_share=0.005)) == "equivalent within 0.5 %"
    slight = v.changed(equivalent=True, margin_share=0.02, difference=1.5e-6, low=1.4e-6, high=1.6e-6)
    assert finding(slight) == "equivalent within 2 %, gpt2@1m lower by more than chance explains"
    assert "+0.0000015 nats per token, 95% interval +0.0000014 to +0.0000016" in verdict_sentence(slight)
    squared = verdict_sentence(v.changed(unit=""))  # a loss without a likelihood
    assert "nats" not in squared and "loss differs by +0.0380, 95% interval" in squared
    lower = v.changed(verdict="no difference shown", diverged=[2, 0], ended=[6, 6], p_diverged=0.45, detectable=0.02)
    told = verdict_sentence(lower)
    assert "gpt2@1m has the lower loss, which does not make better what diverged more often" in told
    assert "would have been shown" not in told


def test_divergences_are_judged_at_the_level_of_the_looks() -> None:
    """Four of four against 0 of four is p = 1/35 = .0286: below 5 %, but not below the .0276 of looks after 4 and 8."""
    runs = runs_of({"a": [2.0, 2.1, 2.2, 2.3], "b": [np.inf] * 4})
    (once,), (twice,) = verdicts(runs), verdicts(runs, looks=(4, 8))
    assert (once.verdict, twice.verdict) == ("a better", "no verdict")
    assert once.p_diverged == twice.p_diverged == pytest.approx(1 / 35)


def test_an_arm_that_failed_in_all_seeds_is_named_with_its_error() -> None:
    runs = [run("a", seed, 2.0 + seed / 100) for seed in range(3)]
    runs += [RunResult(name="b", seed=seed, status="failed", error="out of memory") for seed in range(3)]
    results = Results.of({"schema": 1, "data": {}, "budget": {"seeds": 3}, "runs": []}).changed(runs=runs)
    (said,) = failures(results)
    assert said == "b failed in 3 of 3 seeds, so it has no verdict: out of memory"
    assert said in list(comparison_lines(results))
