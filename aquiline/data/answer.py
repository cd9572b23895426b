"""`data answer`: prompts in, the target's own answers out, as rows that training reads."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aquiline.api import Model
from aquiline.config import AnswerConfig, require
from aquiline.data.chat import Chat, StopMatcher
from aquiline.data.dialogue import Dialogue, Reply, Turn
from aquiline.data.prompts import Prompt
from aquiline.data.rows import Dropped
from aquiline.data.server import Server, through_server
from aquiline.decode.engine import Engine, Request
from aquiline.files.row_file import RowFile

Report = Callable[[int, str], None]  # prompts done, and what there is to say


def answer(
    prompts: Sequence[Prompt],
    out: Path,
    writer: Model | Server,
    chat: Chat,
    config: AnswerConfig,
    dropped: Dropped,
    report: Report = lambda _done, _note: None,
) -> dict[str, Any]:
    """Answer the prompts that `out` has no rows of yet; returns what was counted, which stands in OUT.run.json too.

    UserError when `out` was begun with other settings, and when nothing at all could be answered.
    """
    target = _who(writer, chat)
    with RowFile(out, _settings(config) | {"target": target}, ("id", "finish", "replies", "part")) as file:
        seen = {row["id"] for row in file.rows}
        replies, tokens = Counter[str](), 0
        for row in file.rows:
            replies.update(row["finish"])
            tokens += sum(end - first for first, end in row["replies"])
        todo = [prompt for prompt in prompts if prompt.id not in seen]
        done, left_out = len(prompts) - len(todo), Counter[str]()
        before, tau = done, _Tau()
        for dialogue in _run(writer, (Dialogue(prompt, chat, config) for prompt in todo), config, len(todo), tau):
            done += 1
            if dialogue.error is not None:
                dropped.add(f"prompt {dialogue.prompt.id}", dialogue.error)
            else:
                rows = dialogue.rows(target)
                file.append(rows)
                seen.add(dialogue.prompt.id)
                left_out.update([dialogue.left_out] if dialogue.left_out else [])
                replies.update(finish for row in rows for finish in row["finish"])
                tokens += sum(end - first for row in rows for first, end in row["replies"])
            report(done, f"{tokens} tokens")
        counts = {
            "answered": len(seen),
            "before": before,
            "replies": dict(replies),
            "tokens": tokens,
            "later_turns_left_out": dict(left_out),
            "dropped": dict(dropped.counts),
            "tau": tau.value,
        }
        file.finish(counts)
    require(bool(seen), f"no prompt was answered: {dropped}. The first: {dropped.first or 'there was none'}")
    return counts


def _settings(config: AnswerConfig) -> dict[str, Any]:
    """What may not change from one run to the next."""
    settings = dataclasses.asdict(config)
    del settings["in_flight"]
    return settings


def _who(writer: Model | Server, chat: Chat) -> dict[str, Any]:
    """Who wrote a row, as it stands in each: training compares it with its own target."""
    tokens = {"tokenizer": chat.fingerprint(), "template": chat.template_fingerprint()}
    if isinstance(writer, Server):  # its weights are not seen
        return {"name": writer.model} | tokens
    return {"name": writer.target_name, "fingerprint": writer.fingerprint} | tokens


@dataclasses.dataclass
class _Tau:
    cycles: int = 0
    emitted: int = 0

    @property
    def value(self) -> float | None:
        return self.emitted / self.cycles if self.cycles else None


def _run(
    writer: Model | Server, dialogues: Iterable[Dialogue], config: AnswerConfig, count: int, tau: _Tau
) -> Iterator[Dialogue]:
    if isinstance(writer, Server):
        return through_server(writer, dialogues, max(1, min(config.in_flight or 64, count)))
    return through_engine(writer, dialogues, max(1, min(config.in_flight or 8, count)), config.max_length, tau)


def through_engine(
    model: Model, dialogues: Iterable[Dialogue], in_flight: int, max_length: int, tau: _Tau
) -> Iterator[Dialogue]:
    """Run dialogues, `in_flight` at a time, in one batch; those that ended, in the order in which they do.

    A later turn finds the cache of the one before.
    """
    engine = Engine(model.target, model.draft, in_flight, max_length)
    waiting, running = iter(dialogues), dict[int, tuple[Dialogue, Request]]()

    def submit(dialogue: Dialogue, turn: Turn) -> None:
        request = engine.submit(
            model.request(turn.ids, max_new_tokens=turn.max_new_tokens, temperature=turn.temperature, seed=turn.seed)
        )
        running[id(request)] = dialogue, request

    while True:
        while len(running) < in_flight and (dialogue := next(waiting, None)) is not None:
            turn = dialogue.next()
            if turn is None:
                yield dialogue
            else:
                submit(dialogue, turn)
        if not running:
            return
        for request in engine.step():
            if request.finish_reason is None:
                continue
            dialogue, _ = running.pop(id(request))
            tau.cycles += request.cycles
            tau.emitted += sum(request.cycle_lengths)
            turn = dialogue.next(_reply(request))
            if turn is not None:
                submit(dialogue, turn)
                continue
            yield dialogue


def _reply(request: Request) -> Reply:
    assert isinstance(request.matcher, StopMatcher)
    finish = "stop" if request.finish_reason == "stop" else "length"
    return Reply({"role": "assistant", "content": request.matcher.text}, list(request.output_ids), finish)


def summary(counts: Mapping[str, Any], read: int) -> str:
    """The counts in a few lines."""
    replies = counts["replies"]
    total, cut = sum(replies.values()), replies.get("length", 0)
    lines = [
        f"{counts['answered']} prompts of {read} answered ({counts['before']} of them before): "
        f"{total} replies, {counts['tokens']} tokens",
        f"cut at the length limit: {cut} of {total} replies",
    ]
    if counts["tau"] is not None:
        lines.append(f"tau {counts['tau']:.2f}")
    for reason, number in counts["later_turns_left_out"].items():
        lines.append(f"later turns left out of {number} conversations: {reason}")
    lines += [f"dropped: {number} {reason}" for reason, number in sorted(counts["dropped"].items())]
    return "\n".join(lines)
