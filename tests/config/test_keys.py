"""The list of all keys of a configuration."""

import subprocess

from hpc_swe.config import keys
from tests.kit.checkout import ROOT, typed


def listed(*words: str) -> "subprocess.CompletedProcess[str]":
    return typed("hpc_swe.launch", "keys", *words)


def test_the_page_of_all_keys_is_that_of_today():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == "\n".join(keys.markdown(keys.listed())) + "\n", "python -m hpc_swe.launch keys --markdown"


def test_every_key_says_what_it_means():
    assert [f"{key.table} {key.name}" for key in keys.listed() if not key.meaning] == []


def test_keys_are_listed_by_prefix_with_type_default_and_meaning():
    done = listed("groups.groups")
    assert done.stdout == (
        "groups.groups_per_step: int > 0, default 8\n    Groups with signal in one training batch.\n"
    )


def test_a_prefix_that_no_key_has_is_answered_with_one_that_is_alike():
    done = listed("groups.group_sise")
    assert done.returncode == 2
    assert "no key has 'groups.group_sise'; did you mean 'groups.group_size'?" in done.stderr


def test_a_word_that_begins_no_key_finds_those_that_mean_it():
    names = [line.partition(":")[0] for line in listed("divergence").stdout.splitlines() if line[0] != " "]
    assert "stop.gap" in names
    assert "groups.group_size" not in names
