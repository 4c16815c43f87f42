"""What lead and peers say to each other in post-training; topics and their bodies."""

from __future__ import annotations

import msgspec

from talkoot.core.receipt import Signed


class Begin(msgspec.Struct, frozen=True):
    """Lead to peer, ``begin``: make your policy ready, from a stored state where there is one, and say ``ready``."""

    blob: str = ""


class Ready(msgspec.Struct, frozen=True):
    """Peer to lead, ``ready``: the policy answers and learns.

    Attributes:
        tokenizer: digest; peers with equal ones exchange token ids, others texts.
        size: number of the model's parameters.
        trainable: how many of them learn.
        drift: largest difference between the log-probability that the generator and the trainer give to a token.
    """

    tokenizer: str
    size: int
    trainable: int
    drift: float


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A peer in the view: who, where, with which tokenizer, and the first round in which others wait for it."""

    peer: str
    name: str
    address: str
    tokenizer: str
    since: int


class View(msgspec.Struct, frozen=True):
    """Lead to peers, ``view``: who takes part from here on, in the order of their names.

    ``until``: the number of rounds of the run.
    """

    number: int
    places: tuple[Place, ...]
    until: int


class Rollouts(msgspec.Struct, frozen=True):
    """Peer to peers, ``rollouts``: the signed account of a round's completions.

    Frames: token ids (int32) and log-probabilities (float32) of all completions one behind the other, 8 bytes per
    token; and for peers with another tokenizer the completions' texts (UTF-8, each ended by a zero byte).
    """

    signed: Signed


class Done(msgspec.Struct, frozen=True):
    """Peer to lead, ``round``: what was generated and learned in a round; ``blob``: its state afterwards, if stored."""

    generated: Signed
    updated: Signed
    blob: str = ""


class Ended(msgspec.Struct, frozen=True):
    """Peer to lead, ``ended``: no further round is to be done, and its newest state is stored: in ``blob``, after
    ``round`` rounds, where the run ended before that was due."""

    round: int
    blob: str = ""
