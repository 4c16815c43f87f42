"""Everything that must exist before the first peer starts: tokenizer, tokens, the model's shape. No torch."""

from __future__ import annotations

from pathlib import Path

from talkoot.core.errors import TalkootError
from talkoot.data import TokenFile, Windows, load_tokens, read_documents
from talkoot.model.config import ModelConfig
from talkoot.model.hf_config import load_config
from talkoot.model.tokenizer import Tokenizer
from talkoot.plan.cut import cut_layers
from talkoot.train.recipe import Recipe

TOKENIZER_FOLDER = "tokenizer"
TOKENS_FOLDER = "tokens"


def prepare_tokenizer(recipe: Recipe, folder: Path) -> Tokenizer:
    """The recipe's tokenizer, trained or loaded once and kept in the run's folder."""
    kept = folder / TOKENIZER_FOLDER
    if (kept / "tokenizer.json").is_file():
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
    tokenizer.save(kept)
    return tokenizer


def prepare_tokens(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """The recipe's text as tokens, packed once."""
    return load_tokens(recipe.data.source, tokenizer, folder / TOKENS_FOLDER, recipe.data.column)


def open_windows(recipe: Recipe, tokens: str) -> Windows:
    """Batches by address over the tokens in folder or file ``tokens``."""
    return Windows(
        TokenFile.open(Path(tokens)).tokens,
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
            eos_ids=(tokenizer.eos_id,) if tokenizer else (),
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
    """Which layers each stage holds, balanced by floating-point operations."""
    return cut_layers(config.layer_flops(recipe.model.context), recipe.swarm.stages)
