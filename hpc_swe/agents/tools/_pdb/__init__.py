"""Run a debugger in the sandbox, and keep its breakpoints."""
