"""Experts on other peers: a text's ids go to them, one number per token comes back; their weights stay where they are.

The same in both worlds. While it asks, the asking side takes all score messages and notices of loss of its world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from talkoot.blend.ensemble.ensemble import Mixing, Scored, nobody_answers
from talkoot.blend.ensemble.opening import common_tokenizer
from talkoot.blend.ensemble.posterior import Floats, Prior
from talkoot.blend.ensemble.scorers import Gone, StageScorer, TokenScorer
from talkoot.core.codec import decode, encode, negotiate
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId, digest
from talkoot.model.huggingface import load_model
from talkoot.run.greeting import Hello, Introduce, say_hello
from talkoot.world.api import FAILED, HELLO, LOST, Blank, Frame, Host, Launch, Lost, Message, World, frame_bytes
from talkoot.world.base import rebuild_failure

ASK, TOLD, INTRODUCE = "score/ask", "score/told", "introduce"
MOST_TOKENS = 1 << 20  # in one text
_MOST_REASON = 500  # characters of a peer's excuse that are shown
_ROUNDING = 1e-9  # by which a logarithm of a probability may come out above 0
_HELLO_AGAIN_S = 2.0


class Told(msgspec.Struct, frozen=True):
    """The answer to a ``score/ask``, which has no body and one frame: a text's ids, little-endian int32.

    Topic ``score/told``, frame: little-endian float64 log-probabilities of all tokens but the first.

    Attributes:
        question: digest of the frame of ids, so that an answer that comes late is not taken for another text's.
        refusal: why there is no frame.
    """

    question: str
    refusal: str = ""


class Post(msgspec.Struct, frozen=True):
    """What a peer that serves an expert is told at its launch: ``model`` is the expert's folder."""

    model: str


async def expert_peer(world: World, argument: bytes) -> None:
    """The program of a peer that serves one expert's scores; ``argument`` is a :class:`Post`."""
    scorer = StageScorer(load_model(Path(decode(argument, Post).model)))
    parameters = sum(parameter.numel() for parameter in scorer.stage.parameters())
    await serve_scores(world, scorer, flops_per_token=2.0 * parameters)


async def serve_scores(world: World, scorer: TokenScorer, flops_per_token: float) -> None:
    """Say hello to the lead, then score texts for whoever asks; returns when the lead is gone.

    Args:
        world: the peer's own.
        scorer: the expert.
        flops_per_token: what a token costs, in virtual time.
    """
    if world.lead is None:
        raise ValueError("a peer that nobody launched has no lead")
    message = await say_hello(world, world.lead, (ASK, INTRODUCE, LOST), _HELLO_AGAIN_S)
    while not (message.topic == LOST and message.sender == world.lead):
        if message.topic == INTRODUCE and message.sender == world.lead:
            _meet_all(world, message)
        elif message.topic == ASK:
            await _answer(world, scorer, message, flops_per_token)
        message = await world.receive(ASK, INTRODUCE, LOST)


def _meet_all(world: World, message: Message) -> None:
    with suppress(ValueError):  # an address that is none
        for contact in message.read(Introduce).contacts:
            if contact.peer != world.me:
                world.meet(PeerId(contact.peer), contact.address)


async def _answer(world: World, scorer: TokenScorer, message: Message, flops_per_token: float) -> None:
    frames: list[bytes] = []
    try:
        asked = _numbers(message.frames, "<i4", MOST_TOKENS)
    except ValueError:
        return  # a stranger's bytes, and no question
    ids, told = asked.tolist(), Told(_question(asked))
    try:
        found = await world.compute(lambda: scorer.log_probs(ids), flops_per_token * len(ids))
        frames = [np.asarray(found, "<f8").tobytes()]
    except TalkootError as problem:
        told = Told(told.question, problem.why[:_MOST_REASON])
    except Gone as problem:
        told = Told(told.question, str(problem)[:_MOST_REASON])
    await world.send(message.sender, TOLD, told, frames)


def _numbers(frames: Sequence[Frame], kind: str, most: int) -> NDArray[Any]:
    """The numbers of the only frame.

    Raises:
        ValueError: there is another number of frames, or the one is no array of at most ``most`` such numbers.
    """
    if len(frames) != 1 or isinstance(frames[0], Blank) or frame_bytes(frames[0]) > most * np.dtype(kind).itemsize:
        raise ValueError("one frame of numbers was to come")
    return np.frombuffer(frames[0], kind)


def _question(ids: NDArray[Any]) -> str:
    return digest(ids.tobytes(), "question")


async def hire(world: Host, models: Mapping[str, Path], *, timeout_s: float = 120.0) -> dict[str, PeerId]:
    """Launch a peer for each expert and meet it.

    Args:
        world: the lead's.
        models: the experts' folders by name.
        timeout_s: until all have to be there.

    Raises:
        TalkootError: their tokenizers differ, one cannot load its model, ended, or is not there in time.
    """
    common_tokenizer(models)
    tickets: dict[str, str] = {}
    for name, model in models.items():
        post = encode(Post(str(model.resolve())))
        tickets[world.launch(Launch(name=name, program=f"{__name__}:expert_peer", argument=post))] = name
    identities = {world.identity(ticket): name for ticket, name in tickets.items()}
    here: dict[str, PeerId] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while len(here) < len(models):
                message = await world.receive(HELLO, FAILED, LOST)
                if message.topic == FAILED:
                    raise rebuild_failure(message)
                if message.topic == LOST and message.sender in tickets:
                    raise _absent(tickets[message.sender], message.read(Lost).reason)
                if message.topic == HELLO and message.sender in identities:
                    hello = message.read(Hello)
                    negotiate(hello.oldest_protocol, hello.newest_protocol, who=f"peer {hello.name}")
                    world.meet(message.sender, hello.address)
                    await world.send(message.sender, INTRODUCE, Introduce(()))  # it need not say hello again
                    here[identities[message.sender]] = message.sender
    except TimeoutError:
        missing = ", ".join(sorted(models.keys() - here.keys()))
        raise _absent(missing, f"no word from it within {timeout_s:g} s") from None
    return {name: here[name] for name in models}


def _absent(who: str, why: str) -> TalkootError:
    next = "look at the peer's own messages; its machine may lack memory"
    return TalkootError("an expert's peer did not start", where=who, why=why, next=next, code=Exit.UNREACHABLE)


class RemoteEnsemble:
    """A posterior ensemble whose experts are other peers; some may be on this machine.

    A peer that is lost, does not answer in time or sends what cannot be is left out from then on: the others go on,
    renormalised, and every result says who is gone and why. One that refuses a text is left out of that text only.

    Args:
        world: the asking side's; the experts' peers were met.
        experts: by name, the peer or the scorer.
        prior, keep, after: as for :class:`~talkoot.blend.ensemble.ensemble.PosteriorEnsemble`.
        timeout_s: how long the peers may take for one text.

    Attributes:
        gone: who is left out from now on, and why.
        unclaimed: notices of other peers' loss that came meanwhile, for whoever waits for them.
    """

    def __init__(
        self,
        world: World,
        experts: Mapping[str, PeerId | TokenScorer],
        prior: Prior | None = None,
        *,
        keep: int = 0,
        after: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self._world, self._experts, self._timeout_s = world, dict(experts), timeout_s
        self.mixing = Mixing(tuple(experts), prior, keep=keep, after=after)
        self.gone: dict[str, str] = {}
        self.unclaimed: list[Message] = []

    async def score(self, ids: Sequence[int]) -> Scored:
        """The ensemble's word on a text.

        Raises:
            TalkootError: no expert answers, or the text is not for them.
        """
        gone = dict(self.gone)
        first = await self._ask(self.mixing.names, self.mixing.first(ids), gone)
        rest: dict[str, Floats] = {}
        while wanted := self.mixing.wanted(ids, first, rest, gone):
            rest |= await self._ask(wanted, ids, gone)
        return self.mixing.scored(first, rest, len(ids) - 1, gone)

    async def evidence(self, texts: Iterable[Sequence[int]]) -> Floats:
        """(N, K): log-probability of each held-out text under each expert, for a prior's rule (``priors[...]``).

        Raises:
            TalkootError: an expert does not answer: no prior can be made without its word.
        """
        rows: list[list[float]] = []
        for ids in texts:
            gone = dict(self.gone)
            said = await self._ask(self.mixing.names, ids, gone)
            if gone:
                raise nobody_answers(gone, next="leave these experts out, or use the prior 'uniform'")
            rows.append([float(said[name].sum()) for name in self.mixing.names])
        return np.asarray(rows, np.float64).reshape(len(rows), len(self.mixing.names))

    async def _ask(self, names: Sequence[str], ids: Sequence[int], gone: dict[str, str]) -> dict[str, Floats]:
        answers: dict[str, Floats] = {}
        waiting: dict[str, str] = {}  # name by peer
        asked = np.asarray(ids, np.int64).astype("<i4")
        for name in names:
            expert = self._experts[name]
            if isinstance(expert, str) and name not in gone:
                waiting[expert] = name
                await self._world.send(expert, ASK, None, [asked.tobytes()])
        for name in names:  # while the others compute
            expert = self._experts[name]
            if not isinstance(expert, str):
                try:
                    answers[name] = expert.log_probs(ids)
                except Gone as problem:
                    gone[name] = str(problem)
        try:
            async with asyncio.timeout(self._timeout_s):
                while waiting:
                    message = await self._world.receive(TOLD, LOST)
                    if message.topic == LOST:
                        self._note_loss(message, waiting, gone)
                    elif message.sender in waiting:
                        self._take(message, asked, waiting, answers, gone)
        except TimeoutError:
            for name in waiting.values():
                self._lose(name, f"no answer within {self._timeout_s:g} s", gone)
        return answers

    def _note_loss(self, message: Message, waiting: dict[str, str], gone: dict[str, str]) -> None:
        names = [name for name, expert in self._experts.items() if expert == message.sender]
        for name in names:
            self._lose(name, message.read(Lost).reason, gone)
        if not names:
            self.unclaimed.append(message)
        waiting.pop(message.sender, None)

    def _take(
        self,
        message: Message,
        asked: NDArray[Any],
        waiting: dict[str, str],
        answers: dict[str, Floats],
        gone: dict[str, str],
    ) -> None:
        name = waiting[message.sender]
        try:
            told = message.read(Told)
            if told.question != _question(asked):
                return  # an answer to an older question
            if told.refusal:
                gone[name] = told.refusal[:_MOST_REASON]
            else:
                answers[name] = _checked(message.frames, len(asked) - 1)
        except ValueError as problem:
            self._lose(name, f"its answer is wrong: {problem}", gone)
        del waiting[message.sender]

    def _lose(self, name: str, why: str, gone: dict[str, str]) -> None:
        self.gone[name] = gone[name] = why


def _checked(frames: Sequence[Frame], count: int) -> Floats:
    found = _numbers(frames, "<f8", count)
    if len(found) != count or not np.isfinite(found).all() or (found > _ROUNDING).any():
        raise ValueError(f"{len(found)} numbers, not all of them logarithms of {count} probabilities")
    return found.astype(np.float64)
