"""Prompts from every kind of source, and what becomes of bad ones."""

import json
import sys
import types

import pytest

from aquiline.config import UserError
from aquiline.data.prompts import read_prompts
from aquiline.data.rows import Dropped
from tests.tiny_chat import assistant, user

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TOOL = {"role": "tool", "content": "42"}


def read(*sources, strict=False, limit=None):
    dropped = Dropped(strict)
    return read_prompts([str(s) for s in sources], dropped, limit), dict(dropped.counts)


def lines(path, *rows):
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def test_the_four_shapes_and_mixed_turns_are_the_same_prompt(tmp_path):
    one = [{"role": "system", "content": "S"}, user("a"), user("b")]
    rows = (
        {"messages": [one[0], user("a"), assistant("x"), user("b"), assistant("y")]},
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "a"},
                           {"from": "gpt", "value": "x"}, {"role": "user", "content": "b"}]},
    )  # fmt: skip
    for number, row in enumerate(rows):
        prompts, dropped = read(lines(tmp_path / f"{number}.jsonl", row | {"id": number}))
        assert ([p.messages for p in prompts], dropped) == ([one], {})
        assert prompts[0].id == str(number)
    prompts, _ = read(lines(tmp_path / "t.jsonl", {"turns": ["a", "b"]}, {"prompt": "a", "turns": None}))
    assert [p.messages for p in prompts] == [[user("a"), user("b")], [user("a")]]
    text = tmp_path / "p.txt"
    text.write_bytes("\ufeffa\r\n\n  b\u2028c \n".encode())
    prompts, _ = read(text)
    assert [(p.id, p.source, p.messages) for p in prompts] == [
        ("p.txt:1", "p", [user("a")]),
        ("p.txt:3", "p", [user("b\u2028c")]),
    ]


def test_a_prompt_keeps_its_language(tmp_path):
    rows = [{"prompt": "a", "language": "English"}, {"prompt": "b", "lang": "pl"}, {"prompt": "x", "language": None}]
    prompts, dropped = read(lines(tmp_path / "a.jsonl", *rows, {"prompt": "y", "lang": 3}))
    assert ([p.language for p in prompts], dropped) == (["English", "pl", "", ""], {})


def test_a_call_stays_with_its_answer_and_other_assistant_turns_go(tmp_path):
    talk = [user("a"), CALL, TOOL, assistant("x"), user("b"), CALL]
    prompts, _ = read(lines(tmp_path / "a.jsonl", {"messages": talk}))
    called = {"role": "assistant", "tool_calls": CALL["tool_calls"], "content": None}
    assert prompts[0].messages == [user("a"), called, TOOL, user("b")]


BAD = {
    b"{": "broken JSON",
    b"[" * 100_000: "broken JSON",
    b'{"prompt": "caf\xe9"}': "not UTF-8",
    '{"prompt": "x"}'.encode("utf-16"): "not UTF-8",
    b"[1]": "not an object",
    b"{}": "no conversation",
    b'{"text": "x"}': "no conversation",
    b'{"messages": []}': "empty",
    b'{"prompt": " \\n"}': "empty",
    b'{"turns": ["a", ""]}': "empty",
    b'{"turns": "a"}': "not a conversation",
    b'{"turns": ["a", 1]}': "not a conversation",
    b'{"messages": "hello"}': "not a conversation",
    b'{"prompt": "\\ud800"}': "not valid Unicode",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "starts with the assistant",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}': "two user turns in a row",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}': "null content",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [1]}]}': "broken tool calls",
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "content is not text",
    b'{"messages": [{"role": "wizard", "content": "a"}]}': "unknown role",
    b'{"messages": [{"role": ["user"], "content": "a"}]}': "unknown role",
    b'{"messages": [{"role": "system", "content": "a"}]}': "ends oddly",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}': "ends oddly",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}': "a tool turn after the user's",  # noqa: E501
    b'{"prompt": "good", "id": 7}': "duplicate prompt",
    b'{"prompt": "other", "id": "good"}': "duplicate id",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_counted_by_its_reason(tmp_path, line):
    good = {"prompt": "good", "id": "good"}
    path = lines(tmp_path / "a.jsonl", good, line, {"prompt": "last"})
    prompts, dropped = read(path)
    assert [p.messages[0]["content"] for p in prompts] == ["good", "last"]
    assert set(dropped) == {BAD[line]}
    with pytest.raises(UserError, match=r"a\.jsonl:2: "):
        read(path, strict=True)


def test_several_sources_and_a_limit(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "2", "source": "mine"})
    b = tmp_path / "b.txt"
    b.write_text("3\n1\n4\n")
    prompts, dropped = read(a, b)
    assert [(p.id, p.source) for p in prompts] == [
        ("a.jsonl:1", "a"), ("a.jsonl:2", "mine"), ("b.txt:1", "b"), ("b.txt:3", "b"),
    ]  # fmt: skip
    assert dropped == {"duplicate prompt": 1}
    assert [p.id for p in read(a, b, limit=3)[0]] == [p.id for p in prompts[:3]]
    (tmp_path / "c").mkdir()
    lines(tmp_path / "c" / "a.jsonl", {"prompt": "1"})
    with pytest.raises(UserError, match=r"two sources are named a\.jsonl"):
        read(a, tmp_path / "c" / "a.jsonl")
    with pytest.raises(UserError, match=r"nope\.jsonl does not exist"):
        read(tmp_path / "nope.jsonl")
    with pytest.raises(UserError, match="looks like JSON lines"):
        read(lines(tmp_path / "d", {"prompt": "1"}))


def test_a_data_set_is_read_through_the_package_if_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        read("org/name")
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if split == "nope":
            raise ValueError("Unknown split\n nope")
        # As a table stores it: each turn has the keys of all.
        return [{"messages": [{"role": "user", "content": "hi", "tool_calls": None}], "prompt": "not read"}, {"a": 1}]

    saved = {"train": [{"prompt": "t"}], "test": [{"prompt": "u"}]}
    fake = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=lambda _: saved)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    prompts, dropped = read("org/name:some")
    assert asked == [("org/name", "some")]
    assert [(p.id, p.source, p.messages) for p in prompts] == [("name:some:1", "name:some", [user("hi")])]
    assert dropped == {"no conversation": 1}
    with pytest.raises(UserError, match=r"org/name:nope cannot be read: Unknown split nope"):
        read("org/name:nope")
    read("name")
    assert asked[-1] == ("name", "train")
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert read(tmp_path)[0][0].messages == [user("t")]
    assert read(f"{tmp_path}:test")[0][0].messages == [user("u")]
