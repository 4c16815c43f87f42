"""The section ``mixing``: what a rule fills in, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from talkoot.core.errors import TalkootError
from talkoot.train.mixing import mixing_rules, settled
from talkoot.train.sections import Mixing


def test_the_rule_fills_in_what_is_open_and_nothing_else():
    full = settled(Mixing(rule="noloco", momentum=0.3))
    assert (full.outer_rate, full.momentum, full.pull) == (0.7, 0.3, 0.7)
    assert settled(full) == full
    plain = settled(Mixing(rule="diloco"))
    assert (plain.outer_rate, plain.momentum, plain.pull) == (0.7, 0.9, None)
    assert settled(Mixing()) == Mixing()


@pytest.mark.parametrize("name", list(mixing_rules))
def test_every_rules_own_defaults_are_accepted(name):
    assert settled(Mixing(rule=name)).rule == name


@pytest.mark.parametrize(
    ("rule", "key", "value", "fit"),
    [
        ("diloco", "pull", 0.5, "noloco"),
        ("sparseloco", "momentum", 0.5, "diloco"),
        ("epidemic", "outer_rate", 0.5, "sparseloco"),
        ("none", "overlap", 2, "streaming"),
        ("ddp", "fragments", 2, "streaming"),
    ],
)
def test_a_setting_that_the_rule_has_no_use_for_is_refused_with_the_rules_that_have(rule, key, value, fit):
    with pytest.raises(TalkootError, match=f"no use for mixing.{key}") as caught:
        settled(Mixing(rule=rule, **{key: value}))
    assert fit in caught.value.why
    assert rule not in caught.value.why.split(": ")[1].split(", ")


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("noloco", {"inner_steps": 0}),
        ("noloco", {"outer_rate": 0.0}),
        ("noloco", {"outer_rate": float("nan")}),
        ("noloco", {"momentum": 1.0}),
        ("noloco", {"momentum": -0.1}),
        ("noloco", {"pull": -0.1}),
        ("noloco", {"pull": float("inf")}),
        ("diloco", {"fragments": 0}),
        ("diloco", {"fragments": 51}),
        ("diloco", {"overlap": 50}),
        ("diloco", {"overlap": -1}),
        ("diloco", {"keep": 1.0}),
        ("sparseloco", {"density": 0.0}),
        ("sparseloco", {"density": 1.1}),
        ("sparseloco", {"feedback": 1.1}),
        ("noloco", {"deadline_s": 0.0}),
        ("noloco", {"joiner_donors": 0}),
        ("noloco", {"distance": 1.0}),
    ],
)
def test_values_out_of_range_are_refused_by_key(rule, settings):
    (key,) = settings
    with pytest.raises(TalkootError, match=f"mixing.{key} is out of range"):
        settled(Mixing(rule=rule, **settings))


def test_a_default_that_does_not_fit_says_where_it_comes_from():
    with pytest.raises(TalkootError, match="overlap") as caught:
        settled(Mixing(rule="streaming", inner_steps=4))
    assert "by default with rule 'streaming'" in caught.value.why
    assert settled(Mixing(rule="streaming", inner_steps=4, overlap=1)).overlap == 1


def test_no_pull_at_all_is_an_ablation_that_is_let_through():
    assert settled(Mixing(rule="noloco", pull=0.0)).pull == 0.0


def test_settings_with_which_replicas_would_fly_apart_are_refused():
    for rule in ("noloco", "noloco-literal"):
        with pytest.raises(TalkootError, match="fly apart"):
            settled(Mixing(rule=rule, momentum=0.9, pull=0.7))
    assert settled(Mixing(rule="noloco-nesterov", momentum=0.9, pull=0.7)).pull == 0.7
    with pytest.raises(TalkootError, match="fly apart"):
        settled(Mixing(rule="noloco-nesterov", momentum=0.9, pull=0.9))


def test_rules_are_looked_up_without_torch():
    script = "import sys; from talkoot.train.mixing import mixing_rules, settled; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
