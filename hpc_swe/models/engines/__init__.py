"""Sample tokens from the policy's weights."""
