"""The statistics of a domain's text, as the bytes of a signed file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import talkoot
from talkoot.blend.statistics import Histogram, Provenance, Source, Statistics
from talkoot.core.ids import digest, digest_of_digests
from talkoot.core.keys import Key
from talkoot.model.tokenizer import Tokenizer

BUCKETS = 1 << 16


def counted(domain: str, texts: Sequence[str], tokenizer: Tokenizer, key: Key) -> bytes:
    """Count tokens and pairs of neighbours; text never leaves this function."""
    histogram = Histogram(tokenizer.vocab_size, BUCKETS)
    for text in texts:
        histogram.add(tokenizer.encode(text))
    dataset = digest_of_digests((digest(text.encode()), "") for text in texts)
    provenance = Provenance(
        features=tokenizer.digest(),
        domain=domain,
        sources=(Source(key.peer, dataset),),
        code=talkoot.__version__,
    )
    statistics = Statistics(provenance, histogram=histogram, documents=len(texts), tokens=histogram.tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics"
        statistics.write(path, key)
        return path.read_bytes()
