"""Text sources, packing into token files, and batches addressed by (seed, step, microbatch); no torch."""

from talkoot.data.pack import TokenFile, load_tokens, pack
from talkoot.data.permute import feistel
from talkoot.data.source import Documents, read_documents
from talkoot.data.windows import Windows

__all__ = ["Documents", "TokenFile", "Windows", "feistel", "load_tokens", "pack", "read_documents"]
