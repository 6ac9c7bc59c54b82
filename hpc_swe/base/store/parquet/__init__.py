"""Keep tables that people open with any tool: tasks, conversations of SFT, and evaluations."""
