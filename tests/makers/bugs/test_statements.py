"""A statement shows the function at fault as the agent sees it, and visible tests that fail."""

from hpc_swe.makers.bugs.mutations import Module
from hpc_swe.makers.bugs.statements import MOST_CHARS, with_function

SOURCE = '''class Box:
    """A box."""

    @property
    def size(self):
        """Return twice the side.

        >>> Box(2).size
        4
        """
        return 2 * self.side

    @size.setter
    def size(self, value):
        self.side = value / 2
'''
SEEN = f"""class TestBox:
    def test_size(self):
        assert Box(1).size == 2

    def test_side(self):
        assert Box(1).side == 1


def test_long():
    text = {"x" * MOST_CHARS!r}
"""


def statement(failing):
    module = Module(SOURCE)
    mutant = next(each for each in module.mutants(module.functions[1]) if each.kind == "operator")
    shown = mutant.text.replace("\n        >>> Box(2).size\n        4\n", "")  # a hidden test's example
    return with_function("box.py", mutant, failing, {"box.py": shown, "test_box.py": SEEN})


def test_it_shows_the_one_of_two_functions_of_a_name_that_was_changed():
    text = statement({"test_box.py::TestBox.test_size"})
    assert text == (
        "The function Box.size in box.py has a fault, so that tests fail. Repair it.\n\n"
        "```python\nclass Box:\n    @size.setter\n    def size(self, value):\n"
        "        self.side = value * 2\n```\n\n"
        "This test fails:\n\n```python\n    def test_size(self):\n        assert Box(1).size == 2\n```"
    )
