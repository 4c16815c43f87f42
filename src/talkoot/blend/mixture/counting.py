"""What the owner of a text counts for the gates: its text through the trunk with its own expert in every block.

Because every block is forced to that expert, the sums depend on the trunk, the text and this expert alone: owners
count apart from one another, and experts come and go by adding sums ("DUME", arXiv 2603.29765). A pass through a
mixture with gates (``routed``) sees the states that wrong turns lead to, and depends on everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

import talkoot
from talkoot.blend.mixture.gates import Gate, gates
from talkoot.blend.mixture.names import is_trunk
from talkoot.blend.mixture.trunk import SHAPE
from talkoot.blend.statistics import Gram, Histogram, Provenance, Source, Statistics
from talkoot.blend.statistics.histogram import as_ids
from talkoot.blend.statistics.provenance import dataset_digest
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, PeerId, digest, digest_of_digests
from talkoot.model.decoder import Block, Positions
from talkoot.model.digests import tensor_digest
from talkoot.model.stage import Stage


def layer_name(index: int) -> str:
    """What statistics call block ``index``, counted from 1."""
    return f"block.{index}"


def feature_digest(stage: Stage, gate: str, tokenizer: str) -> Digest:
    """What a gate's statistics are of; those of unlike digests do not add up.

    Args:
        stage: any model with the trunk: the seed, an expert trained on it, or the mixture.
        gate: its name.
        tokenizer: digest of the tokenizer.
    """
    parts = [("gate", gate), ("tokenizer", tokenizer), ("vocabulary", str(stage.config.vocab_size))]
    if gates[gate].reads_states:
        parts += [(name, repr(getattr(stage.config, name))) for name in SHAPE]
        parts += [(name, tensor_digest(value)) for name, value in stage.tensors().items() if is_trunk(name)]
    return digest_of_digests(parts)


@torch.no_grad()
def count(
    stage: Stage,
    documents: Iterable[Sequence[int] | Tensor],
    *,
    domain: str,
    gate: str,
    tokenizer: str,
    contributor: PeerId,
    window: int = 256,
) -> Statistics:
    """Count one domain's text.

    Args:
        stage: the trunk with the domain's own expert (an expert trained on the pinned trunk, or ``mixture.forced``), or
            a mixture with gates for a second pass.
        documents: token ids of each; cut into windows: every token counts once, and there is no padding. Empty ones do
            not count.
        domain: the expert's name.
        gate: what the sums are for.
        tokenizer: digest of the tokenizer.
        contributor: who counts.
        window: tokens that a state can look back to; what the mixture will see.

    Raises:
        TalkootError: no document holds a token, or the gate needs no statistics.
    """
    method, config = gates[gate], stage.config
    if not (method.reads_states or method.reads_tokens):
        raise _bad(
            "this gate needs no statistics", f"gate {gate}", "the caller chooses the expert", "count for another"
        )
    grams = {layer_name(i): Gram(config.width) for i in range(1, config.layers + 1)} if method.reads_states else {}
    histogram = Histogram(config.vocab_size, method.buckets) if method.reads_tokens else None
    read = [as_ids(ids, config.vocab_size) for ids in documents if len(ids)]
    if not read:
        raise _bad("a domain is empty", domain, "no document holds a token", "name a text that is not empty")
    for ids in read:
        if histogram is not None:
            histogram.add(ids)
    _add_states(stage, read, grams, method, window)
    provenance = Provenance(
        features=feature_digest(stage, gate, tokenizer),
        domain=domain,
        sources=(
            Source(contributor=contributor, dataset=dataset_digest(digest(ids.numpy().tobytes()) for ids in read)),
        ),
        code=talkoot.__version__,
    )
    tokens = sum(map(len, read))
    return Statistics(provenance, grams=grams, histogram=histogram, documents=len(read), tokens=tokens)


def _add_states(stage: Stage, documents: Iterable[Tensor], grams: dict[str, Gram], method: Gate, window: int) -> None:
    """One window at a time: in a batch, states would depend on their company in the last digits, and the sums of two
    owners would not be those of one who had all the text."""
    with ExitStack() as hooks:
        for index, gram in enumerate(grams.values(), 1):
            block = stage.layers[index]
            if isinstance(block, Block):
                hook = block.mlp.register_forward_pre_hook(_counter(gram, method))
                hooks.callback(hook.remove)
        for ids in documents if grams else ():
            for piece in ids.split(window):
                stage.run_layers(piece[None].to(stage.device), range(stage.config.layers + 1))


def _counter(gram: Gram, method: Gate) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        frequencies = x.new_empty(0, dtype=torch.float32)
        positions = Positions(0, x.shape[1], frequencies, frequencies)  # no padding, nothing before
        gram.add(method.features(x, positions, None, 0).flatten(0, 1))

    return hook


def _bad(what: str, where: str, why: str, next: str) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=next)
