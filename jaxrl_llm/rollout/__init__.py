"""From questions to batches: tasks, trajectories, filters, packing, evaluation."""
