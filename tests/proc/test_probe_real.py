"""``talkoot doctor --probe`` with real processes, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from talkoot.cli.app import app
from talkoot.core.errors import Exit, TalkootError
from talkoot.plan.profile import load_profile


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_three_processes_are_measured_and_the_profile_loads_back(tmp_path):
    path = tmp_path / "net.toml"
    printed = json.loads(doctor("--probe", str(path), "--nodes", "3", "--json"))
    profile = load_profile(path)
    assert [node["name"] for node in printed["nodes"]] == [node.name for node in profile.nodes]
    assert [node.name for node in profile.nodes] == ["alder", "birch", "cedar"]
    assert len(profile.links) == 6
    for link in profile.links.values():  # loopback, however busy the machine is
        assert 1e-5 < link.latency_s < 0.1
        assert 1e6 < link.bytes_per_s < 1e11
    for node in profile.nodes:
        assert 1e-6 < node.layer_sample_s < 1.0
        assert 1 <= node.slots <= 16


def test_a_file_is_not_overwritten_and_a_folder_not_invented(tmp_path):
    taken = tmp_path / "net.toml"
    taken.write_text("mine")
    for path, why in ((taken, "exists"), (tmp_path, "exists"), (tmp_path / "no" / "net.toml", "no folder")):
        with pytest.raises(TalkootError) as caught:
            doctor("--probe", str(path))
        assert caught.value.code == Exit.BAD_INPUT
        assert why in caught.value.why
    assert taken.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["net.toml"]
