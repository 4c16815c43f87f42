"""How a group of all replicas forms its mean: along a ring, up and down a tree, directly, or by gathering everything.

All of them leave the same bits with everybody. When somebody is lost on the way, whoever has the mean already gives it
to the others; where nobody has, those who are left begin again (see :func:`agree`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry
from talkoot.train.messages import Cut
from talkoot.train.rounds.messages import Ask, Key, Part, Standing
from talkoot.world.api import Frame

if TYPE_CHECKING:
    from talkoot.train.rounds.trainer import Trainer

Collective = Callable[["Trainer", Key, Sequence[PeerId]], Awaitable[None]]
Use = Callable[[Sequence[Frame]], None]
collectives: Registry[Collective] = Registry("collective")


class Broken(Exception):
    """A member is gone, or the group is another one by now."""


async def send(peer: Trainer, to: PeerId, key: Key, hop: int, frames: Sequence[Frame]) -> None:
    """One part on its way."""
    await peer.send(to, "part", Part(key, hop), frames)


async def receive(peer: Trainer, sender: PeerId, key: Key, hop: int, use: Use) -> Sequence[Frame]:
    """The part of that hop, once it has been used.

    Raises:
        Broken: it will not come, or cannot be used.
    """
    message = None

    def heard() -> bool:
        nonlocal message
        message = message or peer.mail.take(key, "part", sender, hop)
        return message is not None or peer.broken(key)

    if not await peer.mail.until(heard, peer.job.recipe.train.patience_s) or message is None:
        raise Broken
    await _use(peer, sender, message.frames, use)
    return message.frames


async def _use(peer: Trainer, sender: PeerId, frames: Sequence[Frame], use: Use) -> None:
    try:
        use(frames)
    except (ValueError, TalkootError) as problem:
        peer.mail.lose(sender, peer.world.now())
        await peer.tell("cut", Cut(sender, f"what it sent cannot be used: {problem}"))
        raise Broken from problem


@collectives.register("ring")
async def ring(peer: Trainer, key: Key, members: Sequence[PeerId]) -> None:
    """Reduce-scatter, then all-gather, with one neighbour each (Patarasuk and Yuan, 2009): 2 (N - 1) hops, the fewest
    bytes."""
    replica, at, n = peer.replica, (key.round, key.fragment), len(members)
    i = members.index(peer.world.me)
    left, right = members[i - 1], members[(i + 1) % n]
    for hop in range(n - 1):
        await send(peer, right, key, hop, replica.part(at, (i - hop) % n, n))
        await receive(peer, left, key, hop, partial(replica.add, at, (i - hop - 1) % n, n))
    whole: Sequence[Frame] = replica.part(at, (i + 1) % n, n)
    replica.put(at, (i + 1) % n, n, whole)  # as the others will read it
    for hop in range(n - 1):
        await send(peer, right, key, n - 1 + hop, whole)
        whole = await receive(peer, left, key, n - 1 + hop, partial(replica.put, at, (i - hop) % n, n))


@collectives.register("tree")
async def tree(peer: Trainer, key: Key, members: Sequence[PeerId]) -> None:
    """Up a binomial tree and down again: 2 log2 N hops, each with everything."""
    replica, at, n = peer.replica, (key.round, key.fragment), len(members)
    i, reach, whole = members.index(peer.world.me), 1, None
    children: list[int] = []
    while reach < n and i % (2 * reach) == 0:
        if i + reach < n:
            await receive(peer, members[i + reach], key, 0, partial(replica.add, at, 0, 1))
            children.append(i + reach)
        reach *= 2
    if i:
        await send(peer, members[i - reach], key, 0, replica.part(at, 0, 1))
        whole = await receive(peer, members[i - reach], key, 1, partial(replica.put, at, 0, 1))
    else:
        whole = replica.part(at, 0, 1)
        replica.put(at, 0, 1, whole)  # as the others will read it
    for child in reversed(children):
        await send(peer, members[child], key, 1, whole)


@collectives.register("direct")
async def direct(peer: Trainer, key: Key, members: Sequence[PeerId]) -> None:
    """Everybody sums one slice and hands it to all: 2 hops, the fewest bytes, N - 1 partners at once."""
    replica, at, n = peer.replica, (key.round, key.fragment), len(members)
    i = members.index(peer.world.me)
    for index, member in enumerate(members):
        if index != i:
            await send(peer, member, key, 0, replica.part(at, index, n))
    for member in members:
        if member != peer.world.me:
            await receive(peer, member, key, 0, partial(replica.add, at, i, n))
    mine = replica.part(at, i, n)
    replica.put(at, i, n, mine)
    for member in members:
        if member != peer.world.me:
            await send(peer, member, key, 1, mine)
    for index, member in enumerate(members):
        if index != i:
            await receive(peer, member, key, 1, partial(replica.put, at, index, n))


async def gather(peer: Trainer, key: Key, members: Sequence[PeerId]) -> None:
    """Everybody sends everything to all, for messages whose sum is larger than they are."""
    replica, at = peer.replica, (key.round, key.fragment)
    mine = replica.part(at, 0, 1)
    for member in members:
        if member != peer.world.me:
            await send(peer, member, key, 0, mine)
    replica.clear(at)
    for member in members:  # everybody adds in the same order
        if member == peer.world.me:
            replica.add(at, 0, 1, mine)
        else:
            await receive(peer, member, key, 0, partial(replica.add, at, 0, 1))


async def agree(peer: Trainer, key: Key, members: Sequence[PeerId], how: Collective, *, doubtful: bool) -> int:
    """Form the sum of all messages; returns of how many it is.

    Args:
        doubtful: somebody may have the sum from a view before: ask.

    Raises:
        Broken: begin again in the newest view.
    """
    at, of = (key.round, key.fragment), 0
    if len(members) > 1 and doubtful:
        of = await _ask(peer, key, members)
    if not of:
        of = len(members)
        if of > 1:
            await how(peer, key, members)
        if peer.broken(key):  # somebody may have been promised that this does not happen any more
            raise Broken
    peer.sums[at] = of
    for known in (peer.sums, peer.promised):
        for old in [other for other in known if other[0] < at[0] - 1]:
            del known[old]
    return of


async def _ask(peer: Trainer, key: Key, members: Sequence[PeerId]) -> int:
    """Take the sum that somebody has already; of how many it is, 0 when nobody has it."""
    at, of = (key.round, key.fragment), 0
    others = [member for member in members if member != peer.world.me]
    for member in others:
        await peer.send(member, "ask", Ask(key))
    for member in others:
        message = None

        def heard(member: PeerId = member) -> bool:
            nonlocal message
            message = message or peer.mail.take(key, "standing", member)
            return message is not None or peer.broken(key)

        if not await peer.mail.until(heard, peer.job.recipe.train.patience_s) or message is None:
            raise Broken
        if not of and (of := max(0, message.read(Standing).of)):
            await _use(peer, member, message.frames, partial(peer.replica.adopt, at))
    return of
