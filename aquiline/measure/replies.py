"""What a target writes to a few prompts, greedily, with the states that heads read: on these replies a head is judged.

Shapes: T tokens, D target width, L captured layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from aquiline.config import TOP, Limits
from aquiline.data.chat import Chat, Message
from aquiline.data.dataset import Document
from aquiline.data.features import Features
from aquiline.decode.engine import Engine, Request
from aquiline.measure.tasks import Prompt
from aquiline.model.target import Target

_BATCH = 8  # prompts that are answered at a time

_PASSAGE = (
    "The lighthouse stood at the end of a long spit of sand, where two currents met. For ninety years a keeper had "
    "lit the lamp at dusk, trimmed the wick at midnight and put it out at dawn, writing the weather of each day into "
    "a ledger. When the lamp was made electric, the keeper stayed on, for somebody had to clean the lenses and paint "
    "the iron stairs against the salt. The fishermen of the village said that they steered by the keeper's window "
    "more than by the lamp, because it showed that someone was awake. In the spring of the last year a storm took "
    "away the path. For three weeks nobody could reach the tower, and every evening the village counted the seconds "
    "between flashes. When the sea calmed, a boat brought bread, letters and a young engineer with a box, which could"
    " light the lamp without anyone. The keeper showed her the ledger, and how the glass sang before a storm. She "
    "stayed a week."
)
PROMPTS = {  # what is asked where the user gives no prompts, by kind
    "questions": (
        "Why is the sky blue?",
        "What is the capital of Italy, and what is it known for?",
        "Explain how a bicycle stays upright.",
        "List five tips for better sleep.",
    ),
    "writing": ("Write a short story about a fox and a river.", "Write an e-mail that asks a colleague for help."),
    "code": (
        "Write a Python function that adds two numbers.",
        "Write a Python function that counts the words of a text, with a docstring.",
    ),
    "mathematics": (
        "A pen costs 3 dollars and a book 12. How much are two pens and a book?",
        "Tom has 24 apples. He gives a third of them to Ann and eats two. How many are left?",
    ),
    "summaries": (f"Summarize this text in three sentences.\n\n{_PASSAGE}",),
}


@dataclass(frozen=True)
class Answers:
    """Prompts with the target's greedy replies, and its states after some of its layers."""

    documents: list[Document]
    layers: tuple[int, ...]
    states_TLD: Tensor
    last_TD: Tensor  # the final state, after its norm
    system: str | None = None  # that was given to prompts without one
    messages: tuple[list[Message], ...] = ()  # of each prompt
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def features(self, capture_after: Sequence[int], late: int = 0) -> Features:
        """What a head that reads these layers is given; `late`: from so many tokens before, within a document."""
        ids = torch.cat([d.ids for d in self.documents]).long()
        if tuple(capture_after) == TOP:
            aux = self.last_TD
        else:
            aux = torch.cat([self.states_TLD[:, self.layers.index(i)] for i in capture_after], dim=-1)
        if late:
            parts = aux.split([len(d) for d in self.documents])
            aux = torch.cat([torch.cat((part[:1].expand(late, -1), part[:-late])) for part in parts])
        follows = torch.cat((ids[1:], ids[-1:]))  # greedy: what was written is the arg-max
        return Features(aux, self.last_TD, follows, torch.zeros(len(ids)))


def own_prompts() -> dict[str, list[Prompt]]:
    return {
        kind: [Prompt(f"{kind} {i}", [{"role": "user", "content": text}]) for i, text in enumerate(texts, 1)]
        for kind, texts in PROMPTS.items()
    }


@torch.no_grad()
def answer(
    target: Target,
    chat: Chat,
    prompts: Mapping[str, Sequence[Prompt]],
    max_new_tokens: int,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
) -> Answers:
    """Let the target answer greedily, and keep the states that it captures. `system`: for prompts that have none."""
    stop_ids = chat.end_of_turn_ids | frozenset(target.config.eos_token_ids)
    limits = Limits(max_new_tokens, stop_ids)
    asked: list[tuple[str, str, Request]] = []
    written: list[list[Message]] = []
    kwargs = dict(template_kwargs or {})
    for source, some in prompts.items():
        for prompt in some:
            written.append(with_system(prompt.messages, system))
            asked.append((source, prompt.id, Request(chat.render(written[-1], **kwargs), limits=limits)))
    context = max(len(request.prompt_ids) for *_, request in asked) + max_new_tokens
    Engine(target, None, min(_BATCH, len(asked)), context).run([request for *_, request in asked])
    documents = [_document(r.prompt_ids, r.output_ids, source, name) for source, name, r in asked]
    return Answers(documents, target.capture_after, *_states(target, documents), system, tuple(written), kwargs)


@torch.no_grad()
def behind(target: Target, answers: Answers, prompts: Sequence[list[int]]) -> Answers:
    """The same replies as if they stood behind other prompts, given as ids."""
    documents = [
        _document(ids, d.ids[d.supervised].tolist(), d.source, d.name)
        for d, ids in zip(answers.documents, prompts, strict=True)
    ]
    states_TLD, last_TD = _states(target, documents)
    return replace(answers, documents=documents, states_TLD=states_TLD, last_TD=last_TD)


def _document(prompt_ids: Sequence[int], reply_ids: Sequence[int], source: str, name: str) -> Document:
    written = torch.tensor([*prompt_ids, *reply_ids])
    return Document(written.int(), torch.arange(len(written)) >= len(prompt_ids), True, source, name)


def _states(target: Target, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """One pass over each."""
    states, last = [], []
    for d in documents:
        ids, positions = d.ids.long(), torch.arange(len(d))
        out = target(ids[None].to(target.device), positions[None].to(target.device))
        states.append(out.aux_BNA[0].cpu().unflatten(-1, (len(target.capture_after), -1)))
        last.append(out.last_BND[0].cpu())
    return torch.cat(states), torch.cat(last)


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    if system is None or any(m["role"] in ("system", "developer") for m in messages):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]
