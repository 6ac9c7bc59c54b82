"""Train the policy, the model that acts in episodes."""
