"""Act in a sandbox for the policy."""
