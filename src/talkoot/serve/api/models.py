"""What can be served, and how each kind gets into memory. Importing this stays light; loading imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry
from talkoot.model.folder import check_finite, read_headers, read_json
from talkoot.model.hf_config import CONFIG

if TYPE_CHECKING:
    from talkoot.model.stage import Stage

S = TypeVar("S", bound="Stage")

FLOAT_BYTES = 4  # models compute in float32: on processors the half types are slower


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A model that could be loaded.

    Attributes:
        name: as clients call it.
        kind: how it is loaded, of :data:`kinds`.
        folders: Hugging Face folders; several for an ensemble.
        stamp: changes when the weights on disk do.
        weights: bytes that they take in memory.
        positions: tokens that prompt and answer may have together; 0 = the folder does not say.
    """

    name: str
    kind: str
    folders: tuple[str, ...]
    stamp: str
    weights: int
    positions: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to go on with.

    Attributes:
        tokens: ids, at least one.
        max_tokens: at most so many new ones.
        ends: ids that end an answer, beside the model's own.
        temperature, top_p, seed: as for ``talkoot.model.generate.stream``.
        expert: the router's choice, for a mixture that leaves it to one.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    ends: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    expert: str = ""


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A new token, the natural logarithm of its probability, and why it is the last: ``stop``, ``length`` or ``""``."""

    id: int
    logprob: float
    last: str = ""


class Model(Protocol):
    """A model in memory; ``size`` is its number of parameters."""

    size: int

    def stream(self, ask: Ask) -> Iterator[Token]:
        """The answer, token by token; ValueError or TalkootError where it cannot be given."""
        ...


kinds: Registry[Callable[[Source], Model]] = Registry("kind of served model")


class StageModel:
    """One model with the interface of a whole ``Stage``."""

    def __init__(self, stage: Any) -> None:
        self.size = sum(parameter.numel() for parameter in stage.parameters())
        self._stage = stage

    def stream(self, ask: Ask) -> Iterator[Token]:
        """See :class:`Model`."""
        import torch

        from talkoot.model.generate import stream

        stage = self._chosen(ask)
        ends = {*stage.config.eos_ids, *ask.ends}
        steps = stream(
            stage,
            torch.tensor([ask.tokens]),
            ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=[ask.seed],
            eos_id=tuple(ends),
        )
        yield from told((one for step in steps for one in step), ends, ask.max_tokens)

    def _chosen(self, ask: Ask) -> Any:
        return self._stage


class PromptMixture(StageModel):
    """A mixture of experts that leaves the choice of one to whoever read the prompt."""

    def _chosen(self, ask: Ask) -> Any:
        if not ask.expert:
            raise TalkootError(
                "nobody chose an expert",
                where="the mixture",
                why="its gate leaves the choice to a router of prompts, and the blend has none",
                next="fit one with `talkoot blend route`, or make the mixture with a gate of its own",
            )
        return self._stage.forced(ask.expert)


class EnsembleModel:
    """Models that speak together, weighed by how likely each finds the text so far."""

    def __init__(self, stages: dict[str, Any]) -> None:
        self.size = sum(parameter.numel() for stage in stages.values() for parameter in stage.parameters())
        self._stages = stages

    def stream(self, ask: Ask) -> Iterator[Token]:
        """See :class:`Model`."""
        from talkoot.blend.ensemble import StageReader, stream

        ends = {*ask.ends, *(end for stage in self._stages.values() for end in stage.config.eos_ids)}
        steps = stream(
            {name: StageReader(stage) for name, stage in self._stages.items()},
            ask.tokens,
            ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            eos_id=tuple(ends),
        )
        yield from told(steps, ends, ask.max_tokens)


def told(steps: Iterator[Any], ends: set[int], max_tokens: int) -> Iterator[Token]:
    """Sampled tokens (``token``, ``logprob``) with the reason why the last one is the last."""
    for number, sampled in enumerate(steps, 1):
        last = "stop" if sampled.token in ends else "length" if number == max_tokens else ""
        yield Token(sampled.token, sampled.logprob, last)


def _sound(model: S, folder: str) -> S:
    """The model, if all its weights are numbers: others would answer with nothing, and look healthy.

    Raises:
        TalkootError: naming the tensor.
    """
    for name, value in model.tensors().items():
        check_finite(name, value, folder)
    return model


@kinds.register("dense")
def _dense(source: Source) -> Model:
    from talkoot.model.huggingface import load_model

    return StageModel(_sound(load_model(source.folders[0]), source.folders[0]))


@kinds.register("mixture")
def _mixture(source: Source) -> Model:
    from talkoot.blend.mixture.store import load_mixture

    return StageModel(_sound(load_mixture(source.folders[0]), source.folders[0]))


@kinds.register("prompt-mixture")
def _prompt_mixture(source: Source) -> Model:
    from talkoot.blend.mixture.store import load_mixture

    return PromptMixture(_sound(load_mixture(source.folders[0]), source.folders[0]))


@kinds.register("ensemble")
def _ensemble(source: Source) -> Model:
    from talkoot.model.huggingface import load_model

    return EnsembleModel({folder: _sound(load_model(folder), folder) for folder in source.folders})


class _Kind(msgspec.Struct):
    model_type: str


def kind_of(folder: Path) -> str:
    """How the model in a folder is loaded, as a name in :data:`kinds`.

    Raises:
        TalkootError: its configuration cannot be read.
    """
    from talkoot.blend.mixture.formats import formats
    from talkoot.blend.mixture.gates import gates

    kind = read_json(folder / CONFIG, _Kind).model_type
    for name in formats:
        if formats[name].model_type == kind:
            gate = gates[formats[name].read(folder).gate]
            return "mixture" if gate.reads_states or gate.reads_tokens else "prompt-mixture"
    return "dense"


class _Positions(msgspec.Struct):
    max_position_embeddings: int = 0


def describe(name: str, folder: Path, *others: Path) -> Source:
    """A model by its folder, or an ensemble by several; reads headers only.

    Raises:
        TalkootError: a folder holds no model.
    """
    folders = (folder, *others)
    entries = [entry for one in folders for entry in read_headers(one).values()]
    files = sorted({one / CONFIG for one in folders} | {entry.file for entry in entries})
    stats = [path.stat() for path in files]
    said = [read_json(one / CONFIG, _Positions).max_position_embeddings for one in folders]
    return Source(
        name=name,
        kind="ensemble" if others else kind_of(folder),
        folders=tuple(map(str, folders)),
        stamp=" ".join(f"{stat.st_mtime_ns}:{stat.st_size}:{stat.st_ino}" for stat in stats),
        weights=sum(prod(entry.shape) for entry in entries) * FLOAT_BYTES,
        positions=min((one for one in said if one), default=0),
    )
