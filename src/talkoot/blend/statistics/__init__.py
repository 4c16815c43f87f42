"""Statistics that the owner of a text counts, signs and gives away, and that others add up."""

from talkoot.blend.statistics.file import Header, read_header
from talkoot.blend.statistics.gram import Gram
from talkoot.blend.statistics.histogram import Histogram
from talkoot.blend.statistics.objects import Provenance, Source, Statistics, merge

__all__ = ["Gram", "Header", "Histogram", "Provenance", "Source", "Statistics", "merge", "read_header"]
