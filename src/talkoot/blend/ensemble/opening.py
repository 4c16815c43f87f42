"""From folders to experts that can speak together; nothing heavy is read before it is sure that they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from talkoot.blend.folder import Blend
from talkoot.core.errors import TalkootError
from talkoot.model.huggingface import load_model
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer


def open_stages(blend: Blend, names: Sequence[str] = ()) -> dict[str, Stage]:
    """Experts of a blend as whole models, by name.

    Args:
        blend: an open blend.
        names: which, in this order; all by default.

    Raises:
        TalkootError: an unknown name, unlike tokenizers, or a folder that holds no model.
    """
    folders = {name: blend.model_folder(name) for name in names or blend.names}
    common_tokenizer(folders)
    return {name: load_model(folder) for name, folder in folders.items()}


def common_tokenizer(folders: Mapping[str, Path]) -> Tokenizer:
    """The tokenizer that the models in these folders share.

    Args:
        folders: Hugging Face folders by the experts' names, at least one.

    Raises:
        TalkootError: two of them differ, with what differs; or a folder holds none.
    """
    tokenizers = {name: Tokenizer.load(folder) for name, folder in folders.items()}
    first = next(iter(tokenizers))
    for name, tokenizer in tokenizers.items():
        if differences := tokenizers[first].differences(tokenizer):
            raise TalkootError(
                "experts with unlike tokenizers cannot speak together",
                where=f"{first} and {name}",
                why=differences,
                next="mix experts that share one; the others can be served and routed to on their own",
            )
    return tokenizers[first]
