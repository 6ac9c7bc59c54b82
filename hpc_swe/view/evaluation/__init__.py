"""An evaluation: started, followed, and read when it has finished."""
