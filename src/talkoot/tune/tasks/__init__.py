"""Tasks with verifiable answers; :mod:`talkoot.tune.tasks.task` says what one is."""

from talkoot.tune.tasks import addition
from talkoot.tune.tasks.task import Item, Task, open_task, task_kinds

__all__ = ["Item", "Task", "addition", "open_task", "task_kinds"]
