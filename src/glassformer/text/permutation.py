"""A random permutation of n indices that is computed, not stored."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 12  # three suffice in theory (Luby, Rackoff 1988) for large halves; small ones need more to look random

BLOCK = 1024
"""Number of indices whose images `permuted` computes together, which takes no longer than for the few of a batch."""


def keyed(*parts: object) -> int:
    """Returns a 64-bit hash of `parts` as an integer, equal in any process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """Returns x, uint64, mixed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of x affects every
    bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Returns pi(index) for the permutation pi of 0..n-1 that `key` selects; O(1) memory, random access.

    A Feistel network (L, R) -> (R, L xor F_k(R)) permutes the numbers of 2m bits, for any F. With 4^m the smallest
    power of 4 at or above n, a result at or above n is mapped again (cycle walking: it returns below n, because it
    started there), which leaves a permutation of 0..n-1. On average fewer than four passes.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = _mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array([key], np.uint64))

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        return (left << shift) | right

    found = network(np.asarray(index, np.uint64))
    while (outside := found >= n).any():
        found[outside] = network(found[outside])
    return found.astype(np.int64)


def permuted(first: int, count: int, n: int, key: int) -> np.ndarray:
    """Returns `permute` of the indices first, ..., first + count - 1, (count,) int64. The array may be a view of a
    cached block, so that it must not be changed."""
    number, place = divmod(first, BLOCK)
    blocks = [_block(k, n, key) for k in range(number, (first + count - 1) // BLOCK + 1)]
    return (blocks[0] if len(blocks) == 1 else np.concatenate(blocks))[place : place + count]


@lru_cache(maxsize=64)
def _block(number: int, n: int, key: int) -> np.ndarray:
    return permute(np.arange(number * BLOCK, min(n, (number + 1) * BLOCK)), n, key)
