"""Expected values stay outside the sandbox, and are compared there as Python compares them."""

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace

import pytest

from hpc_swe.tasks.graders._inside import runner
from hpc_swe.tasks.graders._inside.runner import plain
from hpc_swe.tasks.graders._sealing.answers import OPAQUE, Check, is_plain
from hpc_swe.tasks.graders._sealing.sealed import seal
from hpc_swe.tasks.visible_tests import ids_of_tests

IMPORTS = "from math import isclose\nfrom pytest import approx\n"


def test_of(body: str) -> str:
    return "def test_a():\n" + "".join(f"    {line}\n" for line in body.split("\n"))


test_of.__test__ = False  # type: ignore[attr-defined]

SEALED = {
    "assert f() == 3": [("==", 3)],
    "assert 3 == f()": [("==", 3)],
    "assert f() == -1.5, 'why'": [("==", -1.5)],
    "assert f() == {'a': [1, (2,)]}": [("==", {"a": [1, (2,)]})],
    "assert f() == 1 + 2 * 10 ** 3": [("==", 2001)],
    "assert f() == sorted([3, 1])": [("==", [1, 3])],
    "assert f() == Decimal('1.5')": [("==", Decimal("1.5"))],
    "assert f() != 3": [("!=", 3)],
    "assert 3 < f()": [(">", 3)],
    "assert 1 < f() <= 3": [("both", ">", 1, "<=", 3)],
    "assert f() in (1, 2)": [("in", (1, 2))],
    "assert 'a' not in f()": [("has not", "a")],
    "assert f() == 1 or f() == 2": [("in", [1, 2])],
    "assert f() == pytest.approx(0.5, abs=0.1)": [("approx", 0.5, None, 0.1)],
    "assert math.isclose(f(), 0.5)": [("isclose", 0.5, 1e-9, 0.0)],
    "assert abs(f() - 0.5) < 1e-6": [("within", 0.5, 1e-6, "<")],
    "assert abs(f() - 0.5) <= 1e-6": [("within", 0.5, 1e-6, "<=")],
    "assert f() is '{}'": [("==", True)],
    "want = [[1], [2]]\nassert f() == want[0]": [("==", [1]), ("==", [2])],
    "assert f()": [("==", True)],
    "assert not f()": [("==", True)],
    "assert f() is None": [("==", True)],
    "assert f() == 3 and g() == 4": [("==", 3), ("==", 4)],
    "want = [1, 2]\nassert f() == want, f'not {want}'": [("==", [1, 2])],
    "for x, want in [(1, 2), (3, 4)]:\n    assert f(x) == want": [("==", 2), ("==", 4)],
    "for x, want in {1: 2}.items():\n    assert f(x) == want": [("==", 2)],
    "wants = [5, 6]\nfor n, x in enumerate(q):\n    assert f(x) == wants[n]": [("==", 5), ("==", 6)],
    "if g():\n    return\nassert f() == 1": [("==", 1)],
    "def inner():\n    return 5\nassert f(inner) == 1": [("==", 1)],
    "with open(p) as file:\n    assert f(file) == 1": [("==", 1)],
    "try:\n    assert f() == 1\nfinally:\n    g()": [("==", 1)],
}


@pytest.mark.filterwarnings("ignore:.is. with a literal")
@pytest.mark.parametrize("body", SEALED)
def test_expected_values_of_many_forms_are_taken_out(body: str) -> None:
    sealed = seal(test_of(body))
    assert [(one.how, *one.expected) for one in sealed.checks.values()] == SEALED[body]
    assert (sealed.sealed, sealed.assertions) == (1, 1)
    compile(sealed.text, "test.py", "exec")


@pytest.mark.parametrize(
    "body",
    [
        "assert f() == g()",
        "assert 1 == 1",
        "assert f() > g()",
        "assert np.allclose(f(), [1])",
        "assert np.isclose(f(), 1)",
        "assert isclose(f(), 1)",
        "assert f() == approx(1)",
        "assert f() == pytest.approx(1, **bounds)",
        "assert math.isclose(*pair)",
        "want = [1, 2]\nassert f() == want[:1]",
        "want = {**{'b': 2}, 'a': 1}\nassert f() == want['a']",
        "assert all(x == 3 for x in f())",
        "want = [1]\nwant.append(2)\nassert f() == want",
        "n = 3\nassert f(n) == n",
        "try:\n    assert f() == 1\nexcept AssertionError:\n    pass",
        "with pytest.raises(AssertionError):\n    assert f() == 1",
        "def inner():\n    assert f() == 1\ninner()",
        "assert f() == float('nan')",
        "yield\nassert f() == 1",
    ],
)
def test_what_only_the_process_can_compare_stays(body: str) -> None:
    text = test_of(body)
    assert seal(text).text == text
    assert not seal(text).checks


def test_assertions_of_unittest_are_sealed_and_own_ones_are_not() -> None:
    text = """class TestA(unittest.TestCase):
    async def test_b(self):
        self.assertEqual(await f(), 3, "why")
        self.assertAlmostEqual(f(), 0.5, places=3)
        self.assertTrue(f())
        self.assertIsNone(f())
        self.assertIn("a", f())
        self.assertCountEqual(f(), [1, 2])
        self.assertRaises(ValueError, f)
"""
    sealed = seal(text)
    assert [one.how for one in sealed.checks.values()] == ["==", "almost", "==", "==", "has", "counts"]
    assert sealed.required == {"TestA::test_b": frozenset(range(6))}
    assert (sealed.sealed, sealed.assertions) == (6, 7)
    own = text + "    def assertEqual(self, one, other): pass\n"
    assert not seal(own).checks


@pytest.mark.parametrize(
    "call",
    [
        "AlmostEqual(*pair, 5)",
        "Equal(*pair, 'why')",
        "Equal(f(), *more)",
        "AlmostEqual(f(), 1, **how)",
        "SequenceEqual(f(), [1])",
    ],
)
def test_a_call_that_unpacks_or_compares_loosely_stays(call: str) -> None:
    text = f"class TestA(unittest.TestCase):\n    def test_b(self):\n        self.assert{call}\n"
    assert seal(text).text == text


def test_functions_are_known_by_the_module_that_they_are_imported_from() -> None:
    text = test_of("assert isclose(f(), 1)\nassert f() == approx(1)")
    assert seal(IMPORTS + text).sealed == 2
    assert seal(IMPORTS.replace("math", "numpy").replace("pytest", "mod") + text).sealed == 0


def test_parameters_are_sealed_unless_ids_of_tests_are_given() -> None:
    text = "@pytest.mark.parametrize('x, want', [(1, 20), pytest.param(3, 40)])\ndef test_a(x, want):\n"
    text += "    assert f(x) == want\n"
    sealed = seal(text)
    assert [one.expected for one in sealed.checks.values()] == [(20,), (40,)]
    assert sealed.shared == {"test_a": {0, 1}}
    assert "20" not in sealed.text
    assert "40" not in sealed.text
    assert not seal(text, with_tables=False).checks


def test_a_test_that_is_expected_to_fail_must_be_able_to() -> None:
    body = test_of("assert f() == 1")
    assert not seal("@pytest.mark.xfail\n" + body).checks
    assert not seal("pytestmark = pytest.mark.xfail(strict=True)\n" + body).checks


def test_only_what_each_passing_run_reaches_is_required() -> None:
    body = "assert f() == 1\nif g():\n    assert f() == 2\n    return\nassert f() == 3"
    sealed = seal(test_of(body), first=7)
    assert [one.expected for one in sealed.checks.values()] == [(1,), (2,), (3,)]
    assert sealed.required == {"test_a": {7}}


def test_an_expected_value_at_a_constant_place_is_required() -> None:
    body = "assert f(1) == EXP[-1]\nassert f(2) == KEYS['b']\nassert f(3) == EXP[n]"
    sealed = seal("EXP = [5, 6]\nKEYS = {'a': 7, 'b': 8}\n" + test_of(body))
    assert sealed.sealed == 3
    assert [sealed.checks[number].expected for number in sorted(sealed.required["test_a"])] == [(6,), (8,)]


@pytest.mark.parametrize(
    ("context", "is_sealed"),
    [
        ("self.subTest(n=n, expected=e)", True),
        ("open('skipped')", True),
        ("mock.patch('mod.fails')", True),
        ("nested(pytest.raises(ValueError))", False),
        ("expectation", False),
        ("one if n else pytest.raises(ValueError)", False),
    ],
)
def test_a_block_stays_if_it_calls_what_may_swallow_a_failure(context: str, is_sealed: bool) -> None:
    assert bool(seal(test_of(f"with {context}:\n    assert f() == 1")).sealed) is is_sealed


def test_pytest_is_sure_to_find_only_tests_of_classes_that_it_collects() -> None:
    class_of = "class {}:\n    {}\n    def test_a(self): pass\n".format
    bodies = {
        "TestPlain": "x = 1",
        "TestNone": "__test__ = False",
        "TestMade": "def __init__(self): pass",
        "TestHeir(TestMade)": "x = 1",
        "TestCase(unittest.TestCase)": "def __init__(self, *names): super().__init__(*names)",
    }
    text = "".join(class_of(name, body) for name, body in bodies.items())
    assert ids_of_tests(text) == ["test.py::TestPlain::test_a", "test.py::TestCase::test_a"]
    assert ids_of_tests("__test__ = False\n" + text) == []


def test_of_two_tests_of_one_name_only_the_one_that_counts_is_required() -> None:
    first, last = test_of("assert f() == 1"), test_of("assert f() == 2")
    assert seal(first + last).required == {"test_a": {1}}
    branches = "if x:\n" + first.replace("def", " def").replace("    a", "     a") + last
    assert seal(branches).required == {"test_a": frozenset()}


def test_an_opened_place_and_all_that_is_not_sealed_stay_as_written() -> None:
    """A text that is written anew may need another Python than the image has."""
    text = '''def test_a( ):  # odd
    text = f"{ D [ 'k' ] }-{ f(1) !r:>3}"
    assert text=="v-3" ;  x = """a
\tb"""
    assert ( f( 2 )  # two
        == 4 )
    assert f"{ D [ 'k' ] }" == 'v'
'''
    sealed = seal(text, opened=frozenset({"5:4"}))
    answers = [
        f"__import__('__main__').RECORDER.answer({number}, ({value}))"
        for number, value in ((0, "text"), (1, '''f"{ D [ 'k' ] }"'''))
    ]
    expected = text.replace('assert text=="v-3"', answers[0]).replace(
        """assert f"{ D [ 'k' ] }" == 'v'""", answers[1]
    )
    assert sealed.text == expected
    assert sealed.places == {0: "3:4", 1: "7:4"}


class Odd(list):
    """A list that compares in its own way."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Plain(list):
    """A list that compares as one."""


VALUES = [
    0,
    1,
    True,
    1.0,
    -0.0,
    0.1,
    Decimal("0.1"),
    Decimal("1.00"),
    Fraction(1, 10),
    Fraction(1, 2),
    0.5,
    1 + 0j,
]
VALUES += [
    1 + 2j,
    10**30,
    1e30,
    float("inf"),
    Decimal("Infinity"),
    "a",
    b"a",
    bytearray(b"a"),
    UserString("a"),
    None,
]
VALUES += [[1, 2], Plain([1, 2]), UserList([1.0, 2]), (1, 2), {1, 2}, frozenset({1, 2}), {1: 0, 2: 0}.keys()]
VALUES += [
    {"a": 1},
    UserDict(a=1),
    OrderedDict(a=1),
    Counter(a=1),
    MappingProxyType({"a": 1}),
    {"a": 1}.items(),
]
VALUES += [ChainMap({"a": 1}), {("a", 1)}, [], (), set(), {}, "", "1"]


def test_values_are_compared_outside_as_the_language_does() -> None:
    for one in VALUES:
        assert is_plain(one), one
        for other in VALUES:
            if not isinstance(one, UserString | MappingProxyType) or type(other) in (str, dict):
                assert (plain(one) == plain(other)) == (one == other), (one, other)


@pytest.mark.parametrize("value", [Odd([1]), SimpleNamespace(), object(), range(3), float("nan"), [Odd()]])
def test_values_with_an_equality_of_their_own_are_not_plain(value: object) -> None:
    assert not is_plain(value)
    assert OPAQUE in plain(value) or "nan" in plain(value)
    for how in ("==", "!=", "in", "not in"):
        assert not isinstance(value, Odd) or not Check(how, ([1],)).accepts(plain(value)), how


@pytest.mark.parametrize(
    ("how", "expected", "right", "wrong"),
    [
        ("!=", (3,), 4, 3.0),
        ("in", ([1, 2],), Decimal(2), 3),
        ("in", ("abc",), "b", "x"),
        ("not in", ([1, 2],), 3, 2),
        ("has", ("a",), {"a": object()}, ["b"]),
        ("has", (2,), [1, 2.0], [1]),
        ("has", ("b",), "abc", "xyz"),
        ("has not", (2,), {1}, {2}),
        ("<", (3,), Fraction(5, 2), "2"),
        (">=", ([1, 2],), [1, 3], [1]),
        ("both", (">", 1, "<", 3), 2, 3),
        ("counts", ([1, 2, 2],), (2, 1, 2), [1, 2]),
        ("approx", (0.5, None, None), 0.5000001, 0.501),
        ("approx", ([0.1, 0.2], None, 0.01), [0.105, 0.2], [0.1]),
        ("approx", ({"a": 1.0}, 0.1, None), {"a": 1.05}, {"b": 1.0}),
        ("isclose", (1.0, 1e-9, 0.0), 1.0, 1.1),
        ("isclose", (1.0, 1e-9, 0.0), 1.0, float("inf")),
        ("approx", (float("inf"), None, None), float("inf"), 3),
        ("almost", (0.5, 3, None), 0.5002, 0.51),
        ("almost", (0.5, 7, 0.1), 0.55, 0.7),
        ("within", (0.5, 1e-3, "<"), 0.5001, "0.5"),
        ("within", (100, 1, "<="), 101, 102),
        ("within", (100, 1, "<"), 100.5, 101),
        ("almost", (1 + 2j, 7, None), 1 + 2.00000001j, 1 + 2.1j),
        ("approx", (1 + 2j, None, None), 1 + 2.0000001j, 2j),
        ("approx", (Decimal(1), None, None), Decimal("1.0000001"), 2),
        ("counts", ("cab",), "abc", "ab"),
        ("counts", ("cab",), ["a", "b", "c"], ["abc"]),
    ],
)
def test_a_relation_holds_outside_as_it_does_inside(
    how: str, expected: tuple[object, ...], right: object, wrong: object
) -> None:
    assert Check(how, expected).accepts(plain(right))
    assert not Check(how, expected).accepts(plain(wrong))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[",
        '["="]',
        '["=","1e999999999"]',
        '["=","9/0"]',
        "[" * 100_000,
        '["b","zz"]',
        '"' + "x" * 2_000_000 + '"',
    ],
)
def test_no_forged_answer_is_right_or_costs_time(answer: str) -> None:
    for how, expected in (("has", ("a",)), ("<", (3,)), ("approx", (0.5, None, None)), ("in", ([1],))):
        assert not Check(how, expected).accepts(answer)


def test_a_long_value_is_compared_by_its_digest_and_only_for_equality() -> None:
    told: list[str] = []
    recorder = runner.Recorder(lambda *words: told.append(words[2]), frozenset())
    long = list(range(100_000))
    for value in (long, long[1:], 10**5000, Decimal("sNaN")):
        recorder.answer(3, value)
    first, second, power, signal = told
    assert max(map(len, told)) < 10_000
    assert Check("==", (long,)).accepts(first)
    assert not Check("==", (long,)).accepts(second)
    assert not Check("==", (long,)).is_opaque(second)
    assert not Check("has", (5,)).accepts(first)
    assert Check("has", (5,)).is_opaque(first)
    assert Check(">", (10**50,)).accepts(power)
    assert Check(">", (10**50,)).is_opaque(signal)


def test_a_value_that_holds_itself_is_recorded_all_the_same() -> None:
    told: list[tuple[object, ...]] = []
    loop: list[object] = []
    loop.append(loop)
    runner.Recorder(lambda *words: told.append(words), frozenset()).answer(3, loop)
    assert told == [("answer", 3, '["?","list"]')]
