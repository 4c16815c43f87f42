"""One file per claim. Each module has ``CLAIM`` (a sentence) and ``measure(options) -> Outcome``."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import pkgutil
from types import ModuleType

from talkoot.core.errors import TalkootError, nearest

_HELPERS = {"chart", "outcome"}


def names() -> list[str]:
    """Benches that exist."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in found if name not in _HELPERS and not name.startswith("peer_"))


def load(name: str) -> ModuleType:
    """The module of bench ``name``.

    Raises:
        TalkootError: there is no such bench.
    """
    if name not in names():
        raise TalkootError(
            f"there is no bench {name!r}",
            where="talkoot bench NAME",
            why=nearest(name, names()),
            next=f"use one of: {', '.join(names())}",
        )
    return importlib.import_module(f"talkoot.bench.{name.replace('-', '_')}")


def claim(name: str) -> str:
    """What a bench claims, read from its source: benches import much, and listing them should be quick."""
    source = importlib.resources.files("talkoot.bench").joinpath(f"{name.replace('-', '_')}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CLAIM":
            return str(ast.literal_eval(node.value))
    return ""
