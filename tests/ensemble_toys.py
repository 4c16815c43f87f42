"""Small experts for the tests of ensembles: tables, and models of unlike width and depth with opinions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from talkoot.blend.ensemble import Gone, serve_scores
from talkoot.blend.ensemble.remote import ASK, TOLD, Told
from talkoot.core.ids import digest
from talkoot.model.config import ModelConfig
from talkoot.model.huggingface import save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.greeting import say_hello
from talkoot.world.api import LOST, World

VOCABULARY = 258
TEXT = [ord(char) + 2 for char in "the same numbers in every world"]


class Table:
    """An expert with a probability for each token, whatever came before."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self.table = np.log(np.asarray(probabilities, np.float64))
        self.asked: list[int] = []

    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        """Of every token but the first."""
        self.asked.append(len(ids))
        return self.table[np.asarray(ids[1:], int)]


class Absent:
    """An expert that cannot answer texts longer than so many tokens."""

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest

    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        """Of every token but the first."""
        if len(ids) > self.longest:
            raise Gone("its peer is lost")
        return np.full(len(ids) - 1, -0.1)


def model(number: int, *, vocab_size: int = VOCABULARY, positions: int = 64) -> Stage:
    """Expert ``number``: one block more and wider than the one before."""
    config = ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        width=16 + 8 * number,
        layers=1 + number,
        heads=2,
        kv_heads=1,
        head_dim=8,
        hidden=32,
        max_positions=positions,
        bos_id=0,
        eos_ids=(1,),
    )
    stage = Stage(config, 0, config.layer_count, seed=number)
    with torch.no_grad():  # an untrained model has no opinion; these disagree
        stage.tensors()["lm_head.weight"].mul_(10)
    return stage


def save(folder: Path, number: int) -> Path:
    """That expert as a folder."""
    place = folder / f"expert-{number}"
    save_folder(place, model(number).config, model(number).tensors(), Tokenizer.bytes())
    return place


async def liar(world: World, argument: bytes) -> None:
    """A peer that serves scores which cannot be; ``argument`` says in what way."""
    kind = argument.decode()

    class Lie:
        def log_probs(self, ids: Sequence[int]) -> np.ndarray:
            count = len(ids) - 1
            return {
                "positive": np.full(count, 0.5),
                "nan": np.full(count, np.nan),
                "short": np.full(max(0, count - 1), -1.0),
                "long": np.full(count + 1, -1.0),
            }[kind]

    await serve_scores(world, Lie(), 1.0)


async def late(world: World, argument: bytes) -> None:
    """A peer that answers its first question once the second one is there; the higher an id, the likelier it is."""
    assert world.lead is not None
    held = await say_hello(world, world.lead, (ASK,), 1.0)
    for message in (held, await world.receive(ASK)):
        ids = np.frombuffer(message.frames[0], "<i4")
        told = Told(digest(ids.tobytes(), "question"))
        await world.send(message.sender, TOLD, told, [(ids[1:] / 1000 - 1).astype("<f8").tobytes()])
    await world.receive(LOST)


async def mute(world: World, argument: bytes) -> None:
    """A peer that says hello and then nothing."""
    assert world.lead is not None
    await say_hello(world, world.lead, ("nothing", LOST), 1.0)


async def steady(world: World, argument: bytes) -> None:
    """A peer that finds every token as likely as the next one."""
    await serve_scores(world, Table([1 / VOCABULARY] * VOCABULARY), 1e6)
