"""Statistics that the owner of a text counts, signs and gives away, and that others add up."""

from talkoot.blend.statistics.features import Features, count
from talkoot.blend.statistics.file import Header, read_header
from talkoot.blend.statistics.gram import Gram
from talkoot.blend.statistics.histogram import Histogram
from talkoot.blend.statistics.merge import merge
from talkoot.blend.statistics.objects import Statistics
from talkoot.blend.statistics.provenance import Provenance, Source

__all__ = [
    "Features",
    "Gram",
    "Header",
    "Histogram",
    "Provenance",
    "Source",
    "Statistics",
    "count",
    "merge",
    "read_header",
]
