"""Reading prompt files."""

import json

import pytest

from aquiline.config import UserError
from aquiline.measure.tasks import Prompt, read_prompts, task_name


def write(tmp_path, *lines):
    path = tmp_path / "gsm8k.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_turns_and_messages(tmp_path):
    path = write(
        tmp_path,
        {"question_id": 81, "turns": ["first", "second"], "reference": ["x"]},
        b"",
        {"id": "m1", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    )
    user = {"role": "user", "content": "q"}
    assert read_prompts(path) == [
        Prompt("81", [{"role": "user", "content": "first"}]),
        Prompt("m1", [{"role": "system", "content": "s"}, user]),
        Prompt("4", [user]),  # the line's number; an answer at the end is not asked
    ]
    assert task_name(path) == "gsm8k"


def test_what_data_answer_and_invent_read_and_write_can_be_measured(tmp_path):
    path = write(tmp_path, {"id": "invented-0-3", "source": "invented", "prompt": "q"})
    assert read_prompts(path) == [Prompt("invented-0-3", [{"role": "user", "content": "q"}])]
    text = tmp_path / "prompts.txt"
    text.write_bytes(b"one\n\n two\r\n")
    assert [(p.id, p.messages[0]["content"]) for p in read_prompts(text)] == [("1", "one"), ("3", "two")]
    text.write_bytes(b"one\n\xff\n")
    with pytest.raises(UserError, match=r"prompts\.txt:2: not UTF-8"):
        read_prompts(text)


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path, {"turns": ["a"]}, {"turns": ["b"]}, b"broken")
    assert [p.messages[0]["content"] for p in read_prompts(path, 2)] == ["a", "b"]
    with pytest.raises(UserError, match=r"gsm8k\.jsonl:3: not JSON"):
        read_prompts(path, 3)
    with pytest.raises(UserError, match="at least 1, not 0"):
        read_prompts(path, 0)


def test_separators_inside_strings_and_a_byte_order_mark_are_no_trouble(tmp_path):
    text = "one\u2028two\x85three"
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps({"turns": [text]}, ensure_ascii=False).encode() + b"\r")
    assert read_prompts(path)[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON|nested too deeply"),
        (b"\xff\xfe{", "not UTF-8"),
        ([1], "expected an object, found list"),
        ({}, "found the keys .none."),
        ({"text": "x"}, "expected one of 'turns', 'messages' or 'prompt', found the keys 'text'"),
        ({"prompt": ["x"]}, "'prompt' must be a text string"),
        ({"prompt": "x", "turns": ["x"]}, "expected one of"),
        ({"turns": ["x"], "messages": []}, "expected one of"),
        ({"turns": []}, "'turns' must be a list of at least one"),
        ({"turns": "x"}, "'turns' must be a list"),
        ({"turns": [{"q": 1}]}, "'turns' must be a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, "message 1 .user. has no content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, line, words):
    path = write(tmp_path, {"turns": ["fine"]}, line)
    with pytest.raises(UserError, match=f"gsm8k.jsonl:2: .*({words})"):
        read_prompts(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="is not a file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        read_prompts(tmp_path)
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(write(tmp_path, b"", b"  "))
