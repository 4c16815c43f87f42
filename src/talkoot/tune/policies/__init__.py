"""Policies: models that answer and learn; :mod:`talkoot.tune.policies.policy` says what one is."""
