"""`data invent`: the target makes up what a user might say, for people without prompts.

A chat model has learned user turns too, as context. Given a prompt that ends where a user's text begins, it writes one.
"""

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aquiline.api import Model
from aquiline.config import InventConfig, Limits, SamplingConfig, UserError, require
from aquiline.data.chat import Chat, StopMatcher
from aquiline.decode.engine import Engine, Request
from aquiline.files.row_file import RowFile

_FEWEST_LETTERS, _FEWEST_WORDS = 8, 2
_REPEATED_SHARE = 0.3  # of a text's runs of three words, those that were there before
_AHEAD = 4  # attempts begun for each that runs: a long one holds up those behind it, which are judged after it
_HOPELESS = 200  # attempts in a row without one that is kept
# How an assistant begins, in the language that most chat models answer in. A user rarely does.
_ASSISTANT = re.compile(
    r"(sure\b|certainly\b|of course[,!.]|absolutely[,!.]|as an ai\b|i'm sorry\b|i am sorry\b|i apologi[sz]e\b|"
    r"here (is|are|'s)\b|here's\b|i'd be (happy|glad)\b|i can help\b|thank you for)",
    re.IGNORECASE,
)

Report = Callable[[int, str], None]  # prompts kept, and what there is to say


def invent(model: Model, out: Path, config: InventConfig, report: Report = lambda _kept, _note: None) -> dict[str, Any]:
    """Write `config.count` prompts; returns what was counted. Attempts are judged in order, so that a run that was
    stopped goes on as if it had not been.

    UserError when `out` was begun with other settings, and when hardly an attempt is of use.
    """
    settings = dataclasses.asdict(config)
    del settings["count"], settings["in_flight"]
    target = {"name": model.target_name, "fingerprint": model.fingerprint}
    target["template"] = model.chat.template_fingerprint()
    with RowFile(out, settings | {"target": target}, ("id", "prompt")) as file:
        seen = {normalised(row["prompt"]) for row in file.rows}
        kept, rejected, tried, in_vain = len(file.rows), Counter[str](), 0, 0
        first = 1 + max((int(row["id"].rpartition("-")[2]) for row in file.rows), default=-1)
        if kept < config.count:
            for number, request in _attempts(model, config, first):
                tried += 1
                in_vain += 1
                try:
                    text = usable(request, model.chat, seen)
                except UserError as fault:
                    rejected[fault.reason] += 1
                else:
                    in_vain = 0
                    seen.add(normalised(text))
                    file.append([{"id": f"invented-{config.seed}-{number}", "source": "invented", "prompt": text}])
                    kept += 1
                report(kept, f"{kept} of {tried} usable")
                require(
                    in_vain < _HOPELESS,
                    f"none of the last {_HOPELESS} attempts was usable ({dict(rejected)}): this target does not write "
                    f"user turns. {kept} are in {out}",
                )
                if kept >= config.count:
                    break
        counts = {"prompts": kept, "tried_in_this_run": tried, "rejected_in_this_run": dict(rejected)}
        file.finish(counts)
    return counts


def _attempts(model: Model, config: InventConfig, first: int) -> Iterator[tuple[int, Request]]:
    """Finished attempts in their order, from number `first` on, without end."""
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    ids, ends = model.chat.user_turn(system)
    limits = dataclasses.replace(ends, max_new_tokens=config.max_new_tokens)
    engine = Engine(model.target, model.draft, config.in_flight, len(ids) + config.max_new_tokens)
    begun = [_begin(model, engine, ids, limits, config, first + i) for i in range(_AHEAD * config.in_flight)]
    while True:
        while begun[0].finish_reason is None:
            engine.step()
        yield first, begun.pop(0)
        first += 1
        begun.append(_begin(model, engine, ids, limits, config, first + len(begun)))


def _begin(model: Model, engine: Engine, ids: list[int], limits: Limits, config: InventConfig, number: int) -> Request:
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}:{number}".encode()).digest()[:7], "little")
    sampling = SamplingConfig(temperature=config.temperature, seed=seed)
    tree = None if model.draft is None else model.request(ids).tree
    return engine.submit(Request(ids, sampling, limits, tree, model.chat.stop_matcher(limits)))


def usable(request: Request, chat: Chat, seen: set[str]) -> str:
    """The text of a user's turn that is worth an answer; UserError with the reason for others."""
    assert isinstance(request.matcher, StopMatcher)
    text = request.matcher.text.strip()
    require(request.finish_reason == "stop", "it did not end", "unfinished at the length limit")
    written = request.output_ids[:-1]
    added = chat.added_tokens
    marked = not set(added.values()).isdisjoint(written) or any(token in text for token in added)
    require(not marked, "it holds a special token", "special tokens inside")
    words = text.split()
    letters = sum(c.isalpha() for c in text)
    require("\ufffd" not in text, "its bytes are no text", "broken characters")
    require(letters > 0, "there is no letter in it", "no letters")
    # A script without spaces says as much in one "word".
    short = letters < _FEWEST_LETTERS or (text.isascii() and len(words) < _FEWEST_WORDS)
    require(not short, "it says next to nothing", "too short")
    require(not _ASSISTANT.match(text), "it begins as an assistant does", "looks like an assistant's answer")
    runs = list(zip(words, words[1:], words[2:], strict=False))
    repeated = len(runs) - len(set(runs))
    require(repeated <= _REPEATED_SHARE * len(runs), "it repeats itself", "repeats itself")
    require(normalised(text) not in seen, "it was there before", "duplicate")
    return text


def normalised(text: str) -> str:
    """Letters and digits only, in small letters: texts that differ in the rest are the same prompt."""
    return "".join(c for c in text.casefold() if c.isalnum())
