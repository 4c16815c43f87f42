"""What a prompt router looks at: tokens, pairs of neighbours, and sums of fixed embeddings over short chunks.

No transformer runs: an embedding depends on its token alone, so counting a text costs little more than reading it.
Embeddings are whole numbers (+-1 by chance, or a model's own, rounded to a byte). Their sums and products are whole
numbers too, and below 2^53 doubles add those exactly: whoever counted which part of a text, in whatever order, the
total is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

import talkoot
from talkoot.blend.statistics.gram import Gram
from talkoot.blend.statistics.histogram import Histogram, as_ids
from talkoot.blend.statistics.objects import Statistics
from talkoot.blend.statistics.provenance import Provenance, Source, dataset_digest
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, digest, short
from talkoot.core.keys import Key
from talkoot.model.huggingface import load_stage
from talkoot.model.tokenizer import Tokenizer

CHUNK = 32  # tokens whose embeddings are added up before products are taken
CHUNKS = "chunks"  # name of that Gram matrix
BUCKETS = 1 << 20  # for pairs; at 2,048 tokens a fourth as many cost half a point of accuracy, four times gain 0.1
WIDTH = 384
_LEVELS, _CLIP = 127, 6.0  # of a rounded embedding, and where its numbers are cut, in root mean squares
_PIECE = CHUNK * 1024


class Features:
    """How token ids become numbers; all owners whose statistics are to add up use the same.

    Args:
        tokenizer: of the router; experts may have others.
        table: embeddings, (vocabulary, width) int8; None = chunks are not counted.
        buckets: for pairs of neighbours; 0 = they are not counted.

    Raises:
        ValueError: the table's rows are not the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, table: Tensor | None = None, buckets: int = BUCKETS) -> None:
        self.tokenizer, self.table, self.buckets = tokenizer, table, buckets
        self.vocabulary = tokenizer.vocab_size
        if table is not None and (table.dtype != torch.int8 or table.ndim != 2 or len(table) != self.vocabulary):
            raise ValueError(f"a table of int8 with {self.vocabulary} rows is needed, not {tuple(table.shape)}")
        # Sums of a chunk stay below 2^24: floats hold them exactly, and add them up four times as fast.
        self._floats = None if table is None else table.float()
        content = digest(table.numpy().tobytes()) if table is not None else ""
        text = f"{tokenizer.digest()} {self.vocabulary} {self.width} {content} {CHUNK} {buckets}"
        self.id: Digest = digest(text.encode(), "features")

    @property
    def width(self) -> int:
        """Numbers per token; 0 without a table."""
        return 0 if self.table is None else self.table.shape[1]

    @classmethod
    def random(cls, tokenizer: Tokenizer, width: int = WIDTH, *, buckets: int = BUCKETS, seed: int = 0) -> Features:
        """Embeddings of +1 and -1 by chance (Achlioptas 2003): the same on every machine."""
        chance = torch.Generator().manual_seed(seed)
        bits = torch.randint(2, (tokenizer.vocab_size, width), generator=chance)
        return cls(tokenizer, (2 * bits - 1).to(torch.int8), buckets)

    @classmethod
    def one_hot(cls, tokenizer: Tokenizer, *, buckets: int = BUCKETS) -> Features:
        """As many numbers as tokens; for small vocabularies."""
        return cls(tokenizer, torch.eye(tokenizer.vocab_size, dtype=torch.int8), buckets)

    @classmethod
    def of_model(cls, folder: Path | str, *, buckets: int = BUCKETS) -> Features:
        """The input embeddings of a model's folder, rounded to a byte, with its tokenizer.

        Raises:
            TalkootError: the folder is no model's, has fewer embeddings than tokens, or some that are not finite.
        """
        tokenizer = Tokenizer.load(Path(folder))
        (weights,) = load_stage(folder, 0, 1).tensors().values()
        weights = weights.detach()[: tokenizer.vocab_size].double()
        found = len(weights)
        if found < tokenizer.vocab_size or not bool(torch.isfinite(weights).all()):
            few = f"{found} embeddings of {tokenizer.vocab_size} tokens"
            why = few if found < tokenizer.vocab_size else "some are NaN or infinite"
            next = "use the folder of another model, or random embeddings"
            raise TalkootError("the model's embeddings cannot be used", where=str(folder), why=why, next=next)
        unit = float(weights.square().mean().sqrt()) * _CLIP / _LEVELS or 1.0
        return cls(tokenizer, (weights / unit).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), buckets)

    def check(self, statistics: Statistics) -> None:
        """Whether statistics can have been counted with these features; a stranger may have signed anything.

        Raises:
            ValueError: they are said to be of others, or their sizes or numbers are not these features'.
        """
        if statistics.provenance.features != self.id:
            raise ValueError(f"they are of features {short(statistics.provenance.features)}, not {short(self.id)}")
        histogram, gram = statistics.histogram, statistics.grams.get(CHUNKS)
        if histogram is None or (histogram.vocabulary, histogram.buckets) != (self.vocabulary, self.buckets):
            raise ValueError(f"their histogram is not of {self.vocabulary} tokens and {self.buckets} buckets")
        if len(histogram.bigrams) and int(histogram.bigrams.max()) >= 1 << 31:
            raise ValueError("a pair of neighbours is counted more than two thousand million times")
        if self._floats is None:
            return
        if gram is None or gram.width != self.width:
            raise ValueError(f"they have no Gram matrix of chunks of width {self.width}")
        if gram.rms > CHUNK * float(self._floats.abs().max()):
            raise ValueError(
                f"sums of a chunk are {gram.rms:.3g} on average, more than {CHUNK} embeddings can add up to"
            )
        if gram.count > statistics.tokens:
            raise ValueError(f"{gram.count} chunks are counted of {statistics.tokens} tokens")

    def chunk_sums(self, ids: Tensor) -> Tensor:
        """Sums of embeddings over whole chunks, (n // CHUNK, width) float64; a text shorter than one is one chunk."""
        if self._floats is None:
            raise ValueError("these features have no table")
        size = min(CHUNK, len(ids)) or 1
        whole = ids[: len(ids) // size * size].view(-1, size)
        return embedding_bag(whole, self._floats, mode="sum").double()


def count(domain: str, documents: Iterable[Sequence[int]], features: Features, key: Key) -> Statistics:
    """A domain's statistics, as its owner counts them; the text does not leave this function.

    Args:
        domain: its name.
        documents: token ids by the features' tokenizer; empty ones are passed over.
        features: what to count.
        key: of the owner.

    Raises:
        TalkootError: there are no documents with tokens.
        ValueError: an id is not the tokenizer's.
    """
    histogram = Histogram(features.vocabulary, features.buckets)
    gram = Gram(features.width) if features.table is not None else None
    seen: list[str] = []
    for document in documents:
        ids = as_ids(document, features.vocabulary)
        if not len(ids):
            continue
        seen.append(digest(ids.numpy().tobytes()))
        histogram.add(ids)
        if gram is not None:
            _add_chunks(gram, features, ids)
    if not seen:
        why = "no document has a token"
        raise TalkootError("the domain is empty", where=domain, why=why, next="name a source that holds text")
    source = Source(key.peer, dataset_digest(seen))
    return Statistics(
        provenance=Provenance(features=features.id, domain=domain, sources=(source,), code=talkoot.__version__),
        grams={CHUNKS: gram} if gram is not None else {},
        histogram=histogram,
        documents=len(seen),
        tokens=histogram.tokens,
    )


def _add_chunks(gram: Gram, features: Features, ids: Tensor) -> None:
    for piece in ids.split(_PIECE):
        if len(piece) >= CHUNK or len(ids) < CHUNK:
            gram.add(features.chunk_sums(piece))
