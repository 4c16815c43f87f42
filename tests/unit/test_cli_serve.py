"""``talkoot serve``: what its words mean."""

from __future__ import annotations

import pytest

from talkoot.cli.serve import parse_memory
from talkoot.core.errors import TalkootError


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5g", 15 * 10**8), (" 7 kib ", 7168), ("4096", 4096), ("3B", 3)],
)
def test_memory_is_read_as_people_write_it(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1XB", "GB", "1 2GB"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(TalkootError, match="command line"):
        parse_memory(text)


def test_no_limit_is_none():
    assert parse_memory(None) is None
