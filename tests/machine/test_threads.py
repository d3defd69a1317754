"""The choice of threads while work runs: pure arithmetic, so that neighbours and a clock are made up here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import glassformer as gf
from glassformer import files, machine
from glassformer.generation import prefill, sampling, stream
from glassformer.generation.steps import decode
from glassformer.machine import processor, thread_cache, threads
from glassformer.machine.defaults import chosen
from glassformer.machine.device import Abilities
from glassformer.machine.others import CoreTimes, Others
from glassformer.machine.pace import LATE, SURE, Pace, Way, ways
from glassformer.machine.threads import Pacing
from glassformer.parts import few_rows
from glassformer.parts.quantized import quantize

Seconds = Callable[[Way, float], float]


class Machine:
    """Two cores, a clock, and units of work, whose seconds by way of threads depend on a neighbour's presence."""

    def __init__(self, free: bool, alone: list[float], beside: list[float], noise: float = 0.0, told: bool = True):
        self.pace = Pace(ways(2, free), cores=2)
        self.alone, self.beside, self.noise, self.told = alone, beside, noise, told
        self.now, self.neighbours, self.draw = 0.0, 0, random.Random(0)
        self.changes, self.units = 0, 0

    def run(self, seconds: float) -> float:
        """Works for some seconds; returns the mean time of a unit."""
        end, began, units = self.now + seconds, self.now, 0
        while self.now < end:
            at = self.pace.at
            self.pace.prepare(self.others(), self.now)
            took = (self.beside if self.neighbours else self.alone)[self.pace.at] * (
                1 + self.noise * self.draw.random()
            )
            self.now, units = self.now + took, units + 1
            self.pace.took(took, self.now, self.others)
            self.changes += self.pace.at != at
        return (self.now - began) / units

    def others(self) -> float | None:
        return float(self.neighbours) if self.told else None


DECODE = {"alone": [1 / 152, 1 / 183], "beside": [1 / 152, 1 / 55]}
"""Seconds of a token with one thread and with two, as measured."""
TRAIN = {"alone": [0.50, 0.47], "beside": [0.80, 1.4]}
"""Seconds of a step whose threads sleep, and do not."""


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("free", "times"), [(True, DECODE), (False, TRAIN)])
def test_it_gives_way_and_comes_back(free: bool, times: dict[str, list[float]], noise: float, told: bool) -> None:
    """Without a neighbour the time is within 2 % of the best (5 if units scatter by more), with one within 10, soon
    after it came and after it left; within a minute if the neighbour is not reported."""
    here = Machine(free, **times, noise=noise, told=told)
    usual = 1 + noise / 2
    unit = max(*times["alone"], *times["beside"])
    here.run(10 * unit)
    for _ in range(3):
        here.neighbours = 0
        here.run(max(1.0, 10 * unit) if told else 70)
        assert here.run(200 * unit) < (1.05 if noise else 1.02) * usual * min(times["alone"])
        here.neighbours = 1
        here.run(6 * unit)
        assert here.run(200 * unit) < 1.10 * usual * min(times["beside"])


@pytest.mark.parametrize("told", [True, False])
def test_it_does_not_swing(told: bool) -> None:
    """In an hour with a neighbour, or without, tries become rare; if a neighbour comes and goes, they are bounded."""
    for neighbours in (0, 1):
        here = Machine(True, **DECODE, noise=0.2, told=told)
        here.neighbours = neighbours
        here.run(60)
        before = here.changes
        here.run(3600)
        assert here.changes - before <= 2 * 3600 / LATE + 2
    here = Machine(True, **DECODE, told=told)
    for _ in range(600):
        here.neighbours = 1 - here.neighbours
        here.run(0.2)
    assert here.changes < 120, "two changes a second are more than a neighbour of a fifth of a second is worth"


def test_small_work_takes_one_thread_from_the_start() -> None:
    here = Machine(True, alone=[100e-6, 140e-6], beside=[100e-6, 900e-6])
    here.run(0.2)
    assert here.pace.way == Way(1)
    assert here.run(60) < 1.01 * 100e-6


def test_the_first_unit_after_a_neighbour_takes_the_cores_again() -> None:
    """Units are long, as pieces of a prompt are: not one is spent on a try."""
    here = Machine(True, alone=[0.33, 0.19], beside=[0.34, 0.75])
    for _ in range(3):
        here.neighbours = 0
        here.run(1.5)
        assert here.pace.way == Way(2)
        here.neighbours = 1
        here.run(20)
        assert here.pace.way == Way(1)
    here.neighbours = 0
    assert here.run(2.0) == pytest.approx(0.19)


def test_one_slow_unit_changes_nothing() -> None:
    here = Machine(True, **DECODE)
    here.run(5)
    before = here.changes
    here.pace.took(1.0, here.now)
    here.run(0.1)
    assert (here.changes, here.pace.way) == (before, Way(2))


def test_long_units_are_not_tried_with_less_for_nothing() -> None:
    """A prompt read in a second, alone: no piece takes two."""
    here = Machine(True, alone=[1.7, 1.0], beside=[1.7, 3.0])
    here.run(60)
    assert here.changes == 0


def test_busy_machine_starts_with_the_humblest_way() -> None:
    for free, humble in ((True, Way(1)), (False, Way(2, sleep=True))):
        for others, way in ((1.0, humble), (0.2, Way(2)), (None, Way(2)), (2.0, humble)):
            pace = Pace(ways(2, free), cores=2)
            pace.prepare(others, 0.0)
            assert pace.way == way
    pace = Pace(ways(2, free=True), cores=2)
    for now in range(9):
        pace.prepare(2.0, now)
        pace.took(0.02, now, lambda: 2.0)
    assert (pace.way, pace.usual) == (Way(1), {0: 0.02}), "the humblest way is timed with any number of others"
    pace = Pace(ways(8, free=True), cores=8)
    pace.prepare(1.0, 0.0)
    assert pace.way == Way(7)


def test_ways() -> None:
    assert [way.threads for way in ways(8, free=True)] == [1, 2, 4, 7, 8]
    assert [way.threads for way in ways(2, free=True)] == [1, 2]
    assert ways(3, free=False) == [Way(3, sleep=True), Way(3)]


@pytest.fixture
def pacing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pacing]:
    """Yields the pacing of this process, which has two threads while others use two cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "kept"))
    torch.set_num_threads(2)
    with threads.using(Pacing(others=taking(2.0))) as pacing:
        yield pacing
    torch.set_num_threads(1)


def taking(cores: float | None) -> Callable[..., float | None]:
    """Returns a source that reports `cores` cores used by other processes; None if unknown."""
    return lambda worked=False: cores


class Owner:
    pass


class Clock:
    """A unit of work takes what its way does."""

    def __init__(self, pacing: Pacing, seconds: dict[int, float]):
        self.now, self.seconds = 0.0, seconds
        pacing.clock = lambda: self.now

    def work(self, owner: object, units: int, kind: str = "work") -> list[int]:
        """How many threads each had."""
        took = []
        for _ in range(units):
            with threads.paced(owner, kind):
                took.append(torch.get_num_threads())
                self.now += self.seconds[took[-1]]
        return took


@pytest.fixture
def quiet(pacing: Pacing) -> Pacing:
    """Returns the pacing of this process while no other process uses a core."""
    pacing.others = taking(0.0)
    return pacing


def kept_file(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "threads.json"


def test_gain_of_a_way_is_cached_for_the_processor(quiet: Pacing, tmp_path: Path) -> None:
    """A later process starts with the way that served: no unit is spent on the other."""
    clock = Clock(quiet, {1: 0.010, 2: 0.015})
    assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]
    (known,) = json.loads(kept_file(tmp_path).read_text()).values()
    assert known == {"work on 2^0 bytes: 2 / 1": [1.5]}
    assert clock.work(Owner(), 8) == [1] * 8
    clock.seconds = {1: 0.020, 2: 0.012}
    assert clock.work(Owner(), 8, kind="other work") == [2, 2, 2, 1, 1, 1, 2, 2], "of this work nothing is known"
    assert clock.work(Owner(), 8, kind="other work") == [2] * 8


def test_cached_gain_is_tried_again_and_corrected(quiet: Pacing) -> None:
    """It pins nothing: after some seconds the other way is tried, and as soon as units become slower."""
    clock = Clock(quiet, {1: 0.010, 2: 0.015})
    clock.work(Owner(), 8)
    clock.seconds = {1: 0.010, 2: 0.006}
    second = Owner()
    assert clock.work(second, 8) == [1] * 8
    clock.work(second, 1 + int(SURE / 0.010))
    assert clock.work(second, 20) == [2] * 20
    third = Owner()
    clock.work(third, 2000)
    assert clock.work(third, 20) == [2] * 20
    for _ in range(3):
        clock.work(Owner(), 2000)
    assert clock.work(Owner(), 8) == [2] * 8, "the median of what was found is believed"
    clock.work(fourth := Owner(), 8)
    clock.seconds = {1: 0.010, 2: 0.030}
    assert clock.work(fourth, 60).count(1) > 40


@pytest.mark.parametrize("told", [2.0, None])
def test_cached_gain_yields_to_neighbours(told: float | None, quiet: Pacing, tmp_path: Path) -> None:
    """If neighbours are reported, the humbler way is taken at once; otherwise it is tried as if nothing were known.
    Times measured with neighbours are not kept."""
    clock = Clock(quiet, {1: 0.010, 2: 0.007})
    clock.work(Owner(), 8)
    before = kept_file(tmp_path).read_text()
    clock.seconds = {1: 0.010, 2: 0.020}
    quiet.others = taking(told)
    assert clock.work(Owner(), 8) == ([1] * 8 if told else [2, 2, 2, 1, 1, 1, 1, 1])
    assert kept_file(tmp_path).read_text() == before


@pytest.mark.parametrize(
    "damaged",
    [
        "", "{", "[]", "\0" * 70_000, "[" * 100_000, " " * (1 << 21), '{"HERE": 1}', '{"HERE": {"PAIR": 1.5}}',
        '{"HERE": {"PAIR": []}}', '{"HERE": {"PAIR": [NaN]}}', '{"HERE": {"PAIR": ["1.5"]}}',
        '{"HERE": {"PAIR": [1.5, -1.0]}}', '{"HERE": {"PAIR": [1e300]}}', '{"HERE": {"PAIR": [1.5, 1, 2.5]}}',
        '{"another processor": {"PAIR": [1.5]}}', '{"HERE": {"another kind: 2 / 1": [1.5]}}',
    ],
)  # fmt: skip
def test_a_damaged_file_and_another_processors_are_ignored(damaged: str, quiet: Pacing, tmp_path: Path) -> None:
    """Times measured next are kept together with those of other processors."""
    file = kept_file(tmp_path)
    file.parent.mkdir()
    named = damaged.replace("HERE", thread_cache.here()).replace("PAIR", "work on 2^0 bytes: 2 / 1")
    file.write_text(named)
    clock = Clock(quiet, {1: 0.010, 2: 0.015})
    assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]
    known = json.loads(file.read_text())
    assert known[thread_cache.here()]["work on 2^0 bytes: 2 / 1"] == [1.5]
    assert ("another processor" in known) == ("another processor" in damaged)
    assert list(file.parent.iterdir()) == [file]


def test_cached_gains_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    two = ways(2, free=True)
    for ratio in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, float("nan"), 0.0, 1e9):
        thread_cache.keep("work", two, 1, ratio)
    assert thread_cache.gains("work", two) == {1: 4.0}
    file, spare = tmp_path / "threads.json", thread_cache.KINDS
    for i in range(spare + 10):
        thread_cache.keep(f"work {i} {'x' * 1000}", two, 1, 1.0)
    (known,) = json.loads(file.read_text()).values()
    assert len(known) == spare and max(map(len, known)) == thread_cache.LONGEST
    assert thread_cache.gains("work", two) == {}
    file.write_text(json.dumps({"another": "x" * (files.MOST - 30)}))
    thread_cache.keep("work", two, 1, 1.0)
    assert list(json.loads(file.read_text())) == [thread_cache.here()], "the first goes"


def test_unwritable_cache_keeps_no_gains(quiet: Pacing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "file"))
    clock = Clock(quiet, {1: 0.010, 2: 0.015})
    for _ in range(2):
        assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]


def test_separate_unit_has_a_separate_pace(quiet: Pacing) -> None:
    """The unit around it does not count its time, and continues with its way."""
    clock, owner, found = Clock(quiet, {}), Owner(), []

    class Noted(Pace):
        def took(self, seconds: float, *given: Any) -> None:
            found.append(round(seconds, 6))
            super().took(seconds, *given)

    quiet.make = Noted
    with threads.paced(owner, "step", free=False):
        clock.now += 1.0
        with threads.paced(owner, "statistics", free=False, apart=True):
            clock.now += 10.0
            with threads.paced(owner, "inside"):
                clock.now += 100.0
        with threads.paced(owner, "more statistics", free=False, apart=True):
            clock.now += 1000.0
    assert found == [110.0, 1000.0, 1.0]
    assert {kind for kind, *_ in quiet.paces[owner]} == {"step", "statistics", "more statistics"}
    with threads.at_most(2), threads.paced(owner, "statistics", apart=True):
        pass
    assert len(found) == 3
    with threads.paced(owner, "step", free=False):
        quiet.sleep(True)
        with threads.paced(owner, "statistics", free=False, apart=True):
            assert not quiet.asleep
        assert quiet.asleep


def test_statistics_of_the_watch_have_separate_paces(quiet: Pacing) -> None:
    one = gf.preset("llama@1m+layers=1+d_model=32+heads=2+vocab_size=65+context=32").build(seed=0)
    optimizer, watch = torch.optim.AdamW(one.parameters()), gf.dynamics.Watch(one, every=1)
    tokens = torch.randint(65, (2, 9))
    for step in (1, 2):
        with threads.paced(one, "training step", free=False):
            one.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            moment = gf.dynamics.Moment(step, 4.0, 1.0, 1e-3, tokens[:, :-1], tokens[:, 1:], one, optimizer)
            watch.before_update(moment)
            optimizer.step()
            watch.after_update(moment)
    of_the_watch = {f"watch: {what}" for what in ("norms", "updates", "spectra", "probe")}
    assert {kind for kind, *_ in quiet.paces[one]} == {"training step", *of_the_watch}


def test_steps_of_a_user_loop_are_timed(quiet: Pacing) -> None:
    """A step lasts from one call of the optimizer to the next, less units in between, only inside the context."""
    clock, weight = Clock(quiet, {2: 5.0}), torch.nn.Parameter(torch.ones(2))
    found: list[float] = []

    class Noted(Pace):
        def took(self, seconds: float, *given: Any) -> None:
            found.append(seconds)

    quiet.make = Noted
    optimizer = torch.optim.SGD([weight])
    with gf.fast_training("cpu", "float32", compile=False):
        torch.set_num_threads(2)
        for seconds in (1.0, 2.0, 3.0):
            clock.now += seconds
            optimizer.step()
        clock.work(Owner(), 1)
        clock.now += 4.0
        optimizer.step()
        with threads.paced(Owner(), "training step", free=False):
            optimizer.step()
        quiet.others = taking(2.0)
        optimizer.step()
        assert quiet.asleep, "with others its threads sleep"
    assert not quiet.asleep
    optimizer.step()
    assert found[:4] == [2.0, 3.0, 5.0, 4.0] and len(found) == 5


def seen(pacing: Pacing, owner: Owner, free: bool = True) -> tuple[int, bool]:
    with threads.paced(owner, "work", free=free):
        return torch.get_num_threads(), pacing.asleep


def test_a_unit_takes_them_and_gives_them_back(pacing: Pacing) -> None:
    owner = Owner()
    assert seen(pacing, owner) == (1, False)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads.paced(owner, "work"):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    assert seen(pacing, owner, free=False) == (2, True)
    assert seen(pacing, owner) == (1, False)


def test_units_inside_a_unit_go_its_way(pacing: Pacing) -> None:
    """Else its bits would depend on what they choose."""
    with threads.paced(Owner(), "step", free=False):
        assert seen(pacing, Owner()) == (2, True)


def test_a_number_that_was_asked_for_stays(pacing: Pacing, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.apply(machine.settings("cpu", threads=2))
    assert seen(pacing, Owner()) == (2, False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine.apply(machine.settings("cpu"))
    assert seen(pacing, Owner()) == (2, False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine.apply(chosen(Abilities("cpu", cores=2, fast_bfloat16=False, compiler=False)))
    assert seen(pacing, Owner()) == (1, False)


def test_others_are_all_but_this_process(tmp_path: Path) -> None:
    """Cores of others are the time that two cores were busy less our time; after a pause, those that still run."""
    now: list[float] = [0.0, 0.0, 0, 1]
    ends: list[int] = []
    """Number of the running processes that have ended at each further reading."""
    slept: list[float] = []

    def write() -> None:
        cores = [f"cpu0 {int(now[2])} 0 0 77 7 0 0 99 0 0", "cpu1 0 0 0 9 9 0 0 0 0 0"]
        (tmp_path / "stat").write_text("\n".join(["cpu 9 9 9", *cores, "intr 5", f"procs_running {int(now[3])}"]))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[3] -= ends.pop(0) if ends else 0
        write()

    for thread in "123":
        (tmp_path / "self" / "task" / thread).mkdir(parents=True)
        state = "S" if thread == "3" else "R"
        (tmp_path / "self" / "task" / thread / "stat").write_text(f"1 (a) R) {state} 0 0")
    write()
    others = Others(CoreTimes(str(tmp_path), {0, 1}, lambda: now[0], lambda: now[1], ticks=100), sleep)
    for clock, own, ticks, running, ending, worked, expected, waited in (
        (0.05, 0.0, 5, 4, [], False, None, 0),  # too soon to say
        (1.0, 0.5, 150, 2, [], False, 1.0, 0),
        (1.05, 0.5, 200, 2, [], False, 1.0, 0),
        (2.0, 1.5, 250, 2, [], False, 0.0, 0),
        (60.0, 1.5, 9000, 4, [], False, 2.0, 10),  # two of the four are threads of this process
        (90.0, 1.5, 9100, 4, [0, 0, 0, 0, 1, 1], False, 0.0, 6),  # they have just ended
        (120.0, 1.5, 9100, 3, [], False, 1.0, 10),
        (150.0, 1.5, 12100, 3, [], False, 1.0, 0),  # it was there before and all the time
        (180.0, 11.5, 13100, 4, [], True, 0.0, 0),  # a long unit, whose own threads still turn round
    ):
        now[:], ends[:], slept[:] = [clock, own, ticks, running], ending, []
        write()
        assert others(worked) == expected
        assert len(slept) == waited


def test_others_are_unknown_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Others(CoreTimes(str(tmp_path)))() is None
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert Others()() is None


class Restless(Pace):
    """Goes another way at every unit than at the one before."""

    went: ClassVar[list[Way]] = []
    """Ways that units went."""

    def took(self, *_: object) -> None:
        self.went.append(self.way)
        self.at = (self.at + 1) % len(self.ways)


@pytest.fixture
def restless(pacing: Pacing) -> Pacing:
    Restless.went.clear()
    pacing.others, pacing.make = taking(None), Restless
    return pacing


def model(kind: str) -> gf.Model:
    made = gf.preset("llama@1m+layers=2+d_model=256+heads=4+gqa:2+vocab_size=1000").build(seed=0).eval()
    if kind == "float32":
        return made
    made = made.bfloat16()
    return made if kind == "bfloat16" else quantize(made, kind)  # type: ignore[return-value]


class Threads(TorchDispatchMode):
    """Records how many threads each operation may use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.setdefault(str(func), set()).add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_the_next_token_is_chosen_by_one_thread(pacing: Pacing) -> None:
    """One thread chooses for any number of rows: with other processes, threads that meet over a row lose more than they
    gain."""
    rows, rule = torch.randn(3, 50_000), sampling.Sampling(temperature=1.0)
    with Threads() as recorded:
        sampling.choose(rows, [rule] * 3, generators=[torch.Generator().manual_seed(i) for i in range(3)])
    assert set.union(*recorded.seen.values()) == {1} and "aten.max.dim" in recorded.seen
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_one_thread_has_the_bits_of_two(kind: str, pacing: Pacing) -> None:
    """Bits are equal for short and long prompts, single tokens and several rows."""
    one, found = model(kind), []
    tokens = torch.randint(0, 1000, (4, 300), generator=torch.Generator().manual_seed(0))
    for count in (1, 2):
        with threads.at_most(count), torch.inference_mode():
            logits = []
            for rows, length in ((1, 5), (1, 130), (1, 300), (4, 20)):
                state = one.init_state(rows, length + 3)
                logits.append(prefill(one, tokens[:rows, :length], state, chunk=256))
                logits += [decode(one, tokens[:rows, i : i + 1], state) for i in range(3)]
            found.append(logits)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_a_text_is_the_same_whatever_is_chosen(
    kind: str, native: bool, restless: Pacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a model's own step in fp32 stay two: there the sums depend on them."""
    one, prompt = model(kind), torch.arange(40)[None]
    if not native:
        monkeypatch.setattr("glassformer.generation.steps.native_step", lambda *_: None)
    elif not few_rows.kernel():
        pytest.skip("no kernel for this processor")

    def write() -> list[float]:
        rows = stream(one, prompt, 12, temperature=1.0, seed=0, logprobs=0)
        return [value for row in rows for value in (int(row.tokens), float(row.logprobs))]

    found = write()
    assert {way.threads for way in Restless.went} == ({2} if kind == "float32" and not native else {1, 2})
    assert len(set(Restless.went)) >= 2
    restless.fixed = True
    assert write() == found


@pytest.mark.slow
def test_a_run_has_the_same_weights_whatever_is_chosen(
    tmp_path: Path, restless: Pacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "available_cores", lambda: 2)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of many\n" for i in range(2000)))
    recipe = {"tokens": 8 * 4 * 64, "batch_size": 4, "context": 64, "compile": False, "dtype": "float32"}
    config = gf.preset("gpt2@1m+layers=1+d_model=256+heads=4")
    runs = [gf.train(config, text, recipe, tokenizer="char")]
    assert set(Restless.went) == {Way(2), Way(2, sleep=True)}
    restless.others, restless.make = taking(0.0), Pace
    runs.append(gf.train(config, text, recipe, tokenizer="char"))
    one, two = (run.model.state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
