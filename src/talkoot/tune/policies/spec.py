"""Which model a peer answers and learns with, as a recipe says it; nothing here imports torch."""

from __future__ import annotations

from typing import Literal, NoReturn

import msgspec

from talkoot.core.errors import TalkootError

PROBLEM = "{prompt}"  # in a template: the problem's text
_BOUNDS = (
    ("width", 2, 2**20),
    ("layers", 1, 2**14),
    ("heads", 1, 2**20),
    ("context", 2, 2**30),
    ("lora_rank", 0, 2**20),
    ("batch_rows", 0, 2**20),
)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model: a folder, or the shape of a new one, and who computes it.

    Attributes:
        backend: ``native`` (our decoder), ``huggingface`` (any causal language model that transformers knows), or
            ``vllm`` (learns like ``huggingface``, generates with vLLM).
        load: a folder with config.json, safetensors and tokenizer.json; empty = a new model of the shape below.
        tokenizer: of a new model: ``characters`` (those of the task), ``characters:abc``, ``bytes``, or a folder.
        template: how a problem is put to the model; ``{prompt}`` stands for its text.
        width, layers, heads, context: of a new model; its feed-forward blocks are 8/3 as wide.
        dtype: of matrix products; ``bfloat16`` keeps what is trained in float32.
        lora_rank: train a low-rank adapter of this rank instead of the weights (Hu et al. 2021); 0 = all weights.
        lora_alpha: the adapter's product is scaled by alpha / rank; 0 = twice the rank.
        lora_targets: ``all-linear``, or names of modules separated by commas.
        checkpointing: recompute activations in the backward pass: slower, less memory (Chen et al. 2016).
        batch_rows: completions generated at a time; 0 = the back-end's own choice.
        seed: of a new model's, or a new adapter's, first weights.
    """

    backend: str = "native"
    load: str = ""
    tokenizer: str = "characters"
    template: str = PROBLEM
    width: int = 96
    layers: int = 2
    heads: int = 4
    context: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: str = "all-linear"
    checkpointing: bool = False
    batch_rows: int = 0
    seed: int = 0

    def check(self) -> None:
        """Refuse what contradicts itself; not done on creation, because a peer's keys are laid over the common ones.

        Raises:
            TalkootError: a number is out of range, or the back-end cannot do what is asked.
        """
        for name, least, most in _BOUNDS:
            if not least <= (value := getattr(self, name)) <= most:
                _refuse(name, f"it is {value}, it must be from {least} to {most}", "correct this value")
        if PROBLEM not in self.template:
            _refuse("template", f"{self.template!r} has no place for the problem", f"put {PROBLEM} where it belongs")
        if not 0 <= self.lora_alpha < float("inf"):
            _refuse("lora_alpha", f"it is {self.lora_alpha}", "use 0 for twice the rank, or a positive number")
        if self.backend == "native":
            for name in ("lora_rank", "checkpointing"):
                if getattr(self, name):
                    _refuse(name, "the native back-end has none", 'use backend = "huggingface" and a folder to load')
        elif not self.load:
            _refuse("load", f"the back-end {self.backend!r} makes no new models", "name a model folder, or use native")
        if self.width % (2 * self.heads):
            why = f"{self.heads} heads do not share a width of {self.width} in even parts"
            _refuse("heads", why, "make width a multiple of twice the heads")

    @property
    def alpha(self) -> float:
        """The adapter's scale before it is divided by its rank."""
        return self.lora_alpha or 2.0 * self.lora_rank


def posed(template: str, prompt: str) -> str:
    """A problem as a model is asked."""
    return template.replace(PROBLEM, prompt)


def _refuse(name: str, why: str, next: str) -> NoReturn:
    raise TalkootError("the model cannot be opened like this", where=f"model.{name}", why=why, next=next)
