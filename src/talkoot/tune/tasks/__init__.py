"""Tasks with verifiable answers; :mod:`talkoot.tune.tasks.task` says what one is."""

from talkoot.tune.tasks import addition, code, file, gym
from talkoot.tune.tasks.task import Item, Task, open_task, task_kinds

__all__ = ["Item", "Task", "addition", "code", "file", "gym", "open_task", "task_kinds"]
