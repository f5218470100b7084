"""From questions to batches: tasks, trajectories, filters, packing, evaluation."""

from jaxrl_llm.rollout import arithmetic, strings  # the built-in tasks register themselves

__all__ = ["arithmetic", "strings"]
