"""Sums whose bits do not depend on who adds them up."""

from __future__ import annotations

import json
import math
import operator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.naming import preset
from glassformer.parallel.sums import LONGEST, norm_of_rows, row_squares, tree_sum
from glassformer.text import prepare
from glassformer.training import Interrupted, Reporter, checkpoint, train


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_a_tree_is_cut_by_any_power_of_two_of_ranks(values: list[float], ranks: int):
    """Rounds of ranks that are added up first, and then one after the other, give the bits of one process."""
    values = values * ranks  # the ranks divide the atoms
    rounds = [tree_sum(values[i : i + ranks], operator.add) for i in range(0, len(values), ranks)]
    assert tree_sum(rounds, operator.add) == tree_sum(values, operator.add)


def test_a_tree_adds_neighbours():
    assert tree_sum("abcdefg", lambda a, b: f"({a}{b})") == "(((ab)(cd))((ef)g))"


@pytest.mark.parametrize("columns", [1, 7, 300, LONGEST + 3])
def test_sums_of_rows_do_not_depend_on_other_rows(columns: int):
    """torch divides a long sum among its threads if it is the only one, and does not if there are two sums."""
    gradient, threads = torch.randn(5, columns), torch.get_num_threads()
    whole = row_squares(gradient).view(-1, 5)
    try:
        for used in (1, 2):
            torch.set_num_threads(used)
            for first, last in ((0, 1), (1, 3), (4, 5)):
                assert torch.equal(row_squares(gradient[first:last]).view(-1, last - first), whole[:, first:last])
    finally:
        torch.set_num_threads(threads)


def test_the_norm_is_that_of_all_values_and_knows_no_order():
    gradients = [torch.randn(3, 4, 5), torch.randn(7), torch.randn(()), torch.zeros(0, 3)]
    squares = [row_squares(one) for one in gradients]
    expected = math.sqrt(math.fsum(x * x for one in gradients for x in one.double().flatten().tolist()))
    assert norm_of_rows(squares) == pytest.approx(expected, rel=1e-14)
    assert norm_of_rows(squares) == norm_of_rows([one.flip(0) for one in reversed(squares)])
    assert norm_of_rows([]) == 0 and math.isnan(norm_of_rows([torch.tensor([math.nan, 1.0]).double()]))
    assert norm_of_rows([torch.tensor([1e308, 1e308]).double()]) == math.inf


def test_run_keeps_its_first_order_of_sums(tmp_path: Path):
    """A state.json that names no order is of a run that was started when only one order existed."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    text = prepare(tmp_path / "text", "char")
    config = preset("gpt2@1m+dropout:0.1+layers=1+d_model=16+heads=2")
    recipe = {"steps": 4, "batch_size": 4, "micro_batch": 1, "context": 8, "compile": False, "dtype": "float32"}

    def stop(run: object) -> None:
        raise Interrupted("asked to stop", code="stopped")

    class Stopping(Reporter):
        def saved(self, run: object, folder: Path) -> None:
            stop(run)

    found = {}
    for name in ("as it is", "older"):
        out = tmp_path / name
        with pytest.raises(Interrupted):
            train(config, text, {**recipe, "checkpoint_seconds": 1e-9}, out, callbacks=[Stopping(lambda report: None)])
        state = checkpoint.latest(out) / "state.json"  # type: ignore[operator]
        said = json.loads(state.read_text())
        assert said["sums"] == "tree" and said["step"] == 1
        if name == "older":
            del said["sums"]
            state.write_text(json.dumps(said))
        run = train(config, text, {**recipe, "checkpoint_seconds": 1e-9}, out, resume=True)
        found[name] = [row["loss"] for row in run.metrics if "loss" in row]
        final = json.loads((checkpoint.latest(out) / "state.json").read_text())  # type: ignore[operator]
        assert final["sums"] == ("tree" if name == "as it is" else "sequence")
    assert found["older"][0] == found["as it is"][0] and found["older"][1] != found["as it is"][1]
