"""Speed of `train` for a training loop that a user writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from glassformer import machine
from glassformer.machine import threads as pacing
from glassformer.parts.region import compiled_regions


@contextmanager
def fast_training(
    device: str = "auto", dtype: str = "auto", threads: int | None = None, compile: bool | None = None
) -> Iterator[machine.Settings]:
    """Makes a training loop over `model.loss` that runs inside the `with` block as fast as `gf.train`.

    torch uses all cores, the process keeps the memory that a step frees, and the elementwise regions of models are
    compiled for the shapes of the first steps. Shapes that change from step to step compile again, a few times, and
    then run eagerly: evaluate and generate outside the block.

    Parameters
    ----------
    device
        "auto", "cpu", "cuda", "mps".
    dtype
        "float32", "bfloat16", or "auto": bfloat16 where its matmuls are faster than those in float32.
    threads
        Threads of the CPU. If None, one for each core. The number of before is restored on leaving.
    compile
        False runs the elementwise regions eagerly. If None, they are compiled where a compiler is installed, which
        takes some tens of seconds in the first step.

    Yields
    ------
    Settings
        `.device`, and `.autocast()`, the context of a forward pass in the dtype.

    Raises
    ------
    RequestError
        For settings that this machine does not have.

    Examples
    --------
    >>> with gf.fast_training(compile=False) as how:
    ...     model = gf.preset("llama@0.3m+vocab_size=100").build(seed=0).to(how.device)
    ...     tokens = torch.randint(100, (2, 9), device=how.device)
    ...     with how.autocast():
    ...         loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    ...     loss.backward()
    """
    how = machine.settings(device, dtype, threads, compile)
    before, fixed = torch.get_num_threads(), pacing.fixed()
    machine.apply(how)
    beat = pacing.Beat("step of a loop")
    timed = register_optimizer_step_post_hook(lambda optimizer, *_: beat(optimizer))
    try:
        with compiled_regions(how.compile):
            yield how
    finally:
        timed.remove()
        torch.set_num_threads(before)
        pacing.fix(fixed)
