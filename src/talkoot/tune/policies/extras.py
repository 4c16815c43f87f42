"""Optional packages: asked for only where they are used, and missed with the command that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from talkoot.core.errors import TalkootError


def required(package: str, extra: str) -> None:
    """Make sure that a package is installed.

    Raises:
        TalkootError: it is not; the extra that brings it is named.
    """
    if find_spec(package) is None:
        raise TalkootError(
            f"{package} is not installed",
            where="model.backend",
            why=f"this model needs the package {package}",
            next=f"pip install 'talkoot[{extra}]'",
        )
