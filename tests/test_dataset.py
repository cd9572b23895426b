"""Data files to documents: what is cut, dropped or refused."""

import json
import warnings

import pytest

from aquiline.config import AquilineWarning, UserError
from aquiline.data.dataset import check_writers, hold_out, prompt_hash, read_documents, still_held_out
from tests.tiny_chat import THINKING, assistant, byte_chat, user


def read(tmp_path, *rows, max_length=10, copies=1, strict=False):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_documents([path] * copies, byte_chat(), 262, max_length, strict)


def answer(prompt: int, reply: int) -> dict:
    return {"prompt_ids": [1] * prompt, "response_ids": [2] * reply, "temperature": 0}


def test_rows_cut_and_rows_dropped_are_counted(tmp_path):
    nobody = {"messages": [user("q"), assistant("a")], "written": [False]}
    reading = read(tmp_path, answer(3, 4), answer(3, 7), answer(3, 8), answer(10, 5), answer(1, 1), nobody)
    assert [len(d) for d in reading.documents] == [7, 10, 10]
    assert int(reading.documents[2].supervised.sum()) == 7
    assert reading.cut == 1
    assert reading.dropped == {"nothing supervised within max_length": 2, "nothing supervised": 1}


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
        ({"ids": [1, 2, 3], "replies": [[1, 4]]}, "of 3 ids"),
        ({"ids": [1, 2, 3], "replies": [[2, 3], [1, 2]]}, "ascending"),
        ({"ids": [1, 2, 3], "replies": [[1]]}, "positions"),
        ({"ids": [1, 2, 300], "replies": [[1, 3]]}, "list of integers"),
        ({"messages": [user("q"), assistant("a")], "template_kwargs": ["x"]}, "'template_kwargs'"),
        ({"messages": [assistant("a")]}, "starts with the assistant"),
        ({"messages": [user("a"), user("b"), assistant("c")]}, "two user turns"),
        ({"messages": [user("a"), assistant(None)]}, "no content"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "wizard", "value": "b"}]}, "wizard"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, row, words):
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{words}"):
        read(tmp_path, answer(3, 4), row, strict=True)
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{words}"):  # nothing else is left
        read(tmp_path, row)
    reading = read(tmp_path, answer(3, 4), row, row, answer(3, 5))
    assert [len(d) for d in reading.documents] == [7, 8]
    assert list(reading.dropped.values()) == [2]


def test_what_data_answer_writes_is_read_token_by_token(tmp_path):
    row = {"ids": [9, 8, 7, 6, 5, 4, 3], "replies": [[2, 4], [6, 7]], "temperature": 0, "finish": ["stop", "length"]}
    mixed = {"conversations": [{"from": "human", "value": "hi"}, assistant("a")]}
    reading = read(tmp_path, row, row | {"retokenised": True}, row | {"temperature": 0.7}, mixed, max_length=100)
    first, again, sampled, talk = reading.documents
    assert first.ids.tolist() == row["ids"]
    assert first.supervised.tolist() == [False, False, True, True, False, False, True]
    assert first.replies == [(2, 4), (6, 7)]
    assert first.finish == ("stop", "length")
    assert [d.greedy for d in (first, again, sampled)] == [True, False, False]
    assert talk.ids.tolist() == byte_chat().rows([user("hi"), assistant("a")])[0].ids
    row["replies"] = [[6, 7]]
    assert read(tmp_path, row, answer(3, 3), max_length=6).dropped == {"nothing supervised within max_length": 1}


def test_conversations_are_rendered_with_their_own_template_arguments(tmp_path):
    chat = byte_chat(THINKING)
    talk = [user("q"), assistant("a")]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk, "template_kwargs": {"enable_thinking": False}}))
    reading = read_documents([path], chat, 262, 100)
    prompt = chat.render(talk[:1], enable_thinking=False)
    assert prompt != chat.render(talk[:1])
    assert reading.documents[0].ids.tolist()[: len(prompt)] == prompt
    assert not reading.documents[0].supervised[: len(prompt)].any()
    assert reading.template_kwargs == [{"enable_thinking": False}]


def test_rows_of_another_target_are_noticed(tmp_path):
    ours = {"name": "t", "fingerprint": "w", "tokenizer": byte_chat().fingerprint(), "template": "c"}
    rows = [answer(3, 4) | {"target": target} for target in (ours, {"name": "a server"})]
    facts = ("w", "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_writers(read(tmp_path, answer(3, 4), *rows), *facts)
    for key, words in (("fingerprint", "1 of 2 rows were written by other weights"), ("template", "another chat temp")):
        with pytest.warns(AquilineWarning, match=words):
            check_writers(read(tmp_path, rows[0], answer(3, 4) | {"target": ours | {key: "x"}}), *facts)
    with pytest.warns(AquilineWarning, match="different template arguments"):
        check_writers(read(tmp_path, rows[0], rows[0] | {"template_kwargs": {"enable_thinking": True}}), *facts)
    # Their ids may lie beyond our vocabulary: that they are of another tokenizer is what is wrong with them.
    theirs = {"ids": [1, 2, 300], "replies": [[2, 3]], "target": {"name": "their-model", "tokenizer": "x"}}
    with pytest.raises(UserError, match=r"a\.jsonl:2 holds the ids of another tokenizer, that of their-model: give"):
        read(tmp_path, rows[0], theirs)


def test_prompts_held_out_earlier_are_so_again(tmp_path):
    def row(prompt: int, name: str, **more) -> dict:
        return {"id": name, "prompt_ids": [prompt, 1], "response_ids": [2, 3], "temperature": 0} | more

    def prompts(documents) -> list[int]:
        return sorted(int(d.ids[0]) for d in documents)

    first = read(tmp_path, *(row(i, f"a:{i}") for i in range(9))).documents
    held = hold_out(first, 3, 0)[1]
    before = [prompt_hash(d) for d in held]
    # Other names, other answers, more rows; one of them now sampled, and one with a second row of the same name.
    sampled, twice, same = prompts(held)
    rows = [row(i, f"b:{i + 1}", response_ids=[4] * (i + 1)) for i in range(30)]
    rows[sampled]["temperature"] = 0.7
    rows.append(row(100, rows[twice]["id"], temperature=1))
    more = read(tmp_path, *rows).documents
    training, again = hold_out(more, 2, 0, before)
    assert prompts(again) == [twice, same]
    assert prompts(training) == [i for i in range(30) if i not in (sampled, twice, same)]
    training, again = hold_out(more, 1, 0, before)  # fewer asked for: none of them is learnt
    assert prompts(again) == [twice, same]
    training, again = hold_out(more, 5, 0, before)
    assert len(again) == 5
    assert {twice, same} < set(prompts(again))
    assert not {sampled, twice, same, 100} & set(prompts(training))
    with pytest.warns(AquilineWarning, match=r"2 of the 3 rows .* of run/head are in this data, and 3 others are held"):
        assert still_held_out(again, before, "run/head") == 2
    with pytest.warns(AquilineWarning, match=r"2 of the 3 rows .* of run/head are in this data: its tau"):
        assert still_held_out(held[1:], before, "run/head") == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert still_held_out(held, before, "run/head") == 3
    bare = read(tmp_path, *({"ids": [i, 1, 2, 3], "replies": [[0, 4]]} for i in range(3))).documents
    assert len({prompt_hash(d) for d in bare}) == 3


def test_few_rows_of_which_most_are_held_out_are_said(tmp_path):
    documents = read(tmp_path, *(answer(3 + i, 4) | {"id": f"{i}"} for i in range(5)), max_length=20).documents
    with pytest.warns(AquilineWarning, match="3 rows are held out to measure tau, and 2 are left to train on"):
        hold_out(documents, 3, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hold_out(documents, 2, 0)


def test_a_row_in_another_encoding_is_one_of_no_use(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps(answer(3, 4)).encode()
    path.write_bytes(good + b"\n" + b'{"source": "caf\xe9"}\n' + good)
    reading = read_documents([path], byte_chat(), 262, 100)
    assert (len(reading.documents), reading.dropped) == (2, {"not UTF-8": 1})
    path.write_bytes(path.read_text("latin-1").encode("utf-16"))
    with pytest.raises(UserError, match=r"no usable row in .*a\.jsonl: \d not UTF-8"):
        read_documents([path], byte_chat(), 262, 100)
