"""The formats of Qwen's mixtures (Yang et al. 2024, 2025), for experts of the Qwen2 and Qwen3 families.

Qwen2's has one more expert that every token visits; it is written with width 0, so that it adds nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.formats.format import (
    NAMES,
    Format,
    dense_part,
    formats,
    names_of,
    read_entries,
    unsupported,
)


class _Entries(msgspec.Struct):
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_experts: int | None = None
    num_local_experts: int | None = None
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True
    expert_names: list[str] | None = None


class _Qwen(Format):
    def __init__(self, family: str, architecture: str) -> None:
        self.family, self.architecture = family, architecture
        self.model_type, self.families = f"{family}_moe", (family,)
        self.shared = family == "qwen2"

    def obstacle(self, config: MixtureConfig) -> str:
        if not self.shared and config.full_layers:
            return "either all of its blocks slide or none"
        return super().obstacle(config)

    def entries(self, config: MixtureConfig) -> dict[str, Any]:
        shared = {"shared_expert_intermediate_size": 0, "qkv_bias": True} if self.shared else {"attention_bias": False}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "num_experts": len(config.experts),
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.renormalised,
            "moe_intermediate_size": config.hidden,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            NAMES: list(config.experts),
            **shared,
        }

    def fillers(self, config: MixtureConfig) -> dict[str, tuple[int, ...]]:
        if not self.shared:
            return {}
        sizes = {
            "shared_expert.gate_proj": (0, config.width),
            "shared_expert.up_proj": (0, config.width),
            "shared_expert.down_proj": (config.width, 0),
            "shared_expert_gate": (1, config.width),
        }
        blocks = range(config.layers)
        return {f"model.layers.{block}.mlp.{name}.weight": size for block in blocks for name, size in sizes.items()}

    def read(self, folder: Path) -> MixtureConfig:
        found = read_entries(folder, _Entries)
        count = found.num_experts or found.num_local_experts or 0
        shared = found.shared_expert_intermediate_size
        if self.shared and shared != 0:
            raise unsupported(folder, f"it has an expert that all tokens visit, of width {shared or 'unsaid'}")
        if found.decoder_sparse_step != 1 or found.mlp_only_layers:
            raise unsupported(folder, "some of its blocks have no experts")
        if self.shared and not found.qkv_bias:
            raise unsupported(folder, "its queries, keys and values have no biases")
        dense = dense_part(folder, self.family, hidden=found.moe_intermediate_size)
        names, widths = names_of(found.expert_names, count), [dense.hidden] * count
        top_k = found.num_experts_per_tok
        return MixtureConfig.of(dense, names, widths, top_k=top_k, renormalised=found.norm_topk_prob)


formats.register("qwen2_moe")(_Qwen("qwen2", "Qwen2MoeForCausalLM"))
formats.register("qwen3_moe")(_Qwen("qwen3", "Qwen3MoeForCausalLM"))
