"""How a mixture lies on disk, as a method: names of tensors, keys of config.json, and what a format cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.core.registry import Registry
from talkoot.model.folder import read_json, refuse
from talkoot.model.hf_config import CONFIG, load_config

NAMES = "expert_names"  # a key of config.json that other readers pass over


class Format:
    """A format of folders.

    Attributes:
        model_type: what config.json calls it.
        families: of dense experts whose trunk it can hold.
        equal_widths: narrower experts are padded with units of weight 0, whose output is 0: exact.
    """

    model_type = ""
    families: tuple[str, ...] = ()
    equal_widths = True

    def obstacle(self, config: MixtureConfig) -> str:
        """Why this mixture cannot be said in this format; empty if it can."""
        if config.family not in self.families:
            return f"it holds experts of {' or '.join(self.families)}, these are {config.family}"
        if config.gate != "token":
            return f"its gates look at single tokens' states, and this one is {config.gate!r}"
        return "its gates have no intercept" if config.bias else ""

    def entries(self, config: MixtureConfig) -> dict[str, Any]:
        """Keys of config.json that differ from the dense model's."""
        raise NotImplementedError

    def stored(self, name: str) -> str:
        """A canonical tensor name as the files have it."""
        return name

    def fillers(self, config: MixtureConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors that readers demand and that say nothing; written as zeros."""
        return {}

    def read(self, folder: Path) -> MixtureConfig:
        """The mixture that a folder's config.json describes.

        Raises:
            TalkootError: it is of a kind that is not supported.
        """
        raise NotImplementedError


formats: Registry[Format] = Registry("mixture format")


def names_of(given: list[str] | None, count: int) -> tuple[str, ...]:
    """Of experts; numbered where a foreign folder has no names."""
    fits = given is not None and len(given) == count
    return tuple(given or ()) if fits else tuple(f"expert-{number}" for number in range(count))


def dense_part(folder: Path, family: str, **changes: Any) -> Any:
    """What config.json says of the trunk; ``changes`` replace single values."""
    return msgspec.structs.replace(load_config(folder, family), **changes)


def read_entries(folder: Path, kind: type[Any]) -> Any:
    """The keys of config.json that are the mixture's own."""
    return read_json(folder / CONFIG, kind)


def unsupported(folder: Path, why: str) -> Exception:
    """For mixtures that compute something else."""
    next = "use a mixture whose every block has experts alone, of one width, with renormalised weights"
    return refuse("this mixture is not supported", folder / CONFIG, why, next)
