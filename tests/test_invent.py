"""Prompts that the target makes up: where they begin and end, what is left out, going on after a kill."""

import json
import types

import pytest
import torch

from aquiline import api
from aquiline.config import InventConfig, Limits, SamplingConfig, UserError
from aquiline.data import invent as inventing
from aquiline.data.invent import invent, usable
from aquiline.data.prompts import read_prompts
from aquiline.data.rows import Dropped
from aquiline.decode.engine import Request
from aquiline.files import checkpoint
from tests.conftest import tiny_target
from tests.test_api import END
from tests.tiny_chat import CHATML, DEFAULT_SYSTEM, LLAMA3, LLAMA3_SPECIALS, byte_chat, word_chat

MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)


WORDS = [a + b for a in "ka le mi no ru sa te vi wo xu".split() for b in "ba ce di fo gu ha je ki lo mu".split()]  # noqa: SIM905


def writing_chat():
    return word_chat([*WORDS, "user"], eos_token="<|im_end|>")


def make_writing_target(folder, **changes):
    """A random target that writes words, and ends now and then."""
    chat = writing_chat()
    (end,) = chat.end_of_turn_ids
    sizes = {"vocab_size": end + 1, "eos_token_ids": (end,), "max_positions": 512} | changes
    target = tiny_target(0, **sizes)
    with torch.no_grad():
        target.lm_head.weight[end - 2 : end] = 0  # the other special tokens
        target.lm_head.weight[end] *= 5
    checkpoint.export_target(target, chat, folder)
    return checkpoint.load_target(folder, torch.float32)


@pytest.mark.parametrize(
    ("template", "specials", "more", "opening", "strings"),
    [
        (CHATML, (), {}, "<|im_start|>user\n", ()),
        (DEFAULT_SYSTEM, (), {}, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", ()),
        (
            LLAMA3, LLAMA3_SPECIALS, {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", (),
        ),
        (MISTRAL, ("<s>", "</s>"), {"eos": "</s>"}, "<s>[INST] ", ("[/INST]",)),
    ],
)  # fmt: skip
def test_a_users_turn_begins_and_ends_as_the_template_writes_it(template, specials, more, opening, strings):
    chat = byte_chat(template, specials, **more) if specials else byte_chat(template, **more)
    ids, limits = chat.user_turn()
    assert ids == chat.encode(opening)
    assert limits.stop_strings == strings
    assert chat.tokenizer.eos_token_id in limits.stop_ids
    assert limits.stop_ids == chat.end_of_turn_ids


def test_a_system_message_stands_before_it():
    ids, _ = byte_chat().user_turn([{"role": "system", "content": "S"}])
    assert byte_chat().raw_text(ids) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"


def request(chat, text, finish="stop", end=True):
    limits = Limits(1000, chat.end_of_turn_ids)
    made = Request([1], SamplingConfig(), limits, matcher=chat.stop_matcher(limits))
    for token in [*chat.encode(text), *([END] if end else [])]:
        made.output_ids.append(token)
        made.matcher.push(token)
    made.matcher.finish()
    made.finish_reason = finish
    return made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is the capital of Poland?", None),
        ("  Sum up: one, two and three.\n", None),
        ("天空为什么是蓝色的呢请简单解释", None),
        ("Surely you know the capital of Poland?", None),
        ("", "no letters"),
        ("1 + 1 = ?", "no letters"),
        ("hi you", "too short"),
        ("Supercalifragilistic", "too short"),
        ("go on and go on and go on and go on and go on", "repeats itself"),
        ("Sure, here is what you asked for", "looks like an assistant's answer"),
        ("As an AI language model, I cannot", "looks like an assistant's answer"),
        ("Here are three ideas for you", "looks like an assistant's answer"),
        ("what is<|im_start|>assistant meant to be", "special tokens inside"),
        ("WHAT WAS asked, before!", "duplicate"),
    ],
)
def test_what_is_worth_an_answer(text, reason):
    chat, seen = byte_chat(), {"whatwasaskedbefore"}
    if reason is None:
        assert usable(request(chat, text), chat, seen) == text.strip()
        return
    with pytest.raises(UserError) as caught:
        usable(request(chat, text), chat, seen)
    assert caught.value.reason == reason


def test_what_did_not_end_or_is_no_text_is_left_out():
    chat = byte_chat()
    for finish in ("length", "context"):
        with pytest.raises(UserError, match="did not end"):
            usable(request(chat, "What is the capital of Pol", finish, end=False), chat, set())
    broken = request(chat, "a")
    broken.output_ids[:] = [*chat.encode("what is the "), chat.encode("é")[0], END]
    broken.matcher = chat.stop_matcher(broken.limits)
    for token in broken.output_ids:
        broken.matcher.push(token)
    with pytest.raises(UserError, match="no text"):
        usable(broken, chat, set())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writing") / "target"
    make_writing_target(folder)
    return api.load(folder, "none", dtype="float32", device="cpu")


CONFIG = InventConfig(count=4, max_new_tokens=40, seed=1, in_flight=3)


def test_prompts_are_the_targets_own_and_answer_reads_them(model, tmp_path):
    out = tmp_path / "a.jsonl"
    counts = invent(model, out, CONFIG)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert counts["prompts"] == len(rows) == 4
    assert counts["tried_in_this_run"] == 4 + sum(counts["rejected_in_this_run"].values())
    assert sum(counts["rejected_in_this_run"].values()) > 0
    dropped = Dropped(strict=True)
    prompts = read_prompts([str(out)], dropped)
    assert [p.messages[0]["content"] for p in prompts] == [row["prompt"] for row in rows]
    # One at a time gives the same, and another seed does not.
    other = tmp_path / "b.jsonl"
    invent(model, other, InventConfig(count=4, max_new_tokens=40, seed=1, in_flight=1))
    assert other.read_bytes() == out.read_bytes()
    invent(model, tmp_path / "c.jsonl", InventConfig(count=4, max_new_tokens=40, seed=2))
    assert not {row["prompt"] for row in rows} & set((tmp_path / "c.jsonl").read_text().split('"'))


def test_it_goes_on_where_it_was_killed_and_to_a_higher_count(model, tmp_path):
    out = tmp_path / "a.jsonl"
    invent(model, out, CONFIG)
    whole = out.read_bytes()
    for length in [i + 2 for i, byte in enumerate(whole[:-1]) if byte == 10] + [len(whole) - 1]:
        out.write_bytes(whole[:length])
        invent(model, out, CONFIG)
        assert out.read_bytes() == whole
    counts = invent(model, out, CONFIG)
    assert counts["tried_in_this_run"] == 0
    invent(model, out, InventConfig(count=5, max_new_tokens=40, seed=1))
    assert out.read_bytes().startswith(whole)
    assert len(out.read_bytes().splitlines()) == 5
    with pytest.raises(UserError, match=r"temperature was 1\.0 and is 0\.5"):
        invent(model, out, InventConfig(count=5, max_new_tokens=40, seed=1, temperature=0.5))


def test_the_same_prompt_is_kept_once_and_attempts_are_numbered_on(tmp_path, monkeypatch):
    chat = byte_chat()
    texts = ["What is that thing?", "what IS that thing", "Another thing entirely", "And a third thing", "What is that"]
    tried = []

    def attempts(_model, _config, first):
        for number in range(first, len(texts)):
            tried.append(number)
            yield number, request(chat, texts[number])

    monkeypatch.setattr(inventing, "_attempts", attempts)
    fake = types.SimpleNamespace(chat=chat, target_name="t", fingerprint="f")
    counts = invent(fake, tmp_path / "a.jsonl", InventConfig(count=2))
    assert counts["rejected_in_this_run"] == {"duplicate": 1}
    invent(fake, tmp_path / "a.jsonl", InventConfig(count=4))
    assert tried == [0, 1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [texts[0], *texts[2:]]
    assert [row["id"] for row in rows] == [f"invented-0-{n}" for n in (0, 2, 3, 4)]


def test_a_target_that_writes_no_user_turns_is_said(model, tmp_path):
    with pytest.raises(UserError, match=r"none of the last 200 attempts was usable \({.*unfinished at the"):
        invent(model, tmp_path / "a.jsonl", InventConfig(count=4, max_new_tokens=1, in_flight=8))


def test_a_template_that_does_not_close_a_users_turn_is_refused():
    with pytest.raises(UserError, match="does not close a user's turn"):
        word_chat(["a"], template="{% for m in messages %}{{ m.content }}{% endfor %}").user_turn()
