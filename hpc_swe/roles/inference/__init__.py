"""The inference supervisor: keeps one engine alive and its weights new."""
