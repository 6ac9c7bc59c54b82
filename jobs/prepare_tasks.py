"""python -m jobs.prepare_tasks: python -m hpc_swe.tasks.prepare under its old name, for one release."""

from hpc_swe.tasks.prepare import main

if __name__ == "__main__":
    main()
