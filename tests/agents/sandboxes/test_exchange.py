"""What a program in a sandbox writes is received within its time, whatever the program does."""

import fcntl
import os

import pytest

from hpc_swe.agents.sandboxes._exchange import PipedProgram, pipes

SIZE = 200_000


def test_an_answer_is_late_even_if_more_of_it_can_be_read():
    with pipes() as made:
        fcntl.fcntl(made.program_writes, fcntl.F_SETPIPE_SZ, 1 << 18)
        os.write(made.program_writes, SIZE.to_bytes(4, "big") + b"x" * SIZE)
        session = PipedProgram(made, output=-1, output_bytes=0, interrupt=lambda: None)
        with pytest.raises(TimeoutError):
            session.wait(0.0)
        assert session.wait(60.0) == b"x" * SIZE, "what had arrived is kept"
        for end in (made.program_reads, made.program_writes):
            os.close(end)
