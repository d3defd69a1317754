"""Looks, edits and compiled regions hold for the thread that entered them, and for the backward passes it calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassformer as gf
from glassformer.parts.core.reduce import reducing, total
from glassformer.parts.core.running import NOTHING, thread
from glassformer.parts.core.site import Site, edit_at, look_at
from glassformer.parts.region import compiled_regions, compiling_regions

TOKENS = torch.arange(12).view(2, 6)
ROUNDS = 60


@pytest.fixture(scope="module")
def model() -> gf.Model:
    return gf.preset("llama@1m").replace(vocab_size=16, context=8, d_model=24).build(seed=0).eval()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert thread.now is NOTHING or thread.now.taps is None
    assert not torch._C._is_key_in_tls("glassformer.running")


def together(*work: Callable[[threading.Barrier], Any]) -> list[Any]:
    """Returns the results of functions run at the same time; each gets a barrier that all pass together."""
    meet = threading.Barrier(len(work), timeout=120)

    def run(one: Callable[[threading.Barrier], Any]) -> Any:
        try:
            return one(meet)
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        return [done.result() for done in [pool.submit(run, one) for one in work]]


@torch.no_grad()
def test_two_threads_see_their_own_captures_and_edits(model: gf.Model) -> None:
    plain = model(TOKENS)
    edits: list[dict[str, Callable[[Tensor], Tensor]]] = [
        {"layers.0.mixer.z": lambda z: z * 0}, {"layers.1.ffn.hidden": lambda h: h * 3, "embed": lambda x: x + 1},
    ]  # fmt: skip
    names = ["layers.0.*"], ["layers.1.*", "logits"]
    alone = []
    for edit, patterns in zip(edits, names, strict=True):
        with gf.edit(model, edit):
            alone.append((model(TOKENS), gf.capture(model, TOKENS, patterns)))

    def one(
        edit: dict[str, Any], patterns: list[str], expected: tuple[Tensor, dict[str, Tensor]]
    ) -> Callable[..., Any]:
        def rounds(meet: threading.Barrier) -> None:
            torch.set_grad_enabled(False)
            for i in range(ROUNDS):
                meet.wait()
                with gf.edit(model, edit):
                    assert torch.equal(model(TOKENS), expected[0]), i
                    found = gf.capture(model, TOKENS, patterns)
                assert set(found) == set(expected[1]), i
                assert all(torch.equal(found[name], value) for name, value in expected[1].items()), i
                assert torch.equal(model(TOKENS), plain), i

        return rounds

    def bystander(meet: threading.Barrier) -> None:
        torch.set_grad_enabled(False)
        for i in range(ROUNDS):
            meet.wait()
            assert torch.equal(model(TOKENS), plain), i

    together(*(one(*given) for given in zip(edits, names, alone, strict=True)), bystander)


def test_an_edit_in_one_thread_leaves_the_other_compiled(model: gf.Model) -> None:
    """Neither the regions nor a compiled model of the other thread run eagerly, or are compiled again."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(threading.get_ident())
        return graph.forward

    ran: list[bool] = []
    compiled: Any = torch.compile(copy.deepcopy(model), backend=backend)
    plain = compiled(TOKENS)
    before = len(graphs)

    def edits(meet: threading.Barrier) -> None:
        with pytest.warns(UserWarning, match="it runs eagerly"), gf.edit(compiled, {"embed": lambda x: x * 2}):
            meet.wait()  # the other starts
            doubled = compiled(TOKENS)
            meet.wait()  # it has ended
        assert not torch.equal(doubled, plain) and torch.equal(compiled(TOKENS), plain)

    def computes(meet: threading.Barrier) -> None:
        with compiled_regions():
            meet.wait()
            assert torch.equal(compiled(TOKENS), plain)
            ran.append(compiling_regions())
            meet.wait()

    together(edits, computes)
    assert before > 0 and len(graphs) == before and ran == [True]


def test_a_copy_made_inside_an_edit_is_not_edited(model: gf.Model) -> None:
    plain = model(TOKENS)
    with gf.edit(model, {"embed": lambda x: x * 2}):
        assert torch.equal(copy.deepcopy(model)(TOKENS), plain)


def test_leaving_in_another_order_takes_away_its_own() -> None:
    site = Site()
    first, second = edit_at([(site, lambda x: x + 1)]), edit_at([(site, lambda x: x * 2)])
    one = torch.ones(1, 1, 1)
    first.__enter__(), second.__enter__()
    assert site(one) == 4 and site.edited
    first.__exit__(None, None, None)
    assert site(one) == 2
    second.__exit__(None, None, None)
    assert site(one) == 1 and not site.watched


class Deeper(torch.autograd.Function):
    """The identity, whose backward pass is one of `make()`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            ctx.make().sum().backward()
        return grads[0], None


def backward_in_autograds_thread(make: Callable[[], Tensor], levels: int = 70) -> None:
    """Runs `make().sum().backward()` in a thread of autograd, which starts one after 60 nested backward passes, and for
    every accelerator."""

    def level(depth: int) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        return Deeper.apply(x, make if depth == 0 else lambda: level(depth - 1))

    level(levels).sum().backward()


@pytest.mark.parametrize(
    ("entered", "found"),
    [
        (lambda site: look_at([(site, lambda *_: None)]), lambda site: site.watched),
        (lambda site: compiled_regions(), lambda site: compiling_regions()),
        (lambda site: reducing(lambda x: x * 2), lambda site: total(torch.ones(())) == 2),
    ],
    ids=["looks", "regions", "reduce"],
)
def test_backward_passes_see_the_contexts_of_their_caller(
    entered: Callable[[Site], AbstractContextManager[None]], found: Callable[[Site], bool]
) -> None:
    site, here = Site(), threading.get_ident()
    seen: list[tuple[int, bool]] = []

    def leaf() -> Tensor:
        x = torch.ones(1, requires_grad=True) * 1
        x.register_hook(lambda grad: seen.append((threading.get_ident(), bool(found(site)))))
        return x

    backward_in_autograds_thread(leaf)
    with entered(site):
        backward_in_autograds_thread(leaf)
    backward_in_autograds_thread(leaf)
    assert [value for _, value in seen] == [False, True, False]
    assert all(where != here for where, _ in seen), "autograd kept to the thread of its caller: this shows nothing"


def test_a_pass_made_again_in_autograds_thread_is_edited_as_before() -> None:
    """And what it enters there ends there."""
    linear, site, x = nn.Linear(3, 3), Site(), torch.randn(1, 2, 3)

    def again() -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda: site(linear(x)).square(), use_reentrant=False)

    with edit_at([(site, lambda y: y * 3)]):
        again().sum().backward()
        expected = linear.weight.grad
        linear.weight.grad = None
        backward_in_autograds_thread(again)
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, expected)
