"""Hold what learns and what serves: policies, engines, advantages, and what a model's files say."""
