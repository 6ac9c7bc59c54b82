"""Keep one engine alive and its weights new: the inference supervisor."""
