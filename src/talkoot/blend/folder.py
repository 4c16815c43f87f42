"""A blend's folder: which experts there are, what they share, and where their parts lie.

``blend.json`` is the manifest. Beside it: ``experts/NAME/`` (Hugging Face folders), ``statistics/NAME.safetensors``
(what an owner counted on its own text), ``tokenizer/`` (the router's; experts that were trained here share it),
``router.safetensors``, ``mixture/`` and the log of receipts. Every change writes a new manifest whole, so that a reader
sees the old blend or the new one. Experts may live elsewhere: ``model`` may be an absolute path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.model.folder import read_json, write_file

MANIFEST, STATISTICS, EXPERTS = "blend.json", "statistics", "experts"
ROUTER, MIXTURE, TOKENIZER = "router.safetensors", "mixture", "tokenizer"
VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TAKEN = {"auto", "moe", "ensemble", "general"}  # what `talkoot serve` calls the blend as a whole, and its fallback


class Expert(msgspec.Struct, frozen=True, kw_only=True):
    """One expert.

    Attributes:
        name: of lower-case letters, digits, dots, dashes; also its name as a served model and its domain's.
        model: its Hugging Face folder, absolute or relative to the blend's.
        parameters: how many it has.
        tokenizer: digest of its tokenizer; experts may differ in it where each is served on its own.
        statistics: its domain's statistics, relative to the blend's folder; empty until they are counted.
        source: the text it learned, as its owner calls it.
        trained: facts about its training, for people: steps, tokens, operations, which weights.
    """

    name: str
    model: str
    parameters: int
    tokenizer: str
    statistics: str = ""
    source: str = ""
    trained: dict[str, Any] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``blend.json`` says.

    Attributes:
        version: of this format.
        experts: in the order in which they came.
        general: folder of the model for text that no expert knows (the seed), absolute or relative; empty for none.
    """

    version: int = VERSION
    experts: tuple[Expert, ...] = ()
    general: str = ""


class Blend:
    """An open blend; changes are written at once.

    Args:
        folder: holds ``blend.json``.
        manifest: its content.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path | str) -> Blend:
        """Read a blend.

        Raises:
            TalkootError: there is none, or its manifest is broken or of another version.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            raise TalkootError(
                "this folder holds no blend" if folder.is_dir() else "the folder does not exist",
                where=str(path),
                why="there is no manifest" if folder.is_dir() else f"there is no {folder}",
                next="make one with `talkoot blend train` or `talkoot blend add`; to serve a single model, name its "
                "Hugging Face folder (with config.json)",
            )
        manifest = read_json(path, Manifest)
        if manifest.version != VERSION:
            raise TalkootError(
                "the blend cannot be read",
                where=str(path),
                why=f"it is of version {manifest.version}, this talkoot reads {VERSION}",
                next="use the talkoot that wrote it",
            )
        for expert in manifest.experts:
            check_name(expert.name)
        return cls(folder, manifest)

    @classmethod
    def open_or_new(cls, folder: Path | str) -> Blend:
        """Read a blend, or begin an empty one."""
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            cls(folder, Manifest())._write(Manifest())
        return cls.open(folder)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self.manifest.experts)

    def __len__(self) -> int:
        return len(self.manifest.experts)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the experts, in their order."""
        return tuple(expert.name for expert in self)

    def expert(self, name: str) -> Expert:
        """The expert of that name.

        Raises:
            TalkootError: there is none.
        """
        for expert in self:
            if expert.name == name:
                return expert
        raise TalkootError(
            f"there is no expert {name!r}",
            where=str(self.folder / MANIFEST),
            why=nearest(name, self.names) if self.names else "the blend has no expert yet",
            next="name one that is there, or add it with `talkoot blend add`",
        )

    def path(self, place: str) -> Path:
        """A place that the manifest names."""
        return self.folder / place

    def model_folder(self, name: str) -> Path:
        """Where an expert's weights lie."""
        return self.path(self.expert(name).model)

    def statistics_file(self, name: str) -> Path | None:
        """Where its domain's statistics lie; None while there are none."""
        place = self.expert(name).statistics
        return self.path(place) if place else None

    def put(self, expert: Expert) -> None:
        """Add an expert, or replace the one of that name; the others keep their order."""
        check_name(expert.name)
        known = expert.name in self.names
        experts = tuple(expert if one.name == expert.name else one for one in self)
        self._write(msgspec.structs.replace(self.manifest, experts=experts if known else (*experts, expert)))

    def remove(self, name: str) -> Expert:
        """Strike an expert off; its files stay. The expert that went."""
        gone = self.expert(name)
        self._write(msgspec.structs.replace(self.manifest, experts=tuple(one for one in self if one.name != name)))
        return gone

    def set_general(self, model: str) -> None:
        """Name the model for text that no expert knows."""
        self._write(msgspec.structs.replace(self.manifest, general=model))

    def _write(self, manifest: Manifest) -> None:
        write_file(self.folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        self.manifest = manifest


def check_name(name: str) -> None:
    """Refuse what cannot be a file's, a model's and a domain's name at once.

    Raises:
        TalkootError: characters that do not fit, or a word that the server needs.
    """
    if not _NAME.fullmatch(name) or name in _TAKEN:
        why = (
            "it is taken: auto, moe, ensemble and general mean something when a blend is served"
            if name in _TAKEN
            else "it does not fit"
        )
        raise TalkootError(
            "an expert cannot have this name",
            where=repr(name),
            why=why,
            next="use up to 64 lower-case letters, digits, dots, dashes and underscores, a letter or digit first",
        )
