"""What all experts share, embedding, attention, norms and head: whose it is, as a policy.

``pinned``: the seed's. Experts that trained only their feed-forward layers have the same trunk to the bit, so each,
when forced, gives the logits of the dense expert to the bit; and since one expert's statistics depend on the trunk
and on that expert alone, experts come and go by adding sums.

``mean-frozen``: the mean of the experts' ("DUME", arXiv 2603.29765), taken once; experts that come later bring only
their feed-forward layers. Exact where the experts' trunks are equal to the bit (a mean of equal numbers in double
precision is that number), else only close, and nothing that routes can repair it.

``mean-refresh``: the mean, taken again whenever an expert comes or goes. That changes the states that every gate sees,
so everybody's statistics have to be counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from talkoot.blend.mixture.names import is_trunk
from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry
from talkoot.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]

#: from the seed's tensors, None where there is no seed, and the experts', one after another, to the trunk's
trunks: Registry[Callable[[Tensors | None, Iterable[Tensors]], dict[str, Tensor]]] = Registry("trunk policy")


@trunks.register("pinned")
def pinned(seed: Tensors | None, experts: Iterable[Tensors]) -> dict[str, Tensor]:
    """The seed's own."""
    if seed is None:
        raise TalkootError(
            "a pinned trunk needs the seed",
            where="trunk",
            why="the experts' common ancestor was not given",
            next="name the seed's folder, or choose the trunk policy mean-frozen",
        )
    return {name: value.detach().clone() for name, value in seed.items() if is_trunk(name)}


@trunks.register("mean-frozen")
@trunks.register("mean-refresh")
def mean(seed: Tensors | None, experts: Iterable[Tensors]) -> dict[str, Tensor]:
    """The experts' arithmetic mean, added up in double precision."""
    total: dict[str, Tensor] = {}
    types, count = {}, 0
    for tensors in experts:
        count += 1
        for name, value in tensors.items():
            if is_trunk(name):
                types[name] = value.dtype
                wide = value.detach().double()
                total[name] = total[name] + wide if name in total else wide.clone()
    return {name: (value / count).to(types[name]) for name, value in total.items()}


# What experts of one mixture must agree in; the rest is their own (width inside SwiGLU) or no part of the function.
SHAPE = (
    "family",
    "vocab_size",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "tied",
    "sliding_window",
    "full_layers",
)


def unlike(one: ModelConfig, other: ModelConfig) -> list[str]:
    """In which of `SHAPE` two models differ, in words."""
    return [
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in SHAPE
        if getattr(one, name) != getattr(other, name)
    ]
