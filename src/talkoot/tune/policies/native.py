"""Policies over our own decoder: every weight is trained; the initial ones are a second copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest_of_digests
from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.decoder import Cache
from talkoot.model.digests import tensor_digest
from talkoot.model.huggingface import load_model, save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.policies import rollout
from talkoot.tune.policies.coder import TokenizerCoder
from talkoot.tune.policies.spec import PROBLEM, posed

_INITIAL = "initial."  # in front of the names of the kept initial weights


class NativePolicy:
    """:class:`talkoot.tune.policies.policy.Policy` over a whole :class:`talkoot.model.stage.Stage`.

    On the CPU with one thread, equal weights and inputs give equal bits. With ``Stage(autocast=torch.bfloat16)`` matrix
    products run in bfloat16, in generation and in training alike.

    Args:
        stage: a whole model; a tied one's head is made to share the embedding's parameter.
        tokenizer: the model's.
        batch_rows: completions generated at a time; bounds the memory of generation.

    Raises:
        TalkootError: the stage is no whole model, or the tokenizer has ids that the model does not know, or no end.
    """

    def __init__(self, stage: Stage, tokenizer: Tokenizer, batch_rows: int = 256) -> None:
        config = stage.config
        why = ""
        if not stage.whole:
            why = f"it holds layers {stage.first} to {stage.last - 1} of {config.layer_count}"
        elif tokenizer.vocab_size > config.vocab_size:
            why = f"its tokenizer has {tokenizer.vocab_size} ids, the model knows {config.vocab_size}"
        if why:
            raise TalkootError(
                "the model cannot be tuned", where="NativePolicy", why=why, next="use a model with its own tokenizer"
            )
        if config.tied:
            # One parameter, so that gradients add up.
            shared = stage.layers[0].get_parameter("weight")
            stage.layers[-1].get_submodule("lm_head").register_parameter("weight", shared)
        self.coder = TokenizerCoder(tokenizer, config.eos_ids)
        self.max_positions = config.max_positions
        self.size = sum(parameter.numel() for parameter in stage.parameters())
        self.batch_rows = batch_rows
        self.template = PROBLEM
        self.trained = stage
        self._initial: Stage | None = None
        self._stage = stage  # the one that answers: the trained one, or within frozen() the initial one

    @classmethod
    def load(
        cls,
        folder: Path | str,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
        batch_rows: int = 256,
    ) -> NativePolicy:
        """The model of a Hugging Face folder, in float32.

        Raises:
            TalkootError: files are missing or corrupt, or the architecture is not supported.
        """
        return cls(load_model(folder, device=device, autocast=autocast), Tokenizer.load(folder), batch_rows)

    @classmethod
    def fresh(
        cls,
        config: ModelConfig,
        tokenizer: Tokenizer,
        seed: int,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> NativePolicy:
        """A new model with first weights from ``seed``, the same on every machine."""
        return cls(Stage(config, 0, config.layer_count, seed=seed, device=device, autocast=autocast), tokenizer)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The begin token, where the tokenizer has one and does not say ``add_bos_token: false``, and the text. A chat
        template is not applied: instruction-tuned models are opened with the Hugging Face back-end."""
        tokenizer = self.coder.tokenizer
        begins = tokenizer.bos_id is not None and tokenizer.settings.get("add_bos_token") is not False
        begin = [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []
        return [*begin, *self.coder.encode(posed(self.template, prompt))]

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        return rollout.generate(
            lambda: _StageReader(self._stage, self.coder.vocab_size),
            prompts,
            seeds,
            sampling,
            eos_ids=self.coder.eos_ids,
            max_positions=self.max_positions,
            batch_rows=self.batch_rows,
            device=self._stage.device,
        )

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, completions, strict=True)]
        longest = max(lengths)
        rows = [
            [*prompt, *ids[:-1], *[0] * (longest - length)]
            for prompt, ids, length in zip(prompts, completions, lengths, strict=True)
        ]
        # Padding stands behind the text, where no causal query of the text sees it. Token j is predicted at j - 1.
        wanted = [
            row * longest + place
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            for place in range(len(prompt) - 1, length)
        ]
        stage, device = self._stage, self._stage.device
        *body, head = range(stage.config.layer_count)
        hidden = stage.run_layers(torch.tensor(rows, device=device), body)
        chosen = hidden.flatten(0, 1).index_select(0, torch.tensor(wanted, device=device))
        return stage.run_layers(chosen[:, None], [head])[:, 0, : self.coder.vocab_size]

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self.trained.parameters())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        if self._initial is None:
            raise ValueError("frozen() needs the initial weights: call keep_initial() before training")
        before, self._stage = self._stage, self._initial
        try:
            with torch.no_grad():
                yield
        finally:
            self._stage = before

    def keep_initial(self) -> None:
        if self._initial is None:
            self._initial = copy.deepcopy(self.trained).requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        tensors = _owned(self.trained)
        if self._initial is not None:
            tensors |= {_INITIAL + name: value for name, value in _owned(self._initial).items()}
        return {name: value.detach().clone() for name, value in tensors.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        wanted = _owned(self.trained)
        initial = {name.removeprefix(_INITIAL): one for name, one in tensors.items() if name.startswith(_INITIAL)}
        trained = {name: one for name, one in tensors.items() if not name.startswith(_INITIAL)}
        for part in (trained, initial) if initial else (trained,):
            wrong = sorted(wanted.keys() ^ part.keys()) or [
                name for name, one in part.items() if one.shape != wanted[name].shape
            ]
            if wrong:
                raise TalkootError(
                    "the saved policy does not fit the model",
                    where=f"tensor {wrong[0]}",
                    why=f"{len(wrong)} tensors are missing, unknown or of another shape",
                    next="resume with the model that the run began with",
                )
        self.trained.load(trained)
        if initial:
            self.keep_initial()
        if self._initial is not None and initial:
            self._initial.load(initial)

    def weights_hash(self) -> str:
        return digest_of_digests((name, tensor_digest(value)) for name, value in _owned(self._stage).items())

    def export(self, folder: str) -> None:
        save_folder(folder, self._stage.config, self._stage.tensors(), self.coder.tokenizer)


class _StageReader:
    """Reads one batch of texts with a whole stage; the head runs on the last position only."""

    def __init__(self, stage: Stage, vocab_size: int) -> None:
        self._stage, self._vocab_size = stage, vocab_size
        *self._body, self._head = range(stage.config.layer_count)
        self._cache = Cache()

    def start(self, tokens: Tensor, padding: Tensor | None, room: int) -> Tensor:
        self._cache = Cache(padding, room)
        return self._read(tokens)

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)

    def step(self, tokens: Tensor) -> Tensor:
        return self._read(tokens[:, None])

    def _read(self, tokens: Tensor) -> Tensor:
        hidden = self._stage.run_layers(tokens, self._body, self._cache)
        # Ids beyond the tokenizer's are padding of published checkpoints: nobody could decode them.
        return self._stage.run_layers(hidden[:, -1:], [self._head])[:, 0, : self._vocab_size]


def _owned(stage: Stage) -> dict[str, nn.Parameter]:
    """The stage's distinct tensors by canonical name."""
    copies = {copy for _, copy in tied_names(stage.config)}
    return {name: value for name, value in stage.tensors().items() if name not in copies}
