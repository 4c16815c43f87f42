"""Formats of mixtures on disk, by name."""

from talkoot.blend.mixture.formats import custom, mixtral, qwen
from talkoot.blend.mixture.formats.format import Format, formats

__all__ = ["Format", "custom", "formats", "mixtral", "qwen"]
