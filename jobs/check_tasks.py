"""python -m jobs.check_tasks: python -m hpc_swe.tasks.check under its old name, for one release."""

from hpc_swe.tasks.check import main

if __name__ == "__main__":
    main()
