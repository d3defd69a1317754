"""Watching a run from inside: it changes nothing, its numbers are what they say, and spikes are acted upon."""

from __future__ import annotations

import doctest
import gc
import json
import math
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.dynamics import Moment, Records, Watch
from glassformer.dynamics import watch as watch_module
from glassformer.dynamics.probe import probe
from glassformer.dynamics.weights import named_matrices, spectra
from glassformer.errors import Code
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts import fused_loops
from glassformer.parts.region import compiled_regions, region
from glassformer.text import Batch, Batches, TextData
from glassformer.training import Callback, Interrupted, Report, Reporter, checkpoint, train
from glassformer.training.progress import read_metrics
from glassformer.training.state import Training
from tests.refused import refused

BATCH, CONTEXT = 4, 32
SMALL = {"batch_size": BATCH, "context": CONTEXT, "compile": False, "threads": 1}
TEN = {**SMALL, "tokens": 10 * BATCH * CONTEXT}


def model(name: str = "llama@1m+gqa:1") -> gf.ModelConfig:
    return preset(name + "+layers=2+d_model=32+heads=2")


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "dynamics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(run: Path) -> bytes:
    folder = checkpoint.latest(run)
    assert folder is not None
    return (folder / "model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()


def stop_at(step: int) -> Reporter:
    def stop(report: Report) -> None:
        if report.step == step and report.validation is None:
            os.kill(os.getpid(), signal.SIGINT)

    return Reporter(stop)


class Poke(Callback):
    """Something goes wrong inside a run, at a step."""

    def __init__(self, step: int, poke: Any):
        self.step, self.poke = step, poke

    def after_update(self, run: Training, moment: Moment) -> None:
        if moment.step == self.step:
            with torch.no_grad():
                self.poke(moment.model)


@pytest.mark.parametrize("name", ["gpt2@1m+dropout:0.1", "llama@1m+gqa:1", "bloom@1m", "falcon@1m"])
def test_watching_changes_nothing(text: TextData, tmp_path: Path, name: str) -> None:
    """Weights, moments and losses are those of the unwatched run, bit for bit."""
    alone = train(model(name), text, TEN, tmp_path / "alone")
    watched = train(model(name), text, {**TEN, "watch": 3}, tmp_path / "watched")
    assert weights(tmp_path / "alone") == weights(tmp_path / "watched")
    assert [row.get("loss") for row in alone.metrics] == [row.get("loss") for row in watched.metrics]
    assert not (tmp_path / "alone" / "dynamics.jsonl").exists()
    assert [row["step"] for row in rows(tmp_path / "watched")] == [1, 3, 6, 9]


@pytest.fixture
def marked_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces `torch.compile`, so that a compiled region differs from its body: floats are larger by a thousandth."""
    regions = [one for one in gc.get_objects() if type(one) is region]  # a dead proxy answers no isinstance
    calls: list[str] = []

    def more(made: Any) -> Any:
        if isinstance(made, tuple):
            return tuple(more(one) for one in made)
        return made * 1.001 if isinstance(made, torch.Tensor) and made.is_floating_point() else made

    def compiled(body: Any, **how: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(body.__name__)
            return more(body(*args))

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    for one in regions:
        monkeypatch.setattr(one, "fused", None)
    yield calls


@pytest.mark.slow  # a compiler runs
@pytest.mark.parametrize("recipe", [{}, {"qk_clip": 0.5}])
def test_watching_changes_nothing_where_regions_are_compiled(
    text: TextData, tmp_path: Path, marked_regions: list[str], recipe: dict[str, Any]
) -> None:
    """The watch measures in separate eager passes; QK-clip observes the step itself, which stays compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model(), text, {**TEN, "compile": True, **recipe}, tmp_path / "alone")
        calls, marked_regions[:] = list(marked_regions), []
        train(model(), text, {**TEN, "compile": True, "watch": 3, **recipe}, tmp_path / "watched")
    assert calls == marked_regions and len(set(calls)) > 3
    assert weights(tmp_path / "alone") == weights(tmp_path / "watched")
    train(model(), text, {**TEN, **recipe}, tmp_path / "eager")
    assert weights(tmp_path / "eager") != weights(tmp_path / "alone")  # the mark is seen


@pytest.mark.parametrize("name", ["llama@1m", "gpt2@1m"])
def test_regions_run_eagerly_while_observed(
    marked_regions: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning appears once for each capture or edit, whichever of the two contexts is the outer one."""
    monkeypatch.setattr(fused_loops, "_library", lambda: None)  # its loops come before regions
    net = model(name).replace(vocab_size=11, context=CONTEXT).build(seed=0).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        plain = net(tokens)
        with compiled_regions():
            assert not torch.equal(net(tokens), plain)
            marked_regions.clear()
            with pytest.warns(UserWarning, match="observed or edited, they run eagerly") as said:
                assert torch.equal(gf.capture(net, tokens, "*")["logits"], plain)
            assert len(said) == 1
            with pytest.warns(UserWarning) as said, gf.edit(net, {"embed": lambda x: x}):
                assert torch.equal(net(tokens), plain) and torch.equal(net(tokens), plain)
                assert torch.equal(gf.capture(net, tokens, "logits")["logits"], plain)
            assert len(said) == 1 and not marked_regions
            assert not torch.equal(net(tokens), plain) and marked_regions
        marked_regions.clear()
        with pytest.warns(UserWarning) as said, gf.edit(net, {"embed": lambda x: x}), compiled_regions():
            assert torch.equal(net(tokens), plain)
        assert len(said) == 1 and not marked_regions
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gf.capture(net, tokens, "*")


def test_resumed_run_continues_its_watch(text: TextData, tmp_path: Path) -> None:
    """Rows and the watch's state are those of the run that did not stop; what came after the checkpoint is cut."""

    recipe = {**TEN, "watch": 2}
    train(model(), text, recipe, tmp_path / "straight")
    with pytest.raises(Interrupted):
        train(model(), text, recipe, tmp_path / "broken", callbacks=[stop_at(5)])
    with (tmp_path / "broken" / "dynamics.jsonl").open("a") as file:
        file.write('{"step": 6, "event": "spike"}\n{"step": 8, "stat')  # a crash after the checkpoint
    train(model(), text, recipe, tmp_path / "broken", resume=True)
    assert rows(tmp_path / "broken") == rows(tmp_path / "straight")
    states = [checkpoint.read_watch(checkpoint.latest(tmp_path / run)) for run in ("straight", "broken")]  # type: ignore[arg-type]
    assert states[0] == states[1] and len(states[0]["ring"]) == 10


def test_a_damaged_state_is_refused(text: TextData, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(model(), text, TEN, tmp_path, callbacks=[stop_at(5)])
    kept = checkpoint.latest(tmp_path)
    assert kept is not None
    (kept / "watch.json").write_text("{}")
    with refused(code="damaged", field="watch.json"):
        train(model(), text, TEN, tmp_path, resume=True)


def test_weights_gradients_and_updates_are_measured(text: TextData) -> None:
    """Each against the tensors themselves."""
    net = model().replace(vocab_size=text.tokenizer.vocab_size, context=CONTEXT).build(seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = Watch(net, every=1)
    tokens = torch.randint(0, 10, (2, 16), generator=torch.Generator().manual_seed(0))
    net.loss(tokens, tokens).backward()
    moment = Moment(1, 3.0, 1.0, 0.1, tokens, tokens, net, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    watch.before_update(moment)
    optimizer.step()
    watch.after_update(moment)
    found = watch.ring[-1]["statistics"]
    qkv, grad = before["layers.1.mixer.qkv.weight"], net.layers[1].mixer.qkv.weight.grad
    heads = {"q": (0, 2), "k": (32, 1), "v": (48, 1)}  # h = 16: two query heads, one key and value head
    for name, (first, n) in heads.items():
        for head in range(n):
            part = slice(first + 16 * head, first + 16 * (head + 1))
            where = f"layers.1.mixer.{name}"
            assert found["weight_norm"][where][head] == pytest.approx(qkv[part].norm().item(), rel=1e-5)
            assert found["gradient_norm"][where][head] == pytest.approx(grad[part].norm().item(), rel=1e-5)
            rms = grad[part].square().mean().sqrt().item()
            assert found["gradient_rms"][where][head] == pytest.approx(rms, rel=1e-5)
            moved = net.layers[1].mixer.qkv.weight.detach()[part]
            ratio = ((moved - qkv[part]).norm() / qkv[part].norm()).item()
            assert found["update_ratio"][where][head] == pytest.approx(ratio, rel=1e-4)
            top = torch.linalg.matrix_norm(moved, 2).item()
            assert found["spectral_norm"][where][head] == pytest.approx(top, rel=1e-4)
    q, k = net.layers[1].mixer.qkv.weight.detach()[:32], net.layers[1].mixer.qkv.weight.detach()[32:48]
    for head in range(2):
        singular = torch.linalg.svdvals(q[16 * head : 16 * (head + 1)].T @ k)
        share = singular / singular.sum()
        erank = (-(share * share.clamp_min(1e-30).log()).sum()).exp().item()
        assert found["effective_rank"]["layers.1.mixer.qk"][head] == pytest.approx(erank, rel=1e-3)
        rows = torch.nn.functional.normalize(q[16 * head : 16 * (head + 1)].T @ k, dim=-1)
        pairs = [abs(float(rows[i] @ rows[j])) for i in range(32) for j in range(i)]
        mean = sum(pairs) / len(pairs)
        assert found["row_cosine"]["layers.1.mixer.qk"][head] == pytest.approx(mean, rel=1e-4)
    down = before["layers.0.ffn.down_proj.weight"]
    assert found["weight_norm"]["layers.0.ffn.down"] == pytest.approx(down.norm().item(), rel=1e-5)
    assert found["weight_norm"]["embed"] == pytest.approx(before["embedding.weight"].norm().item(), rel=1e-5)


def test_a_zero_weight_that_moved_has_moved_by_inf(tmp_path: Path) -> None:
    """`update_ratio` is inf in the row, in the file and in the checkpoint; a weight that stays zero has not moved."""
    net = model().replace(vocab_size=11, context=CONTEXT).build(seed=0)
    net.layers[0].ffn.down_proj.weight.data.zero_()
    net.layers[1].ffn.up_proj.weight.data.zero_()
    net.layers[1].ffn.up_proj.weight.requires_grad_(False)
    records = Records(tmp_path / "dynamics.jsonl")
    watch, optimizer = Watch(net, every=1, records=records), torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = torch.randint(0, 11, (2, 16), generator=torch.Generator().manual_seed(0))
    net.loss(tokens, tokens).backward()
    was = net.layers[0].ffn.down_proj.weight.detach().clone()
    moment = Moment(1, 3.0, 1.0, 0.1, tokens, tokens, net, optimizer)
    watch.before_update(moment)
    optimizer.step()
    watch.after_update(moment)
    records.close()
    found = watch.ring[-1]["statistics"]["update_ratio"]
    moved = net.layers[0].ffn.down_proj.weight.detach() - was
    assert found["layers.0.ffn.down"] == math.inf == gf.dynamics.update_ratio(moved, was).item()
    assert found["layers.1.ffn.up"] == 0.0
    assert rows(tmp_path)[0]["statistics"]["update_ratio"]["layers.0.ffn.down"] == "inf"
    (kept,) = gf.dynamics.read_records(tmp_path / "dynamics.jsonl")
    assert kept["statistics"]["update_ratio"]["layers.0.ffn.down"] == math.inf
    resumed = Watch(net, every=1)
    resumed.restore(json.loads(json.dumps(watch.state())))
    assert resumed.state() == watch.state()


@pytest.mark.parametrize("name", ["llama@1m+gqa:1", "bloom@1m", "llama@1m+window:5", "falcon@1m"])
def test_activations_are_measured(name: str) -> None:
    """Each against what capture sees."""
    net = model(name).replace(vocab_size=11, context=CONTEXT).build(seed=0).train()
    tokens = torch.randint(0, 11, (2, 16), generator=torch.Generator().manual_seed(0))
    found = probe(net, tokens)
    assert net.training
    seen = gf.capture(net.eval(), tokens, "*")
    for layer in range(2):
        pattern, scores = (seen[f"layers.{layer}.mixer.{site}"].double() for site in ("pattern", "scores"))
        visible = torch.isfinite(scores).sum(-1)
        entropy = torch.special.entr(pattern).sum(-1) / visible.clamp_min(2).log()
        for head in range(pattern.shape[1]):
            where, choice = f"layers.{layer}.mixer", visible[:, 0] > 1
            mean = entropy[:, head][choice].mean().item()
            assert found["attention_entropy"][where][head] == pytest.approx(mean, rel=1e-4)  # type: ignore[index]
            assert 0 <= mean <= 1 + 1e-9
            largest = scores[:, head][torch.isfinite(scores[:, head])].abs().max().item()
            assert found["max_attention_logit"][where][head] == pytest.approx(largest, rel=1e-4)  # type: ignore[index]
            sink = pattern[:, head, :, 0].mean().item()
            assert found["sink_mass"][where][head] == pytest.approx(sink, rel=1e-4)  # type: ignore[index]
        x = seen[f"layers.{layer}.resid_post"].double()
        unit = torch.nn.functional.normalize(x, dim=-1)
        cosines = unit @ unit.mT
        rho = ((cosines.sum((1, 2)) - 16) / (16 * 15)).mean().item()
        where = f"layers.{layer}.resid_post"
        assert found["token_cosine"][where] == pytest.approx(rho, abs=1e-4)
        mu = ((x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean().item()
        assert found["relative_residual"][where] == pytest.approx(mu, rel=1e-4)
        rms = x.square().mean((1, 2)).sqrt().mean().item()
        assert found["residual_rms"][where] == pytest.approx(rms, rel=1e-3)
        assert found["massive"][where] == pytest.approx((x.abs().max() / x.abs().median()).item(), rel=1e-3)
    assert found["log_z"]["logits"] == pytest.approx(seen["logits"].double().logsumexp(-1).mean().item(), rel=1e-5)


class Streams(Callback):
    """Callback that records every layer's output, by plain hooks, after the steps that the watch measures."""

    def __init__(self, every: int):
        self.every = every
        self.seen: dict[int, list[np.ndarray]] = {}

    def after_update(self, run: Training, moment: Moment) -> None:
        if moment.step != 1 and moment.step % self.every:
            return
        found: list[np.ndarray] = []
        hooks = [
            layer.register_forward_hook(lambda module, given, x: found.append(x.double().numpy()))
            for layer in moment.model.layers
        ]
        with torch.no_grad():
            moment.model(moment.inputs)
        for hook in hooks:
            hook.remove()
        self.seen[moment.step] = found


def test_the_recorded_ranks_are_those_of_the_stream(text: TextData, tmp_path: Path) -> None:
    """Ranks in dynamics.jsonl equal those from numpy's singular values of the layers' outputs."""
    streams = Streams(3)
    config = model().replace(init=gf.preset("gpt2@1m+init.std=0.3").init)  # far from full rank: ranks differ
    recipe = {**TEN, "watch": 3, "learning_rate": 0.03, "dtype": "float32"}
    train(config, text, recipe, tmp_path, callbacks=[streams])
    recorded = {
        row["step"]: row["statistics"] for row in rows(tmp_path) if "activation_stable_rank" in row["statistics"]
    }
    assert list(recorded) == list(streams.seen) == [1, 3, 6, 9]
    values = set()
    for step, layers in streams.seen.items():
        for layer, x in enumerate(layers):
            assert x.shape == (BATCH, CONTEXT, 32)
            effective = stable = 0.0
            for sequence in x:
                singular = np.linalg.svd(sequence, compute_uv=False)
                share = singular[singular > 0] / singular.sum()
                effective += math.exp(-float((share * np.log(share)).sum())) / BATCH
                stable += float((singular**2).sum() / singular[0] ** 2) / BATCH
            where = f"layers.{layer}.resid_post"
            assert recorded[step]["activation_effective_rank"][where] == pytest.approx(effective, rel=1e-4)
            assert recorded[step]["activation_stable_rank"][where] == pytest.approx(stable, rel=1e-4)
            values |= {round(effective, 3), round(stable, 3)}
    assert len(values) == 16  # all different


HUNDRED = {**SMALL, "batch_size": 2, "context": 16, "tokens": 100 * 2 * 16, "learning_rate": 1e-3}


def test_user_loop_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the docstring, which docs/under_glass.md repeats, runs unchanged."""
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_examples(gf.dynamics.Watch.__doc__ or "")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec("".join(one.source for one in examples), {"gf": gf, "torch": torch, "math": math, "Path": Path})
    assert capsys.readouterr().out == examples[-1].want == "nothing wrong\n"
    assert [row["step"] for row in rows(tmp_path) if "statistics" in row] == [1, 25, 50, 75, 100]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routers_are_measured(score: str) -> None:
    expression = f"llama@1m+moe:4:2+ffn.score={score}+ffn.balance_rate=0.1+ffn.capacity=0.9"
    net = model(expression).replace(vocab_size=11, context=CONTEXT).build(seed=0).train()
    for layer in net.layers:
        layer.ffn.router.weight.data *= 30
        layer.ffn.router.selection_bias.copy_(torch.tensor([0.0, 0.2, -0.2, 0.0]))
    tokens = torch.randint(0, 11, (2, 16), generator=torch.Generator().manual_seed(0))
    found = probe(net, tokens)
    assert net.training and all(layer.ffn.router.load.sum() == 0 for layer in net.layers)
    seen = gf.capture(net.eval(), tokens, "layers.*.ffn.router")
    for where, p in seen.items():
        counts, entropy = [0] * 4, 0.0
        for row in p.flatten(0, 1):
            for expert in (row + torch.tensor([0.0, 0.2, -0.2, 0.0])).argsort()[-2:].tolist():
                counts[expert] += 1
            share = row / row.sum()
            entropy -= float((share * share.log()).sum()) / 32
        assert found["router_load"][where] == pytest.approx([count / 64 for count in counts])
        over = [max(0, count - 15) for count in counts]  # ceil(0.9 * 64 / 4)
        assert found["router_dropped"][where] == pytest.approx(sum(over) / 64) and sum(over)
        assert found["max_violation"][where] == pytest.approx(max(counts) / 16 - 1)
        assert found["router_entropy"][where] == pytest.approx(entropy, rel=1e-5)


def test_non_finite_step_names_its_site(text: TextData, tmp_path: Path) -> None:
    def poke(net: Any) -> None:
        net.layers[1].ffn.up.register_forward_hook(lambda site, args, x: x * float("nan"))

    run = train(model(), text, {**TEN, "watch": 2, "evaluate_every": 1}, tmp_path, callbacks=[Poke(4, poke)])
    assert run.status == "diverged" and "after step 4" in str(run.error)  # found by the evaluation
    event = next(row for row in rows(tmp_path) if row.get("event") == "not_finite")
    assert (event["step"], event["site"], event["what"]) == (4, "layers.1.ffn.up", "loss")
    assert event["value"] == "nan" and len(event["batch"]) == 3 and all(len(one) <= 240 for one in event["batch"])
    steps = [row["step"] for row in rows(tmp_path) if "statistics" in row]
    assert sorted(steps) == [1, 2, 3, 4]  # the ring is written
    run = train(model(), text, {**TEN, "watch": 2}, tmp_path / "w", callbacks=[Poke(4, spoil_a_weight)])
    event = next(row for row in rows(tmp_path / "w") if row.get("event") == "not_finite")
    assert event["site"] == "layers.0.ffn.down (its weights)"


def spoil_a_weight(net: Any) -> None:
    net.layers[0].ffn.down_proj.weight[3, 3] = float("inf")


HUNDRED = {**SMALL, "batch_size": 2, "context": 16, "tokens": 100 * 2 * 16, "learning_rate": 1e-3}


@pytest.fixture
def one_bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of step 80 is noise."""
    whole = Batches.__getitem__

    def get(self: Batches, step: int) -> Batch:
        inputs, targets = whole(self, step)
        if step == 79:
            noise = torch.Generator().manual_seed(0)
            inputs, targets = (torch.randint(0, int(x.max()) + 1, x.shape, generator=noise) for x in (inputs, targets))
        return Batch(inputs, targets)

    monkeypatch.setattr(Batches, "__getitem__", get)


def test_a_spike_is_found_and_noted(text: TextData, tmp_path: Path, one_bad_batch: None) -> None:
    told: list[Any] = []
    run = train(
        model(),
        text,
        {**HUNDRED, "watch": 20},
        tmp_path,
        callbacks=[Reporter(lambda report: told.extend(report.events))],
    )
    assert run.status == "ok"
    event = next(row for row in rows(tmp_path) if row.get("event") == "spike" and row["what"] == "loss")
    assert event["step"] == 80 and event["sigmas"] > 6 and event["batch_losses"][0] > event["value"] - 0.5
    assert any(event["step"] == 80 and event["what"] == "loss" for event in told)
    steps = [row["step"] for row in rows(tmp_path) if "statistics" in row]
    assert set(range(17, 97)) <= set(steps)  # 64 before, all to 16 after
    assert len(steps) == len(set(steps))


def test_sequences_of_a_spike_are_chosen_by_their_own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them are run together; targets that do not count are left out of the means."""
    net = model().replace(vocab_size=11, context=CONTEXT).build(seed=0)
    tokens = torch.randint(0, 11, (5, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).index_fill(1, torch.tensor([2, 15]), -100)
    alone = [net.eval().loss(x, y).item() for x, y in zip(tokens.split(1), targets.split(1), strict=True)]
    moment = Moment(1, math.nan, 1.0, 0.1, tokens, targets, net, torch.optim.SGD(net.parameters(), lr=0.1))
    for together in (1, 16, 32, 4096):
        monkeypatch.setattr(watch_module, "BATCH_TOKENS", together)
        (folder := tmp_path / str(together)).mkdir()
        watch = Watch(net, records=Records.open(folder, 0))
        assert watch.not_finite(moment)["batch_losses"] == pytest.approx(sorted(alone, reverse=True)[:3], rel=1e-5)
    assert "batch" not in Watch(net).not_finite(moment)  # without records, no batch is kept


@pytest.mark.slow
def test_a_spike_is_left_out(text: TextData, tmp_path: Path, one_bad_batch: None) -> None:
    run = train(model(), text, {**HUNDRED, "on_spike": "skip"}, tmp_path)
    assert run.steps == 100
    skipped = [row["step"] for row in run.metrics if "skipped" in row]
    assert 80 in skipped and len(skipped) <= 3
    assert [row["step"] for row in rows(tmp_path) if row.get("event") == "skipped"] == skipped


@pytest.mark.slow
def test_a_run_goes_back_before_a_spike(text: TextData, tmp_path: Path, one_bad_batch: None) -> None:
    recipe = {**HUNDRED, "on_spike": "roll_back"}
    with pytest.raises(Interrupted):  # which saves
        train(model(), text, recipe, tmp_path, callbacks=[stop_at(75)])
    run = train(model(), text, recipe, tmp_path, resume=True)
    assert run.steps == 100 and run.status == "ok"
    back = next(row for row in rows(tmp_path) if row.get("event") == "rolled_back")
    assert (back["step"], back["from"], back["to"]) == (75, 80, 75)
    spike = next(row for row in rows(tmp_path) if row.get("event") == "spike")
    assert (spike["step"], spike["from"]) == (75, 80)  # kept by a resume from the checkpoint of 75, too
    metrics = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in metrics] == list(range(1, 101))
    assert max(row["loss"] for row in metrics[70:]) < 3.2  # noise costs more; its batch is not read again
    assert checkpoint.read_state(checkpoint.latest(tmp_path))["shift"] == 5  # type: ignore[arg-type]


def test_not_a_number_can_be_left_out_too(text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that overflows once costs one step, not the run; one that stays ends it after ten."""
    plain = Model.loss
    passes = iter(range(10_000))

    def loss(self: Model, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = plain(self, *args, **kwargs)
        return made * float("nan") if self.training and bad(next(passes)) else made

    monkeypatch.setattr(Model, "loss", loss)
    recipe = {**TEN, "on_spike": "skip", "tokens": 20 * BATCH * CONTEXT}
    bad = lambda call: call == 4  # noqa: E731  # pass 0 warms up
    run = train(model(), text, recipe, tmp_path / "once")
    assert run.status == "ok" and [row["step"] for row in run.metrics if "skipped" in row] == [4]
    bad = lambda call: True  # noqa: E731
    run = train(model(), text, recipe, tmp_path / "always")
    assert run.status == "diverged" and len([row for row in run.metrics if "skipped" in row]) == 10


@pytest.mark.parametrize(
    ("recipe", "code", "field"),
    [
        ({"watch": 0}, "range", "watch"),
        ({"watch": -3}, "range", "watch"),
        ({"on_spike": "explode"}, "unknown", "on_spike"),
        ({"on_spike": "roll_back"}, "missing", "out"),
    ],
)
def test_wrong_requests_are_refused(text: TextData, recipe: dict[str, Any], code: Code, field: str) -> None:
    with refused(code=code, field=field):
        train(model(), text, {**TEN, **recipe})


def test_the_monitor_refuses_an_interval_of_zero_and_a_damaged_state() -> None:
    net = model().replace(vocab_size=11, context=CONTEXT).build(seed=0)
    with refused(code="range", field="watch"):
        Watch(net, every=0)
    for state in (None, [], {}, {"ring": 3}, {"ring": [3]}):
        with refused(code="damaged", field="state.ring"):
            Watch(net, every=1).restore(state)


def test_spectra_are_those_of_the_applied_matrices() -> None:
    """A sigma-reparametrised matrix has the norm gamma, however large the one beneath it grows."""
    net = model("llama@1m+sigmareparam").replace(vocab_size=11, context=CONTEXT).build(seed=0).eval()
    up = net.layers[1].ffn.up_proj
    with torch.no_grad():
        up.weight.mul_(50.0)
    found = spectra(named_matrices(net))["spectral_norm"]["layers.1.ffn.up"]
    assert found == pytest.approx(torch.linalg.matrix_norm(up.applied(), 2).item(), rel=1e-4)
    assert found == pytest.approx(float(up.reparam.gamma.detach()), rel=1e-3)
