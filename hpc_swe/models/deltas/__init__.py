"""Find, write and place what changed between two versions of weights."""
