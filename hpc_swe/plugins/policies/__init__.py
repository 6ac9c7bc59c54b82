"""The model being trained."""
