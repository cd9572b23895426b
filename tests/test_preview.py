"""What `data show` prints, against figures counted by hand."""

import json

from rich.console import Console

from aquiline.data import preview
from aquiline.data.dataset import read_documents
from tests.test_api import END
from tests.tiny_chat import assistant, byte_chat, user

CHAT = byte_chat()


def reading(tmp_path, *rows, max_length=100):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_documents([path], CHAT, END + 1, max_length)


def printed(what) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as caught:
        console.print(what)
    return caught.get()


def test_a_row_shows_who_wrote_what(tmp_path):
    talk = {
        "id": "x",
        "messages": [user("q"), assistant("zażółć"), user("r"), assistant("b")],
        "written": [True, False],
    }
    (document,) = reading(tmp_path, talk).documents
    text = preview.preview(document, CHAT)
    first, end = document.replies[0]
    assert list(preview.stretches(document)) == [(0, first, False), (first, end, True)]
    painted = [text.plain[span.start : span.end] for span in text.spans if span.style == "green"]
    assert painted == ["zażółć<|im_end|>\n"]
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant" in text.plain
    assert f"written {first}..{end - 1}  {' '.join(map(str, document.ids[first:end].tolist()))}" in text.plain
    assert preview._some(list(range(17))) == "0 1 2 3 4 5 6 7 ... 9 10 11 12 13 14 15 16"


def test_lengths_are_counted_in_doubling_steps(tmp_path):
    rows = [{"prompt_ids": [1, 1, 1], "response_ids": [2] * (length - 3)} for length in (4, 5, 8, 9, 16, 33)]
    lines = [
        line.replace("│", " ").split()
        for line in printed(preview.lengths(reading(tmp_path, *rows).documents)).splitlines()
    ]
    found = {cells[0]: cells[1] for cells in lines if cells and ".." in cells[0]}
    assert found == {"3..4": "1", "5..8": "2", "9..16": "2", "17..32": "0", "33..64": "1"}


def test_coverage_by_the_most_frequent_tokens_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(preview, "DRAFT_VOCABULARIES", (1, 2, 1000))
    rows = [
        {"prompt_ids": [1, 1], "response_ids": [7, 7, 7, 7, 8, 9], "source": "s"},
        {"prompt_ids": [1, 1], "response_ids": [8, 8], "source": "t"},
    ]
    documents = reading(tmp_path, *rows).documents
    # Of all: 4 of token 7, 3 of 8, 1 of 9.
    assert preview.coverage(documents, CHAT, END + 1) == {
        "all": (8, [0.5, 0.875, 1.0]),
        "source s": (6, [4 / 6, 5 / 6, 1.0]),
        "source t": (2, [0, 1.0, 1.0]),
    }
    assert set(preview.coverage(documents[:1], CHAT, END + 1)) == {"all"}
    table = printed(preview.coverage_table(documents, CHAT, END + 1))
    assert "87.5%" in table
    assert "262" in table
    assert "script" not in table


def talk(text, **more) -> dict:
    return {"messages": [user("q"), assistant(text)]} | more


def test_coverage_by_the_language_that_rows_name(tmp_path, monkeypatch):
    monkeypatch.setattr(preview, "DRAFT_VOCABULARIES", (4,))
    rows = [talk("aaaaaa", language="English"), talk("aab", lang="English"), talk("ж", language="Russian"), talk("a")]
    documents = reading(tmp_path, *rows, talk("a", language=["?"])).documents
    found = preview.coverage(documents, CHAT, END + 1)
    # A token a byte, and one at the end. The four: a, the end, b, and one of the two bytes of ж.
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        "all": 18, "language English": 11, "language Russian": 3, "language not named": 4,
    }  # fmt: skip
    assert found["language English"][1] == [1.0, 1.0]
    assert found["language Russian"][1] == [2 / 3, 1.0]
    assert "script" not in printed(preview.coverage_table(documents, CHAT, END + 1))
    assert set(preview.coverage(documents[:2], CHAT, END + 1)) == {"all"}  # one language is all there is


def test_coverage_by_script_where_no_row_names_a_language(tmp_path):
    texts = ["zażółć jaźń", "naïve", "Привет, Bob и Ann", "天は青い", "नमस्ते", "مرحبا", "12 + 3 = 15"]
    documents = reading(tmp_path, *map(talk, texts)).documents
    found = preview.coverage(documents, CHAT, END + 1)
    names = ["Arabic", "CJK", "Cyrillic", "Devanagari", "Latin", "none"]
    assert list(found) == ["all", *(f"script {name}" for name in names)]
    latin = sum(int(d.supervised.sum()) for d in documents[:2])
    assert found["script Latin"] == (latin, [1.0])
    table = printed(preview.coverage_table(documents, CHAT, END + 1))
    assert "script Cyrillic" in table
    assert "by script, a guess from the text, as no row has a 'language'" in " ".join(table.split())


def test_the_script_of_a_text_is_that_of_most_of_its_letters():
    mixed = "Ответ: use the function open() для файла на диске"
    assert preview.script(mixed) == "Cyrillic"
    assert preview.script("The word мир means peace") == "Latin"
    assert preview.script("ひらがなとカタカナと漢") == "CJK"
    assert preview.script("한국어") == "Hangul"
    assert preview.script("") == preview.script("3.14 …\ue000") == "none"


def test_facts_count_cut_rows_replies_and_what_was_dropped(tmp_path):
    rows = [
        {"ids": [1] * 9, "replies": [[2, 4], [6, 9]], "finish": ["stop", "length"], "temperature": 0},
        {"ids": [1] * 5, "replies": [[2, 5]], "finish": ["stop"], "template_kwargs": {"enable_thinking": False}},
        {"messages": []},
    ]
    text = preview.facts(reading(tmp_path, *rows, max_length=8))
    for line in (
        "2 documents, 13 tokens, 7 of them written by the target", "1 documents decoded greedily",
        "cut at the longest length: 1 documents, 50.0%", "replies that ended by length: 1, stop: 2",
        "template arguments {'enable_thinking': False}", "dropped: 1 empty",
    ):  # fmt: skip
        assert line in text.splitlines()
