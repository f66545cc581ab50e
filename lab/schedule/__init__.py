"""Schedules of k by batch size: the acceptance of a method on given traffic, and the best k for every batch size."""

from lab.schedule.choose import best_schedule
from lab.schedule.drafts import Drafts, drafts_of, mean_context_tokens

__all__ = ["Drafts", "best_schedule", "drafts_of", "mean_context_tokens"]
