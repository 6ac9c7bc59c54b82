"""The demonstration: the whole loop on one machine, and the tiny model that it trains."""
