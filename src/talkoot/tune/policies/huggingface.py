"""Policies over any causal language model that transformers loads, with all weights or a low-rank adapter trained.

Folders only: nothing is downloaded, no pickle is read, no code from a folder runs.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest_of_digests
from talkoot.model.digests import tensor_digest
from talkoot.model.folder import read_headers
from talkoot.model.initial import tensor_seed
from talkoot.model.tokenizer import Tokenizer
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.policies import rollout
from talkoot.tune.policies.chat import ChatPrompt
from talkoot.tune.policies.coder import TokenizerCoder
from talkoot.tune.policies.extras import required
from talkoot.tune.policies.spec import ModelSpec, posed

_INITIAL = "initial."  # in front of the names of the kept initial weights


class HuggingFacePolicy:
    """:class:`talkoot.tune.policies.policy.Policy` over a folder of transformers' format.

    With an adapter (LoRA, Hu et al. 2021) the folder's weights never change: they are the reference for free, and
    :meth:`state` holds the adapter alone. Dropout is off, so a completion scores as it was generated. With ``bfloat16``
    frozen weights are stored so; trained ones stay float32 and only products are rounded, because small steps would be
    lost. Checkpointing acts while gradients are computed, and leaves generation its cache.

    Args:
        spec: ``load``, ``dtype``, ``lora_*``, ``checkpointing``, ``batch_rows`` and ``seed`` count.

    Raises:
        TalkootError: transformers or peft are not installed, the folder is no usable model, or the adapter's targets
            are not in it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        folder = Path(spec.load)
        read_headers(folder)  # refuses pickle and damage before transformers opens anything
        self._lora, self._checkpoints = spec.lora_rank > 0, spec.checkpointing
        half = torch.bfloat16 if spec.dtype == "bfloat16" else None
        self._autocast = half
        causal = _load(folder, half if half and self._lora else torch.float32)
        config = causal.config.get_text_config()
        tokenizer = Tokenizer.load(folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise TalkootError(
                "the model cannot be tuned",
                where=str(folder),
                why=f"its tokenizer has {tokenizer.vocab_size} ids, the model knows {config.vocab_size}",
                next="use a model with its own tokenizer",
            )
        self.coder = TokenizerCoder(tokenizer, _eos_ids(causal))
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 2048)
        self.size = sum(parameter.numel() for parameter in causal.parameters())
        self.batch_rows = spec.batch_rows or 32
        self._prompt, self._template = ChatPrompt(folder, tokenizer), spec.template
        self._causal = causal  # computes, whether or not adapters have been put into it
        self._adapted = _adapt(causal, spec) if self._lora else None
        self._layers = _checkpointed_layers(causal, folder) if spec.checkpointing else []
        self._initial: dict[str, Tensor] | None = None
        self._swapped = False
        self._base_digest = ""

    def prompt_ids(self, prompt: str) -> list[int]:
        return self._prompt(posed(self._template, prompt))

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        return rollout.generate(
            lambda: _CachedReader(self),
            prompts,
            seeds,
            sampling,
            eos_ids=self.coder.eos_ids,
            max_positions=self.max_positions,
            batch_rows=self.batch_rows,
        )

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, completions, strict=True)]
        longest = max(lengths)
        rows = [
            [*prompt, *ids[:-1], *[0] * (longest - length)]
            for prompt, ids, length in zip(prompts, completions, lengths, strict=True)
        ]
        # Padding stands behind the text, where no causal query of the text sees it: no mask is needed.
        wanted = [
            row * longest + place
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            for place in range(len(prompt) - 1, length)
        ]
        positions = torch.arange(longest).expand(len(rows), -1)
        with self._recomputing():
            return self.logits(torch.tensor(rows), positions, torch.tensor(wanted), use_cache=False)

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor, **options: Any) -> Tensor:
        """Float32 logits (N, vocabulary) at some places of a batch.

        The places are picked from what enters the head, so that a large vocabulary is computed only where it is needed
        and whatever the model does behind its head (soft caps, scales) still happens.

        Args:
            tokens, positions: int64 (B, T).
            wanted: int64 (N,), places in the flattened batch.
            options: of the model's forward pass: mask, cache.
        """

        def pick(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return inputs[0].flatten(0, 1).index_select(0, wanted)[None], *inputs[1:]

        hook = self._causal.get_output_embeddings().register_forward_pre_hook(pick)
        cast = torch.autocast("cpu", self._autocast) if self._autocast else nullcontext()
        try:
            with cast:
                out = self._causal(input_ids=tokens, position_ids=positions, **options).logits
        finally:
            hook.remove()
        # Ids beyond the tokenizer's are padding of published checkpoints: nobody could decode them.
        return out[0, :, : self.coder.vocab_size].float()

    def new_cache(self) -> tuple[str, Any]:
        """An empty cache, and the name of the argument that takes it in the installed version of transformers."""
        from transformers import DynamicCache

        name = "cache" if "cache" in inspect.signature(self._causal.forward).parameters else "past_key_values"
        return name, DynamicCache(config=self._causal.config)

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self._trained().values())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        if self._adapted is not None:
            with torch.no_grad(), self._adapted.disable_adapter():
                yield
            return
        if self._initial is None:
            raise ValueError("frozen() needs the initial weights: call keep_initial() before training")
        if self._swapped:
            raise ValueError("frozen() is not entered twice")
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()

    def keep_initial(self) -> None:
        if self._adapted is None and self._initial is None:
            self._initial = {name: value.detach().clone() for name, value in self._trained().items()}

    def state(self) -> dict[str, Tensor]:
        tensors = {name: value.detach().clone() for name, value in self._trained().items()}
        return tensors | {_INITIAL + name: value.clone() for name, value in (self._initial or {}).items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        mine = self._trained()
        initial = {name.removeprefix(_INITIAL): one for name, one in tensors.items() if name.startswith(_INITIAL)}
        trained = {name: one for name, one in tensors.items() if not name.startswith(_INITIAL)}
        for part in (trained, initial) if initial else (trained,):
            wrong = sorted(mine.keys() ^ part.keys()) or [n for n, one in part.items() if one.shape != mine[n].shape]
            if wrong:
                raise TalkootError(
                    "the saved policy does not fit the model",
                    where=f"tensor {wrong[0]}",
                    why=f"{len(wrong)} tensors are missing, unknown or of another shape",
                    next="resume with the model and the adapter that the run began with",
                )
        with torch.no_grad():
            for name, value in trained.items():
                mine[name].copy_(value)
        if initial:
            self._initial = {name: value.clone().to(mine[name].dtype) for name, value in initial.items()}

    def weights_hash(self) -> str:
        if self._adapted is not None and not self._base_digest:  # the base never changes
            base = {_plain_name(n): p for n, p in self._causal.named_parameters() if not p.requires_grad}
            self._base_digest = digest_of_digests((name, tensor_digest(value)) for name, value in base.items())
        own = [(name, tensor_digest(value)) for name, value in self._trained().items()]
        return digest_of_digests([*own, ("base", self._base_digest)])

    def export(self, folder: str) -> None:
        target = Path(folder)
        if target.exists() and not (target / "config.json").exists() and (target.is_file() or any(target.iterdir())):
            raise TalkootError(
                "the export would overwrite something else",
                where=folder,
                why="it exists and holds no config.json",
                next="choose another folder",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            beside.chmod(0o755)
            self._causal.save_pretrained(beside, state_dict=self._merged())
            self.coder.tokenizer.save(beside)
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained, not the weights."""
        return self._adapted is not None

    def save_adapter(self, folder: str) -> None:
        """Write the adapter alone, in peft's format; ValueError without one."""
        if self._adapted is None:
            raise ValueError("there is no adapter")
        self._adapted.save_pretrained(folder)

    def _merged(self) -> dict[str, Tensor]:
        """All weights by the plain model's names, the adapter added to what it adapts; the model is left as it is."""
        added = {
            f"{name}.weight": module.get_delta_weight("default")
            for name, module in self._causal.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        with torch.no_grad():
            plain = {_plain_name(n): v.detach() for n, v in self._causal.state_dict().items() if "lora_" not in n}
            return {n: (v + added[n].to(v.dtype)).contiguous() if n in added else v for n, v in plain.items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self._causal.named_parameters() if value.requires_grad}

    def _swap(self) -> None:
        for name, value in self._trained().items():
            kept = (self._initial or {})[name]
            value.data, (self._initial or {})[name] = kept, value.data
        self._swapped = not self._swapped

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """transformers recomputes layers that are in training mode; all else stays in evaluation mode, dropout-free."""
        on = self._checkpoints and torch.is_grad_enabled()
        for layer in self._layers:
            layer.training = on
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


class _CachedReader:
    """Reads one batch of texts, padded on the left, with explicit positions and mask."""

    def __init__(self, policy: HuggingFacePolicy) -> None:
        self._policy = policy
        self._name, self._cache = policy.new_cache()
        self._mask = torch.ones(0, 0, dtype=torch.int64)

    def start(self, tokens: Tensor, padding: Tensor | None, room: int) -> Tensor:
        columns = torch.arange(tokens.shape[1])
        blank = torch.zeros(len(tokens), dtype=torch.int64) if padding is None else padding
        self._mask = (columns >= blank[:, None]).long()
        return self._read(tokens, (columns - blank[:, None]).clamp(min=0))

    def select(self, rows: Tensor) -> None:
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)

    def step(self, tokens: Tensor) -> Tensor:
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(positions)], 1)
        return self._read(tokens[:, None], positions)

    def _read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        last = torch.arange(1, len(tokens) + 1) * tokens.shape[1] - 1
        # Without padding there is nothing to hide, and attention without a mask is faster.
        mask = self._mask if bool((self._mask == 0).any()) else None
        options = {self._name: self._cache, "use_cache": True, "attention_mask": mask}
        return self._policy.logits(tokens, positions, last, **options)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    required("transformers", "hf")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a peer's output is a log
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation="sdpa",
        )
    except (ValueError, OSError, KeyError) as error:
        raise TalkootError(
            "transformers cannot open the model",
            where=str(folder),
            why=str(error)[:300],
            next="use an intact folder of a causal language model that needs no code of its own",
        ) from error
    for name in vars(model.config):
        if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(model.config, name), float):
            setattr(model.config, name, 0.0)  # some layers ask the configuration
    return model.eval()


def _adapt(causal: Any, spec: ModelSpec) -> Any:
    required("peft", "lora")
    from peft import LoraConfig, get_peft_model

    names = spec.lora_targets if spec.lora_targets == "all-linear" else spec.lora_targets.replace(" ", "").split(",")
    settings: Any = LoraConfig(r=spec.lora_rank, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
    settings.lora_alpha = spec.alpha  # declared whole, but any number scales
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that are going away
        torch.manual_seed(tensor_seed(spec.seed, "adapter"))
        try:
            return get_peft_model(causal, settings).eval()
        except ValueError as error:
            raise TalkootError(
                "the adapter does not fit the model",
                where="model.lora_targets",
                why=str(error)[:300],
                next='use "all-linear", or names of linear modules such as "q_proj,v_proj"',
            ) from error


def _checkpointed_layers(causal: Any, folder: Path) -> list[nn.Module]:
    if not causal.supports_gradient_checkpointing:
        raise TalkootError(
            "the model cannot recompute its activations",
            where="model.checkpointing",
            why=f"transformers has no gradient checkpointing for {type(causal).__name__}",
            next="switch checkpointing off, and score fewer rows at a time",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old name, which every version has that we accept
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return [layer for layer in causal.modules() if getattr(layer, "gradient_checkpointing", False)]


def _eos_ids(causal: Any) -> list[int]:
    """End tokens of both configurations: chat models name the one that ends a turn in generation_config alone."""
    found: list[int] = []
    for config in (causal.generation_config, causal.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")
