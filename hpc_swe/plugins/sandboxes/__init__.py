"""Where an episode acts."""
