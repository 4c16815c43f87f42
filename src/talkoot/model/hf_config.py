"""Hugging Face's ``config.json`` to ModelConfig and back; nothing here imports torch.

Both spellings are written, so that transformers 4 (``rope_theta``, ``torch_dtype``) and 5
(``rope_parameters``, ``dtype``) read the same model. What would change the function and is not supported is
refused, never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.model.config import DTYPES, LinearScaling, Llama3Scaling, ModelConfig
from talkoot.model.folder import has_weights, read_headers, read_json, refuse, stored_dtype

CONFIG, GENERATION = "config.json", "generation_config.json"


class _Family(NamedTuple):
    """A family's class name and the values transformers assumes where config.json is silent."""

    architecture: str
    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048),
    "mistral": _Family("MistralForCausalLM", 131_072, kv_heads=8, window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32_768, kv_heads=32, window=4096),
    "qwen3": _Family("Qwen3ForCausalLM", 32_768, kv_heads=32, head_dim=128, window=4096),
}

# Close relatives whose difference would otherwise show only as bad text.
_RELATIVES = {
    "smollm3": "SmolLM3 leaves rotary embedding out of every fourth block (NoPE)",
    "mixtral": "Mixtral is a mixture of experts",
    "qwen2_moe": "Qwen2-MoE is a mixture of experts",
    "qwen3_moe": "Qwen3-MoE is a mixture of experts",
    "talkoot_mixture": "it is a mixture of experts in talkoot's own format",
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "talkoot_mixture")  # that `talkoot.blend.mixture` reads


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


class _Config(msgspec.Struct):
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: list[str] | None = None
    num_key_value_heads: int | msgspec.UnsetType | None = msgspec.UNSET
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_config(folder: Path | str, family: str | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder.

    Args:
        folder: holds config.json.
        family: read it as that of this family, whatever model_type it names: for a mixture of experts, whose trunk is
            that of a dense model. The caller answers for everything else that model_type means.

    ``dtype`` is taken from the weights' headers where weights are there, because config.json may disagree;
    end tokens from generation_config.json where it names them, because chat models end turns with extra ones.

    Raises:
        TalkootError: a file is missing, corrupt or too large, or describes a model that is not supported.
    """
    folder = Path(folder)
    path = folder / CONFIG
    raw = read_json(path, _Config)
    kind = family or raw.model_type
    family_of = _FAMILIES[kind] if family else _family(raw, path)
    _check_supported(raw, path)
    generation = folder / GENERATION
    ends = read_json(generation, _Generation).eos_token_id if generation.exists() else None
    declared = str(raw.dtype or raw.torch_dtype or "float32").removeprefix("torch.")
    dtype = stored_dtype(read_headers(folder).values()) if has_weights(folder) else declared
    kv_heads = family_of.kv_heads if raw.num_key_value_heads is msgspec.UNSET else raw.num_key_value_heads
    theta, scaling = _rope(raw, path)
    window, full = _window(raw, kind, family_of, path)
    try:
        return ModelConfig(
            family=kind,  # type: ignore[arg-type]  # one of _FAMILIES
            vocab_size=raw.vocab_size,
            width=raw.hidden_size,
            layers=raw.num_hidden_layers,
            heads=raw.num_attention_heads,
            kv_heads=kv_heads or raw.num_attention_heads,
            head_dim=raw.head_dim or family_of.head_dim or raw.hidden_size // max(1, raw.num_attention_heads),
            hidden=raw.intermediate_size,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=raw.rms_norm_eps,
            tied=raw.tie_word_embeddings,
            sliding_window=window,
            full_layers=full,
            max_positions=raw.max_position_embeddings or family_of.max_positions,
            bos_id=raw.bos_token_id,
            eos_ids=_ids(ends if ends is not None else raw.eos_token_id),
            pad_id=raw.pad_token_id,
            dtype=dtype if dtype in DTYPES else "float32",  # type: ignore[arg-type]
        )
    except TalkootError as error:
        next = "use an intact folder of a supported model"
        raise refuse(f"{CONFIG} describes no usable model", path, f"{error.where}: {error.why}", next) from error


def config_files(config: ModelConfig, dtype: str) -> dict[str, dict[str, Any]]:
    """Contents of ``config.json`` and ``generation_config.json`` by file name."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(config.rope_scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    elif isinstance(config.rope_scaling, Llama3Scaling):
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_positions,
        }
    ends = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    tokens = {"bos_token_id": config.bos_id, "eos_token_id": ends, "pad_token_id": config.pad_id}
    main = {
        "architectures": [_FAMILIES[config.family].architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "dtype": dtype,
        **tokens,
        **_window_keys(config),
    }
    present = {key: value for key, value in tokens.items() if value is not None}
    return {CONFIG: main, GENERATION: {"_from_model_config": True, **present}}


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    if config.family == "mistral":
        return {"sliding_window": config.sliding_window}
    slides = [config.window(index) is not None for index in range(1, config.layers + 1)]
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": slides.index(True) if True in slides else config.layers,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
    }


def _family(raw: _Config, path: Path) -> _Family:
    kind = raw.model_type
    if kind not in _FAMILIES:
        why = f"model_type {kind!r}: " + (_RELATIVES.get(kind) or nearest(kind, _FAMILIES))
        next = f"use one of: {', '.join(_FAMILIES)}"
        if kind in MIXTURES:
            next = "load it as a mixture (talkoot.blend.mixture.store.load_mixture); as a dense model, " + next
        raise refuse("this architecture is not supported", path, why, next)
    family = _FAMILIES[kind]
    for name in raw.architectures or []:
        if name != family.architecture:
            why = f"{name} is not {family.architecture}, the only head read for {kind!r}"
            raise refuse("this architecture is not supported", path, why, "export the causal language model")
    return family


def _check_supported(raw: _Config, path: Path) -> None:
    odd = {
        "hidden_act": raw.hidden_act not in ("silu", "swish"),
        "attention_bias": raw.attention_bias,
        "mlp_bias": raw.mlp_bias,
        "quantization_config": raw.quantization_config is not None,
    }
    for key in (key for key, found in odd.items() if found):
        next = "convert the model to plain weights, or use another one"
        raise refuse(f"{key} is not supported", path, f"{key} is {getattr(raw, key)!r}"[:200], next)


def _rope(raw: _Config, path: Path) -> tuple[float, LinearScaling | Llama3Scaling | None]:
    rope = raw.rope_scaling or raw.rope_parameters or _Rope()  # the order of precedence that transformers has
    theta = next((t for t in (rope.rope_theta, raw.rope_theta) if t is not None), 10_000.0)
    kind = rope.rope_type or rope.type or "default"
    why = ""
    part = next((p for p in (rope.partial_rotary_factor, raw.partial_rotary_factor) if p is not None), 1.0)
    if part != 1:
        why = f"partial_rotary_factor is {part}; all pairs must turn"
    elif rope.full_attention or rope.sliding_attention:
        why = "kinds of blocks turn differently"
    elif kind == "default":
        return theta, None
    elif kind == "linear" and rope.factor is not None:
        return theta, LinearScaling(factor=rope.factor)
    elif kind == "llama3":
        original = rope.original_max_position_embeddings or raw.max_position_embeddings
        if rope.factor and rope.low_freq_factor and rope.high_freq_factor and original:
            return theta, Llama3Scaling(
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_positions=original,
            )
        why = "llama3 needs factor, low_freq_factor, high_freq_factor, original_max_position_embeddings"
    raise refuse(
        "this rotary scaling is not supported",
        path,
        why or f"rope_type {kind!r}; {nearest(kind, ('default', 'linear', 'llama3'))}",
        "use a model with default, linear or llama3 scaling",
    )


def _window(raw: _Config, kind: str, family: _Family, path: Path) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the blocks that ignore it, as transformers decides them for each family."""
    window = family.window if raw.sliding_window is msgspec.UNSET else raw.sliding_window
    if kind == "llama":
        window = None
    if kind.startswith("qwen") and not raw.use_sliding_window:
        window = None
    count = min(max(raw.num_hidden_layers, 0), 4096)  # ModelConfig refuses more
    first = raw.max_window_layers if kind.startswith("qwen") else 0
    derived = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(count)]
    types = raw.layer_types or derived
    fixed = not kind.startswith("qwen")
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        why = f"it names {len(types)} blocks of kinds {sorted(set(types))[:4]}, the model has {count} blocks"
    elif (fixed and types != derived) or ("sliding_attention" in types and window is None):
        why = "it contradicts the model's sliding window"
    elif "sliding_attention" not in types:
        return None, ()
    else:
        return window, tuple(i for i, kind in enumerate(types, 1) if kind == "full_attention")
    raise refuse("layer_types cannot be followed", path, why, "use an intact config.json of a supported model")


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))
