"""The peer's attention is that of each sequence alone, also where lengths are rounded up."""

import pytest

torch = pytest.importorskip("torch")

from hpc_swe.view.benchmarks import peer_attention  # noqa: E402


@pytest.mark.parametrize(("heads", "groups"), [(32, 8), (4, 2)])
def test_attention_does_not_see_the_zeros_that_round_lengths_up(heads, groups):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, count, 300, 16) for count in (heads, groups, groups))
    found = peer_attention._cudnn(query, key, value, [16, 284])
    alone = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        for part in (slice(0, 16), slice(16, 300))
    ]
    torch.testing.assert_close(found, torch.cat(alone, 1))
    called = peer_attention.PackedAttention("torch")
    called.lengths = [16, 284]
    torch.testing.assert_close(called(None, query, key, value)[0], found)
