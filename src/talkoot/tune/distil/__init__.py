"""Self-distillation from feedback: the policy learns from itself with a hint in its context.

:mod:`talkoot.tune.distil.critics` says what is wrong, :mod:`talkoot.tune.distil.lessons` turns it into lessons,
:mod:`talkoot.tune.distil.learner` learns from them (only this module needs torch).
"""
