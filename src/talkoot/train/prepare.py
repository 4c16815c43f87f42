"""Everything that must exist before the first peer starts: tokenizer, tokens, the model's shape. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

from talkoot.core.errors import TalkootError
from talkoot.data import TokenFile, Windows, load_tokens, read_documents
from talkoot.data.pack import Tokenizer as PackTokenizer
from talkoot.model.config import ModelConfig
from talkoot.model.hf_config import load_config
from talkoot.model.tokenizer import Tokenizer
from talkoot.plan.cut import cut_layers
from talkoot.train.recipe import Recipe

TOKENIZER_FOLDER = "tokenizer"
TOKENS_FOLDER = "tokens"


def prepare_tokenizer(recipe: Recipe, folder: Path, *, begun: bool = False) -> Tokenizer:
    """The recipe's tokenizer, trained or loaded once and kept in the run's folder.

    Args:
        recipe: says which.
        folder: the run's.
        begun: whether the run has begun, so that the kept one is this recipe's and not that of a refused attempt.
    """
    kept = folder / TOKENIZER_FOLDER
    if begun and (kept / "tokenizer.json").is_file():
        return Tokenizer.load(kept)
    spec = recipe.data.tokenizer
    kind, _, size = spec.partition(":")
    if recipe.model.load is not None:
        tokenizer = Tokenizer.load(recipe.model.load)  # a loaded model understands only its own tokens
    elif spec == "bytes":
        tokenizer = Tokenizer.bytes()
    elif kind == "bpe" and size.isdigit():
        tokenizer = Tokenizer.train(read_documents(recipe.data.source, recipe.data.column), int(size))
    else:
        tokenizer = Tokenizer.load(spec)
    tokenizer.save(kept)  # if this is cut short, the run has not begun and it is made again
    return tokenizer


def prepare_tokens(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """The recipe's text as tokens, packed once.

    Raises:
        TalkootError: the tokenizer has no token that ends a document.
    """
    if tokenizer.eos_id is None:
        raise TalkootError(
            "the tokenizer has no end-of-text token",
            where=recipe.model.load or recipe.data.tokenizer,
            why="documents are joined with one, and neither tokenizer_config.json nor its special tokens name it",
            next="set eos_token in the tokenizer's tokenizer_config.json",
        )
    return load_tokens(recipe.data.source, cast(PackTokenizer, tokenizer), folder / TOKENS_FOLDER, recipe.data.column)


def open_windows(recipe: Recipe, tokens: str, digest: str | None = None) -> Windows:
    """Batches by address over the tokens in folder or file ``tokens``, whose digest must be ``digest`` if one is given.

    Raises:
        TalkootError: they are not the tokens that the run was started with.
    """
    opened = TokenFile.open(Path(tokens))
    if digest is not None and opened.digest != digest:
        raise TalkootError(
            "this is not the text that the run is trained on",
            where=tokens,
            why=f"its digest is {opened.digest[:8]}, the run names {digest[:8]}",
            next="restore the run's own tokens folder, or start a new run with --out",
        )
    return Windows(
        opened.tokens,
        length=recipe.model.context,
        batch=recipe.train.microbatch_size,
        seed=recipe.seed,
        held_out=recipe.data.held_out,
    )


def model_config(recipe: Recipe, tokenizer: Tokenizer | None = None, vocab_size: int = 1024) -> ModelConfig:
    """The model's shape: the loaded folder's, or what follows from the depth and the tokenizer.

    Raises:
        TalkootError: the tokenizer makes tokens that the loaded model does not know.
    """
    if recipe.model.load is None:
        return ModelConfig.from_depth(
            recipe.model.depth,
            tokenizer.vocab_size if tokenizer else vocab_size,
            max_positions=max(2048, recipe.model.context),
            bos_id=tokenizer.bos_id if tokenizer else None,
            eos_ids=() if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,),
        )
    config = load_config(recipe.model.load)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TalkootError(
            "the tokenizer does not fit the model",
            where=recipe.model.load,
            why=f"it makes {tokenizer.vocab_size} different tokens, the model knows {config.vocab_size}",
            next="use the tokenizer that belongs to the model (leave data.tokenizer out)",
        )
    return config


def cut_stages(config: ModelConfig, recipe: Recipe) -> list[tuple[int, int]]:
    """Which layers each stage holds, balanced by floating-point operations.

    In a ring the first stage begins with the head, at -1 (see :meth:`ModelConfig.held`); it and the embedding stay
    together.
    """
    flops, blocks = config.layer_flops(recipe.model.context), recipe.swarm.cut
    if blocks:
        return _cut_as_told(config, blocks, ring=recipe.swarm.layout == "ring")
    if recipe.swarm.layout == "line":
        return cut_layers(flops, recipe.swarm.num_stages)
    ends = cut_layers([flops[-1] + flops[0], *flops[1:-1]], recipe.swarm.num_stages)
    return [(-1, ends[0][1]), *ends[1:]]


def _cut_as_told(config: ModelConfig, blocks: Sequence[int], *, ring: bool) -> list[tuple[int, int]]:
    """Stages of these numbers of decoder blocks; embedding and head go to the ends.

    Raises:
        TalkootError: they are not the model's blocks.
    """
    if sum(blocks) != config.layers:
        raise TalkootError(
            "the model cannot be cut like that",
            where="swarm.cut",
            why=f"{list(blocks)} are {sum(blocks)} decoder blocks, the model has {config.layers}",
            next="name a number of blocks for each stage that add up to the model's",
        )
    ends = list(accumulate(blocks, initial=1))
    stages = list(pairwise(ends))
    first, last = stages[0][1], stages[-1][0]
    if ring:
        return [(-1, first), *stages[1:]]
    return [(0, first), *stages[1:-1], (last, config.layer_count)] if len(stages) > 1 else [(0, config.layer_count)]
