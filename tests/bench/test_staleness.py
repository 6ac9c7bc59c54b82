"""What old samples cost, with our own objectives."""

import pytest

pytest.importorskip("torch")

from tests.bench.staleness import mean_rates  # noqa: E402


def test_decoupled_learns_as_much_from_old_samples_as_from_new_ones() -> None:
    new, old = (mean_rates(age, "decoupled", seeds=2) for age in (0, 2))
    assert min(later - earlier for earlier, later in zip(new, old, strict=True)) > -0.05


def test_sampler_ratio_learns_little_from_batches_that_one_version_sampled() -> None:
    new, old = (mean_rates(age, "sampler_ratio", seeds=2) for age in (0, 2))
    assert new[3] - old[3] > 0.1
