"""Opens a policy from its description. A new back-end is one file and one registration here.

Back-ends are imported when they are opened: looking a name up needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry
from talkoot.tune.policies.policy import Policy
from talkoot.tune.policies.spec import ModelSpec

if TYPE_CHECKING:
    from talkoot.model.tokenizer import Tokenizer
    from talkoot.tune.policies.huggingface import HuggingFacePolicy

policy_backends: Registry[Callable[[ModelSpec, str], Policy]] = Registry("back-end")


def open_policy(spec: ModelSpec, alphabet: str = "") -> Policy:
    """The policy that ``spec`` describes.

    Args:
        alphabet: the task's characters, for a new model whose tokenizer is ``characters``.

    Raises:
        TalkootError: the back-end or folder is unknown, holds pickle only, or cannot do what is asked.
    """
    opener = policy_backends[spec.backend]
    spec.check()
    if spec.load and not Path(spec.load).is_dir():
        raise TalkootError(
            "there is no such model folder",
            where="model.load",
            why=f"{spec.load!r} is no folder; nothing is ever downloaded",
            next="fetch the model yourself and name its folder",
        )
    return opener(spec, alphabet)


@policy_backends.register("native")
def _native(spec: ModelSpec, alphabet: str) -> Policy:
    import torch

    from talkoot.model.config import ModelConfig
    from talkoot.tune.policies.native import NativePolicy

    autocast = torch.bfloat16 if spec.dtype == "bfloat16" else None
    if spec.load:
        policy = NativePolicy.load(spec.load, autocast=autocast)
    else:
        tokenizer = _tokenizer(spec.tokenizer, alphabet)
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size,
            width=spec.width,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.heads,
            head_dim=spec.width // spec.heads,
            hidden=max(8, round(spec.width / 3) * 8),
            max_positions=spec.context,
            bos_id=tokenizer.bos_id,
            eos_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
        )
        policy = NativePolicy.fresh(config, tokenizer, spec.seed, autocast=autocast)
    policy.batch_rows = spec.batch_rows or policy.batch_rows
    policy.template = spec.template
    return policy


@policy_backends.register("huggingface")
def _huggingface(spec: ModelSpec, alphabet: str) -> HuggingFacePolicy:
    from talkoot.tune.policies.huggingface import HuggingFacePolicy

    return HuggingFacePolicy(spec)


@policy_backends.register("vllm")
def _vllm(spec: ModelSpec, alphabet: str) -> Policy:
    from talkoot.tune.policies.vllm import VllmPolicy

    return VllmPolicy.open(spec)


def _tokenizer(name: str, alphabet: str) -> Tokenizer:
    from talkoot.model.tokenizer import Tokenizer

    kind, _, characters = name.partition(":")
    if kind == "characters":
        if not (characters or alphabet):
            raise TalkootError(
                "the task does not say which characters it uses",
                where="model.tokenizer",
                why="a character tokenizer needs an alphabet",
                next='use tokenizer = "characters:0123456789+=" (those that occur), or "bytes"',
            )
        return Tokenizer.characters(characters or alphabet)
    return Tokenizer.bytes() if name == "bytes" else Tokenizer.load(name)
