"""Let a wheel bring inside the package what a checkout has beside it: its configurations, scripts and jobs.

A top-level package called jobs could be anybody's. All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

BESIDE = ("configs", "containers", "jobs")

setup(
    packages=[*find_packages(include=["hpc_swe*"]), *(f"hpc_swe.{name}" for name in BESIDE)],
    package_dir={f"hpc_swe.{name}": name for name in BESIDE},
)
