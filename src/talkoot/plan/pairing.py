"""Who talks to whom in a round, without a word about it: shuffles that everybody computes alike.

A round's groups are consecutive members of a shuffled list. The shuffle is that of Fisher and Yates (in Durstenfeld's
form, 1964) over integers drawn from BLAKE2b in counter mode, without modulo bias; so it is the same on every machine
and in every version of Python. Random partners are the pairing of NoLoCo (arXiv 2506.10911); drawing them from the
live view instead of a fixed list of ranks is our own. The shuffle between pipeline stages is theirs, too, as a
stand-in for the load balancing of SWARM (arXiv 2301.11913).

What a shuffle belongs to (its *topic*, the seed, and one or two counters) is hashed with the lengths of its parts, so
no two shuffles share their random numbers. Not for secrets: who knows the seed knows all partners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

_WORD = 8  # bytes of a random integer
_BLOCK = 64  # bytes that one hash gives


def view_seed(run: str, view: str | int) -> bytes:
    """The seed of all rounds in one view of the membership; 32 bytes.

    Args:
        run, view: the run's id, and the view's within it.
    """
    return _digest("view", run.encode(), str(view).encode())[:32]


def pairs(members: Sequence[str], round: int, seed: bytes | str) -> dict[str, str | None]:
    """Everybody's partner in a round: a perfect matching, each one equally likely.

    Args:
        members: of the live view, in any order.
        round: its number.
        seed: of the view, see :func:`view_seed`.

    Returns:
        By member, in sorted order: the partner, who has this member as partner; None for the odd one out.

    Raises:
        ValueError: a member is listed twice.
    """
    partners: dict[str, str | None] = dict.fromkeys(sorted(members))
    for group in groups(members, round, seed, 2):
        if len(group) == 2:
            one, other = group
            partners[one], partners[other] = other, one
    return partners


def groups(members: Sequence[str], round: int, seed: bytes | str, size: int) -> list[tuple[str, ...]]:
    """The members in random groups of ``size``; the last one takes the rest and may be smaller.

    Raises:
        ValueError: a member is listed twice, or groups of less than one.
    """
    if size < 1:
        raise ValueError(f"groups of {size} members")
    order = _shuffled(members, "round", _bytes(seed), round)
    return [tuple(order[first : first + size]) for first in range(0, len(order), size)]


def shuffle(members: Sequence[str], microbatch: int, stage: int, seed: bytes | str) -> tuple[str, ...]:
    """Which member of a stage takes over from whom of the stage before it, for one microbatch of each.

    Both sides of the boundary compute it: the sender at index r of its own stage, sorted, sends to entry r, and
    everybody gets one microbatch. Gradients go back the same way.

    Args:
        members: of the receiving stage, in any order, as many as of the sending one.
        microbatch: counted over the whole run, the same for all senders.
        stage: the receiving stage.
        seed: of the view, see :func:`view_seed`.

    Raises:
        ValueError: a member is listed twice.
    """
    return tuple(_shuffled(members, "routing", _bytes(seed), microbatch, stage))


def _shuffled(members: Sequence[str], topic: str, seed: bytes, *counters: int) -> list[str]:
    order = sorted(members)
    if len(set(order)) != len(order):
        raise ValueError("a member is listed twice")
    words = _words(_digest(topic, seed, *(str(counter).encode() for counter in counters)))
    for last in range(len(order) - 1, 0, -1):
        other = _below(last + 1, words)
        order[last], order[other] = order[other], order[last]
    return order


def _below(bound: int, words: Iterator[int]) -> int:
    """A random integer below ``bound``; words of the incomplete last stretch are passed over."""
    whole = (1 << 8 * _WORD) // bound * bound
    return next(word for word in words if word < whole) % bound


def _words(key: bytes) -> Iterator[int]:
    counter = 0
    while True:
        block = blake2b(counter.to_bytes(8, "big"), key=key, digest_size=_BLOCK).digest()
        yield from (int.from_bytes(block[at : at + _WORD], "big") for at in range(0, _BLOCK, _WORD))
        counter += 1


def _digest(topic: str, *parts: bytes) -> bytes:
    total = blake2b(person=topic.encode(), digest_size=_BLOCK)
    for part in parts:
        total.update(len(part).to_bytes(8, "big") + part)
    return total.digest()


def _bytes(seed: bytes | str) -> bytes:
    return seed.encode() if isinstance(seed, str) else seed
