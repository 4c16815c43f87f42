"""talkoot's own format: every gate, intercepts, temperature, experts of unlike widths. Only talkoot reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.formats.format import Format, dense_part, formats, read_entries
from talkoot.model.config import FAMILIES


class _Mixture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    experts: tuple[str, ...]
    widths: tuple[int, ...]
    gate: str
    top_k: int
    temperature: float
    bias: bool
    renormalised: bool
    trunk: str


class _Entries(msgspec.Struct):
    mixture: _Mixture


class _Custom(Format):
    model_type = "talkoot_mixture"
    families = FAMILIES
    equal_widths = False

    def obstacle(self, config: MixtureConfig) -> str:
        return ""

    def entries(self, config: MixtureConfig) -> dict[str, Any]:
        own = _Mixture(**{name: getattr(config, name) for name in _Mixture.__struct_fields__})
        return {"architectures": [], "model_type": self.model_type, "mixture": msgspec.to_builtins(own)}

    def read(self, folder: Path) -> MixtureConfig:
        own = read_entries(folder, _Entries).mixture
        choices = {
            name: getattr(own, name) for name in own.__struct_fields__ if name not in ("family", "experts", "widths")
        }
        return MixtureConfig.of(dense_part(folder, own.family), own.experts, own.widths, **choices)


formats.register("custom")(_Custom())
