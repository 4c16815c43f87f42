"""What can be done to a blend: add and remove experts, fit a router, fuse the experts into one mixture.

Each leaves a whole blend and a receipt. Nothing here trains, and adding or removing an expert fits nothing again but
the router's own small system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from talkoot.blend.folder import MIXTURE, ROUTER, STATISTICS, TOKENIZER, Blend, Expert, check_name
from talkoot.blend.ledger import Added, Removed, Routed, Upcycled, key_of, record
from talkoot.blend.mixture.assemble import Assembly, assemble
from talkoot.blend.mixture.counting import count as count_states
from talkoot.blend.mixture.fitting import fit_gates
from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.store import save_mixture
from talkoot.blend.router import Router, Wanted, choose
from talkoot.blend.statistics import Features, Statistics, count
from talkoot.blend.text import documents_of, has_part, pack_split, split_source, spread_windows
from talkoot.core.errors import TalkootError, nearest
from talkoot.core.keys import Key
from talkoot.model.folder import check_finite
from talkoot.model.huggingface import load_model, preflight, read_tensors
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.lock import locked

AUTO = "auto"  # the rule that held-out prompts choose
CHOICES = tuple(name for name in gates if name != "oracle")  # which one would have to be told the right expert


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A domain's text, as :func:`talkoot.blend.text.split_source` takes it."""

    source: str
    column: str = "text"
    megabytes: float = 0.0
    pieces: int = 0


class Fused(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`upcycle` made.

    Attributes:
        folder, format: of the mixture.
        gate: that chooses; ``condition``: the worst condition number of its systems.
        strays: of each expert, how many tensors of its trunk are not the mixture's; all 0 = exact.
    """

    folder: str
    format: str
    gate: str
    condition: float
    strays: dict[str, int]


def add_expert(
    folder: Path, name: str, model: Path, *, text: Text | None = None, statistics: Path | None = None
) -> Router | None:
    """Add an expert, or replace the one of that name; the router, where there is one, learns its domain.

    Args:
        folder: the blend's; an empty blend is begun where there is none.
        model: its Hugging Face folder; stays where it is.
        text: of its domain, counted here; or
        statistics: that its owner counted elsewhere with the blend's tokenizer.

    Returns:
        The new router, where there is one.

    Raises:
        TalkootError: the name or the model cannot be used, weights are not finite, or statistics are of other features.
    """
    check_name(name)
    config, entries = preflight(model)
    for tensor, value in read_tensors(entries, {one: one for one in entries}):
        check_finite(tensor, value, model)
    with _changing(folder) as (blend, key):
        tokenizer = Tokenizer.load(model)
        if not (folder / TOKENIZER).is_dir():
            tokenizer.save(folder / TOKENIZER)  # the first expert's is the router's
        features = features_of(folder)
        place, counted = f"{STATISTICS}/{name}.safetensors", None
        if text is not None:
            split = split_source(text.source, text.column, megabytes=text.megabytes, pieces=text.pieces)
            pack_split(folder, name, split, features.tokenizer, text.source)
            counted = count_text(name, split.train, features, key)
            counted.write(folder / place, key)
        elif statistics is not None:
            counted = _read_statistics(statistics, name, features)
            (folder / STATISTICS).mkdir(exist_ok=True)
            (folder / place).write_bytes(statistics.read_bytes())
        router = None
        if counted is not None and (folder / ROUTER).exists():
            router = _calibrated(Router.load(folder / ROUTER).adding(name, counted), folder)
            router.save(folder / ROUTER)  # before the manifest: a router that knows more than there is does no harm
        blend.put(
            Expert(
                name=name,
                model=str(model.absolute()),
                parameters=config.num_parameters(),
                tokenizer=tokenizer.digest(),
                statistics=place if counted is not None else "",
                source=text.source if text is not None else "",
            )
        )
        digest = counted.outline().content if counted is not None else ""
        record(folder, key, "blend.add", Added(name=name, parameters=config.num_parameters(), statistics=digest))
    return router


def remove_expert(folder: Path, name: str) -> None:
    """Strike an expert off, and let the router forget its domain; its files stay.

    Raises:
        TalkootError: there is none of that name.
    """
    with _changing(folder, must_exist=True) as (blend, key):
        blend.expert(name)
        path = folder / ROUTER
        router = Router.load(path) if path.exists() else None
        blend.remove(name)
        if router is not None and name in router.names:
            if len(router.names) > 2:
                router.without(name).save(path)
            else:
                path.unlink()  # of one there is nothing to choose
        record(folder, key, "blend.remove", Removed(name=name))


def route(folder: Path, rule: str = AUTO, wanted: Wanted | None = None) -> tuple[Router, dict[str, float]]:
    """Fit a router from the experts' statistics and calibrate it on their held-out text, as far as that is here.

    Returns:
        The router, and each rule's accuracy on held-out prompts.

    Raises:
        TalkootError: fewer than two experts have statistics, or they are of other features.
    """
    with _changing(folder, must_exist=True) as (blend, key):
        features = features_of(folder)
        files = {expert.name: blend.statistics_file(expert.name) for expert in blend}
        statistics = {name: _read_statistics(path, name, features) for name, path in files.items() if path is not None}
        documents = _held_out(folder, list(statistics), features.tokenizer)
        if documents and rule == AUTO:
            router, accuracy = choose(statistics, features, documents, wanted=wanted)
        else:
            router = Router.fit(statistics, features, *(() if rule == AUTO else (rule,)))
            router, accuracy = router.calibrated(documents, wanted) if documents else router, {}
        router.save(folder / ROUTER)
        facts = Routed(router=router.version, rule=router.rule, domains=router.names, accuracy=accuracy)
        record(folder, key, "blend.route", facts)
    return router, accuracy


def upcycle(
    folder: Path,
    *,
    gate: str = "token",
    top_k: int = 1,
    trunk: str = "pinned",
    format: str = "",
    tokens: int = 100_000,
    window: int = 256,
) -> Fused:
    """Fuse the experts into ``mixture/`` without training: their feed-forward layers side by side behind gates in
    closed form, from statistics of each domain's text through the trunk with its own expert.

    Args:
        gate, top_k, trunk: see :class:`talkoot.blend.mixture.config.MixtureConfig`.
        format: on disk; empty = the standard one of the experts' family, where it can hold the gate.
        tokens: of each domain's text, about, for gates on states; ``window``: that such a state looks back to.

    Raises:
        TalkootError: fewer than two experts, unlike shapes or tokenizers, or a domain's text is not here.
    """
    if gate not in CHOICES:
        raise TalkootError(
            f"there is no gate {gate!r}",
            where="--gate",
            why=nearest(gate, CHOICES),
            next=f"use one of: {', '.join(CHOICES)}",
        )
    with _changing(folder, must_exist=True) as (blend, key):
        places = {expert.name: blend.model_folder(expert.name) for expert in blend}
        general = blend.path(blend.manifest.general) if blend.manifest.general else None
        bias = format == "custom" and gates[gate].reads_states
        made = assemble(places, general if trunk == "pinned" else None, gate=gate, top_k=top_k, trunk=trunk, bias=bias)
        tokenizer = made.tokenizer or Tokenizer.load(next(iter(places.values())))
        condition = _fit(made, places, _Texts(blend, tokenizer, tokens, window), key)
        target = folder / MIXTURE
        written = save_mixture(target, made.mixture, tokenizer, format)
        parameters = sum(value.numel() for value in made.mixture.tensors().values())
        facts = Upcycled(experts=tuple(places), gate=gate, format=written, exact=made.exact, parameters=parameters)
        record(folder, key, "blend.upcycle", facts)
    strays = {name: len(made.strays.get(name, ())) for name in places}
    return Fused(folder=str(target), format=written, gate=gate, condition=condition, strays=strays)


class _Texts(NamedTuple):
    """Where the domains' tokens lie, whose they are, and how much of each is enough."""

    blend: Blend
    tokenizer: Tokenizer
    tokens: int
    window: int


def _fit(made: Assembly, places: Mapping[str, Path], texts: _Texts, key: Key) -> float:
    """Set the gates of a mixture; the worst condition number on the way."""
    method = gates[made.mixture.config.gate]
    if not (method.reads_states or method.reads_tokens):
        return 0.0
    statistics = None if method.reads_states else _router_statistics(texts)
    if statistics is None:
        statistics = {name: _counted(made, name, place, texts, key) for name, place in places.items()}
    return max(fit_gates(made.mixture, statistics).values(), default=0.0)


def _router_statistics(texts: _Texts) -> dict[str, Statistics] | None:
    """What owners counted for the router serves a gate on tokens as well, if all have it and read the same tokens."""
    features = features_of(texts.blend.folder)
    files = {expert.name: texts.blend.statistics_file(expert.name) for expert in texts.blend}
    if features.tokenizer.digest() != texts.tokenizer.digest() or None in files.values():
        return None
    return {name: _read_statistics(path, name, features) for name, path in files.items() if path is not None}


def _counted(made: Assembly, name: str, place: Path, texts: _Texts, key: Key) -> Statistics:
    """A domain's statistics for a gate: its text through the trunk with its own expert."""
    config, window = made.mixture.config, texts.window
    documents = _train_text(texts, name)
    if gates[config.gate].reads_states:  # as dear as reading the text with the model
        documents = spread_windows(documents, window, texts.tokens)
    return count_states(
        load_model(place) if made.exact else made.mixture.forced(name),
        documents,
        domain=name,
        gate=config.gate,
        tokenizer=texts.tokenizer.digest(),
        contributor=key.peer,
        window=window,
    )


def features_of(folder: Path) -> Features:
    """What all statistics of a blend are counted with: its tokenizer, and embeddings by chance."""
    return Features.random(Tokenizer.load(folder / TOKENIZER))


def count_text(name: str, texts: Sequence[str], features: Features, key: Key) -> Statistics:
    """A domain's statistics from its text."""
    return count(name, (features.tokenizer.encode(text) for text in texts), features, key)


def _read_statistics(path: Path, name: str, features: Features) -> Statistics:
    """A domain's statistics, believed only if they are that domain's."""
    found = Statistics.read(path, features=features.id)
    if found.provenance.domain != name:
        raise TalkootError(
            "these are statistics of another domain",
            where=str(path),
            why=f"they were counted and signed for {found.provenance.domain!r}, this expert is {name!r}",
            next="count the text for this name with `talkoot blend count`, or give the expert the other name",
        )
    return found


@contextmanager
def _changing(folder: Path, *, must_exist: bool = False) -> Iterator[tuple[Blend, Key]]:
    """A blend and its key, with nobody else changing it."""
    if must_exist:
        Blend.open(folder)  # before a lock is left where no blend is
    with locked(folder):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # many small operations: a second thread would mostly wait for the first
        try:
            yield Blend.open(folder) if must_exist else Blend.open_or_new(folder), key_of(folder)
        finally:
            torch.set_num_threads(threads)


def _held_out(folder: Path, names: Sequence[str], tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Validation documents of all domains; nothing where some domain has none here."""
    if not all(has_part(folder, name, "validation") for name in names):
        return {}
    return {name: documents_of(folder, name, "validation", tokenizer) for name in names}


def _calibrated(router: Router, folder: Path) -> Router:
    documents = _held_out(folder, router.names, router.features.tokenizer)
    return router.calibrated(documents) if documents else router


def _train_text(texts: _Texts, name: str) -> Sequence[Sequence[int]]:
    if not has_part(texts.blend.folder, name, "train"):
        raise TalkootError(
            f"the text of domain {name!r} is not here",
            where=str(texts.blend.folder),
            why="gates are fitted to what the trunk makes of each domain's text, and this expert came without any",
            next="add it again with --text, or fuse with --gate bigram (router statistics do) or prompt (needs none)",
        )
    return documents_of(texts.blend.folder, name, "train", texts.tokenizer)
