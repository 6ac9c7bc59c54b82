"""Write a run as pages that a browser shows from files: its curves, and every episode turn by turn."""
