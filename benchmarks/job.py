"""Jobs of several processes, for benchmarks that ask what one rank prints."""

from __future__ import annotations

import subprocess
import sys

from glassformer.errors import WorkError


def printed(program: str, first: str, world: int, *rest: object) -> str:
    """What the first of `world` processes prints, of which each runs `program` with (first, rank, world, *rest)."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, first, str(rank), str(world), *map(str, rest)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [process.communicate()[0] for process in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise WorkError(f"rank {failed[0]} of {world} failed")
    return told[0]
