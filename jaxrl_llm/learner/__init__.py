"""The learner: state, scoring, one jitted update step."""
