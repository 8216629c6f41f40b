"""Who runs next: requests waiting, requests running, and the plan of one step."""

from enginecore.plan import NewRequest, StepPlan, StepResult
from enginecore.scheduler.scheduler import Scheduler, SchedulerConfig

__all__ = ["NewRequest", "Scheduler", "SchedulerConfig", "StepPlan", "StepResult"]
