"""Run the learner, which trains one batch per step."""
