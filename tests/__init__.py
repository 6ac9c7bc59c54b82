"""Tests of hpc_swe and jobs; folders are named as the packages that they test."""
