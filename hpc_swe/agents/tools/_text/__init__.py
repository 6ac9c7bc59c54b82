"""Read, write and search texts of the sandbox."""
