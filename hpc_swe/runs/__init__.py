"""A run as the login node sees it: made, submitted, watched and ended."""
