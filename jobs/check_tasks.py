"""Forward `python -m jobs.check_tasks` to `python -m hpc_swe.tasks.check`, for one release."""

from hpc_swe.tasks.check import main

if __name__ == "__main__":
    main()
