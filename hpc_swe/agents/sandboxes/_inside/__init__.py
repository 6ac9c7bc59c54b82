"""Programs that are sent to containers and interpreters as text: standard library only."""
