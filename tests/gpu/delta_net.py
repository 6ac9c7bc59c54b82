"""Compare the kernels of gated delta nets with plain torch in float32, and time them.

    python -m tests.gpu.delta_net

Sequences of random lengths lie in one pack, and a line for each pack has the largest relative distance (of
norms) of outputs and gradients; "leak" counts the outputs and gradients of other sequences that a change of
one sequence changes. Then it prints the time of one layer of Qwen3.5-4B, forward alone and with backward. It
exits with 1 if a distance is above 2e-2, or anything leaks. It needs a GPU.
"""

import sys

import torch
from torch import Tensor
from torch.autograd import grad

from hpc_swe.models.policies._megatron.kernels.delta_rule import Borders, convolved, delta_rule
from hpc_swe.models.policies._megatron.kernels.linear_attention import Ends

GROUPS, HEADS, WIDTH, KERNEL = 16, 32, 128, 4
MIXED = (2 * GROUPS + HEADS) * WIDTH
NEAR = 2e-2
TIMED = {"1 x 16,384": [16384], "16 x 1,024": [1024] * 16, "128 x 128": [128] * 128}
NAMES = ("output", "mixed", "weight", "decay", "rate")


def core(mixed: Tensor, weight: Tensor, decay: Tensor, rate: Tensor, borders: Borders) -> Tensor:
    """Do what a layer does between its projections, without its norm."""
    states = convolved(mixed, weight, borders).unflatten(1, (GROUPS, -1))
    query, key, value = states.split([WIDTH, WIDTH, HEADS // GROUPS * WIDTH], 2)
    return delta_rule(query, key, value.reshape(len(mixed), HEADS, WIDTH), decay, rate, borders)


def draw(tokens: int, seed: int) -> list[Tensor]:
    """Draw inputs as a layer makes them: states that last for a few up to thousands of tokens."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    decay = -normal(HEADS).exp() * torch.nn.functional.softplus(normal(tokens, HEADS) - 4)
    states = [normal(tokens, MIXED), 0.5 * normal(MIXED, 1, KERNEL), normal(tokens, HEADS).sigmoid()]
    mixed, weight, rate = (each.bfloat16() for each in states)
    return [mixed, weight, decay, rate]


def run(inputs: list[Tensor], borders: Borders, upper: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the inputs, for the gradient `upper` of the output."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    found = core(*leaves, borders)
    return [found.detach(), *grad(found, leaves, upper.to(found.dtype))]


def with_kernels(lengths: list[int]) -> Borders:
    return Borders(lengths, Ends.of(lengths, torch.device("cuda")))


def distances(lengths: list[int], seed: int) -> dict[str, float]:
    inputs = draw(sum(lengths), seed)
    upper = torch.randn(sum(lengths), HEADS, WIDTH, device="cuda").bfloat16()
    found = run(inputs, with_kernels(lengths), upper)
    wanted = run([each.float() for each in inputs], Borders(lengths), upper)
    pairs = zip(NAMES, found, wanted, strict=True)
    far = {name: ((mine - right).norm() / right.norm()).item() for name, mine, right in pairs}
    return far | {"leak": leaks(inputs, lengths, upper, found)}


def leaks(inputs: list[Tensor], lengths: list[int], upper: Tensor, before: list[Tensor]) -> float:
    """Change the sequence in the middle, and count what changes in others, but for the weight's gradient."""
    middle = len(lengths) // 2
    first, size = sum(lengths[:middle]), lengths[middle]
    others = torch.ones(sum(lengths), dtype=torch.bool, device="cuda")
    others[first : first + size] = False
    changed = [each.clone() for each in inputs]
    for each in (changed[0], changed[3]):
        each[first : first + size] *= 0.5
    after = run(changed, with_kernels(lengths), upper)
    pairs = [each for each in zip(before, after, strict=True) if len(each[0]) == len(others)]
    of_tokens = [(one[others], two[others]) for one, two in pairs]
    return float(sum((one != two).sum().item() for one, two in of_tokens))


def milliseconds(lengths: list[int], with_backward: bool) -> float:
    from triton.testing import do_bench

    inputs, borders = draw(sum(lengths), 0), with_kernels(lengths)
    upper = torch.randn(sum(lengths), HEADS, WIDTH, device="cuda").bfloat16()
    if with_backward:
        return do_bench(lambda: run(inputs, borders, upper), return_mode="median")
    with torch.no_grad():
        return do_bench(lambda: core(*inputs, borders), return_mode="median")


def main() -> int:
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    failed, random = 0, torch.Generator().manual_seed(0)
    packs = [
        torch.randint(1, most, (count,), generator=random).tolist() for most, count in ((66, 60), (700, 9))
    ]
    for lengths in ([64], [65], list(range(1, 67)), *packs, [3000, 1, 64, 5000]):
        found = distances(lengths, sum(lengths))
        passed = found["leak"] == 0 and all(found[name] <= NEAR for name in NAMES)  # nan is not
        failed += not passed
        numbers = "  ".join(f"{name} {value:.1e}" for name, value in found.items())
        print(
            f"{'ok  ' if passed else 'FAIL'} {len(lengths)} of {sum(lengths)} tokens  {numbers}", flush=True
        )
    for name, lengths in TIMED.items():
        forward, both = (milliseconds(lengths, with_backward) for with_backward in (False, True))
        print(f"{name}: forward {forward:.2f} ms, with backward {both:.2f} ms", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
