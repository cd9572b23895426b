"""Data files to documents: what is cut, dropped or refused."""

import json

import pytest

from aquiline.config import UserError
from aquiline.data.dataset import read_documents
from tests.tiny_chat import assistant, byte_chat, user


def read(tmp_path, *rows, max_length=10, copies=1):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_documents([path] * copies, byte_chat(), 262, max_length)


def answer(prompt: int, reply: int) -> dict:
    return {"prompt_ids": [1] * prompt, "response_ids": [2] * reply, "temperature": 0}


def test_rows_cut_and_rows_dropped_are_counted(tmp_path):
    nobody = {"messages": [user("q"), assistant("a")], "written": [False]}
    reading = read(tmp_path, answer(3, 4), answer(3, 7), answer(3, 8), answer(10, 5), answer(1, 1), nobody)
    assert [len(d) for d in reading.documents] == [7, 10, 10]
    assert int(reading.documents[2].supervised.sum()) == 7
    assert (reading.cut, reading.dropped) == (1, 2)  # a conversation without a turn of the target makes no row


def test_a_file_given_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl is given twice"):
        read(tmp_path, answer(3, 4), copies=2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [user("q"), assistant("a")], "written": "yes"}, "'written' is 'yes'"),
        ({"messages": [user("q"), assistant("a")], "written": [1]}, "'written' is"),
        ({"messages": [user("q"), assistant("a")], "written": None}, "'written' is null"),
        ({"messages": [user("q"), assistant("a")], "written": [True, True]}, "2 entries for 1"),
        ({"prompt_ids": [True], "response_ids": [1, 2]}, "list of integers"),
        ({"prompt_ids": [10**30], "response_ids": [1, 2]}, "list of integers"),
        ("[" * 100_000, "nested"),
        ("1" * 5000, "not JSON"),
        ("[]", "expected an object, found list"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, row, words):
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{words}"):
        read(tmp_path, answer(3, 4), row)
