"""Generation with vLLM (Kwon et al. 2023), learning with transformers; an optional extra.

**Not run here:** vLLM needs a GPU and was not installable where this was written. What is tested is what needs no vLLM:
the requests, and the reading of answers of the documented shape (vLLM 0.10 and later).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.policies.extras import required
from talkoot.tune.policies.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from talkoot.tune.policies.huggingface import HuggingFacePolicy


class VllmPolicy:
    """:class:`talkoot.tune.policies.policy.Policy` that generates with an engine and does all else with ``learner``.

    The engine gets the learner's weights again whenever their hash has changed: an adapter as a LoRA request, whole
    weights through its folder. vLLM's draws follow the seed of each request, but not bit for bit across batches.

    Args:
        learner: holds the weights.
        engine: a ``vllm.LLM`` that reports processed log-probabilities.
        vllm: the module, for its request types.
        folder: where weights are handed over.
    """

    def __init__(self, learner: HuggingFacePolicy, engine: Any, vllm: Any, folder: Path) -> None:
        self._learner, self._engine, self._vllm, self._folder = learner, engine, vllm, folder
        self.coder, self.max_positions, self.size = learner.coder, learner.max_positions, learner.size
        self._served, self._version, self._adapter, self._frozen = "", 0, None, False

    @classmethod
    def open(cls, spec: ModelSpec) -> VllmPolicy:
        """Start an engine on the model folder.

        Raises:
            TalkootError: vLLM is not installed, or the folder is no usable model.
        """
        required("vllm", "vllm")
        from talkoot.tune.policies.huggingface import HuggingFacePolicy

        vllm = import_module("vllm")
        learner = HuggingFacePolicy(spec)
        folder = Path(tempfile.mkdtemp(prefix="talkoot-vllm-"))
        whole = folder / "whole"
        if not spec.lora_rank:
            learner.export(str(whole))
        engine = vllm.LLM(
            model=spec.load if spec.lora_rank else str(whole),
            dtype=spec.dtype,
            trust_remote_code=False,
            logprobs_mode="processed_logprobs",
            enable_lora=spec.lora_rank > 0,
            **({"max_lora_rank": spec.lora_rank} if spec.lora_rank else {}),
        )
        return cls(learner, engine, vllm, folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        if self._frozen:
            raise ValueError("the engine holds the trained weights only: generate outside frozen()")
        self._refresh()
        requests, parameters = [], []
        for ids, own in zip(prompts, seeds, strict=True):
            for seed in own:
                requests.append({"prompt_token_ids": list(ids)})
                parameters.append(self._vllm.SamplingParams(**request(sampling, seed, self.coder.eos_ids)))
        outputs = iter(self._engine.generate(requests, parameters, use_tqdm=False, lora_request=self._adapter))
        return [[completion(next(outputs), self.coder.eos_ids) for _ in own] for own in seeds]

    def _refresh(self) -> None:
        now = self._learner.weights_hash()
        if now == self._served:
            return
        self._version += 1
        if self._learner.adapted:
            place = self._folder / f"adapter-{self._version}"
            self._learner.save_adapter(str(place))
            self._adapter = import_module("vllm.lora.request").LoRARequest("policy", self._version, str(place))
        else:
            self._learner.export(str(self._folder / "whole"))
            self._engine.collective_rpc("reload_weights")
        self._engine.reset_prefix_cache()  # keys and values of the old weights
        self._served = now

    def prompt_ids(self, prompt: str) -> list[int]:
        return self._learner.prompt_ids(prompt)

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        return self._learner.completion_logits(prompts, completions)

    def parameters(self) -> Sequence[nn.Parameter]:
        return self._learner.parameters()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with self._learner.frozen():
            self._frozen = True
            try:
                yield
            finally:
                self._frozen = False

    def keep_initial(self) -> None:
        self._learner.keep_initial()

    def state(self) -> dict[str, Tensor]:
        return self._learner.state()

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._learner.load_state(tensors)

    def weights_hash(self) -> str:
        return self._learner.weights_hash()

    def export(self, folder: str) -> None:
        self._learner.export(folder)


def request(sampling: Sampling, seed: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Arguments of one ``vllm.SamplingParams``: one draw, ids only, the log-probability of each drawn token.

    Raises:
        TalkootError: tokens are cut off: then the engine reports renormalised values only, not the full vocabulary's.
    """
    if sampling.top_k or sampling.top_p < 1:
        raise TalkootError(
            "vLLM cannot report log-probabilities before top-k and top-p",
            where="rollout.top_k and rollout.top_p",
            why="they would be renormalised, and importance ratios biased",
            next="use top_k = 0 and top_p = 1, or another back-end",
        )
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed % 2**63,
        "logprobs": 0,  # of the drawn token alone
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,  # the list above has them all, and keeps the end token among the ids
        "detokenize": False,
    }


def completion(output: Any, eos_ids: Sequence[int]) -> Completion:
    """A completion from one ``RequestOutput``.

    Raises:
        TalkootError: log-probabilities are missing, not one per token, or the engine gave up.
    """
    answer = output.outputs[0]
    ids, tables = tuple(answer.token_ids), answer.logprobs
    why = ""
    if answer.finish_reason not in ("stop", "length"):
        why = f"it ended with {answer.finish_reason!r}"
    elif tables is None or len(tables) != len(ids):
        why = f"{0 if tables is None else len(tables)} log-probabilities came for {len(ids)} tokens"
    elif (answer.finish_reason == "stop") != (bool(ids) and ids[-1] in eos_ids):
        why = "whether it ended, and whether its last token is an end token, disagree"
    else:
        missing = [token for token, table in zip(ids, tables, strict=True) if not _has(table, token)]
        why = f"the log-probability of token {missing[0]} is missing" if missing else ""
    if why:
        raise TalkootError(
            "the engine's answer cannot be used",
            where="vLLM",
            why=why,
            next='start it with logprobs_mode="processed_logprobs" and an unmodified SamplingParams',
        )
    logp = tuple(float(table[token].logprob) for token, table in zip(ids, tables or (), strict=True))
    return Completion(ids=ids, logp=logp, finish=answer.finish_reason)


def _has(table: Mapping[int, Any] | None, token: int) -> bool:
    return table is not None and token in table and table[token].logprob is not None
