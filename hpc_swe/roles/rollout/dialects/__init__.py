"""Read the requests of agent programs and write their answers, for each API that such programs speak."""
