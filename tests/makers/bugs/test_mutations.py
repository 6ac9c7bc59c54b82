"""Functions are broken in one place each, in the ways that people break them."""

import ast

import pytest

from hpc_swe.makers.bugs.mutations import Module, chosen


def made(text: str) -> dict[str, str]:
    """Changed text -> kind."""
    module = Module(text)
    return {one.text: one.kind for function in module.functions for one in module.mutants(function)}


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("operator", "return a + b", "return a - b"),
        ("operator", "a -= b\n    return a", "a += b\n    return a"),
        ("boundary", "return a < b", "return a <= b"),
        ("opposite comparison", "return a is not b", "return a is b"),
        ("opposite comparison", "return (a) in (b)", "return (a) not in (b)"),
        ("and or", "return a and b", "return a or b"),
        (
            "negated condition",
            "if a:\n        return b\n    return a",
            "if not (a):\n        return b\n    return a",
        ),
        ("negated condition", "return a if not b else c()", "return a if (b) else c()"),
        ("removed branch", "if a:\n        b = 1\n    return b", "pass\n    return b"),
        ("off by one", "return a[b:]", "return a[b + 1:]"),
        ("off by one", "return range(b)", "return range(b - 1)"),
        ("off by one", "return b - 1", "return b"),
        ("wrong constant", "return a * 10", "return a * 11"),
        ("wrong variable", "return a", "return b"),
        ("swapped arguments", "return divmod(a, b)", "return divmod(b, a)"),
        ("dropped return", "return a.sort()", "a.sort()"),
        ("removed check", "if a:\n        raise KeyError(b)", "if a:\n        pass"),
        ("removed statement", "a.x = b\n    return a", "pass\n    return a"),
        ("removed statement", "a.append(b)\n    return a", "pass\n    return a"),
        (
            "exception swallowed",
            "try:\n        return a\n    except KeyError:\n        raise ValueError from None",
            "try:\n        return a\n    except KeyError:\n        pass",
        ),
        (
            "wrong exception",
            "try:\n        return a\n    except KeyError:\n        pass",
            "try:\n        return a\n    except IndexError:\n        pass",
        ),
        ("missing copy", "b = a.copy()\n    return b", "b = a\n    return b"),
        ("missing copy", "b = list(a)\n    return b", "b = (a)\n    return b"),
        ("missing call", "return sorted(a)", "return (a)"),
        ("wrong function", "return min(a, b)", "return max(a, b)"),
        ("dropped sign", "return -a", "return (a)"),
        ("loop control", "for x in a:\n        continue", "for x in a:\n        break"),
    ],
)
def test_each_kind_of_change_is_made_in_its_place(kind, old, new):
    head = "def f(a, b):\n    "
    assert made(f"{head}{old}\n")[f"{head}{new}\n"] == kind


TEXT = '''# Umlauts take two bytes: \xe4\xf6\xfc
class A:
    """Class."""

    @property
    def one(self, x: int = 1) -> "int":
        """Say "a < b"."""
        s = "\xe9" + f"{x - 1}"  # a comment < with operators
        return (x
                + 2) if x < 3 else len(s)


def same(x):
    return x + 1


def again(x):
    return x + 1
'''


def test_every_mutant_is_python_that_differs_and_keeps_the_rest():
    module = Module(TEXT)
    assert [function.name for function in module.functions] == ["A.one", "same", "again"]
    trees = set()
    for function in module.functions:
        for mutant in module.mutants(function):
            trees.add(ast.dump(ast.parse(mutant.text)))
            kept = module.data[: function.start].decode(), module.data[function.end :].decode()
            assert (mutant.text.startswith(kept[0]), mutant.text.endswith(kept[1])) == (True, True)
            assert '"""Say "a < b"."""' in mutant.text
            assert 'f"{x - 1}"  # a comment < with operators' in mutant.text
    every = [mutant for function in module.functions for mutant in module.mutants(function)]
    assert len(trees) == len(every) > 10
    assert ast.dump(ast.parse(TEXT)) not in trees
    assert any("(x\n                - 2)" in mutant.text for mutant in every)


def test_a_choice_has_many_kinds_and_depends_on_the_seed_alone():
    module = Module(TEXT)
    mutants = list(module.mutants(module.functions[0]))
    first = chosen(mutants, 4, seed=1)
    assert len({mutant.kind for mutant in first}) == 4
    assert chosen(list(reversed(mutants)), 4, seed=1) == first
    assert any(chosen(mutants, 4, seed=seed) != first for seed in range(2, 6))
    assert len(chosen(mutants, 1000, seed=1)) == len(mutants)


def test_a_lone_carriage_return_moves_no_mutant():
    text, mark = "def f(x):\n    if x > 3:\n        return x + 1\n    return 2 * x\n", "# a\r# b\r\n"
    assert made(mark + text) == {mark + mutant: kind for mutant, kind in made(text).items()}
