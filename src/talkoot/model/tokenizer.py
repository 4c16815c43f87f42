"""Text to token ids and back, as Hugging Face's ``tokenizer.json``; nothing here imports torch.

Byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019): every string has an encoding, and
decoding gives it back. For models of a few thousand weights there is also one token per character of an alphabet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

# Before the import: the library's thread pool must not start in a process that later forks peers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from talkoot.core.errors import TalkootError
from talkoot.model.folder import read_bounded, read_json, refuse, write_file

BEGIN, END = "<|begin|>", "<|end|>"

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

_MAX_FILE = 1 << 28


class Tokenizer:
    """A tokenizer with the ids of its begin and end tokens.

    Markers such as ``<|end|>`` inside a text are ordinary characters unless the caller asks for
    ``special=True``: what a stranger writes must not end a document or open a chat turn.

    Args:
        content: the text of a ``tokenizer.json``.
        settings: the content of a ``tokenizer_config.json``; kept, so that saving loses nothing.
        template: Jinja text that lays out a chat, kept likewise.
        where: file to name in messages.

    Attributes:
        markers: special tokens and their ids.
        prefix: ids that go in front of a text by itself; empty where the model is used to none.

    Raises:
        TalkootError: the content is no tokenizer, or lacks the begin or end token that the settings name.
    """

    def __init__(
        self,
        content: str,
        settings: dict[str, Any] | None = None,
        template: str | None = None,
        where: Path = Path(TOKENIZER),
    ) -> None:
        with _Explained(where):
            self._plain = tokenizers.Tokenizer.from_str(content)
            self._marked = tokenizers.Tokenizer.from_str(content)
        self._plain.encode_special_tokens = True
        for backend in (self._plain, self._marked):  # stored settings would cut or pad texts silently
            backend.no_truncation()
            backend.no_padding()
        self.settings, self.template = dict(settings or {}), template
        self.vocab_size = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id, self.eos_id = self._role("bos_token", where), self._role("eos_token", where)
        self._alphabet = _only_characters(self._plain)
        added = self._plain.get_added_tokens_decoder()
        self.markers = {token.content: id for id, token in added.items() if token.special}
        # What the file itself puts around a text, as transformers does: the begin token, for most families.
        first = self._marked.encode("", add_special_tokens=True).ids[:1]
        self.prefix = first if first == [self.bos_id] else []

    def _role(self, key: str, where: Path) -> int | None:
        token = self.settings.get(key)
        if isinstance(token, dict):  # older files spell out how the token is matched
            token = token.get("content")
        if token is None:
            return None
        found = self._plain.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            next = "use the tokenizer.json and tokenizer_config.json of one model"
            raise refuse(f"the {key} is unknown", where, f"{token!r} is not in the vocabulary", next)
        return found

    @classmethod
    def bytes(cls) -> Tokenizer:
        """One token per byte: begin is 0, end is 1, byte b is b + 2."""
        symbols = [BEGIN, END, *_byte_symbols()]
        backend = _assemble(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]), split=False)
        backend.add_special_tokens([BEGIN, END])
        return cls(backend.to_str(), _settings())

    @classmethod
    def characters(cls, alphabet: str) -> Tokenizer:
        """One token per character of the alphabet: begin is 0, end is 1, then the characters by code point.

        The order and repetitions of ``alphabet`` do not matter. Text with any other character is refused.

        Raises:
            TalkootError: the alphabet is empty or no valid Unicode.
        """
        symbols = [BEGIN, END, *sorted(set(alphabet))]
        if not alphabet or any(0xD800 <= ord(one) < 0xE000 for one in alphabet):
            raise TalkootError(
                "the alphabet cannot be used",
                where="Tokenizer.characters(alphabet)",
                why="it holds a lone surrogate, which is no character" if alphabet else "it is empty",
                next="name every character that the texts use",
            )
        backend = tokenizers.Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([BEGIN, END])
        return cls(backend.to_str(), _settings())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn byte pairs from texts; the same texts give the same tokenizer.

        Args:
            texts: documents or lines, read once.
            vocab_size: number of tokens at most, at least 258 (two markers and the bytes).
        """
        if vocab_size < 258:
            raise TalkootError(
                "the vocabulary is too small",
                where="Tokenizer.train(vocab_size)",
                why=f"{vocab_size} tokens cannot hold the 256 bytes and 2 markers",
                next="ask for at least 258",
            )
        backend = _assemble(models.BPE(), split=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BEGIN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        return cls(backend.to_str(), _settings())

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read a model folder, or a ``tokenizer.json`` with the settings beside it.

        Raises:
            TalkootError: no tokenizer.json is there, or a file is corrupt or too large.
        """
        path = Path(path)
        file = path / TOKENIZER if path.is_dir() else path
        if path.is_dir() and not file.exists():
            next = "let transformers write one: AutoTokenizer.from_pretrained(X).save_pretrained(X)"
            raise refuse("the folder has no tokenizer.json", path, "other formats are not read", next)
        settings, template = file.with_name(SETTINGS), file.with_name(TEMPLATE)
        return cls(
            _text(file),
            read_json(settings, dict[str, Any], _MAX_FILE) if settings.exists() else None,
            _text(template) if template.exists() else None,
            file,
        )

    def save(self, folder: Path | str) -> None:
        """Write the files that ``transformers.AutoTokenizer`` reads into an existing or new folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / TOKENIZER, self._plain.to_str(pretty=True).encode())
        write_file(folder / SETTINGS, json.dumps(self.settings, indent=2, ensure_ascii=False).encode())
        if self.template is not None:
            write_file(folder / TEMPLATE, self.template.encode())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, without begin or end; ``special`` lets markers in it count as such."""
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Token ids of several texts; see ``encode``.

        Raises:
            TalkootError: a text is no valid Unicode, or has a character outside a character tokenizer's alphabet.
        """
        self._refuse_strange(texts, special)
        backend = self._marked if special else self._plain
        try:
            return [one.ids for one in backend.encode_batch(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise TalkootError(
                "the text cannot be encoded",
                where="Tokenizer.encode",
                why="it is not a string of valid Unicode (a lone surrogate cannot be written as UTF-8)",
                next="read it with errors='replace'",
            ) from error

    def _refuse_strange(self, texts: Sequence[str], special: bool) -> None:
        for text in texts if self._alphabet is not None else ():
            plain = text.replace(BEGIN, "").replace(END, "") if special else text
            strange = sorted(set(plain) - (self._alphabet or set()))
            if strange:
                raise TalkootError(
                    "the text has characters that the tokenizer does not know",
                    where=f"character {text.index(strange[0])} of the text",
                    why=f"{strange[0]!r} is not among the {len(self._alphabet or ())} of its alphabet",
                    next="build the tokenizer from an alphabet with every character of the texts",
                )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; markers are left out unless ``special``. Broken UTF-8 shows as U+FFFD."""
        return self._plain.decode(list(ids), skip_special_tokens=not special)

    @property
    def content(self) -> str:
        """The text of a ``tokenizer.json``, from which the same tokenizer is made."""
        return self._plain.to_str()

    def vocabulary(self) -> dict[str, int]:
        """Ids by token, markers included; byte-level tokens as the file spells them."""
        return self._plain.get_vocab(with_added_tokens=True)

    def digest(self) -> str:
        """Content hash (blake2b, 64 hex digits): equal digests mean equal ids for every text."""
        content = [json.loads(self.content), self.bos_id, self.eos_id]
        return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()

    def differences(self, other: Tokenizer) -> str:
        """In words, what another tokenizer does otherwise; empty where every text gets the same ids from both."""
        if self.digest() == other.digest():
            return ""
        here, there = self.vocabulary(), other.vocabulary()
        moved = sorted(token for token in here.keys() & there.keys() if here[token] != there[token])
        alone = sorted(here.keys() ^ there.keys())
        if not moved and not alone:
            return "the tokens are the same, but merges, markers or settings are not"
        parts = [f"{token!r} is {here[token]} and {there[token]}" for token in moved[:3]]
        parts += [f"{token!r} is only in the {'first' if token in here else 'second'}" for token in alone[:3]]
        return f"{len(moved)} tokens have another id, {len(alone)} are in one of them only: {', '.join(parts)}"


class _Explained:
    """The library reports malformed files as bare ``Exception``; this renames exactly those."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or kind is UnicodeEncodeError:
            next = "fetch the file again, or export it anew with transformers' save_pretrained"
            raise refuse("this is no tokenizer.json", self.where, str(error), next) from error


def _assemble(model: models.Model, split: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _only_characters(backend: tokenizers.Tokenizer) -> frozenset[str] | None:
    """The alphabet of a tokenizer that knows no other text and would leave strange characters out, silently."""
    model: Any = backend.model
    bare = backend.pre_tokenizer is None and backend.normalizer is None and isinstance(model, models.BPE)
    if not bare or model.unk_token is not None or model.byte_fallback:
        return None
    return frozenset(one for one in backend.get_vocab(with_added_tokens=False) if len(one) == 1)


def _settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }


def _byte_symbols() -> list[str]:
    """The printable stand-in that byte-level tokenizers write for each byte, in the bytes' order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_FILE).decode()
    except UnicodeDecodeError as error:
        raise refuse(f"{path.name} is corrupt", path, str(error), "fetch the file again") from error
