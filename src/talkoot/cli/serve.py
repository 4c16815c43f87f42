"""``talkoot serve``: experts behind an OpenAI-compatible address."""

from __future__ import annotations

import re
from pathlib import Path

from talkoot.cli.output import say
from talkoot.core.errors import TalkootError, nearest
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.routing import SCOPES, UNKNOWN
from talkoot.serve.api.server import Settings, serve_api

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def run(
    folder: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    memory: str | None,
    unknown: str,
    route_on: str,
    remote: bool,
) -> None:
    """Serve until interrupted."""
    for key, word, words in (("--mode-for-unknown", unknown, UNKNOWN), ("--route-on", route_on, SCOPES)):
        if word not in words:
            raise _bad(key, f"{word!r}: {nearest(word, words)}", f"use one of: {', '.join(words)}")
    settings = Settings(memory=parse_memory(memory), unknown=unknown, scope=route_on, remote=remote)

    def ready(address: str, catalogue: Catalogue) -> None:
        names = catalogue.shelf.names
        say(f"serving {', '.join(names) or 'nothing yet'} at {address}/v1")
        for name, why in catalogue.shelf.problems.items():
            say(f"warning: {name} is not served: {why}")
        for name, source in catalogue.shelf.models.items():
            if settings.memory is not None and source.weights > settings.memory:
                say(f"warning: {name} takes {source.weights:,} bytes, more than --memory: it cannot be loaded")
        secret = f" -H 'authorization: Bearer {token}'" if token else ""
        model = names[0] if names else "auto"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        say(f"try: curl {address}/v1/chat/completions{secret} -H 'content-type: application/json' -d '{body}'")

    serve_api(folder, settings, host=host, port=port, token=token, ready=ready)


def parse_memory(text: str | None) -> int | None:
    """Bytes, from ``2GB``, ``512MiB`` or a plain number.

    Raises:
        TalkootError: it is none of these.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise _bad("--memory", f"{text!r} is no amount of memory", "write it like 2GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def _bad(key: str, why: str, next: str) -> TalkootError:
    return TalkootError("the command line cannot be understood", where=key, why=why, next=next)
