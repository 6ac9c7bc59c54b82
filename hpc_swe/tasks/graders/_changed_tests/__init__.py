"""Choose other values that hidden tests expect, and grade a resolving patch again with such tests."""
