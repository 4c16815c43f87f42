"""Which of a mixture's tensors is what, by canonical name."""

TABLES = "model.embed_tokens.gate."  # of gates that read tokens


def is_trunk(name: str) -> bool:
    """Whether a tensor belongs to what all experts share."""
    return ".mlp." not in name and not name.startswith(TABLES)


def is_gate(name: str) -> bool:
    """Whether a tensor is a gate's."""
    return ".mlp.gate." in name or name.startswith(TABLES)


def of_expert(name: str, number: int) -> str:
    """A dense model's name of a feed-forward tensor, as the mixture calls it for one of its experts."""
    return name.replace(".mlp.", f".mlp.experts.{number}.")


def renumbered(name: str, places: dict[int, int]) -> str | None:
    """The name after experts have moved from one place to another; None if that one is gone."""
    head, found, rest = name.partition(".mlp.experts.")
    if not found:
        return name
    number, _, tail = rest.partition(".")
    place = places.get(int(number))
    return None if place is None else f"{head}.mlp.experts.{place}.{tail}"
