"""Answers for training: what the rows hold, that they are the target's own, and that no kill loses or doubles one."""

import json

import pytest

from aquiline.config import AnswerConfig, UserError
from aquiline.data import answer as answering
from aquiline.data.answer import answer, summary
from aquiline.data.dataset import read_documents
from aquiline.data.dialogue import Dialogue, Reply, Turn
from aquiline.data.prompts import Prompt
from aquiline.data.rows import Dropped
from aquiline.data.server import Server
from aquiline.files.row_file import RowFile
from tests.test_api import END, folders, load  # noqa: F401 (a fixture)
from tests.tiny_chat import CHATML, THINKING, assistant, byte_chat, user

CONFIG = AnswerConfig((0.0, 1.0), max_new_tokens=12, max_length=200, seed=3, in_flight=3)
PROMPTS = [
    Prompt("one", "s", [user("hi")]),
    Prompt("two", "s", [user("a"), user("b"), user("c")]),
    Prompt("sys", "s", [{"role": "system", "content": "S"}, user("x")]),
    Prompt("four", "t", [user("więcej"), user("?")]),
    Prompt("five", "t", [user("hi hi")], "English"),
]


class Scripted(Server):
    """A server without a network: replies that depend on nothing but the turn."""

    def __init__(self, chat, text="", finish="stop", ids=True):
        self.model, self.chat, self.text, self.finish, self.ids = "scripted", chat, text, finish, ids
        self.asked: list[Turn] = []

    def ask(self, turn):
        self.asked.append(turn)
        text = f"{self.text}{turn.messages[-1]['content']}!"
        ids = [*self.chat.encode(text), END][: None if self.finish == "stop" else -1]
        return Reply(assistant(text), ids if self.ids else None, self.finish)


def run(out, writer, prompts=PROMPTS, config=CONFIG, chat=None, strict=False):
    dropped = Dropped(strict)
    return answer(prompts, out, writer, chat or writer.chat, config, dropped)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_later_turn_keeps_the_cache_of_the_one_before(folders, tmp_path, monkeypatch):  # noqa: F811
    model, reused = load(folders, "none"), []
    reply = answering._reply
    monkeypatch.setattr(
        answering, "_reply", lambda r: (reused.append((r.reused_tokens, len(r.prompt_ids))), reply(r))[1]
    )
    run(tmp_path / "a.jsonl", model, PROMPTS[1:2], chat=model.chat)
    (first, length), *later = reused
    assert first == 0
    assert len(later) == 2
    assert all(tokens >= length - 1 for tokens, _ in later)


@pytest.mark.parametrize("draft", ["draft", "none"])
def test_answers_are_the_targets_own_turn_by_turn(folders, tmp_path, draft):  # noqa: F811
    model = load(folders, draft)
    counts = run(tmp_path / "a.jsonl", model, chat=model.chat)
    rows = rows_of(tmp_path / "a.jsonl")
    assert sorted({row["id"] for row in rows}) == sorted(p.id for p in PROMPTS)
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert {row["id"]: row["language"] for row in rows if "language" in row} == {"five": "English"}
    plain = load(folders, "none")
    replies = 0
    for prompt in PROMPTS:
        mine = [row for row in rows if row["id"] == prompt.id]
        spans = [(row["ids"][:a], row["ids"][a:b]) for row in mine for a, b in row["replies"]]
        assert all(row["replies"][-1][1] == len(row["ids"]) for row in mine)
        talk, dialogue = [], Dialogue(prompt, model.chat, CONFIG)
        turn = dialogue.next()
        for message in prompt.messages:
            talk.append(message)
            if message["role"] != "user":
                continue
            before, written = spans.pop(0)
            result = plain.generate(talk, max_new_tokens=12, temperature=dialogue.temperature, seed=turn.seed)
            assert before == model.chat.render(talk)
            assert written == result.token_ids
            talk.append(assistant(result.text))
            turn = dialogue.next(Reply(talk[-1], result.token_ids, "length"))
            replies += 1
        assert mine[-1]["messages"] == talk
        assert sum(sum(row["written"]) for row in mine) == sum(m["role"] == "user" for m in prompt.messages)
    assert sum(counts["replies"].values()) == replies == 8
    assert counts["tokens"] == sum(b - a for row in rows for a, b in row["replies"])
    assert (counts["tau"] is None) == (draft == "none")
    documents = read_documents([tmp_path / "a.jsonl"], model.chat, END + 1, 2048, strict=True).documents
    assert [d.ids.tolist() for d in documents] == [row["ids"] for row in rows]
    assert {d.name: d.language for d in documents if d.language} == {"five": "English"}
    assert [d.replies for d in documents] == [[tuple(span) for span in row["replies"]] for row in rows]


def test_a_conversation_is_one_row_while_the_template_only_appends(tmp_path):
    writer = Scripted(byte_chat(CHATML))
    run(tmp_path / "a.jsonl", writer, PROMPTS[1:2])
    (row,) = rows_of(tmp_path / "a.jsonl")
    talk = [user("a"), assistant("a!"), user("b"), assistant("b!"), user("c"), assistant("c!")]
    assert row["messages"] == talk
    assert row["written"] == [True] * 3
    assert "part" not in row
    (expected,) = writer.chat.rows(talk)
    assert row["ids"] == expected.ids
    assert [i for a, b in row["replies"] for i in range(a, b)] == [i for i, on in enumerate(expected.supervised) if on]


def test_a_template_that_rewrites_earlier_turns_makes_a_row_of_each(tmp_path):
    writer = Scripted(byte_chat(THINKING), "<think>so</think>")
    config = AnswerConfig(template_kwargs={"enable_thinking": True})
    run(tmp_path / "a.jsonl", writer, PROMPTS[1:2], config)
    rows = rows_of(tmp_path / "a.jsonl")
    assert [row["part"] for row in rows] == [[1, 3], [2, 3], [3, 3]]
    assert [row["written"] for row in rows] == [[True], [False, True], [False, False, True]]
    assert all(row["template_kwargs"] == {"enable_thinking": True} for row in rows)
    talk = rows[2]["messages"]
    expected = writer.chat.rows(talk, enable_thinking=True)
    assert [row["ids"] for row in rows] == [r.ids for r in expected]
    assert "so" in writer.chat.raw_text(rows[1]["ids"][rows[1]["replies"][0][0] :])
    assert "so" not in writer.chat.raw_text(rows[1]["ids"][: rows[1]["replies"][0][0]])


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_text_without_ids_is_cut_into_tokens_and_marked(tmp_path, finish):
    chat = byte_chat()
    for ids in (True, False):
        run(tmp_path / f"{ids}.jsonl", Scripted(chat, finish=finish, ids=ids))
    with_ids, without = rows_of(tmp_path / "True.jsonl"), rows_of(tmp_path / "False.jsonl")
    assert all(row.pop("retokenised") for row in without)
    key = lambda row: (row["id"], row.get("part", 0))  # noqa: E731
    assert sorted(with_ids, key=key) == sorted(without, key=key)
    assert all(set(row["finish"]) == {finish} for row in with_ids)
    one = next(row for row in with_ids if row["id"] == "one")
    assert (one["ids"][-1] == END) == (finish == "stop")


def test_a_file_truncated_at_any_byte_keeps_the_rows_that_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # the machine does not fail here, and it is slow
    groups = [[{"id": 1, "x": "é"}], [{"id": 2, "part": [1, 2]}, {"id": 2, "part": [2, 2]}], [{"id": 3}]]
    ends = [0]
    with RowFile(tmp_path / "a.jsonl", {}, ("id",)) as file:
        for group in groups:
            file.append(group)
            ends.append((tmp_path / "a.jsonl").stat().st_size)
    whole = (tmp_path / "a.jsonl").read_bytes()
    for length in range(len(whole) + 1):
        (tmp_path / "a.jsonl").write_bytes(whole[:length])
        kept = max(i for i, end in enumerate(ends) if end <= length)
        with RowFile(tmp_path / "a.jsonl", {}, ("id",)) as file:
            assert (tmp_path / "a.jsonl").read_bytes() == whole[: ends[kept]]
            assert file.rows == [{"id": row["id"]} for group in groups[:kept] for row in group]
            for group in groups[kept:]:
                file.append(group)
        assert (tmp_path / "a.jsonl").read_bytes() == whole


def test_a_run_that_was_killed_anywhere_goes_on_to_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    writer = Scripted(byte_chat(THINKING), "<think>so</think>")
    prompts, out = PROMPTS[:3], tmp_path / "a.jsonl"
    run(out, writer, prompts)
    whole = out.read_bytes()
    rows = sorted(whole.splitlines())
    assert len(rows) == 5
    record = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    near = {i + d for i, byte in enumerate(whole) if byte == 10 for d in (-1, 0, 1, 2)} | {0, 1}
    for length in sorted(near | set(range(0, len(whole), 97))):
        out.write_bytes(whole[:length])
        asked = len(writer.asked)
        counts = run(out, writer, prompts)
        assert sorted(out.read_bytes().splitlines()) == rows
        assert counts["answered"] == 3
        assert len(writer.asked) - asked <= 5
    assert {k: record["counts"][k] for k in ("answered", "replies", "tokens")} == {
        k: counts[k] for k in ("answered", "replies", "tokens")
    }
    # A kill in the middle of the last line asks for that conversation only.
    out.write_bytes(whole[:-2])
    writer.asked.clear()
    counts = run(out, writer, prompts)
    assert counts["before"] == 2
    assert len(writer.asked) == len(json.loads(whole.splitlines()[-1])["messages"]) // 2


def test_other_settings_another_file_or_another_process_are_refused(tmp_path):
    chat, out = byte_chat(), tmp_path / "a.jsonl"
    run(out, Scripted(chat))
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"max_new_tokens was 12 and is 13. Give the same"):
        run(out, Scripted(chat), config=AnswerConfig((0.0, 1.0), 13, 200, seed=3))
    other = Scripted(chat)
    other.model = "another"
    with pytest.raises(UserError, match="target was"):
        run(out, other)
    counts = run(out, Scripted(chat), [*PROMPTS, Prompt("six", "u", [user("more")])], AnswerConfig(
        (0.0, 1.0), 12, 200, seed=3, in_flight=1))  # fmt: skip
    assert (counts["answered"], counts["before"]) == (6, 5)
    assert out.read_bytes().startswith(before)
    with RowFile(tmp_path / "b.jsonl", {}, ()), pytest.raises(UserError, match="another process"):
        RowFile(tmp_path / "b.jsonl", {}, ())
    (tmp_path / "c.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="was not written by this command"):
        run(tmp_path / "c.jsonl", Scripted(chat))
    assert (tmp_path / "c.jsonl").read_text() == "{}\n"
    out.write_bytes(before[:20] + b"\n" + before)
    with pytest.raises(UserError, match=r"a\.jsonl:1: not JSON.*damaged"):
        run(out, Scripted(chat))


def test_temperature_and_seed_depend_on_the_prompt_alone():
    chat, config = byte_chat(), AnswerConfig((0.0, 0.5, 1.0))
    names = [f"p{i}" for i in range(300)]
    drawn = {n: Dialogue(Prompt(n, "", [user("a")]), chat, config) for n in names}
    counts = [sum(d.temperature == t for d in drawn.values()) for t in config.temperatures]
    assert all(70 < count < 130 for count in counts)
    seeds = {n: d.next().seed for n, d in drawn.items()}
    assert len(set(seeds.values())) == 300
    for n in reversed(names):
        again = Dialogue(Prompt(n, "other", [user("a")]), chat, config)
        assert (again.temperature, again.next().seed) == (drawn[n].temperature, seeds[n])


def test_prompts_longer_than_the_context_and_later_turns(tmp_path):
    chat = byte_chat()
    short = len(chat.render([user("x" * 9)]))
    prompts = [Prompt("long", "", [user("x" * 10)]), Prompt("fits", "", [user("x" * 8), user("never asked")])]
    writer = Scripted(chat)
    counts = run(tmp_path / "a.jsonl", writer, prompts, AnswerConfig(max_length=short))
    assert counts["dropped"] == {"prompt longer than the context": 1}
    assert counts["later_turns_left_out"] == {"prompt longer than the context": 1}
    assert [turn.max_new_tokens for turn in writer.asked] == [1]
    (row,) = rows_of(tmp_path / "a.jsonl")
    assert row["written"] == [True]
    text = summary(counts, 2)
    assert "1 prompts of 2 answered" in text
    assert "dropped: 1 prompt longer than the context" in text
    with pytest.raises(UserError, match=r"prompt long: \d+ tokens"):
        run(tmp_path / "b.jsonl", writer, prompts, AnswerConfig(max_length=short), strict=True)
    with pytest.raises(UserError, match=r"no prompt was answered: 1 prompt longer .* The first: prompt long"):
        run(tmp_path / "c.jsonl", writer, prompts[:1], AnswerConfig(max_length=short))


def test_an_empty_answer_is_none_and_takes_nothing_from_the_turns_before(tmp_path):
    class Falling(Scripted):
        def ask(self, turn):
            silent = turn.messages[-1]["content"] == "silent"
            return Reply(assistant(""), [END], "stop") if silent else super().ask(turn)

    prompts = [Prompt("a", "", [user("silent")]), Prompt("b", "", [user("x"), user("silent"), user("y")])]
    for ids in (True, False):
        counts = run(tmp_path / f"{ids}.jsonl", Falling(byte_chat(), ids=ids), prompts)
        assert counts["dropped"] == counts["later_turns_left_out"] == {"empty answer": 1}
        (row,) = rows_of(tmp_path / f"{ids}.jsonl")
        assert (row["id"], row["messages"]) == ("b", [user("x"), assistant("x!")])


def test_calls_are_context_and_a_system_message_is_added_where_there_is_none(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tools = CHATML.replace("m.content +", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '') +")
    writer = Scripted(byte_chat(tools))
    prompts = [Prompt("t", "", [user("a"), call, {"role": "tool", "content": "42"}, user("b")]), PROMPTS[2]]
    run(tmp_path / "a.jsonl", writer, prompts, AnswerConfig(system="Be brief.", in_flight=1))
    first, second = rows_of(tmp_path / "a.jsonl")
    assert "".join(m["role"][0] for m in first["messages"]) == "suataua"
    assert first["written"] == [False, True, True]
    assert first["messages"][0]["content"] == "Be brief."
    assert [m["content"] for m in second["messages"] if m["role"] == "system"] == ["S"]
