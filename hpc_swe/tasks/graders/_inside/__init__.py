"""Hold what runs inside a sandbox, in the process that runs the tests, and how its texts are read."""
