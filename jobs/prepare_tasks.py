"""Forward `python -m jobs.prepare_tasks` to `python -m hpc_swe.tasks.prepare`, for one release."""

from hpc_swe.tasks.prepare import main

if __name__ == "__main__":
    main()
