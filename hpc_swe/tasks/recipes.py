"""Say how the tests of a repository are run, where a row does not."""

from typing import Literal

import msgspec


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe says how the tests of a repository are run."""

    command: str
    """Shell line; the names of the test files follow."""
    log_parser: str
    """Name of swebench's parser, for example parse_log_pytest."""
    labels: Literal["files", "modules", "none"] = "files"
    """How tests are named: by files, or dotted modules below tests/; none if the command itself has them."""
    set_up: list[str] = []
    """Shell lines before the tests."""
    conda: bool = True
    """Whether conda's environment `testbed` is activated before these lines."""


DJANGO = Recipe(
    command="./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    log_parser="parse_log_django",
    labels="modules",
    set_up=["export LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8"],
)
SYMPY = Recipe(
    command="PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose",
    log_parser="parse_log_sympy",
)
_BY_PYTEST = {
    "astropy/astropy": "astropy",
    "matplotlib/matplotlib": "matplotlib",
    "mwaskom/seaborn": "seaborn",
    "pallets/flask": "flask",
    "psf/requests": "requests",
    "pydata/xarray": "xarray",
    "pylint-dev/pylint": "pylint",
    "pytest-dev/pytest": "pytest",
    "scikit-learn/scikit-learn": "scikit",
    "sphinx-doc/sphinx": "sphinx",
}
RECIPES = {"django/django": DJANGO, "sympy/sympy": SYMPY} | {
    repo: Recipe(command="python -m pytest -rA", log_parser=f"parse_log_{parser}")
    for repo, parser in _BY_PYTEST.items()
}
"""Recipes of the repositories of SWE-bench Verified."""
