"""Small experts over one trunk, and texts that only one of them knows; no training."""

from __future__ import annotations

import torch

from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage

VOCABULARY, NAMES = 64, ("alder", "birch", "cedar")
CONTRIBUTOR = "a" * 64


def shape(**changes):
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}
    return ModelConfig(**{"vocab_size": VOCABULARY, "max_positions": 128, **sizes, **changes})


def model(seed=0, **changes):
    config = shape(**changes)
    return Stage(config, 0, config.layer_count, seed=seed)


@torch.no_grad()
def expert(number, trained="mlp", hidden=48, **changes):
    """The seed (of seed 0) with other feed-forward layers, or with all weights moved a little."""
    stage, other = model(0, hidden=hidden, **changes), model(number + 10, hidden=hidden, **changes)
    base = model(0, **changes).tensors()
    for name, value in stage.tensors().items():
        if ".mlp." in name:
            value.copy_(3 * other.tensors()[name])  # loud enough that experts differ
        else:
            value.copy_(base[name])
            if trained == "all":
                value.add_(other.tensors()[name], alpha=0.1)
    return stage


def experts(trained="mlp", names=NAMES, **changes):
    return {name: expert(number, trained, **changes) for number, name in enumerate(names)}


def text(number, count=6, length=40, seed=0):
    """Documents of one domain: tokens from its own third of the vocabulary, and some from everywhere."""
    chance = torch.Generator().manual_seed(seed * 100 + number)
    own = torch.randint(0, VOCABULARY // 3, (count, length), generator=chance) + number * (VOCABULARY // 3)
    anything = torch.randint(0, VOCABULARY, (count, length), generator=chance)
    mixed = torch.where(torch.rand(count, length, generator=chance) < 0.4, anything, own)
    return [row.tolist() for row in mixed]
