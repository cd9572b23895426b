"""The page in a real browser: before a real server with tiny models, and before one that answers by a script.

Skipped where there is no browser; `make browser-test` installs one, and then nothing is skipped.
"""

import itertools
import json
import os
import re
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.browser import browser, missing
from tests.scripted_server import Scripted, Sent, chunk, stream, usage
from tests.serving import WAIT, serving
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_serve import looked_up, no_cache  # noqa: F401 (fixtures)

PAGE = Path(__file__).parents[1] / "aquiline" / "serve" / "chat.html"
BUBBLE, REPLY, FOOT, NOTICE = "#log .said", "#log article > .text", "#log article > .foot", "#notice"


@pytest.fixture(scope="module")
def window():
    reason = missing()
    if reason is not None:
        assert not os.environ.get("AQUILINE_BROWSER"), reason
        pytest.skip(reason)
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def url(looked_up):  # noqa: F811
    """Of a server whose draft looks tokens up in the text; tiny models repeat themselves, so many are accepted."""
    return f"http://{looked_up.address}"


@pytest.fixture(scope="module")
def page(url):
    with urllib.request.urlopen(url) as response:
        return Sent(response.read(), dict(response.headers.items()))


@pytest.fixture
def scripted(page):
    server = Scripted(page)
    yield server
    server.close()


def slowly(seconds=0.02, count=10_000):
    for i in range(count):
        time.sleep(seconds)
        yield chunk((f" {i}", 0))


def waits_for(event, chunks):
    assert event.wait(WAIT)
    yield from chunks


def ask(window, text, button="#send"):
    window.find("#prompt").send_keys(text)
    window.find(button).click()


def ended(window):
    window.wait(lambda: window.text("#send") == "Send")


def check_quiet(window, url):
    """No error, no breach of the policy, and no request to anywhere else."""
    assert window.log("browser") == []
    asked_for = [address for address in window.requests() if not address.startswith("data:")]
    assert asked_for
    assert {address.removeprefix(url) for address in asked_for} <= {"/", "/v1/models", "/v1/chat/completions"}


def answer(url, text, **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "temperature": 0} | more
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


def limit_tokens(window, count=60):
    window.run(f"document.querySelector('[name=max_tokens]').value = {count}")


# ---------------------------------------------------------------- before the real server


def test_a_chat_streams_and_tells_where_each_token_came_from(window, url):
    window.open(url)
    limit_tokens(window)
    ask(window, "hi")
    ended(window)
    expected = answer(url, "hi", token_origins=True)
    (choice,) = expected["choices"]
    assert window.text(BUBBLE) == "hi"
    assert window.text(REPLY) == choice["message"]["content"]
    origins = [t["origin"] for t in choice["aquiline"]["tokens"]]
    assert max(origins) > 0
    assert window.run("return [...document.querySelectorAll('#log .text > span')].map((s) => s.depth)") == origins
    figures = expected["usage"]["aquiline"]
    assert window.text("#count") == str(expected["usage"]["completion_tokens"])
    assert window.text("#tau") == f"{figures['tau']:.2f}"
    assert re.fullmatch(r"\d+\.\d", window.text("#rate"))
    counts = window.run("return [...document.querySelectorAll('#legend td:last-child')].map((c) => +c.textContent)")
    assert counts == [sum(1 for o in origins if min(o, 6) == depth) for depth in range(7)]
    assert window.text("#cycle-name") == f"Tree {figures['cycles']} of {figures['cycles']}"
    assert window.all("#tree rect")
    ask(window, "and")  # the conversation goes on
    ended(window)
    first = choice["message"]["content"]
    history = [("user", "hi"), ("assistant", first), ("user", "and")]
    expected = answer(url, "", messages=[{"role": role, "content": text} for role, text in history])
    assert window.text(REPLY) == expected["choices"][0]["message"]["content"]
    check_quiet(window, url)


def test_a_race_runs_both_ways_and_compares(window, url):
    window.open(url)
    limit_tokens(window)
    ask(window, "hi", "#race")
    ended(window)
    plain, fast = (lane.get_attribute("textContent") for lane in window.all(".lane .text"))
    assert plain == fast == answer(url, "hi")["choices"][0]["message"]["content"]
    assert re.fullmatch(r"The texts are equal, all 60 tokens\. With the draft it was \d+\.\d\d times as fast\.",
                        window.text(".verdict"))  # fmt: skip
    clocks = [float(clock.text.removesuffix(" s")) for clock in window.all(".clock")]
    assert min(clocks) > 0
    origins = [
        window.run("return [...arguments[0].children].map((s) => s.depth)", t) for t in window.all(".lane .text")
    ]
    assert max(origins[0]) == 0 < max(origins[1])
    window.find(".race .foot button").click()  # the replay ends as it was
    window.wait(lambda: window.find(".race .foot button").is_enabled() and not window.all(".later"))
    assert [float(clock.text.removesuffix(" s")) for clock in window.all(".clock")] == clocks
    check_quiet(window, url)


def test_a_key_is_asked_for_and_kept_for_the_tab(window, folders):  # noqa: F811
    with serving(load(folders, "none"), key="sesame") as running:
        window.open(f"http://{running.address}")
        window.wait(lambda: "wants a key" in window.text(NOTICE))
        window.find("#notice input").send_keys("wrong\n")
        window.wait(lambda: "does not accept this key" in window.text(NOTICE))
        window.find("#notice input").send_keys("sesame\n")
        window.wait(lambda: window.text("#model") == "target")
        assert not window.find(NOTICE).is_displayed()
        window.driver.refresh()
        limit_tokens(window, 5)
        ask(window, "hi")
        ended(window)
        assert window.text(REPLY)
        assert "sesame" not in window.run("return JSON.stringify(localStorage)")


# ---------------------------------------------------------------- before a scripted one


TREE = {"tokens": [" sea", " sky", " is", "!"], "parents": [-1, -1, 1, 0], "accepted": [1, 2]}


def test_colours_are_a_switch_and_trees_can_be_leafed_through(window, scripted):
    second = {"tokens": [".", " so"], "parents": [-1, 0], "accepted": []}
    chunks = [chunk(("The", 0)), chunk((" sky", 1), (" is", 2), (" blue", 0), tree=TREE), chunk(("!", 0), tree=second)]
    scripted.answers += [stream(*chunks, tau=2.0)]
    window.open(scripted.url)
    ask(window, "hi")
    ended(window)
    assert window.text(REPLY) == "The sky is blue!"
    assert window.text(FOOT) == "Copy5 tokens · 4.0 tokens/s · tau 2.00"

    def tints():
        return window.run("return [...arguments[0].children].map((s) => getComputedStyle(s).backgroundImage)",
                          window.find(REPLY))  # fmt: skip

    assert set(tints()) == {"none"}
    window.find("#colours").click()
    the, sky, means, blue, _ = tints()
    assert len({the, sky, means}) == 3
    assert the == blue
    window.driver.refresh()
    assert window.find("#colours").is_selected()

    scripted.answers += [stream(*chunks, tau=2.0)]
    ask(window, "hi")
    ended(window)
    assert window.text("#cycle-name") == "Tree 2 of 2"
    assert window.run("return [...document.querySelectorAll('#tree .taken text')].map((t) => t.textContent)") == ["!"]
    window.find("#earlier").click()
    labels = {kind: window.run("return [...document.querySelectorAll(arguments[0])].map((t) => t.textContent)",
                               f"#tree g.{kind} text") for kind in ("root", "taken", "left", "own")}  # fmt: skip
    assert labels == {"root": ["The"], "taken": ["sky", "is", "blue"], "left": ["sea", "!"], "own": ["blue"]}
    edges = "return [...document.querySelectorAll(arguments[0])].map((r) => [r.y.baseVal.value, r.x.baseVal.value"
    along = window.run(f"{edges}])", "#tree g.taken rect, #tree g.root rect")
    assert len({y for y, _ in along}) == 1  # straight on
    assert sorted(x for _, x in along) == [x for _, x in along]
    ends = [x for _, x in window.run(f"{edges} + r.width.baseVal.value])", "#tree rect")]
    assert max(ends) <= float(window.find("#tree svg").get_attribute("width"))
    assert "4 tokens drafted" in window.find("#tree svg").get_attribute("aria-label")
    assert [span.text for span in window.all(".shown")] == ["sky", "is", "blue"]
    assert not window.find("#earlier").is_enabled()
    window.all("#log .text > span")[-1].click()
    assert window.text("#cycle-name") == "Tree 2 of 2"
    assert window.all("#log .text > span")[1].get_attribute("title") == "drafted at depth 1"


def test_what_a_model_writes_stays_text(window, scripted):
    evil = ["<img src=x", " onerror=alert(1)>", "<script>alert(2)</script>", "</div>", "&lt;b&gt;"]
    tree = {"tokens": [evil[0], evil[2]], "parents": [-1, 0], "accepted": [0]}
    scripted.model = "<b onclick=alert(3)>tiny</b>"
    scripted.answers += [stream(*(chunk((text, i), tree=tree) for i, text in enumerate(evil)))]
    scripted.answers += [(400, {"error": {"message": "<img src=y onerror=alert(4)>"}})]
    window.open(scripted.url)
    ask(window, "<u>hi</u>")
    ended(window)
    assert window.text(REPLY) == "".join(evil)
    assert window.text(BUBBLE) == "<u>hi</u>"
    assert window.text("#model") == scripted.model
    assert window.text("#tree svg").count("<img src=x") >= 1
    ask(window, "again")
    window.wait(lambda: "<img src=y" in window.text(NOTICE))
    assert not window.all("img, b, u, main script, svg script")
    assert [entry for entry in window.log("browser") if "400" not in entry["message"]] == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_keeps_what_is_there_and_tells_the_server(window, scripted, way):
    scripted.answers += [slowly(), stream(chunk(("fine", 0)))]
    window.open(scripted.url)
    ask(window, "hi")
    window.wait(lambda: " 3" in window.text(REPLY))
    assert window.find("#log").get_attribute("aria-busy") == "true"
    if way == "button":
        window.find("#send").click()
    else:
        window.find("#prompt").send_keys("\ue00c")
    ended(window)
    assert scripted.left.wait(WAIT)
    text = window.text(REPLY)
    assert "stopped" in window.text(FOOT)
    assert window.find("#log").get_attribute("aria-busy") == "false"
    ask(window, "more")
    ended(window)
    assert [m["content"] for m in scripted.bodies[1]["messages"]] == ["hi", text, "more"]


def test_what_is_stopped_before_its_first_word_can_be_sent_again(window, scripted):
    hold = threading.Event()
    scripted.answers += [waits_for(hold, stream(chunk(("never", 0)))), stream(chunk(("fine", 0)))]
    window.open(scripted.url)
    window.find("#welcome button").click()
    asked = window.text(BUBBLE)
    assert window.run("return document.activeElement.id") == "prompt"
    window.wait(lambda: scripted.bodies)
    window.find("#send").click()
    ended(window)
    hold.set()
    assert window.find("#prompt").get_property("value") == asked
    assert window.find("#welcome").is_displayed()
    assert not window.all(f"{BUBBLE}, {REPLY}")
    window.find("#send").click()
    window.wait(lambda: window.text(REPLY) == "fine")
    assert [m["content"] for m in scripted.bodies[1]["messages"]] == [asked]


def test_settings_that_change_meanwhile_are_for_the_next_time(window, scripted):
    hold = threading.Event()
    plain = waits_for(hold, stream(chunk(("a", 0))))
    scripted.answers += [stream(chunk(("w", 0))), plain, stream(chunk(("a", 0)))]
    window.open(scripted.url)
    ask(window, "hi", "#race")
    window.wait(lambda: len(scripted.bodies) == 2)
    window.run("document.querySelector('[name=temperature]').value = 1.5")
    window.run("document.querySelector('[name=seed]').value = 12345")
    hold.set()
    ended(window)
    assert len(scripted.bodies) == 3
    assert {body["temperature"] for body in scripted.bodies} == {0}
    assert len({body["seed"] for body in scripted.bodies} - {12345}) == 1


def test_a_race_that_is_refused_leaves_nothing_but_the_message(window, scripted):
    scripted.answers += [(429, {"error": {"message": "full"}})]
    window.open(scripted.url)
    ask(window, "hi", "#race")
    window.wait(lambda: "busy" in window.text(NOTICE))
    ended(window)
    assert not window.all("#log article")
    assert window.find("#prompt").get_property("value") == "hi"


def test_a_text_without_drafts_says_so(window, scripted):
    scripted.answers += [stream(chunk(("plain", 0)))]
    window.open(scripted.url)
    ask(window, "hi")
    ended(window)
    assert "Nothing was drafted" in window.text("#tree")


def test_an_empty_reply_is_one(window, scripted):
    scripted.answers += [stream(chunk(("", 0))), stream(chunk(("fine", 0)))]
    window.open(scripted.url)
    for text in ("hi", "and"):
        ask(window, text)
        ended(window)
    assert window.text(REPLY) == "fine"
    assert [m["content"] for m in scripted.bodies[1]["messages"]] == ["hi", "", "and"]


def test_what_others_store_here_is_not_looked_at(window, scripted):
    window.open(scripted.url)
    window.run("localStorage.settings = 'of another page'; sessionStorage.bearer = 'of it, too'")
    window.driver.refresh()
    window.wait(lambda: window.text("#model") == "tiny")
    scripted.answers += [stream(chunk(("fine", 0)))]
    ask(window, "hi")
    ended(window)
    assert scripted.keys == [None]


def test_settings_that_cannot_be_read_or_kept_do_not_stop_the_page(window, scripted):
    window.open(scripted.url)
    for text in ("null", "3", "{", '{"temperature": null}', '[["seed", 7]]'):
        window.run("localStorage.aquiline = arguments[0]", text)
        window.driver.refresh()
        window.wait(lambda: window.text("#model") == "tiny")
        assert window.run("return document.querySelector('[name=temperature]').value") == "0"
    window.run(
        "localStorage.clear();"
        "for (let size = 2 ** 23, i = 0; size >= 1; i++)"
        "  try { localStorage[i] = 'x'.repeat(size); } catch { size = Math.floor(size / 2); }"
    )
    window.driver.refresh()
    window.wait(lambda: window.text("#model") == "tiny")
    assert window.run("return localStorage.aquiline ?? null") is None  # there was no room for it
    scripted.answers += [stream(chunk(("fine", 0)))]
    ask(window, "hi")
    ended(window)
    assert window.text(REPLY) == "fine"
    window.run("localStorage.clear()")


def test_a_busy_server_is_told_of_and_tried_again(window, scripted):
    scripted.answers += [(429, {"error": {"message": "full"}}, {"Retry-After": 7}), stream(chunk(("fine", 0)))]
    window.open(scripted.url)
    ask(window, "hi")
    window.wait(lambda: "busy" in window.text(NOTICE))
    assert "wait 7 s" in window.text(NOTICE)
    assert window.find("#prompt").get_property("value") == "hi"
    assert not window.all(BUBBLE)
    window.find("#notice button").click()
    ended(window)
    assert window.text(REPLY) == "fine"
    assert not window.find(NOTICE).is_displayed()
    assert [len(body["messages"]) for body in scripted.bodies] == [1, 1]


def test_a_server_that_is_gone_is_told_of_and_noticed_when_back(window, scripted, page):
    window.open(scripted.url)
    window.wait(lambda: window.text("#model") == "tiny")
    scripted.close()
    ask(window, "hi")
    window.wait(lambda: "does not answer" in window.text(NOTICE))
    time.sleep(2.5)  # longer than to the first look whether it is back
    back = Scripted(page, scripted.http.server_port)
    back.answers += [stream(chunk(("fine", 0)))]
    try:
        window.wait(lambda: "is back" in window.text(NOTICE))
        window.find("#notice button").click()
        window.wait(lambda: window.text(REPLY) == "fine")
    finally:
        back.close()


@pytest.mark.parametrize(("last", "message"), [(None, "does not answer"), ({"error": {"message": "bug"}}, "bug")])
def test_a_reply_that_breaks_off_is_shown_but_is_no_part_of_the_conversation(window, scripted, last, message):
    scripted.answers += [[chunk(("half", 0)), *([] if last is None else [last])], stream(chunk(("fine", 0)))]
    window.open(scripted.url)
    ask(window, "hi")
    window.wait(lambda: message in window.text(NOTICE))
    ended(window)
    assert window.text(REPLY) == "half"
    assert "Broken off" in window.text("#log .lost")
    window.find("#notice button").click()
    window.wait(lambda: window.text(REPLY) == "fine")
    assert [m["content"] for m in scripted.bodies[1]["messages"]] == ["hi"]


@pytest.mark.parametrize(("other", "place"), [("abd", 3), ("abcd", 4), ("ab", 3)])
def test_a_race_says_where_texts_part_and_asks_three_times(window, scripted, other, place):
    scripted.answers += [stream(*(chunk((text, 0)) for text in each)) for each in ("w", "abc", other)]
    window.open(scripted.url)
    ask(window, "hi", "#race")
    ended(window)
    assert window.text(".verdict") == (
        f"The texts differ from token {place} on. Nothing was drafted: both ran plainly."
    )
    warm, plain, fast = scripted.bodies
    assert (warm["max_tokens"], warm["speculative"], plain["speculative"], fast["speculative"]) == (
        8,
        True,
        False,
        True,
    )
    assert warm["seed"] == plain["seed"] == fast["seed"]
    assert plain["max_tokens"] == fast["max_tokens"] == 512
    scripted.answers += [stream(chunk(("w", 0))), slowly()]
    ask(window, "more", "#race")
    window.wait(lambda: " 2" in window.text(".lane .text") or window.all(".lane.running .text > span"))
    window.find("#send").click()
    ended(window)
    assert "Stopped" in window.text(".verdict")


def test_keys_settings_and_copy(window, scripted):
    scripted.answers += [stream(chunk(("one ", 0), ("two", 0)))]
    window.open(scripted.url)
    may = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    window.driver.execute_cdp_cmd("Browser.grantPermissions", may)
    assert window.run("return document.activeElement.id") == "prompt"
    window.find("#open-settings").click()
    for name, value in {"temperature": "0.5", "seed": "7", "top_k": "3", "max_nodes": "0", "system": "S"}.items():
        field = window.find(f"[name={name}]")
        field.clear()
        field.send_keys(value)
    window.find("[name=speculative]").click()
    window.find("[name=look] option:last-child").click()
    window.find("dialog .main").click()
    assert not window.find("dialog").is_displayed()
    assert window.run("return getComputedStyle(document.body).colorScheme") == "dark"
    window.driver.refresh()
    window.find("#prompt").send_keys("a", "\ue008\ue007\ue008", "b")  # Shift and Enter: a new line
    window.find("#prompt").send_keys("\ue007")
    ended(window)
    (body,) = scripted.bodies
    sent = {"temperature": 0.5, "seed": 7, "top_k": 3, "max_nodes": 0, "speculative": False, "max_tokens": 512}
    assert {key: body[key] for key in sent} == sent
    assert [m["content"] for m in body["messages"]] == ["S", "a\nb"]
    assert "top_p" not in body
    window.find(f"{FOOT} button").click()
    window.wait(lambda: window.text(f"{FOOT} button") == "Copied")
    assert window.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == "one two"
    window.find("#anew").click()
    assert window.find("#welcome").is_displayed()
    assert not window.all(BUBBLE)
    assert not window.text("#count").isdecimal()


def test_nothing_moves_while_a_reply_streams(window, scripted):
    watched, chunks = threading.Event(), slowly(0.005, 60)
    first = itertools.islice(chunks, 1)
    scripted.answers += [itertools.chain(first, waits_for(watched, chunks), [usage(60), "[DONE]"])]
    window.open(scripted.url)
    ask(window, "hi")
    window.wait(lambda: window.text(REPLY))
    window.run(
        "window.moved = 0; new PerformanceObserver((list) => list.getEntries().forEach((e) => (moved += e.value)))"
        ".observe({type: 'layout-shift'})"
    )
    watched.set()
    ended(window)
    assert window.text("#count") == "60"
    assert window.run("return moved") < 0.005


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_has_room_for_everything(window, scripted, dark):
    window.open(scripted.url, 360, 740, dark=dark)
    scripted.answers += [stream(chunk(("word " * 400, 0)), chunk((" sky", 1), (" is", 2), (" blue", 0), tree=TREE))]
    ask(window, "x" * 200)
    ended(window)
    window.find("summary").click()
    assert window.find("#tree svg").is_displayed()
    assert window.run("return document.documentElement.scrollWidth") == 360
    for button in window.all("header button, header label, #composer button, summary, #count"):
        box = button.rect
        corners = box["x"], box["x"] + box["width"], box["y"], box["y"] + box["height"]
        assert max(corners[:2]) <= 360, button.text
        assert max(corners[2:]) <= 740, button.text
        assert min(corners) >= 0, button.text
    red, green, blue = map(
        int, re.findall(r"\d+", window.run("return getComputedStyle(document.body).backgroundColor"))
    )
    assert (red + green + blue < 200) == dark
    assert window.run("return getComputedStyle(document.querySelector('#prompt')).fontSize") == "16px"  # no zooming in


# ---------------------------------------------------------------- without a browser


def test_text_can_be_read_on_all_that_lies_behind_it():
    """WCAG AA: 4.5 to 1, in light and dark."""
    css = PAGE.read_text("utf-8")
    pairs = dict(re.findall(r"--([\w-]+): light-dark\((#\w+, #\w+)\)", css))
    tints = re.findall(r"\.d[1-6] \{ --tint: light-dark\((#\w+, #\w+)\)", css)
    assert len(tints) == 6

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other, dark):
        bright, dim = sorted((luminance(pair.split(", ")[dark]) for pair in (one, other)), reverse=True)
        return (bright + 0.05) / (dim + 0.05)

    inks = [("ink", pairs[name]) for name in ("paper", "card", "said", "alert")]
    inks += [("ink", tint) for tint in tints] + [("muted", pairs["paper"]), ("muted", pairs["card"])]
    inks += [("accent", pairs["paper"]), ("on-accent", pairs["accent"])]
    for dark in (False, True):
        for name, behind in inks:
            assert contrast(pairs[name], behind, dark) >= 4.5, (name, behind, dark)


def test_the_page_is_one_file_that_loads_nothing():
    text = PAGE.read_text("utf-8")
    assert re.findall(r"(?:src|href)\s*=\s*\"(?!data:)", text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|url\(|@import", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
