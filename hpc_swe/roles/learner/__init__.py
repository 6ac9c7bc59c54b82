"""The learner: one optimizer step a batch."""
