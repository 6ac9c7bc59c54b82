"""What tests share and what is no test; programs here are started by tests."""
