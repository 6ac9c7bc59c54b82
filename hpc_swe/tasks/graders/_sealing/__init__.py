"""Take expected values out of tests, and compare outside a sandbox what the tests record there."""
