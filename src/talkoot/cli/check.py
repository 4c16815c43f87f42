"""``talkoot status --check``: whether a run's log is what honest peers would have written."""

from __future__ import annotations

import sys
from pathlib import Path

from talkoot.cli.output import print_json
from talkoot.core.errors import Exit
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.records import Start
from talkoot.serve.tuned import is_tuning

MOST_SHOWN = 20


def check_log(run: Path, *, as_json: bool) -> None:
    """Print what is wrong; the exit code is 4 where something is.

    Raises:
        TalkootError: the log is missing, or a signature or the hash chain does not hold.
    """
    log = Log(run / LOG, readonly=True)
    try:
        receipts, first = len(log), next(iter(log.entries(1, 1)), None)
    finally:
        log.close()
    recipe = first.receipt.read(Start).recipe if first and first.receipt.op == "run.start" else {}
    if "experts" in recipe:
        from talkoot.blend.train.verify import verify as verify_blend

        findings = verify_blend(run / LOG)
    elif is_tuning(recipe):
        from talkoot.tune.verify import verify as verify_tuned

        findings = verify_tuned(run / LOG)
    else:
        from talkoot.train.verify import verify as verify_trained

        findings = list(verify_trained(run / LOG).faults)
    if as_json:
        print_json({"receipts": receipts, "findings": findings})
    else:
        good = "every signature holds, the hash chain is unbroken, and the receipts agree with each other"
        n = len(findings)
        bad = f"{n} receipt{'s are' if n != 1 else ' is'} wrong"
        print(f"{receipts} receipts checked: {bad if findings else good}")
        for finding in findings[:MOST_SHOWN]:
            print(f"- {finding}")
        if len(findings) > MOST_SHOWN:
            print(f"- and {len(findings) - MOST_SHOWN} more")
    if findings:
        sys.exit(Exit.FAILED_CHECK)
