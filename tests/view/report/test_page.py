"""The pages in a real browser, opened as files: clicks, keys, hostile texts; nothing leaves the machine."""

import json

import pytest

from hpc_swe.view.report.__main__ import WholeEpisodes, write
from tests.kit.browser import browser, program
from tests.kit.reported_run import RunMaker, Words

pytestmark = pytest.mark.slow
TEXTS = [
    "</script><script>owned = 1</script><img src=x onerror='owned = 1'>",
    '"]});owned = 1;report("run", {',
    "\u2028\u2029\x00\x1b\u202e",
    "<a href='javascript:owned = 1'>click</a><style>body{display:none}</style>",
    "<form action='http://198.51.100.7/'><input autofocus onfocus='owned = 1'>",
]
HOSTILE = "".join(TEXTS)
ROWS = "[...document.querySelectorAll('#rows tr')]"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    made = RunMaker(tmp_path_factory.mktemp("pages") / "grpo")
    for step in range(3):
        made.step(step)
    hostile = json.dumps({HOSTILE: HOSTILE, "__proto__": "\ud800", "constructor": 1})
    made.step(3, words=Words(HOSTILE, HOSTILE, hostile, HOSTILE, HOSTILE, HOSTILE, HOSTILE))
    made.step(4, words=Words(seen="x" * 200_000, task="long-line"))
    made.evaluation("step_000002")
    made.curves(5)
    with made.run.metric_log("c").open("wb") as log:
        log.write(b"<script>owned = 1</script>\n")
    out = made.run.report
    write(made.run, out, WholeEpisodes(newest=None, task=""))
    return out / "index.html"


@pytest.fixture(scope="module")
def tab():
    if program() is None:
        pytest.skip("no chromium here: tests/kit/install_browser.sh installs it")
    with browser() as page:
        yield page


@pytest.fixture
def page(tab, report):
    """The report's first page; afterwards nothing must have gone wrong, and nothing have left."""
    tab.call("Page.navigate", url="about:blank")
    tab.problems.clear()
    tab.requests.clear()
    tab.look()
    tab.visit(report, "#curves")
    yield tab
    assert tab.ask("typeof owned") == "undefined"
    assert tab.problems == []
    assert tab.requests
    assert [url for url in tab.requests if not url.startswith(report.parent.as_uri())] == []


def shows(page, name):
    page.wait(f"document.getElementById('main').dataset.page === '{name}'")


def test_a_step_of_a_curve_leads_to_its_episodes_and_back(page):
    assert page.ask("document.querySelectorAll('figure').length") >= 12
    assert page.ask("document.querySelector('figcaption').textContent") == "reward"
    page.click("figure svg")
    shows(page, "episodes")
    assert page.ask(f"[...new Set({ROWS}.map(row => row.cells[0].textContent))]") == ["2"]
    page.ask("history.back()")
    shows(page, "curves")


def test_the_table_is_filtered_and_sorted(page):
    page.click("nav a", 1)
    shows(page, "episodes")
    assert page.ask("document.getElementById('count').textContent").startswith("44 of 44 episodes; 43")
    page.press("/", *"EVAL")
    page.wait(f"{ROWS}.length === 4")
    assert page.ask("document.activeElement.id") == "text"
    page.press("Escape")
    page.click(".filters button", 1)
    page.wait(f"{ROWS}.length === 44")
    page.click("#outcome")
    page.ask(
        "(() => {const s = document.getElementById('outcome'); s.value = 'resolved';"
        "s.dispatchEvent(new Event('change'))})()"
    )
    page.wait(f"{ROWS}.length === 7")
    page.click("th a", 0)
    page.wait(f"{ROWS}[0].cells[0].textContent === '0'")
    page.click("th a", 0)
    page.wait(f"{ROWS}[0].cells[0].textContent === '4'")
    assert "outcome=resolved" in page.ask("location.hash")


def test_an_episode_is_opened_and_read_turn_by_turn(page, report):
    page.visit(report, "#episodes?step=2&split=train")
    page.click("#rows tr", 1)
    shows(page, "episode")
    heading = page.ask("document.querySelector('h2').textContent")
    assert "train-000004-01" in heading
    assert "advantage +0.75" in heading
    assert page.ask("document.querySelectorAll('.turn').length") == 3
    assert page.ask("document.querySelectorAll('.turn .token.trained.up').length") > 30
    assert page.ask("[...document.querySelectorAll('.version')].map(e => e.textContent)") == [
        "v000001-i00",
        "v000002-i00",
    ]
    assert "def f(x, y):" in page.ask("document.querySelectorAll('.message.tool')[0].textContent")
    assert "m.py" in page.ask("document.querySelector('.call').textContent")
    assert page.ask("document.querySelector('.tests .passed').textContent") == "test_m.py::test_f"
    page.press("ArrowRight", "ArrowRight")
    assert page.ask("[...document.querySelectorAll('.turn')].indexOf(document.activeElement)") == 1
    page.click(".turn .token", 5)
    tip = page.ask("document.getElementById('tip').textContent")
    assert "id " in tip
    assert "log-probability -" in tip
    assert "trained, advantage +0.75" in tip
    page.click(".turn summary", 0)
    page.wait("document.querySelector('.turn details[open] pre')?.textContent.includes('<|im_start|>system')")
    page.press("j")
    page.wait("document.querySelector('h2').textContent.includes('train-000004-02')")
    page.press("k", "Escape")
    shows(page, "episodes")
    assert page.ask(f"{ROWS}.findIndex(row => row.classList.contains('selected'))") == 1
    page.press("j", "Enter")
    page.wait("document.querySelector('h2')?.textContent.includes('train-000004-02')")


def test_what_a_policy_wrote_is_text_and_runs_nowhere(page, report):
    page.visit(report, "#episodes?step=3")
    assert "<script>owned" in page.ask(f"{ROWS}[0].textContent")
    page.click("#rows tr", 1)
    shows(page, "episode")
    seen = page.ask("document.getElementById('main').textContent")
    assert seen.count("</script><script>owned = 1</script>") > 10
    assert "\\u202e" in seen
    assert "__proto__" in seen
    active = "main script, main img, main style, main form, main input"
    assert page.ask(f"document.querySelectorAll('{active}').length") == 0
    assert page.ask("document.querySelectorAll('main a[href^=javascript]').length") == 0
    assert page.ask("getComputedStyle(document.body).display") == "block"


def test_a_script_that_a_text_smuggled_in_would_not_run(tab, report):
    """Even where our code failed to keep markup out, the page's policy refuses what has no password."""
    tab.visit(report, "#curves")
    tab.ask(
        "(() => {const box = document.createElement('div'); document.body.append(box);"
        "box.innerHTML = `<img src=x onerror='owned = 1'><svg onload='owned = 1'></svg>`;"
        "const script = document.createElement('script'); script.textContent = 'owned = 1';"
        "box.append(script)})()"
    )
    tab.ask("new Promise(done => setTimeout(done, 100))")
    assert tab.ask("typeof owned") == "undefined"
    assert any("Content Security Policy" in problem for problem in tab.problems)


def test_texts_are_searched_in_all_conversations(page, report):
    page.visit(report, "#episodes?step=0-2")
    page.press("/", *"RETURN X - Y", "Enter")
    page.wait(f"{ROWS}.length === 28 - 1 && document.getElementById('count').textContent.startsWith('27')")
    page.visit(report, "#episodes")
    page.press("/", *"OWNED = 1", "Enter")
    page.wait("document.getElementById('count').textContent.startsWith('8 of 44')")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_window(page, report, width):
    page.look(width)
    for place in (
        "#curves",
        "#episodes",
        "#episode/train-step_000003/0001",
        "#episode/train-step_000004/0001",
        "#configuration",
    ):
        page.visit(report, place)
        assert page.ask("document.documentElement.scrollWidth") <= width, place
