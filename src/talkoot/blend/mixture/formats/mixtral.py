"""Mixtral's format (Jiang et al. 2024, arXiv 2401.04088), for experts of the Llama and Mistral families.

On disk its blocks are ``block_sparse_moe.experts.0.w1`` (gate), ``w3`` (up), ``w2`` (down): what transformers, vLLM and
llama.cpp read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.formats.format import NAMES, Format, dense_part, formats, names_of, read_entries

_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class _Entries(msgspec.Struct):
    num_local_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float  # Mixtral's default is not the dense families'
    sliding_window: int | None = None
    expert_names: list[str] | None = None


class _Mixtral(Format):
    model_type = "mixtral"
    families = ("llama", "mistral")

    def obstacle(self, config: MixtureConfig) -> str:
        return super().obstacle(config) or ("" if config.renormalised else "its weights add up to 1")

    def entries(self, config: MixtureConfig) -> dict[str, Any]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": self.model_type,
            "num_local_experts": len(config.experts),
            "num_experts_per_tok": config.top_k,
            "sliding_window": config.sliding_window,
            "router_jitter_noise": 0.0,
            NAMES: list(config.experts),
        }

    def stored(self, name: str) -> str:
        for ours, theirs in _PARTS.items():
            name = name.replace(f".{ours}.", f".{theirs}.") if ".experts." in name else name
        return name.replace(".mlp.", ".block_sparse_moe.")

    def read(self, folder: Path) -> MixtureConfig:
        found = read_entries(folder, _Entries)
        dense = dense_part(folder, "llama" if found.sliding_window is None else "mistral")
        count = found.num_local_experts
        names = names_of(found.expert_names, count)
        return MixtureConfig.of(dense, names, [dense.hidden] * count, top_k=found.num_experts_per_tok)


formats.register("mixtral")(_Mixtral())
