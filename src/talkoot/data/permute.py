"""A keyed permutation of ``range(size)`` that is computed one index at a time, with no table and no state.

Shuffled data must be the same on every machine, for ever, and any peer must be able to say which window
belongs to step one million without replaying the steps before it. A library's shuffle gives neither, so this
is our own: a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", 1988) over the smallest power of two that holds ``size``, with cycle-walking
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) to stay below ``size``.
The round function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014). Not for secrets.

Exactly: ``bits = max(6, bit length of size - 1)``; ``left`` is the upper ``bits // 2`` bits, ``right`` the
rest; round keys are the first eight outputs of splitmix64 seeded with ``key``; a round maps ``(left,
right)`` to ``(right, left XOR low bits of mix(right XOR round key))``, so the halves' widths swap. All
integers.
"""

from __future__ import annotations

from functools import lru_cache

_ROUNDS = 8  # even, so that the widths of the two halves end where they began
_MIN_BITS = 6  # halves of fewer than three bits mix badly; the price is a longer walk for tiny sizes
_U64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def feistel(index: int, size: int, key: int) -> int:
    """Where the permutation of ``range(size)`` that belongs to ``key`` sends ``index``.

    Args:
        index: position before the shuffle, in ``range(size)``.
        size: how many items are shuffled, 1 to 2**64.
        key: 64-bit unsigned integer; unrelated keys give unrelated orders.

    Returns:
        The position after the shuffle; for fixed ``size`` and ``key`` a bijection on ``range(size)``.

    Raises:
        ValueError: an argument is out of range (a bug of the caller, not of the user).
    """
    if not 0 <= index < size <= 1 << 64:
        raise ValueError(f"index {index} must lie in range({size}), and size must be at most 2**64")
    if not 0 <= key <= _U64:
        raise ValueError(f"key {key} is not an unsigned 64-bit integer")
    bits = max(_MIN_BITS, (size - 1).bit_length())
    keys = _round_keys(key)
    while True:  # the domain is below 2 * size (or 64), so this walk is short; it ends, as cycles close
        index = _network(index, bits, keys)
        if index < size:
            return index


def _network(value: int, bits: int, keys: tuple[int, ...]) -> int:
    left_width, right_width = bits // 2, bits - bits // 2
    left, right = value >> right_width, value & ((1 << right_width) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & ((1 << left_width) - 1))
        left_width, right_width = right_width, left_width
    return left << right_width | right


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix((key + _GOLDEN_GAMMA * n) & _U64) for n in range(1, _ROUNDS + 1))


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _U64
    return z ^ (z >> 31)
