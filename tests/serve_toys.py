"""What the tests of the served experts share: tiny models in folders, and a router that anybody can foretell."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from talkoot.blend.folder import ROUTER, Blend, Expert
from talkoot.core.errors import TalkootError
from talkoot.core.keys import Key
from talkoot.model.config import ModelConfig
from talkoot.model.folder import write_file
from talkoot.model.huggingface import save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.app import Api
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.server import Settings, build
from talkoot.serve.web import Server, bind

POSITIONS = 256


def write_model(folder: Path, seed: int, tokenizer: Tokenizer | None = None, positions: int = POSITIONS) -> Path:
    """A model of a few thousand parameters with opinions; at temperature 0 it never ends by itself."""
    tokenizer = tokenizer or Tokenizer.bytes()
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        hidden=24,
        max_positions=positions,
        bos_id=tokenizer.bos_id,
    )
    stage = Stage(config, 0, config.layer_count, seed=seed)
    with torch.no_grad():
        stage.tensors()["lm_head.weight"].mul_(20)[:2].mul_(0.001)  # begin and end tokens are nobody's favourites
    save_folder(folder, config, stage.tensors(), tokenizer)
    return folder


def write_blend(
    folder: Path,
    *names: str,
    general: bool = False,
    router: bool = True,
    positions: int = POSITIONS,
    **tokenizers: Tokenizer,
) -> Path:
    """A blend of such models; the router sends a prompt to the expert whose name it spells out most often."""
    blend = Blend.open_or_new(folder)
    for seed, name in enumerate(names, 1):
        tokenizer = tokenizers.get(name, Tokenizer.bytes())
        write_model(folder / "experts" / name, seed, tokenizer, positions)
        blend.put(Expert(name=name, model=f"experts/{name}", parameters=1, tokenizer=tokenizer.digest()))
    if general:
        write_model(folder / "seed", 99)
        blend.set_general("seed")
    if router:
        Names(names).save(folder / ROUTER)
    return folder


class Decided(NamedTuple):
    expert: str
    scores: dict[str, float]
    confidence: float
    known: bool


class Names:
    """A router: each expert knows the prompts that have its name in them."""

    def __init__(self, names) -> None:
        self.names = tuple(sorted(names))
        self.version = "names-" + "-".join(self.names)

    @classmethod
    def load(cls, path: Path) -> Names:
        return cls(json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(self.names).encode())

    def route_text(self, text: str) -> Decided:
        scores = {name: float(text.count(name)) for name in self.names}
        best = max(self.names, key=lambda name: scores[name])
        total = sum(scores.values())
        return Decided(best, scores, scores[best] / total if total else 0.0, total > 0)

    def without(self, name: str) -> Names:
        if len(self.names) == 1:
            raise TalkootError("nobody is left", where=name, why="", next="")
        return Names(set(self.names) - {name})


TEXTS = {
    "cat": "the cat purrs and miaows at the mouse in the house ",
    "dog": "a dog barks at all who pass by, and fetches sticks ",
    "cow": "moo moo moo says every cow, moo, moo, and chews on ",
    "places": "What is the capital of France? And which river flows through it? ",
}


def write_routed(folder: Path, *names: str, **more: Any) -> Path:
    """The same blend with the real router, of these texts."""
    from talkoot.blend.changes import features_of
    from talkoot.blend.folder import TOKENIZER
    from talkoot.blend.router import Router

    write_blend(folder, *names, router=False, **more)
    Tokenizer.bytes().save(folder / TOKENIZER)
    Router.fit({name: counted(folder, name) for name in names}, features_of(folder)).save(folder / ROUTER)
    return folder


def counted(folder: Path, name: str) -> Any:
    """A text's statistics, for this blend."""
    from talkoot.blend.changes import count_text, features_of

    return count_text(name, [TEXTS[name] * 9], features_of(folder), Key.derived(1, name))


def write_newcomer(folder: Path, blend: Path, name: str = "cow") -> dict[str, str]:
    """A model and statistics somewhere else; what ``POST /v1/experts`` is told of them."""
    write_model(folder / name, 5)
    counted(blend, name).write(folder / f"{name}.safetensors", Key.derived(1, name))
    return {"name": name, "model": str(folder / name), "statistics": str(folder / f"{name}.safetensors")}


def build_toy(place: Path | Catalogue, settings: Settings = Settings(), **options: Any):
    """The application over a blend with such a router, or over any other catalogue."""
    options = {"hosts": frozenset({"127.0.0.1"}), **options}
    if isinstance(place, Path):
        place = Catalogue(place, Names.load)
    return build(place, settings, **options)


@contextlib.asynccontextmanager
async def client_of(
    place: Path | Catalogue, settings: Settings = Settings(), client: tuple[str, int] = ("127.0.0.1", 2), **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a network, at the address ``client``."""
    app = build_toy(place, settings, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as browser:
            yield browser


@contextlib.asynccontextmanager
async def served(
    place: Path | Catalogue, settings: Settings = Settings(), **options: Any
) -> AsyncIterator[tuple[str, Api]]:
    """A real server on loopback in this event loop: its address, and its inside."""
    app = build_toy(place, settings, **options)
    listener = bind("127.0.0.1", 0)
    server = Server(app)
    server.capture_signals = contextlib.nullcontext  # the test's own are left alone
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.api
    finally:
        server.should_exit = True
        await task
        listener.close()


def events(text: str) -> list[Any]:
    """The data of server-sent events, the closing word included."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def chat(content: str, model: str = "auto", **more: Any) -> dict[str, Any]:
    """A request's body."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
