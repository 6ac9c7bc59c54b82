"""Programs that run as the ranks of one learner, and what starts and checks them."""
