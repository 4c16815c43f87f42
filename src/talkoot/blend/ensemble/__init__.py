"""Posterior ensembles: experts that share nothing but a tokenizer, mixed by how likely each finds the text so far."""

from talkoot.blend.ensemble.ensemble import PosteriorEnsemble, Scored, evidence, prior_from
from talkoot.blend.ensemble.generation import Reader, StageReader, Told, stream
from talkoot.blend.ensemble.opening import common_tokenizer, open_stages
from talkoot.blend.ensemble.posterior import Belief, Mixed, Prior, mix
from talkoot.blend.ensemble.priors import priors
from talkoot.blend.ensemble.remote import RemoteEnsemble, hire, serve_scores
from talkoot.blend.ensemble.scorers import Gone, StageScorer, TokenScorer

__all__ = [
    "Belief",
    "Gone",
    "Mixed",
    "PosteriorEnsemble",
    "Prior",
    "Reader",
    "RemoteEnsemble",
    "Scored",
    "StageReader",
    "StageScorer",
    "TokenScorer",
    "Told",
    "common_tokenizer",
    "evidence",
    "hire",
    "mix",
    "open_stages",
    "prior_from",
    "priors",
    "serve_scores",
    "stream",
]
