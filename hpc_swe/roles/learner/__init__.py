"""Run the learner, which takes one optimizer step per batch."""
