"""Who gets which arm: pure functions of names, salts and values, the same in every process and after every restart.

A unit (a request, a user, a key, a header's value) has two fixed numbers in [0, 1), independent of each other: it takes part when the
first is below the share of traffic, and the second chooses the arm. So a ramp up adds units and never moves one to another arm.

Time slices come in blocks. A block has each arm as often as its weight says, in an order of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from .records import UNIT_HEX


def _digest(name: str, salt: str, purpose: str, value: str) -> bytes:
    key = hashlib.blake2b(f"{name}\0{salt}".encode("utf-8", "surrogatepass"), digest_size=32).digest()
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8, key=key, person=purpose.encode()).digest()


def fraction(name: str, salt: str, purpose: str, value: str) -> float:
    """A number in [0, 1) that depends on nothing else; uniform over values. purpose: 16 bytes at most; one number for each."""
    return (int.from_bytes(_digest(name, salt, purpose, value), "big") >> 11) / 2**53


def takes_part(name: str, salt: str, value: str, traffic: float) -> bool:
    """traffic: share of units, 0 to 1."""
    return fraction(name, salt, "traffic", value) < traffic


def arm_of(name: str, salt: str, value: str, shares: Mapping[str, float]) -> str:
    """shares: of the arms, in their fixed order; they sum to 1."""
    place, reached = fraction(name, salt, "arm", value), 0.0
    for arm, share in shares.items():
        reached += share
        if place < reached:
            return arm
    return list(shares)[-1]  # the shares' sum was rounded down


def unit_of(secret: bytes, name: str, value: str) -> str:
    """What stands for a value in rows: the same for the same value, and no way back without the secret."""
    data = f"{name}\0{value}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=UNIT_HEX // 2, key=secret, person=b"unit").hexdigest()


def slice_at(now: float, started: float, seconds: float) -> int:
    """Number of the slice that holds `now`, from 0. Times in seconds; a clock that went back gives 0."""
    return max(0, math.floor((now - started) / seconds))


def slice_arm(name: str, salt: str, run: int, index: int, counts: Mapping[str, int]) -> str:
    """The arm of a time slice. counts: slices of each arm in a block."""
    size = sum(counts.values())
    block, place = divmod(index, size)
    arms = [arm for arm, count in counts.items() for _ in range(count)]
    order = sorted(range(size), key=lambda i: _digest(name, salt, "slice", f"{run}/{block}/{i}"))
    return arms[order[place]]
