"""What an ensemble over a network promises, as checks for a lead; run in the simulated world and in the real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ensemble_toys import TEXT, Absent, Table, model, save
from talkoot.blend.ensemble import PosteriorEnsemble, Prior, RemoteEnsemble, StageScorer, evidence, hire, priors
from talkoot.blend.ensemble.remote import ASK, MOST_TOKENS
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.run.greeting import Hello, Introduce
from talkoot.world.api import HELLO, LOST, Host, Launch, Lost

TOYS = "ensemble_toys"
MODELS = 3


def local(**knobs) -> PosteriorEnsemble:
    """The same experts on this machine."""
    return PosteriorEnsemble({str(number): StageScorer(model(number)) for number in range(MODELS)}, **knobs)


async def meet(host: Host, **programs: tuple[str, bytes]) -> dict[str, PeerId]:
    """Launch peers by name, program and argument, and meet them."""
    for name, (program, argument) in programs.items():
        host.launch(Launch(name=name, program=f"{TOYS}:{program}", argument=argument))
    met: dict[str, PeerId] = {}
    while len(met) < len(programs):
        message = await host.receive(HELLO, timeout=20)
        hello = message.read(Hello)
        host.meet(message.sender, hello.address)
        await host.send(message.sender, "introduce", Introduce(()))
        met[hello.name] = message.sender
    return {name: met[name] for name in programs}


async def check_numbers_are_those_of_local_experts(host: Host, folder: Path) -> None:
    """Whole models on peers give the bits that they give here, dense and sparse, with any prior."""
    peers = await hire(host, {str(number): save(folder, number) for number in range(MODELS)})
    assert list(peers) == ["0", "1", "2"]
    prior = Prior(np.log([0.2, 0.3, 0.5]))
    for knobs in ({}, {"prior": prior}, {"keep": 1, "after": 4}, {"keep": 2, "after": 0}):
        there, here = await RemoteEnsemble(host, peers, **knobs).score(TEXT), local(**knobs).score(TEXT)
        assert there.log_probs.tobytes() == here.log_probs.tobytes()
        assert there.weights.tobytes() == here.weights.tobytes()
        assert there.gone == {}
    assert (await RemoteEnsemble(host, peers).score(TEXT[:1])).log_probs.shape == (0,)
    mixed: Mapping = {"0": peers["0"], "1": StageScorer(model(1)), "2": peers["2"]}
    assert (await RemoteEnsemble(host, mixed).score(TEXT)).log_probs.tobytes() == local().score(
        TEXT
    ).log_probs.tobytes()


async def check_a_lost_peer_is_left_out(host: Host, folder: Path) -> None:
    """The others go on, renormalised, and every later result says who is gone."""
    peers = await hire(host, {str(number): save(folder, number) for number in range(2)})
    peers |= await meet(host, steady=("steady", b""))
    ensemble = RemoteEnsemble(host, peers)
    assert (await ensemble.score(TEXT)).gone == {}
    host.disturb("steady", "kill")
    for _ in range(2):
        scored = await ensemble.score(TEXT)
        assert list(scored.gone) == ["steady"]
        here = PosteriorEnsemble({str(number): StageScorer(model(number)) for number in range(2)}).score(TEXT)
        assert scored.log_probs == pytest.approx(here.log_probs, rel=1e-12)
        assert scored.weights[:, 2].tolist() == [0] * (len(TEXT) - 1)


async def check_silence_ends(host: Host, folder: Path) -> None:
    """A peer that never answers costs one wait, and is left out from then on; without any, the error says so."""
    peers = await meet(host, mute=("mute", b""), steady=("steady", b""))
    ensemble = RemoteEnsemble(host, peers, timeout_s=0.5)
    assert (await ensemble.score(TEXT)).gone == {"mute": "no answer within 0.5 s"}
    assert (await ensemble.score(TEXT)).after.tolist() == [0, 1]
    with pytest.raises(TalkootError, match="no answer from experts") as caught:
        await RemoteEnsemble(host, {"mute": peers["mute"]}, timeout_s=0.2).score(TEXT)
    assert caught.value.code is Exit.UNREACHABLE


async def check_an_answer_that_comes_late_is_not_taken_for_another_texts(host: Host, folder: Path) -> None:
    """Even if the texts are of one length, and another ensemble asked the first one."""
    host.launch(Launch(name="late", program=f"{TOYS}:late"))
    hello = await host.receive(HELLO, timeout=20)
    host.meet(hello.sender, hello.read(Hello).address)
    with pytest.raises(TalkootError, match="no answer"):
        await RemoteEnsemble(host, {"late": hello.sender}, timeout_s=0.5).score([1, 10, 20])
    scored = await RemoteEnsemble(host, {"late": hello.sender}).score([1, 30, 40])
    assert scored.log_probs == pytest.approx([-0.97, -0.96])


async def check_what_is_no_question_is_dropped(host: Host, folder: Path) -> None:
    """An expert goes on whatever others send it."""
    peers = await meet(host, steady=("steady", b""))
    for frames in ([], [b"123"], [b"1234", b"1234"], [bytes(4 * MOST_TOKENS + 4)]):
        await host.send(peers["steady"], ASK, None, frames)
    await host.send(peers["steady"], "introduce", Lost("not contacts"))
    assert (await RemoteEnsemble(host, peers).score(TEXT)).gone == {}


async def check_lies_are_not_mixed(host: Host, folder: Path) -> None:
    """Numbers that are no logarithms of probabilities, or too few or many of them."""
    kinds = ("positive", "nan", "short", "long")
    peers = await meet(host, **{kind: ("liar", kind.encode()) for kind in kinds}, steady=("steady", b""))
    scored = await RemoteEnsemble(host, peers).score(TEXT)
    assert sorted(scored.gone) == sorted(kinds)
    assert all("its answer is wrong" in why for why in scored.gone.values())
    assert np.isfinite(scored.log_probs).all()
    assert scored.after.tolist() == [0, 0, 0, 0, 1]


async def check_a_text_that_one_refuses_is_scored_by_the_others(host: Host, folder: Path) -> None:
    """And the one that refused it answers the next text."""
    peers = await hire(host, {"model": save(folder, 0)})
    experts: Mapping = {**peers, **await meet(host, steady=("steady", b"")), "near": Absent(longest=3)}
    ensemble = RemoteEnsemble(host, experts)
    scored = await ensemble.score([7] * 65)
    assert "64 positions" in scored.gone["model"]
    assert scored.gone["near"] == "its peer is lost"
    assert (await ensemble.score([7] * 3)).gone == {}
    with pytest.raises(TalkootError, match="no answer"):
        await RemoteEnsemble(host, peers).score([9999, 1])


async def check_a_prior_is_made_from_the_peers_word_on_held_out_text(host: Host, folder: Path) -> None:
    """The same as from experts on this machine; without one of them there is none."""
    peers = await hire(host, {str(number): save(folder, number) for number in range(2)})
    texts = [TEXT, TEXT[3:9]]
    there = await RemoteEnsemble(host, peers).evidence(texts)
    scorers = {str(number): StageScorer(model(number)) for number in range(2)}
    assert there.tobytes() == evidence(scorers, texts).tobytes()
    assert np.exp(priors["cached"](2, there).log_weights).sum() == pytest.approx(1)
    with pytest.raises(TalkootError, match="no answer") as caught:
        await RemoteEnsemble(host, {**peers, "gone": Absent()}).evidence(texts)
    assert caught.value.where == "gone"


async def check_when_the_chosen_one_is_lost_the_next_best_is_asked(host: Host, folder: Path) -> None:
    """Sparse scoring survives a loss between its two questions."""
    experts: Mapping = {
        **await meet(host, steady=("steady", b"")),
        "chosen": Absent(longest=3),
        "poor": Table([1e-9] * 258),
    }
    scored = await RemoteEnsemble(host, experts, keep=1, after=2).score(TEXT)
    assert scored.gone == {"chosen": "its peer is lost"}
    assert scored.after.tolist() == [1, 0, 0]
    assert scored.log_probs[2:] == pytest.approx(-np.log(258))


async def check_losses_of_others_are_kept_for_whoever_waits(host: Host, folder: Path) -> None:
    """A notice about a peer that is no expert is not swallowed."""
    peers = await meet(host, other=("mute", b""), steady=("steady", b""), slow=("mute", b""))
    host.disturb("other", "kill")
    ensemble = RemoteEnsemble(host, {"steady": peers["steady"], "slow": peers["slow"]}, timeout_s=3)
    await ensemble.score(TEXT)
    assert peers["other"] in {message.sender for message in ensemble.unclaimed}
    assert {message.topic for message in ensemble.unclaimed} == {LOST}


async def check_a_folder_that_holds_no_model_is_said_so(host: Host, folder: Path) -> None:
    """The peer's own error reaches whoever hires it."""
    place = save(folder, 0)
    (place / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(TalkootError) as caught:
        await hire(host, {"broken": place})
    assert "peer broken" in caught.value.where


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
