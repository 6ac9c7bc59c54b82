"""Create, submit, watch and stop runs from the login node."""
