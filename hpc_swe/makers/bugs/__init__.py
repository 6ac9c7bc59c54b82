"""Make buggy programs from code that works."""
