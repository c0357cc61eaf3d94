"""The page in a real browser: it plays, pauses, scrubs and jumps, shows what the file says, asks for nothing and runs nothing foreign."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.browser import Browser, find_browser
from doubles.replays import PWNED, hostile_replay, long_replay, skirmish_replay, small_replay
from inchworm.worlds.replay import replay_page
from inchworm.worlds.skirmish import SkirmishConfig

pytestmark = pytest.mark.slow


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    @property
    def frame(self) -> int:
        return int(self.browser.value("document.body.dataset.frame"))

    def text(self, selector: str) -> str:
        return str(self.browser.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        return list(self.browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.textContent)"))

    def scrub(self, part: float) -> None:
        """A click on the slider, at this part of its length."""
        rectangle = "(r => [r.x, r.y, r.width, r.height])(document.querySelector('#scrub').getBoundingClientRect())"
        left, top, width, height = self.browser.value(rectangle)
        self.browser.click_at(left + 8 + (width - 16) * part, top + height / 2)

    def colour(self, x: float, y: float) -> list[int]:
        """Red, green and blue of the canvas at a place of the world, origin at the lower left."""
        script = """((x, y) => {
            const c = document.querySelector('#arena'), w = JSON.parse(document.querySelector('#replay').textContent).world;
            return [...c.getContext('2d').getImageData(x / w.width * c.width, (1 - y / w.height) * c.height, 1, 1).data].slice(0, 3); })"""
        return list(self.browser.value(f"{script}({x}, {y})"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH: the page was not tried in a browser")
    with Browser(program, tmp_path_factory.mktemp("browser")) as browser:
        yield Page(browser)


def show(page: Page, replay: dict[str, Any], directory: Path, **options: Any) -> None:
    path = directory / "page.html"
    path.write_text(replay_page(replay), encoding="utf-8")
    page.browser.open(path, **options)


@pytest.fixture
def small(page: Page, tmp_path: Path) -> Page:
    show(page, small_replay(), tmp_path)
    return page


def test_it_opens_without_a_complaint_and_asks_for_nothing(small: Page, tmp_path: Path) -> None:
    assert small.browser.value("document.title") == "Replay: Skirmish-v0"
    assert small.text("#subtitle") == "blue (policy) against red (heuristic), 1 v 1, 3 steps"
    assert small.frame == 0
    small.browser.press("End")
    assert small.browser.requests() == [(tmp_path / "page.html").as_uri()]
    assert small.browser.complaints() == []


def test_it_plays_pauses_and_ends(page: Page, tmp_path: Path) -> None:
    show(page, long_replay(150), tmp_path)  # 15 s of game
    assert page.browser.value("document.querySelector('#play').ariaLabel") == "Play"
    page.browser.click("#play")
    page.browser.wait("Number(document.body.dataset.frame) > 3")
    assert page.browser.value("document.querySelector('#play').ariaLabel") == "Pause"
    page.browser.click("#play")
    stopped = page.frame
    page.browser.value("new Promise(done => setTimeout(done, 300))")
    assert page.frame == stopped
    page.browser.press("End")
    page.browser.press("ArrowLeft")
    assert page.browser.value("document.querySelector('#banner').hidden") is True
    page.browser.click("#play")  # one step is left: 0.1 s
    page.browser.wait("document.body.dataset.frame === '150' && !document.body.classList.contains('playing')")
    assert page.text("#banner") == "blue (policy) wins on time"
    assert page.browser.value("document.querySelector('#banner').hidden") is False
    page.browser.click("#play")  # from the end it begins again
    page.browser.wait("Number(document.body.dataset.frame) < 100")
    assert page.browser.complaints() == []


def test_what_is_shown_is_what_the_file_says(small: Page) -> None:
    """The numbers of `small_replay`, frame by frame."""
    assert small.texts("#units .badge") == ["S1", "H1"]
    small.scrub(1 / 3)
    assert small.frame == 1
    assert small.texts("#units .health") == ["10 / 10", "10 / 20"]
    assert small.texts("#units .place") == ["5.0, 6.0", "15.0, 6.0"]
    assert small.browser.value("[...document.querySelectorAll('.bar i')].map(bar => bar.style.width)") == ["100%", "50%"]
    assert (small.text("#clock"), small.text("#step")) == ("0.5 s", "step 1 / 3")
    small.scrub(2 / 3)
    assert small.texts("#units .health") == ["10 / 10", "dead"]
    assert small.text("#zone-state") == "zone: neutral"
    small.scrub(1)
    assert small.frame == 3
    assert small.texts("#units .health") == ["7.5 / 10", "dead"]
    assert small.texts(".score") == ["1", "0"]
    assert small.text("#zone-state") == "zone: blue"
    assert small.browser.value("document.querySelector('#scrub').getAttribute('aria-valuetext')") == "step 3 of 3, 1.5 s"
    assert small.browser.value("document.querySelector('#arena').ariaLabel") == "The arena at 1.5 s: blue has 1 alive, red has 0"


def test_the_canvas_shows_the_units_where_they_are(small: Page) -> None:
    """Teams' colours at the units' rims: 0.4 left of the scout's centre, and on the heavy's ring; wall and ground elsewhere."""
    blue, red, wall, ground = [0, 114, 178], [213, 94, 0], [115, 125, 136], [251, 250, 246]
    small.browser.click("#arcs")
    assert small.colour(4.0 - 0.4, 6.1) == blue
    assert small.colour(16.1, 6.0 - 0.87) == red
    assert small.colour(10.0, 1.5) == wall
    assert small.colour(3.5, 2.3) == ground
    small.scrub(1)
    assert small.colour(4.0 - 0.4, 6.1) == ground
    assert small.colour(9.0 - 0.4, 6.1) == blue
    assert small.colour(16.1, 6.0 - 0.87) == ground


def test_units_move_between_two_steps(page: Page, tmp_path: Path) -> None:
    """A step of 3 s from x = 4 to x = 5: the scout has left its place long before step 1, and is back there after a pause in step 0."""
    replay = small_replay()
    replay["world"]["step_seconds"] = 3.0
    show(page, replay, tmp_path)
    page.browser.click("#arcs")
    page.browser.click("#arena")
    blue, seen = [0, 114, 178], [page.colour(3.55, 6.1)]
    while seen[-1] == blue and page.frame == 0:
        seen.append(page.colour(3.55, 6.1))
    assert page.frame == 0
    page.browser.click("#arena")
    assert page.colour(3.55, 6.1) == blue
    assert page.text("#clock") == "0.0 s"


def test_keys_do_what_the_hints_say_and_buttons_step(page: Page, tmp_path: Path) -> None:
    show(page, long_replay(40), tmp_path)
    press = page.browser.press
    keys = {"ArrowRight": 1, "Shift ArrowRight": 11, "ArrowLeft": 10, "End": 40, "Home": 0}
    for key, expected in keys.items():
        press(key.removeprefix("Shift "), shift=key.startswith("Shift "))
        assert page.frame == expected, key
    press(" ")
    page.browser.wait("Number(document.body.dataset.frame) > 0")
    press(" ")
    assert page.browser.value("document.body.classList.contains('playing')") is False
    speeds = []
    for key in "++++---------+":
        press(key)
        speeds.append(page.browser.value("document.querySelector('#speed').value"))
    assert speeds == ["2", "4", "8", "8", "4", "2", "1", "0.5", *["0.25"] * 5, "0.5"]
    press("a")
    assert page.browser.value("document.querySelector('#arcs').checked") is False
    press("Home")
    for button, expected in (("#forward", 1), ("#forward", 2), ("#back", 1)):
        page.browser.click(button)
        assert page.frame == expected


@pytest.mark.parametrize(("speed", "frame"), [("8", 80), ("1", 10), ("0.25", 2)])
def test_speed_changes_how_fast_it_plays(speed: str, frame: int, page: Page, tmp_path: Path) -> None:
    """One second on a clock that the test advances, at 10 frames a second of game."""
    show(page, long_replay(400), tmp_path)
    page.browser.value("performance.now = () => 0")
    page.browser.value("void (window.requestAnimationFrame = tick => { window.tick = tick; })")
    page.browser.value(f"document.querySelector('#speed').value = {speed!r}")
    page.browser.click("#play")
    page.browser.value("[200, 400, 600, 800, 1000].forEach(now => window.tick(now))")
    assert page.frame == frame


def test_events_are_listed_and_lead_to_their_frame(small: Page) -> None:
    assert small.texts("#events time") == ["1.0 s", "1.5 s", "1.5 s"]
    assert small.texts("#events span") == ["blue S1 kills red H1", "blue takes the zone", "blue (policy) wins by elimination"]
    small.browser.click("#events li:nth-child(1) button")
    assert small.frame == 2
    assert small.texts("#events .now span") == ["blue S1 kills red H1"]
    small.browser.click("#events li:nth-child(2) button")
    assert small.frame == 3


def test_meta_is_shown_with_every_digit(small: Page) -> None:
    shown = dict(zip(small.texts("#meta dt"), small.texts("#meta dd")))
    assert shown["seed"] == "9223372036854775809"
    assert shown["opponent"] == '{"skill":1,"tags":[null]}'


def test_a_hostile_replay_runs_nothing(page: Page, tmp_path: Path) -> None:
    show(page, hostile_replay(), tmp_path)
    for _ in range(3):
        page.browser.press("ArrowRight")
    assert page.browser.value("typeof window.pwned") == "undefined"
    assert page.browser.value("({}).pwned") is None
    assert page.browser.value("document.querySelectorAll('img, iframe, object, embed, link, b:not(.team)').length") == 0
    assert page.browser.value("document.scripts.length") == 2
    assert page.text("#title") == PWNED
    assert page.texts(".team") == [PWNED, PWNED + "2"]
    assert page.texts(".player") == [PWNED, "{{script}} ${window.pwned=1}"]
    assert page.browser.requests() == [(tmp_path / "page.html").as_uri()]
    assert page.browser.complaints() == []
    assert page.browser.value("document.documentElement.scrollWidth <= innerWidth") is True


def test_even_markup_that_got_in_would_run_nothing(small: Page) -> None:
    """The policy, tried: an inline script, a handler and a picture from elsewhere are all refused."""
    small.browser.value("""(s => { s.textContent = 'window.pwned = 1'; document.body.append(s); })(document.createElement('script'))""")
    small.browser.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\" onerror=\"window.pwned = 1\">')"
    )
    small.browser.value("new Promise(done => setTimeout(done, 100))")
    assert small.browser.value("typeof window.pwned") == "undefined"
    assert len([text for text in small.browser.complaints() if "Content Security Policy" in text]) >= 2


def test_a_game_of_one_frame_and_of_odd_shape(page: Page, tmp_path: Path) -> None:
    replay = long_replay(0)
    replay["world"] |= {"width": 10_000.0, "height": 0.01, "walls": []}
    replay["result"] = None
    show(page, replay, tmp_path)
    page.browser.click("#play")
    page.browser.press("ArrowRight")
    assert page.frame == 0
    assert page.text("#banner") == "the recording ends"
    assert page.browser.complaints() == []


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1200, "dark")])
def test_narrow_and_dark(width: int, scheme: str, page: Page, tmp_path: Path) -> None:
    """Nothing is wider than the window; the canvas has a pixel for each of the screen's; dark paper is dark."""
    show(page, long_replay(60), tmp_path, width=width, height=740, dense=2, scheme=scheme)
    assert page.browser.value("document.documentElement.scrollWidth") == width
    shown, drawn = page.browser.value("(c => [c.getBoundingClientRect().width, c.width])(document.querySelector('#arena'))")
    assert drawn == pytest.approx(2 * shown, abs=1)
    assert shown > width * 0.55
    assert page.browser.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 22, 27)" if scheme == "dark" else "rgb(244, 245, 247)"
    )
    assert page.browser.value(
        "[...document.querySelectorAll('button, input, select')].every(e => e.ariaLabel || e.textContent || e.closest('label'))"
    )
    page.browser.look(width, 740, 2, "light" if scheme == "dark" else "dark")
    corner = "document.querySelector('#arena').getContext('2d').getImageData(20, 20, 1, 1).data[0]"
    page.browser.wait(f"{corner} {'> 200' if scheme == 'dark' else '< 100'}")


def test_the_page_shows_a_real_game(page: Page, tmp_path: Path) -> None:
    replay = skirmish_replay(SkirmishConfig(), 40)
    show(page, replay, tmp_path)
    page.browser.press("End")
    shown = [[float(part) for part in text.split(", ")] for text in page.texts("#units .place")]
    assert shown == [pytest.approx([x, y], abs=0.051) for x, y, *_ in replay["frames"][-1]["units"]]
    assert page.browser.complaints() == []
