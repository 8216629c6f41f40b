"""Who runs next: requests waiting, requests running, and the plan of one step."""

from enginecore.plan import NewRequest, StepPlan, StepResult
from enginecore.scheduler.config import SchedulerConfig
from enginecore.scheduler.scheduler import Scheduler

__all__ = ["NewRequest", "Scheduler", "SchedulerConfig", "StepPlan", "StepResult"]
