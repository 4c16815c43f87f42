"""The command line: one file per verb. Importing this must stay cheap; verbs import what they need when they run."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn


def main() -> None:
    """Entry point of the ``talkoot`` command."""
    from typer.main import get_command

    from talkoot.cli.app import app
    from talkoot.cli.output import report_error
    from talkoot.core.errors import Exit, TalkootError

    as_json = "--json" in sys.argv
    try:
        command = get_command(app)  # not app(): typer's own main turns Ctrl-C and a closed pipe into other exit codes
        with command.make_context("talkoot", sys.argv[1:]) as context:
            command.invoke(context)
    except TalkootError as problem:
        report_error(problem, as_json=as_json)
        sys.exit(problem.code)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except OSError as problem:
        _surroundings(problem, as_json=as_json)
    except Exception as problem:
        sys.exit(_usage_or_bug(problem, as_json=as_json))


def _surroundings(problem: OSError, *, as_json: bool) -> NoReturn:
    """What the system refuses (a full disk, a file that may not be read) is the user's to mend, not a bug of ours."""
    from talkoot.cli.output import report_error
    from talkoot.core.errors import Exit, TalkootError

    if problem.errno == errno.EPIPE:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.DONE)
    if problem.errno is None:
        raise problem
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    error = TalkootError(
        "the disk is full" if full else "the system refused to read or write",
        where=str(problem.filename or "standard output, or a file that the system does not name"),
        why=problem.strerror or str(problem),
        next="free some space and run the same command again" if full else "name a path that this user may use",
    )
    try:
        report_error(error, as_json=as_json)
    except OSError:  # it was standard output itself
        report_error(error, as_json=False)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(error.code)


def _usage_or_bug(problem: Exception, *, as_json: bool) -> int:
    """Typer's own complaints are bad input; everything else is a bug of ours and keeps its traceback."""
    from talkoot.cli.output import report_error
    from talkoot.core.errors import Exit, TalkootError

    show, describe = getattr(problem, "show", None), getattr(problem, "format_message", None)
    if show is not None and describe is not None:
        command = getattr(getattr(problem, "ctx", None), "command_path", "talkoot")
        if as_json:
            error = TalkootError(
                "the command line cannot be understood", where=command, why=describe(), next=f"read {command} --help"
            )
            report_error(error, as_json=True)
        else:
            show()
        return Exit.BAD_INPUT
    code = getattr(problem, "exit_code", None)
    if code is not None:
        return int(code)
    raise problem
