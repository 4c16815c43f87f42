"""Tasks with verifiable answers; :mod:`talkoot.tune.tasks.task` says what one is."""

from talkoot.tune.tasks import addition, code, file
from talkoot.tune.tasks.task import Item, Task, open_task, task_kinds

__all__ = ["Item", "Task", "addition", "code", "file", "open_task", "task_kinds"]
