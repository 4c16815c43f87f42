"""Statistics as a file: safetensors with a signed header; read with suspicion, header before numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from talkoot.blend.statistics.gram import MAX_WIDTH, Gram
from talkoot.blend.statistics.histogram import MAX_BUCKETS, MAX_VOCABULARY, Histogram
from talkoot.blend.statistics.objects import Provenance, Statistics
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, PeerId, digest, digest_of_digests, short
from talkoot.core.keys import Key, verify
from talkoot.model.folder import write_file

VERSION = 1
MAX_GRAMS = 1024
MAX_BYTES = 1 << 32
_MAX_HEADER = 1 << 20
_PURPOSE = "statistics"


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the signature covers.

    Attributes:
        version: of this format.
        provenance, documents, tokens: as in `Statistics`.
        grams: width of each Gram matrix by name.
        histogram: vocabulary and buckets; None without one.
        content: digest of all numbers.
        signer: who vouches for all of this; for statistics of one source, its contributor.
    """

    version: int
    provenance: Provenance
    documents: int
    tokens: int
    grams: dict[str, int]
    histogram: tuple[int, int] | None
    content: Digest
    signer: PeerId


def write(statistics: Statistics, path: Path, key: Key) -> None:
    """Write and sign.

    Raises:
        ValueError: they are not fit to be sent, or are of one source that is not the key's.
    """
    statistics.check()
    sources = statistics.provenance.sources
    if len(sources) == 1 and sources[0].contributor != key.peer:
        raise ValueError("statistics of one source are signed by the peer that counted them")
    tensors, histogram = _tensors(statistics), statistics.histogram
    header = Header(
        version=VERSION,
        provenance=statistics.provenance,
        documents=statistics.documents,
        tokens=statistics.tokens,
        grams={name: gram.width for name, gram in sorted(statistics.grams.items())},
        histogram=(histogram.vocabulary, histogram.buckets) if histogram else None,
        content=_content(tensors),
        signer=key.peer,
    )
    text = msgspec.json.encode(header)
    signature = key.sign(bytes.fromhex(digest(text, _PURPOSE))).hex()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(tensors, {"statistics": text.decode(), "signature": signature}))


def read_header(path: Path) -> Header:
    """What a file says about itself, its signature checked; no number is read.

    Raises:
        TalkootError: there is no such file, it is no statistics, or the signature does not fit.
    """
    with _opened(path) as file:
        return _header(file, path)


def read(path: Path, *, features: str = "") -> Statistics:
    """Read, and believe nothing that can be checked.

    Args:
        features: what they must be of; others are refused before any number is read. Empty = whatever they are.

    Raises:
        TalkootError: unreadable, too large, unsigned, of other features, or numbers that cannot be.
    """
    with _opened(path) as file:
        header = _header(file, path)
        if features and header.provenance.features != features:
            why = f"they are of {short(header.provenance.features)}, wanted are {short(features)}"
            next = "count the text anew with the same tokenizer, embeddings and sizes"
            raise _refused("the statistics are of other features", path, why, next)
        _check_sizes(file, header, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    if _content(tensors) != header.content:
        raise _refused("the statistics were changed", path, "the numbers are not those that were signed")
    try:
        statistics = _rebuilt(header, tensors)
        statistics.check()
    except ValueError as problem:
        raise _refused("the statistics cannot be", path, str(problem), "do not trust whoever signed them") from None
    return statistics


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file whose header is intact; the library's own complaints, renamed."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refused("the statistics are too large", path, f"more than {MAX_BYTES:,} bytes")
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise _refused("the statistics cannot be read", path, why, "check the path") from None
    except SafetensorError as problem:
        raise _refused("the statistics cannot be read", path, str(problem)) from None


def _header(file: Any, path: Path) -> Header:
    metadata = file.metadata() or {}
    text, signature = metadata.get("statistics", "").encode(), metadata.get("signature", "")
    if not text or len(text) > _MAX_HEADER:
        raise _refused("the file holds no statistics", path, "its header does not say so")
    try:
        header = msgspec.json.decode(text, type=Header)
        signed = verify(header.signer, bytes.fromhex(signature), bytes.fromhex(digest(text, _PURPOSE)))
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise _refused("the file holds no statistics", path, f"its header is broken: {problem}") from None
    if header.version != VERSION:
        why = f"they are of version {header.version}, this talkoot reads {VERSION}"
        raise _refused("the statistics cannot be read", path, why, "use the talkoot that wrote them")
    if not signed:
        raise _refused("the statistics are not signed", path, f"the signature is not {short(header.signer)}'s")
    sources = header.provenance.sources
    if len(sources) == 1 and sources[0].contributor != header.signer:
        why = f"counted by {short(sources[0].contributor)}, signed by {short(header.signer)}"
        raise _refused("the statistics are signed by somebody else", path, why)
    return header


def _check_sizes(file: Any, header: Header, path: Path) -> None:
    """Declared sizes are possible, and the file's tensors are exactly those; before any is read."""
    vocabulary, buckets = header.histogram or (1, 0)
    possible = (
        len(header.grams) <= MAX_GRAMS
        and all(1 <= width <= MAX_WIDTH and len(name) <= 256 for name, width in header.grams.items())
        and 1 <= vocabulary <= MAX_VOCABULARY
        and 0 <= buckets <= MAX_BUCKETS
    )
    wanted = {f"gram.{name}": ("F64", [(w + 1) * (w + 2) // 2]) for name, w in header.grams.items()}
    if header.histogram:
        wanted |= {"histogram.unigrams": ("I64", [vocabulary]), "histogram.bigrams": ("I64", [buckets])}
    found: dict[str, tuple[str, list[int]]] = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        part = file.get_slice(name)
        found[name] = part.get_dtype(), part.get_shape()
    if not possible or found != wanted:
        raise _refused("the statistics cannot be read", path, "the numbers' sizes are not those that the header says")


def _tensors(statistics: Statistics) -> dict[str, Tensor]:
    tensors = {f"gram.{name}": gram.packed() for name, gram in statistics.grams.items()}
    if statistics.histogram is not None:
        tensors["histogram.unigrams"] = statistics.histogram.unigrams
        tensors["histogram.bigrams"] = statistics.histogram.bigrams
    return tensors


def _rebuilt(header: Header, tensors: dict[str, Tensor]) -> Statistics:
    histogram = None
    if header.histogram:
        histogram = Histogram(*header.histogram, tensors["histogram.unigrams"], tensors["histogram.bigrams"])
    return Statistics(
        provenance=header.provenance,
        grams={name: Gram.unpacked(width, tensors[f"gram.{name}"]) for name, width in header.grams.items()},
        histogram=histogram,
        documents=header.documents,
        tokens=header.tokens,
    )


def _content(tensors: dict[str, Tensor]) -> Digest:
    return digest_of_digests((name, digest(part.numpy().tobytes())) for name, part in tensors.items())


def _refused(what: str, path: Path, why: str, next: str = "fetch or count them again") -> TalkootError:
    return TalkootError(what, where=str(path), why=why, next=next)
