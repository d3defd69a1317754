"""Every statistic against a separate computation in numpy (loops, definitions) and against closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import glassformer as gf
from glassformer.dynamics.spectra import product_row_cosine
from glassformer.dynamics.weights import named_matrices, spectra
from tests.refused import refused

D = gf.dynamics
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def causal_pattern(*lead: int, s: int, t: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Scores with -inf where hidden, and their softmax."""
    hidden = torch.arange(t) > torch.arange(t - s, t)[:, None]
    scores = (scale * gaussian(*lead, s, t, seed=seed)).masked_fill(hidden, float("-inf"))
    return scores, scores.softmax(-1)


def close(mine: Tensor, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(mine.double().numpy(), np.asarray(theirs, dtype=np.float64), rtol=rtol, atol=atol)


# Attention


def entropies(pattern: Tensor) -> np.ndarray:
    """Returns the entropy of every row, by the definition."""
    rows = pattern.double().numpy().reshape(-1, pattern.shape[-1])
    values = [-sum(p * math.log(p) for p in row if p > 0) for row in rows]
    return np.array(values).reshape(pattern.shape[:-1])


@pytest.mark.parametrize(("s", "t"), [(7, 7), (3, 9), (1, 5)])
def test_entropy_is_the_mean_over_queries_and_batch(s: int, t: int):
    _, pattern = causal_pattern(2, 3, s=s, t=t)
    rows = entropies(pattern)
    close(D.attention_entropy(pattern), rows.mean((0, 2)))
    visible = np.arange(t - s + 1, t + 1)
    kept = visible > 1
    share = rows[..., kept] / np.log(visible[kept])
    close(D.attention_entropy(pattern, normalised=True), share.mean((0, 2)))
    close(D.attention_entropy(pattern[0]), rows[0].mean(-1))
    close(D.attention_entropy(pattern[0, 0]), rows[0, 0].mean())


def test_entropy_against_scipys_definition_through_torch_distributions():
    pattern = (3 * gaussian(4, 5, 6, 6, seed=3)).softmax(-1)
    close(D.attention_entropy(pattern), torch.distributions.Categorical(pattern).entropy().mean((0, 2)))


def test_visible_keys_may_be_given():
    hidden = torch.arange(6) < torch.tensor([0, 2, 5, 6])[:, None]  # the last row sees nothing, the third one key
    pattern = gaussian(2, 4, 6).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0)
    rows = entropies(pattern)
    visible = torch.tensor([6, 4, 1, 0])
    close(D.attention_entropy(pattern, visible=visible), rows[:, :3].mean(-1))
    close(D.attention_entropy(pattern, True, visible), (rows[:, :2] / np.log([6, 4])).mean(-1))
    per_head = torch.stack([visible, visible])
    assert torch.equal(D.attention_entropy(pattern, True, per_head), D.attention_entropy(pattern, True, visible))


def test_entropy_at_its_ends():
    uniform = torch.full((2, 5, 8), 1 / 8)
    close(D.attention_entropy(uniform), [math.log(8)] * 2)
    close(D.attention_entropy(uniform, normalised=True, visible=torch.tensor(8)), [1, 1])
    one_hot = torch.eye(8).expand(2, 8, 8)
    close(D.attention_entropy(one_hot), [0, 0])
    close(D.attention_entropy(one_hot, normalised=True), [0, 0])
    close(D.attention_entropy(causal_pattern(3, s=9, t=9, scale=0)[1], normalised=True), [1, 1, 1])


def test_attention_without_a_row_to_judge():
    """Without a token, or with one, nothing is collapsed."""
    lone, none = torch.ones(2, 3, 1, 1), torch.ones(2, 3, 0, 4)
    for pattern in (lone, none):
        close(D.attention_entropy(pattern), [0, 0, 0])
        close(D.attention_entropy(pattern, normalised=True), [1, 1, 1])
    close(D.sink_mass(lone), [1, 1, 1])
    close(D.sink_mass(none), [0, 0, 0])
    close(D.inverse_participation_ratio(lone), [1, 1, 1])
    close(D.inverse_participation_ratio(none), [0, 0, 0])
    close(D.max_attention_logit(torch.zeros(2, 3, 0, 4)), [0, 0, 0])
    close(D.max_attention_logit(torch.full((3, 2, 2), float("-inf"))), [0, 0, 0])


def test_max_logit_covers_only_visible_keys():
    scores, _ = causal_pattern(2, 3, s=4, t=6, scale=5)
    rows = scores.numpy()
    wanted = [max(abs(v) for v in rows[:, n].ravel() if v != -math.inf) for n in range(3)]
    close(D.max_attention_logit(scores), wanted)
    close(D.max_attention_logit(scores[0, 0]), max(abs(v) for v in rows[0, 0].ravel() if v != -math.inf))
    scores[1, 2, 3, 0] = -40.0
    close(D.max_attention_logit(scores), [*wanted[:2], 40.0])
    scores[1, 1, 3, 0] = float("inf")
    assert D.max_attention_logit(scores)[1] == float("inf")
    scores[1, 1, 3, 1] = float("nan")
    assert D.max_attention_logit(scores)[1].isnan()


@pytest.mark.parametrize(("s", "t"), [(6, 6), (2, 6)])
@pytest.mark.parametrize("key", [0, 1, 4])
def test_sink_mass_is_of_the_queries_from_that_key_on(s: int, t: int, key: int):
    _, pattern = causal_pattern(2, 3, s=s, t=t)
    received: list[list[float]] = [[], [], []]
    for b in range(2):
        for n in range(3):
            received[n] += [float(pattern[b, n, i, key]) for i in range(s) if i + t - s >= key]
    close(D.sink_mass(pattern, key), [np.mean(one) for one in received])


def test_sinks_by_hand():
    pattern = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.9]]])
    close(D.sink_mass(pattern), [0.75, 0.05])
    close(D.sink_rate(pattern), 0.5)
    with refused(code="range", field="key"):
        D.sink_mass(pattern, 2)


def test_participation_by_the_definition():
    _, pattern = causal_pattern(2, 3, s=5, t=7)
    close(D.inverse_participation_ratio(pattern), (pattern.double().numpy() ** 2).sum(-1).mean((0, 2)))
    close(D.inverse_participation_ratio(torch.full((3, 4, 8), 1 / 8)), [1 / 8] * 3)


def test_participation_of_random_scores_by_temperature():
    """Scores of variance β² log T at T = 1024: rows of the table in arXiv 2505.24333's setting, measured apart."""
    for beta, entropy, ipr in [(0.5, 0.876, 0.005), (1.0, 0.575, 0.084), (2.0, 0.232, 0.411), (4.0, 0.093, 0.689)]:
        pattern = (beta * math.sqrt(math.log(1024)) * gaussian(1000, 1024, seed=7)).softmax(-1)
        close(D.inverse_participation_ratio(pattern), ipr, rtol=0.1, atol=2e-3)
        full = torch.tensor(1024)
        close(D.attention_entropy(pattern, normalised=True, visible=full), entropy, rtol=0.03, atol=0.01)


@pytest.mark.parametrize(("s", "value"), [(1.0, 2.7168), (4.0, 1.0180), (8.0, 0.0357)])
def test_entropy_bound_is_tight_at_one_large_logit(s: float, value: float):
    keys = 16
    logits = torch.full((keys,), -1 / (keys - 1), dtype=torch.float64)
    logits[3] = 1.0
    logits *= s / logits.norm()
    close(D.entropy_bound(s, keys), value, atol=5e-5)
    close(D.entropy_bound(s, keys), entropies(logits.softmax(-1)[None])[0], rtol=1e-9)


@few
@given(seeds, st.integers(2, 40), st.floats(0.01, 30))
def test_no_row_falls_below_its_bound(seed: int, keys: int, s: float):
    logits = gaussian(50, keys, seed=seed, dtype=torch.float64)
    logits *= s / logits.norm(dim=-1, keepdim=True)
    assert entropies(logits.softmax(-1)).min() >= D.entropy_bound(s, keys).item() - 1e-12


def test_entropy_bound_at_its_ends():
    assert D.entropy_bound(0.0, 16).item() == pytest.approx(math.log(16))
    assert D.entropy_bound(5.0, 1).item() == 0
    for s in (12.3, 300.7):  # a number of Python's has no fewer digits than a tensor's
        assert D.entropy_bound(s, 64) == D.entropy_bound(torch.tensor(s, dtype=torch.float64), 64)
    assert D.entropy_bound(float("inf"), 16).item() == 0
    assert D.entropy_bound(20.0, 16).item() == pytest.approx(
        20 * 4 * 15**0.5 * math.exp(-20 * (16 / 15) ** 0.5), rel=0.1
    )
    table = D.entropy_bound(torch.tensor([[1.0], [4.0]]), torch.arange(1, 6))
    assert table.shape == (2, 5) and bool((table[0] >= table[1]).all())


# Tokens


def cosines(x: Tensor) -> np.ndarray:
    """Returns the cosine of every pair of rows (s, s), 0 for zero rows."""
    rows = x.double().numpy()
    return np.array([
        [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) if a.any() and b.any() else 0.0 for b in rows]
        for a in rows
    ])  # fmt: skip


def mean_off_diagonal(table: np.ndarray) -> float:
    n = len(table)
    return (table.sum() - np.trace(table)) / (n * (n - 1))


@pytest.mark.parametrize(("t", "d", "offset"), [(2, 3, 0.0), (9, 5, 0.0), (30, 16, 1.0), (20, 4, 50.0)])
def test_token_cosine_against_every_pair(t: int, d: int, offset: float):
    x = gaussian(3, t, d) + offset
    x[1, 1] = 0
    close(D.token_cosine(x), [mean_off_diagonal(cosines(one)) for one in x])


def test_token_statistics_at_their_ends():
    same = torch.ones(6, 4) * torch.arange(1.0, 5)
    close(D.token_cosine(same), 1)
    close(D.relative_residual(same), 0)
    close(D.composite_residual(same), 0)
    close(D.token_cosine(torch.eye(5)), 0)
    apart = torch.tensor([[1.0, 0], [-1.0, 0]])
    close(D.token_cosine(apart), -1)
    close(D.relative_residual(apart), 1)
    zeros = torch.zeros(2, 4, 3)
    for statistic in (D.token_cosine, D.relative_residual, D.composite_residual, D.residual_rms):
        close(statistic(zeros), [0, 0])
        close(statistic(torch.ones(2, 1, 3) * 2), [{D.residual_rms: 2.0}.get(statistic, 0.0)] * 2)
    for statistic in (D.token_cosine, D.relative_residual, D.residual_rms):
        close(statistic(torch.ones(2, 0, 3)), [0, 0])


@few
@given(seeds, st.integers(2, 40), st.integers(1, 20))
def test_residual_and_cosine_are_one_where_norms_are_equal(seed: int, t: int, d: int):
    """mu² = (1 - rho) (T-1)/T."""
    x = gaussian(t, d, seed=seed, dtype=torch.float64) + 0.5
    x = x / x.norm(dim=-1, keepdim=True)
    close(D.relative_residual(x) ** 2, (1 - D.token_cosine(x)) * (t - 1) / t, atol=1e-12)


def test_residuals_by_their_definitions():
    x = gaussian(4, 7, 5) + 0.3
    for one in x:
        rows = one.double().numpy()
        rest = rows - rows.mean(0)
        close(D.relative_residual(one), np.linalg.norm(rest) / np.linalg.norm(rows))
        close(D.residual_rms(one), np.sqrt((rows**2).mean()))
        both = [np.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf)) for m in (rest, rows)]
        close(D.composite_norm(one), both[1])
        close(D.composite_residual(one), both[0] / both[1])
    assert D.relative_residual(x).shape == (4,)


def test_the_mean_token_is_the_nearest_in_the_frobenius_norm():
    x = gaussian(6, 3) + 1
    best = D.relative_residual(x) * x.norm()
    for seed in range(20):
        other = x.mean(0) + 0.1 * gaussian(3, seed=seed)
        assert (x - other).norm() >= best


def test_massive_activations_by_the_published_predicate():
    x = 0.05 * gaussian(2, 8, 32)
    x[0, 0, 3], x[0, 2, 7], x[1, 0, 3] = 150.0, -300.0, 99.0
    found = D.massive(x)
    assert found.mask.nonzero().tolist() == [[0, 0, 3], [0, 2, 7]]
    assert found.count.tolist() == [2, 0]
    sizes = x.abs().double().numpy().reshape(2, -1)
    close(found.largest, sizes.max(1))
    close(found.median, np.sort(sizes)[:, sizes.shape[1] // 2 - 1])  # the lower one
    close(found.ratio, sizes.max(1) / np.sort(sizes)[:, sizes.shape[1] // 2 - 1])
    loud = D.massive(100 * x[0])  # all the more than 100, but no longer a thousand times the median
    assert loud.count == 2 and D.massive(torch.full((4, 4), 500.0)).count == 0
    assert D.massive(x, times=1e5).count.tolist() == [0, 0]


def test_massive_activations_of_nothing():
    assert D.massive(torch.zeros(3, 4)).ratio == 0
    assert D.massive(torch.tensor([[0.0, 0, 0, 5]])).ratio == float("inf")
    none = D.massive(torch.zeros(2, 0, 4))
    assert none.count.tolist() == [0, 0] and none.ratio.tolist() == [0, 0]


# Spectra


def numpy_erank(a: Tensor) -> float:
    s = np.linalg.svd(a.double().numpy(), compute_uv=False)
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 17), (40, 12), (96, 384)])
def test_spectra_against_numpy(shape: tuple[int, int]):
    a = gaussian(*shape)
    s = np.linalg.svd(a.double().numpy(), compute_uv=False)
    close(D.singular_values(a), s, rtol=1e-5)
    close(D.effective_rank(a), numpy_erank(a))
    close(D.stable_rank(a), (s**2).sum() / s[0] ** 2)
    close(D.spectral_norm(a), s[0])
    together = torch.stack([a, 2 * a, a.flip(0)])
    close(D.effective_rank(together), [numpy_erank(a)] * 3)


@pytest.mark.parametrize("d", [1, 2, 7, 64])
def test_unit_matrices(d: int):
    close(D.effective_rank(torch.eye(d)), d)
    close(D.stable_rank(torch.eye(d)), d)
    one = gaussian(d, 1) @ gaussian(1, 2 * d, seed=1)
    close(D.effective_rank(one), 1)
    close(D.stable_rank(one), 1)
    close(D.spectral_norm(one), one.norm())


def test_geometric_spectrum():
    """diag(2^-i), i < m: p_i = 2^-i / (2 - 2^(1-m)), entropy in closed form; in the limit erank 4, stable rank 4/3."""
    for m in (1, 2, 10, 20):
        a = torch.diag(2.0 ** -torch.arange(m))
        total = 2 - 2.0 ** (1 - m)
        entropy = math.log(total) + math.log(2) * sum(i * 2.0**-i for i in range(m)) / total
        close(D.effective_rank(a), math.exp(entropy))
        close(D.stable_rank(a), (4 / 3) * (1 - 4.0**-m))


def test_gaussian_ranks():
    """For d x d, the effective rank is about 0.80 d, the stable rank about d/4."""
    ranks = torch.stack([gaussian(128, 128, seed=seed) for seed in range(4)])
    assert D.effective_rank(ranks).sub(103).abs().max() < 1.5
    assert D.stable_rank(ranks).sub(32).abs().max() < 4
    assert D.effective_rank(gaussian(128, 512)).item() == pytest.approx(124, abs=1)


def test_a_collapsed_matrix_is_seen_as_one_in_fp32():
    """A Gram matrix in fp32 would hide the collapse."""
    one = gaussian(384, 1) @ gaussian(1, 1536, seed=1)
    assert D.effective_rank(one).item() == pytest.approx(1, abs=1e-4)
    three = gaussian(384, 3) @ gaussian(3, 384, seed=1)
    assert 2 < D.effective_rank(three).item() <= 3
    assert int((D.singular_values(three) > 0).sum()) == 3


def test_a_badly_conditioned_matrix_keeps_its_small_values():
    a = torch.diag(10.0 ** -torch.arange(6)) @ torch.linalg.qr(gaussian(6, 6)).Q
    close(D.singular_values(a), 10.0 ** -np.arange(6), rtol=1e-2)
    close(D.singular_values(a)[:5], 10.0 ** -np.arange(5), rtol=1e-3)


@few
@given(seeds, st.integers(1, 9), st.integers(1, 9), st.floats(1e-3, 1e3), st.integers(1, 9))
def test_ranks_are_bounded_by_the_rank_and_blind_to_scale_order_and_rotation(
    seed: int, m: int, n: int, scale: float, rank: int
):
    a = gaussian(m, rank, seed=seed) @ gaussian(rank, n, seed=seed + 1)
    r = min(m, n, rank)
    shuffle = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    turn = torch.linalg.qr(gaussian(n, n, seed=seed)).Q
    for statistic in (D.effective_rank, D.stable_rank):
        value = statistic(a).item()
        assert 1 - 1e-5 <= value <= r * (1 + 1e-5)
        for same in (a * scale, a[shuffle], a.T, a @ turn):
            assert statistic(same).item() == pytest.approx(value, rel=2e-3)
    assert D.spectral_norm(a * scale).item() == pytest.approx(scale * D.spectral_norm(a).item(), rel=1e-5)
    assert D.stable_rank(a).item() <= D.effective_rank(a).item() * (1 + 1e-5)


@pytest.mark.parametrize("statistic", ["effective_rank", "stable_rank", "spectral_norm"])
def test_matrices_that_have_no_rank(statistic: str):
    """Zero and empty ones: 0. Not finite: NaN, and no exception in the middle of a run."""
    of = getattr(D, statistic)
    close(of(torch.zeros(2, 3, 4)), [0, 0])
    close(of(torch.zeros(2, 0, 4)), [0, 0])
    broken = torch.stack([torch.eye(3), torch.eye(3), torch.eye(3)])
    broken[1, 0, 0], broken[2, 1, 1] = float("nan"), float("inf")
    values = of(broken)
    assert values.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize(("n", "g", "h", "d"), [(4, 4, 8, 32), (4, 2, 8, 32), (6, 1, 4, 24), (2, 2, 16, 8)])
def test_product_spectrum_against_the_whole_product(n: int, g: int, h: int, d: int):
    w_q, w_k = gaussian(n, h, d), gaussian(g, h, d, seed=1)
    mine = D.product_spectrum(w_q, w_k)
    for head in range(n):
        product = w_q[head].double().numpy().T @ w_k[head * g // n].double().numpy()  # W_Q W_K^T, (d, d)
        whole = np.linalg.svd(product, compute_uv=False)
        close(mine[head], whole[: mine.shape[-1]], rtol=1e-4, atol=1e-4)
        close(D.effective_rank_of(mine[head]), numpy_erank(torch.from_numpy(product)), rtol=1e-3)
    w_q[0, 0, 0] = float("nan")
    assert D.product_spectrum(w_q, w_k).isnan().any(-1).tolist() == [True] + [False] * (n - 1)


@pytest.mark.parametrize(("n", "g", "h", "d"), [(4, 2, 8, 32), (2, 2, 16, 16), (3, 1, 12, 8)])
def test_product_row_cosine_against_the_whole_product(n: int, g: int, h: int, d: int):
    w_q, w_k = gaussian(n, h, d), gaussian(g, h, d, seed=1)
    w_q[0, :, 3] = 0  # a row of zeros
    w_q[1] = gaussian(h, 1) * gaussian(1, d, seed=2)  # all rows on one line
    for one in (w_q, w_q.bfloat16()):
        mine = product_row_cosine(one, w_k)
        for head in range(n):
            product = one[head].double().numpy().T @ w_k[head * g // n].double().numpy()  # W_Q W_K^T, (d, d)
            close(mine[head], mean_off_diagonal(np.abs(cosines(torch.from_numpy(product)))), rtol=1e-5, atol=1e-5)
    close(mine[1], 1, atol=1e-2)
    w_k[0, 0, 0] = float("nan")
    assert product_row_cosine(w_q, w_k).isnan().tolist() == [head * g // n == 0 for head in range(n)]


def test_product_spectrum_of_collapsed_heads():
    w = gaussian(1, 1, 32) * gaussian(1, 8, 1, seed=1)  # every row on one line
    close(D.effective_rank_of(D.product_spectrum(w, w)), [1], atol=1e-3)
    close(D.effective_rank_of(D.product_spectrum(w * 0, w)), [0])


def test_row_cosine_against_every_pair():
    w = gaussian(3, 12, 5)
    w[1, 4] = 0
    wanted = [np.abs(cosines(one)) for one in w]
    close(D.row_cosine(w), [mean_off_diagonal(one) for one in wanted])
    close(D.cosine_matrix(w), np.stack([cosines(one) for one in w]), atol=1e-6)
    close(D.row_cosine(torch.eye(6)), 0)
    close(D.row_cosine(gaussian(6, 1) * gaussian(1, 9, seed=1)), 1)
    close(D.row_cosine(torch.ones(1, 4)), 0)
    close(D.row_cosine(torch.zeros(3, 4)), 0)
    assert D.row_cosine(gaussian(400, 200)).item() == pytest.approx(math.sqrt(2 / (math.pi * 200)), rel=0.02)


def test_row_cosine_of_a_long_table_takes_rows_evenly():
    w = gaussian(10, 4)
    close(D.row_cosine(w, rows=5), mean_off_diagonal(np.abs(cosines(w[::2]))))
    close(D.row_cosine(w, rows=10), mean_off_diagonal(np.abs(cosines(w))))
    assert D.row_cosine(gaussian(5000, 64), rows=500).item() == pytest.approx(math.sqrt(2 / (math.pi * 64)), rel=0.03)


def test_cosine_map_orders_rows_by_direction():
    sides = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1])
    w = sides[:, None] * gaussian(1, 20) + 0.1 * gaussian(8, 20, seed=1)
    found = D.cosine_map(w)
    close(found.cosines, cosines(w[found.order]))
    signs = sides[found.order]
    assert signs.tolist() == sorted(signs.tolist()) or signs.tolist() == sorted(signs.tolist(), reverse=True)
    assert D.cosine_map(torch.stack([w, w])).cosines.shape == (2, 8, 8)
    assert D.cosine_map(w * float("nan")).cosines.isnan().all()


# Gradients, units, logits, routers


def test_gradient_statistics():
    gradient, weight = gaussian(6, 9), gaussian(6, 9, seed=1)
    flat = gradient.double().numpy().ravel()
    close(D.gradient_norm(gradient), np.sqrt((flat**2).sum()))
    close(D.gradient_rms(gradient), np.sqrt((flat**2).mean()))
    close(D.update_ratio(gradient, weight), np.linalg.norm(flat) / np.linalg.norm(weight.double().numpy()))
    assert D.gradient_rms(torch.zeros(0)) == 0
    assert D.update_ratio(torch.zeros(3), torch.zeros(3)) == 0
    assert D.update_ratio(torch.ones(3), torch.zeros(3)) == float("inf")
    assert D.update_ratio(torch.tensor([float("nan")]), torch.ones(1)).isnan()


def test_gradient_rms_of_a_tiny_gradient_in_bf16():
    gradient = torch.full((1000,), 1e-12, dtype=torch.bfloat16)
    assert D.gradient_rms(gradient).item() == pytest.approx(1e-12, rel=0.01)


def test_dead_units():
    hidden = gaussian(2, 50, 10).relu()
    hidden[..., [1, 4, 7]] = 0
    close(D.dead_units(hidden), 0.3)
    hidden[1, 30, 4] = -0.5
    close(D.dead_units(hidden), 0.2)
    hidden[..., 7] = 5e-4
    close(D.dead_units(hidden), 0.2)
    close(D.dead_units(hidden, threshold=1e-4), 0.1)
    close(D.dead_units(torch.zeros(3, 4)), 1)
    close(D.dead_units(torch.zeros(0, 4)), 0)
    assert D.dead_units(hidden * float("nan")).isnan()


def test_log_z(monkeypatch: pytest.MonkeyPatch):
    logits = 3 * gaussian(2, 5, 11)
    wanted = np.log(np.exp(logits.double().numpy()).sum(-1)).mean()
    close(D.log_z(logits), wanted)
    monkeypatch.setattr("glassformer.dynamics.outputs.VALUES_PER_BLOCK", 25)
    close(D.log_z(logits), wanted)
    close(D.log_z(torch.zeros(4, 1000)), math.log(1000))
    close(D.log_z(torch.full((4, 1000), 1e4)), 1e4 + math.log(1000))
    close(D.log_z(torch.zeros(0, 7)), 0)


def test_router_statistics():
    experts = torch.tensor([[[0, 1], [0, 2]], [[0, 1], [3, 0]]])
    load = D.router_load(experts, 5)
    close(load, [4 / 8, 2 / 8, 1 / 8, 1 / 8, 0])
    close(D.max_violation(load), 0.5 * 5 - 1)
    close(D.max_violation(torch.full((3, 4), 0.25)), [0, 0, 0])
    close(D.max_violation(torch.tensor([1.0, 0, 0, 0])), 3)
    close(D.router_load(experts[:0], 3), [0, 0, 0])
    close(D.max_violation(torch.zeros(3)), 0)
    probabilities = (2 * gaussian(3, 7, 6)).softmax(-1)
    close(D.router_entropy(probabilities), entropies(probabilities).mean())
    close(D.router_entropy(probabilities, normalised=True), entropies(probabilities).mean() / math.log(6))
    close(D.router_entropy(torch.full((2, 8), 1 / 8), normalised=True), 1)
    close(D.router_entropy(torch.zeros(0, 8)), 0)
    close(D.router_entropy(torch.ones(4, 1), normalised=True), 0)


# What holds for all of them


@few
@given(seeds, st.integers(2, 20), st.integers(1, 12), st.floats(1e-3, 1e3))
def test_token_statistics_are_bounded_and_blind_to_scale_and_order(seed: int, t: int, d: int, scale: float):
    x = gaussian(t, d, seed=seed) + gaussian(1, d, seed=seed + 1)
    shuffle = torch.randperm(t, generator=torch.Generator().manual_seed(seed))
    rho, mu = D.token_cosine(x).item(), D.relative_residual(x).item()
    assert -1 / (t - 1) - 1e-5 <= rho <= 1 + 1e-5
    assert 0 <= mu <= 1 + 1e-6
    for same in (x * scale, x[shuffle], x.flip(-1)):
        assert D.token_cosine(same).item() == pytest.approx(rho, abs=1e-5)
        assert D.relative_residual(same).item() == pytest.approx(mu, abs=1e-5)
        assert D.composite_residual(same).item() == pytest.approx(D.composite_residual(x).item(), rel=1e-4)
        assert D.massive(same).ratio.item() == pytest.approx(D.massive(x).ratio.item(), rel=1e-5)
    assert D.residual_rms(x * scale).item() == pytest.approx(scale * D.residual_rms(x).item(), rel=1e-5)


@few
@given(seeds, st.integers(1, 12), st.floats(0, 20))
def test_attention_statistics_are_bounded_and_blind_to_the_order_of_heads_and_rows(seed: int, t: int, scale: float):
    scores, pattern = causal_pattern(2, 3, s=t, t=t, seed=seed, scale=scale)
    turned = pattern.flip(1)
    for statistic, low, high in [
        (D.attention_entropy, 0, math.log(t)),
        (lambda p: D.attention_entropy(p, normalised=True), 0, 1),
        (D.sink_mass, 0, 1),
        (D.inverse_participation_ratio, 1 / t, 1),
    ]:
        values = statistic(pattern)
        assert values.shape == (3,)
        assert bool(((values >= low - 1e-5) & (values <= high + 1e-5)).all())
        close(statistic(turned), values.flip(0))
        close(statistic(pattern.flip(0)), values)
    full = torch.tensor(t)
    rows = torch.randperm(t, generator=torch.Generator().manual_seed(seed))
    close(
        D.attention_entropy(pattern[:, :, rows], visible=full),
        D.attention_entropy(pattern, visible=full),
    )
    close(D.max_attention_logit(scores * 2), 2 * D.max_attention_logit(scores))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


READY: dict[str, Any] = {"attention_entropy": softmax, "sink_mass": softmax, "inverse_participation_ratio": softmax,
         "router_entropy": softmax, "max_violation": torch.abs}  # fmt: skip
"""Statistic -> function that turns Gaussian noise into a valid input."""
ON_TENSORS: dict[str, Any] = {
    name: getattr(D, name)
    for name in (
        "attention_entropy", "max_attention_logit", "sink_mass", "inverse_participation_ratio", "token_cosine",
        "relative_residual", "composite_residual", "residual_rms", "singular_values", "effective_rank", "stable_rank",
        "spectral_norm", "row_cosine", "gradient_norm", "gradient_rms", "dead_units", "log_z", "router_entropy",
        "max_violation",
    )
} | {
    "massive": lambda x: D.massive(x).ratio,
    "product_spectrum": lambda x: D.product_spectrum(x, x.flip(-1)),
    "update_ratio": lambda x: D.update_ratio(x.flip(-1), x),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_TENSORS)
def test_half_precision_is_computed_wide(name: str):
    statistic, x = ON_TENSORS[name], READY.get(name, Tensor.float)(gaussian(2, 3, 8, 6)).bfloat16()
    mine, wanted = statistic(x), statistic(x.double())
    assert (mine.dtype, wanted.dtype) == (torch.float32, torch.float64)
    close(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["row_cosine", "product_spectrum", "singular_values", "effective_rank"])
def test_autocast_around_a_statistic_changes_nothing(name: str):
    x = gaussian(2, 16, 24)
    wanted = ON_TENSORS[name](x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ON_TENSORS[name](x), wanted)


@pytest.mark.parametrize("name", ON_TENSORS)
def test_a_value_that_is_not_a_number_is_handed_on(name: str):
    x = READY.get(name, Tensor.float)(gaussian(1, 2, 8, 6))
    x[0, 1, 2, 0] = float("nan")
    assert ON_TENSORS[name](x).isnan().any()


@pytest.mark.parametrize("name", ON_TENSORS)
def test_the_docstring_is_a_page(name: str):
    """Documentation is made of it."""
    assert len(getattr(D, name).__doc__ or "") > 60


@pytest.mark.parametrize(("word", "both"), [("mha", True), ("gqa:2", True), ("mla:16", False)])
def test_scores_of_weights_are_of_maps_that_read_one_stream(word: str, both: bool):
    """Keys that are made of a latent have another input than the queries, and no product with them."""
    model = gf.preset(f"llama@1m+layers=1+d_model=32+heads=4+vocab_size=61+{word}").build(seed=0)
    assert ("layers.0.mixer.qk" in spectra(named_matrices(model))["spectral_norm"]) is both
