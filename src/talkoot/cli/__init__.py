"""The command line: one file per verb. Importing this must stay cheap; verbs import what they need when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``talkoot`` command."""
    from talkoot.cli.app import app
    from talkoot.cli.output import report_error
    from talkoot.core.errors import Exit, TalkootError

    try:
        app(standalone_mode=False)
    except TalkootError as problem:
        report_error(problem, as_json="--json" in sys.argv)
        sys.exit(problem.code)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except Exception as problem:
        sys.exit(_usage_or_bug(problem))


def _usage_or_bug(problem: Exception) -> int:
    """Typer's own complaints are bad input; everything else is a bug of ours and keeps its traceback."""
    from talkoot.core.errors import Exit

    show, code = getattr(problem, "show", None), getattr(problem, "exit_code", None)
    if show is not None:
        show()
        return Exit.BAD_INPUT
    if code is not None:
        return int(code)
    raise problem
