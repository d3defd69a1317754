"""Threads are chosen while work runs: by arithmetic alone, so that neighbours and a clock can be made up here."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import folders, machine, threads
from glassformer.generation import prefill, sampling, stream
from glassformer.generation.steps import decode
from glassformer.parts.quantized import quantize
from glassformer.threads.pace import LATE, SURE, Pace, Way, ways

Seconds = Callable[[Way, float], float]


class Machine:
    """Two cores, a clock, and units of work that take what `alone` and `beside` say of each way."""

    def __init__(self, free: bool, alone: list[float], beside: list[float], noise: float = 0.0, told: bool = True):
        self.pace = Pace(ways(2, free), cores=2)
        self.alone, self.beside, self.noise, self.told = alone, beside, noise, told
        self.now, self.neighbours, self.draw = 0.0, 0, random.Random(0)
        self.changes, self.units = 0, 0

    def run(self, seconds: float) -> float:
        """The mean time of a unit meanwhile."""
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
    """Alone within 2 % of the best (5 where units scatter by more than that), beside a neighbour within 10, soon after
    it came and after it left; where nobody tells of it, within a minute."""
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
    """In an hour beside a neighbour, or alone, tries become rare; where something comes and goes, they are bounded."""
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


def test_small_work_takes_one_thread_from_the_beginning() -> None:
    here = Machine(True, alone=[100e-6, 140e-6], beside=[100e-6, 900e-6])
    here.run(0.2)
    assert here.pace.way == Way(1)
    assert here.run(60) < 1.01 * 100e-6


def test_the_first_unit_after_a_neighbour_takes_the_cores_again() -> None:
    """Long units, as pieces of a prompt: none is spent on a try."""
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


def test_where_the_machine_is_taken_it_begins_humbly() -> None:
    for free, humble in ((True, Way(1)), (False, Way(2, sleep=True))):
        for others, way in ((1.0, humble), (0.2, Way(2)), (None, Way(2)), (2.0, humble)):
            pace = Pace(ways(2, free), cores=2)
            pace.prepare(others, 0.0)
            assert pace.way == way
    pace = Pace(ways(2, free=True), cores=2)
    for now in range(9):
        pace.prepare(2.0, now)
        pace.took(0.02, now, lambda: 2.0)
    assert (pace.way, pace.usual) == (Way(1), {0: 0.02}), "the humblest way is timed beside any number of others"
    pace = Pace(ways(8, free=True), cores=8)
    pace.prepare(1.0, 0.0)
    assert pace.way == Way(7)


def test_ways() -> None:
    assert [way.threads for way in ways(8, free=True)] == [1, 2, 4, 7, 8]
    assert [way.threads for way in ways(2, free=True)] == [1, 2]
    assert ways(3, free=False) == [Way(3, sleep=True), Way(3)]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(threads, "_fixed", False)
    monkeypatch.setattr(threads, "_others", lambda worked=False: 2.0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    threads.fix(False)


class Owner:
    pass


class Clock:
    """A unit of work takes what its way does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def work(self, owner: object, units: int, kind: str = "work") -> list[int]:
        """How many threads each had."""
        took = []
        for _ in range(units):
            with threads.paced(owner, kind):
                took.append(torch.get_num_threads())
                self.now += self.seconds[took[-1]]
        return took


@pytest.fixture
def quiet(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_others", lambda worked=False: 0.0)


def kept_file(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "threads.json"


def test_what_a_way_gains_is_kept_for_the_processor(
    quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later process begins with the way that served: no unit is spent on the other."""
    clock = Clock(monkeypatch, {1: 0.010, 2: 0.015})
    assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]
    (known,) = json.loads(kept_file(tmp_path).read_text()).values()
    assert known == {"work on 2^0 bytes: 2 / 1": [1.5]}
    assert clock.work(Owner(), 8) == [1] * 8
    clock.seconds = {1: 0.020, 2: 0.012}
    assert clock.work(Owner(), 8, kind="other work") == [2, 2, 2, 1, 1, 1, 2, 2], "of this work nothing is known"
    assert clock.work(Owner(), 8, kind="other work") == [2] * 8


def test_what_was_kept_is_tried_again_and_corrected(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pins nothing: after some seconds the other way is tried, and as soon as units become slower."""
    clock = Clock(monkeypatch, {1: 0.010, 2: 0.015})
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
def test_what_was_kept_yields_to_neighbours(
    told: float | None, quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are told of the humbler way is taken at once, where nobody tells it is tried as if nothing were known;
    and what is found beside them is not kept."""
    clock = Clock(monkeypatch, {1: 0.010, 2: 0.007})
    clock.work(Owner(), 8)
    before = kept_file(tmp_path).read_text()
    clock.seconds = {1: 0.010, 2: 0.020}
    monkeypatch.setattr(threads, "_others", lambda worked=False: told)
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
def test_a_damaged_file_and_another_processors_are_ignored(
    damaged: str, quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is found next is kept beside what others found."""
    file = kept_file(tmp_path)
    file.parent.mkdir()
    named = damaged.replace("HERE", threads.kept.here()).replace("PAIR", "work on 2^0 bytes: 2 / 1")
    file.write_text(named)
    clock = Clock(monkeypatch, {1: 0.010, 2: 0.015})
    assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]
    known = json.loads(file.read_text())
    assert known[threads.kept.here()]["work on 2^0 bytes: 2 / 1"] == [1.5]
    assert ("another processor" in known) == ("another processor" in damaged)
    assert list(file.parent.iterdir()) == [file]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    two = ways(2, free=True)
    for ratio in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, float("nan"), 0.0, 1e9):
        threads.kept.keep("work", two, 1, ratio)
    assert threads.kept.gains("work", two) == {1: 4.0}
    monkeypatch.setattr(threads.kept, "KINDS", 10)
    for i in range(20):
        threads.kept.keep(f"work {i} {'x' * 1000}", two, 1, 1.0)
    (known,) = json.loads((tmp_path / "threads.json").read_text()).values()
    assert len(known) == 10 and max(map(len, known)) == threads.kept.LONGEST
    assert threads.kept.gains("work", two) == {}
    monkeypatch.setattr(folders, "MOST", (tmp_path / "threads.json").stat().st_size + 10)
    monkeypatch.setattr(threads.kept, "here", lambda: "another")
    threads.kept.keep("work", two, 1, 1.0)
    assert list(json.loads((tmp_path / "threads.json").read_text())) == ["another"], "the first goes"


def test_where_nothing_can_be_written_nothing_is_kept(
    quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "file"))
    clock = Clock(monkeypatch, {1: 0.010, 2: 0.015})
    for _ in range(2):
        assert clock.work(Owner(), 8) == [2, 2, 2, 1, 1, 1, 1, 1]


def test_a_unit_apart_has_a_pace_of_its_own(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit around it does not count its time, and goes on as it was."""
    clock, owner, found = Clock(monkeypatch, {}), Owner(), []
    took = Pace.took

    def noted(pace: Pace, seconds: float, *given: Any) -> None:
        found.append(round(seconds, 6))
        took(pace, seconds, *given)

    monkeypatch.setattr(Pace, "took", noted)
    with threads.paced(owner, "step", free=False):
        clock.now += 1.0
        with threads.paced(owner, "statistics", free=False, apart=True):
            clock.now += 10.0
            with threads.paced(owner, "inside"):
                clock.now += 100.0
        with threads.paced(owner, "more statistics", free=False, apart=True):
            clock.now += 1000.0
    assert found == [110.0, 1000.0, 1.0]
    assert {kind for kind, *_ in threads._paces[owner]} == {"step", "statistics", "more statistics"}
    with threads.at_most(2), threads.paced(owner, "statistics", apart=True):
        pass
    assert len(found) == 3
    with threads.paced(owner, "step", free=False):
        threads.sleeping(True)
        with threads.paced(owner, "statistics", free=False, apart=True):
            assert threads._crowd is None
        assert threads._crowd is not None


def test_statistics_of_the_watch_have_paces_of_their_own(quiet: None) -> None:
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
    assert {kind for kind, *_ in threads._paces[one]} == {"training step", *of_the_watch}


def test_steps_of_a_loop_of_ones_own_are_timed(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one call of the optimizer to the next, without what is paced in between, and inside the context alone."""
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setattr(machine, "has_fast_bfloat16", lambda device: False)
    clock, weight = Clock(monkeypatch, {2: 5.0}), torch.nn.Parameter(torch.ones(2))
    found: list[float] = []
    monkeypatch.setattr(Pace, "took", lambda pace, seconds, *_: found.append(seconds))
    optimizer = torch.optim.SGD([weight])
    with gf.fast_training("cpu", compile=False):
        for seconds in (1.0, 2.0, 3.0):
            clock.now += seconds
            optimizer.step()
        clock.work(Owner(), 1)
        clock.now += 4.0
        optimizer.step()
        with threads.paced(Owner(), "training step", free=False):
            optimizer.step()
        monkeypatch.setattr(threads, "_others", lambda worked=False: 2.0)
        optimizer.step()
        assert threads._crowd is not None, "beside others its threads sleep"
    assert threads._crowd is None
    optimizer.step()
    assert found[:4] == [2.0, 3.0, 5.0, 4.0] and len(found) == 5


def seen(owner: Owner, free: bool = True) -> tuple[int, bool]:
    with threads.paced(owner, "work", free=free):
        return torch.get_num_threads(), threads._crowd is not None


def test_a_unit_takes_them_and_gives_them_back(two_threads: None) -> None:
    owner = Owner()
    assert seen(owner) == (1, False)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads.paced(owner, "work"):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    assert seen(owner, free=False) == (2, True)
    assert seen(owner) == (1, False)


def test_units_inside_a_unit_go_its_way(two_threads: None) -> None:
    """Else its bits would depend on what they choose."""
    with threads.paced(Owner(), "step", free=False):
        assert seen(Owner()) == (2, True)


def test_a_number_that_was_asked_for_stays(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.apply(machine.settings("cpu", threads=2))
    assert seen(Owner()) == (2, False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine.apply(machine.settings("cpu"))
    assert seen(Owner()) == (2, False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    machine.apply(machine.settings("cpu"))
    assert seen(Owner()) == (1, False)


def test_others_are_all_but_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time that two cores were busy, less one's own; after a pause, those that run and go on."""
    now: list[float] = [0.0, 0.0, 0, 1]
    ends: list[int] = []
    """Of those that run, how many have ended at each further look."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[3] -= ends.pop(0) if ends else 0

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: now[1])
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("os.listdir", lambda _: ["1", "2", "3"])

    def stat(path: str, **__: object) -> io.StringIO:
        if path != "/proc/stat":
            return io.StringIO(f"1 (a) R) {'R' if path.endswith(('/1/stat', '/2/stat')) else 'S'} 0 0")
        cores = [f"cpu0 {int(now[2])} 0 0 77 7 0 0 99 0 0", "cpu1 0 0 0 9 9 0 0 0 0 0"]
        return io.StringIO("\n".join(["cpu 9 9 9", *cores, "intr 5", f"procs_running {int(now[3])}"]))

    monkeypatch.setattr("builtins.open", stat)
    others = threads.Others()
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
        assert others(worked) == expected
        assert len(slept) == waited


def test_where_nobody_counts_others_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert threads.Others()() is None


@pytest.fixture
def restless(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """Every unit goes another way than the one before; which way each went."""
    went: list[Way] = []

    def took(pace: Pace, *_: object) -> None:
        went.append(pace.way)
        pace.at = (pace.at + 1) % len(pace.ways)

    monkeypatch.setattr(threads, "_others", lambda worked=False: None)
    monkeypatch.setattr(Pace, "took", took)
    return went


def model(kind: str) -> gf.Model:
    made = gf.preset("llama@1m+layers=2+d_model=256+heads=4+gqa:2+vocab_size=1000").build(seed=0).eval()
    if kind == "float32":
        return made
    made = made.bfloat16()
    return made if kind == "bfloat16" else quantize(made, kind)  # type: ignore[return-value]


def test_the_next_token_is_chosen_by_one_thread(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows: beside others, meeting over a row of logits takes several times what it gains."""
    seen: list[int] = []
    draw = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda *given: seen.append(torch.get_num_threads()) or draw(*given))
    rows, rule = torch.randn(3, 50_000), sampling.Sampling(temperature=1.0)
    sampling.choose(rows, [rule] * 3, generators=[torch.Generator().manual_seed(i) for i in range(3)])
    assert (seen, torch.get_num_threads()) == ([1], 2)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_one_thread_has_the_bits_of_two(kind: str, two_threads: None) -> None:
    """Of prompts, short and long, of single tokens and of several rows."""
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_a_text_is_the_same_whatever_is_chosen(kind: str, restless: list[Way], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the number of threads stays, in 16 bits and less it may not matter."""
    one, prompt = model(kind), torch.arange(40)[None]

    def write() -> list[float]:
        rows = stream(one, prompt, 12, temperature=1.0, seed=0, logprobs=0)
        return [value for row in rows for value in (int(row.tokens), float(row.logprobs))]

    found = write()
    assert {way.threads for way in restless} == ({2} if kind == "float32" else {1, 2})
    assert len(set(restless)) == 2
    monkeypatch.setattr(threads, "_fixed", True)
    assert write() == found


@pytest.mark.slow
def test_a_run_has_the_same_weights_whatever_is_chosen(
    tmp_path: Path, restless: list[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of many\n" for i in range(2000)))
    recipe = {"tokens": 8 * 4 * 64, "batch_size": 4, "context": 64, "compile": False, "dtype": "float32"}
    config = gf.preset("gpt2@1m+layers=1+d_model=256+heads=4")
    runs = [gf.train(config, text, recipe, tokenizer="char")]
    assert set(restless) == {Way(2), Way(2, sleep=True)}
    monkeypatch.setattr(Pace, "took", lambda *_: None)
    monkeypatch.setattr(threads, "_others", lambda worked=False: 0.0)
    runs.append(gf.train(config, text, recipe, tokenizer="char"))
    one, two = (run.model.state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
