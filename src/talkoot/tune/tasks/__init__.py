"""Tasks with verifiable answers; :mod:`talkoot.tune.tasks.task` says what one is."""
