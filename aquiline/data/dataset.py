"""Conversations and stored answers to documents, and documents to packs of one optimiser update.

A document is token ids plus, per token, whether THIS target wrote it: only such tokens are supervised.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import UserError, require
from aquiline.data.chat import Chat
from aquiline.files.disk import read_jsonl


@dataclass(frozen=True)
class Document:
    """One row of training data. `greedy` says that its supervised tokens were decoded at temperature 0."""

    ids: Tensor  # int32 [T]
    supervised: Tensor  # bool [T]
    greedy: bool
    source: str
    name: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def replies(self) -> list[tuple[int, int]]:
        """First and end position of every run of supervised tokens."""
        edges = torch.diff(self.supervised.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().squeeze(1)
        return [(int(a), int(b)) for a, b in edges.view(-1, 2)]


@dataclass(frozen=True)
class Reading:
    """What was read, and what `max_length` did to it."""

    documents: list[Document]
    cut: int  # of these documents
    dropped: int  # rows in which nothing supervised was left


def read_documents(paths: Sequence[Path], chat: Chat, vocab_size: int, max_length: int) -> Reading:
    """Read JSON lines of either shape; rows are cut at `max_length` and left out when nothing supervised remains.

    Stored answers: `prompt_ids` and `response_ids`, taken exactly as they were generated.
    Conversations: `messages`, rendered with the target's own chat template; `written` (a list of booleans, one per
    assistant turn) says which turns this target wrote, by default all of them.

    Raises UserError naming file and line for anything else, and when no token at all is supervised.
    """
    given: set[Path] = set()
    documents: list[Document] = []
    for path in paths:
        require(path.resolve() not in given, f"{path} is given twice: its rows would count double")
        given.add(path.resolve())
        for number, row in read_jsonl(path):
            documents += _documents(row, path, number, chat, vocab_size)
    # x_{t+2} is the first token a row can be taught.
    kept = [d for d in documents if bool(d.supervised[2:max_length].any())]
    require(
        bool(kept),
        f"{len(documents)} rows in {', '.join(map(str, paths))}, and none has a supervised token: "
        "nothing was written by this target, or the replies are cut off by max_length",
    )
    cut = sum(len(d) > max_length for d in kept)
    return Reading([_cut(d, max_length) for d in kept], cut, len(documents) - len(kept))


def _documents(row: dict[str, Any], path: Path, number: int, chat: Chat, vocab_size: int) -> list[Document]:
    where = f"{path}:{number}"
    source, name = str(row.get("source", "")), str(row.get("id", f"{path.name}:{number}"))
    greedy = row.get("temperature") == 0
    if "prompt_ids" in row and "response_ids" in row:
        prompt, reply = _ids(row["prompt_ids"], where, vocab_size), _ids(row["response_ids"], where, vocab_size)
        flags = torch.arange(len(prompt) + len(reply)) >= len(prompt)
        return [Document(torch.cat((prompt, reply)), flags, greedy, source, name)]
    if "messages" in row:
        try:
            require(row.get("written", ()) is not None, "'written' is null; leave it out, or give a list")
            rows = chat.rows(row["messages"], row.get("written"))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return [
            Document(
                _ids(list(r.ids), where, vocab_size), torch.tensor(r.supervised, dtype=torch.bool), greedy, source, name
            )
            for r in rows
        ]
    raise UserError(
        f"{where}: no conversation: expected 'messages', or 'prompt_ids' and 'response_ids'; got {sorted(row)}"
    )


def _ids(values: Any, where: str, vocab_size: int) -> Tensor:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < vocab_size for v in values):
        raise UserError(
            f"{where}: token ids must be a list of integers within 0..{vocab_size - 1}, the target's vocabulary"
        )
    return torch.tensor(values, dtype=torch.int32)


def _cut(d: Document, max_length: int) -> Document:
    if len(d) <= max_length:
        return d
    return Document(d.ids[:max_length].clone(), d.supervised[:max_length].clone(), d.greedy, d.source, d.name)


def fingerprint(documents: Sequence[Document]) -> str:
    """A sha256 over ids and flags, in order."""
    digest = hashlib.sha256()
    for d in documents:
        digest.update(len(d).to_bytes(4, "little"))
        digest.update(d.ids.numpy().tobytes())
        digest.update(d.supervised.numpy().tobytes())
    return digest.hexdigest()


def token_counts(documents: Sequence[Document], vocab_size: int) -> Tensor:
    """How often each token occurs among the supervised ones `[V]`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for d in documents:
        counts += torch.bincount(d.ids[d.supervised].long(), minlength=vocab_size)
    return counts


def hold_out(documents: list[Document], count: int, seed: int) -> tuple[list[Document], list[Document]]:
    """(training, held-out greedy) documents. Held-out ones are drawn by hashed name, so the draw does not depend on
    which other rows there are; every row with the same name goes with them.
    """

    def key(d: Document) -> bytes:
        return hashlib.sha256(f"{seed}:{d.name}".encode()).digest()

    names = sorted({(key(d), d.name) for d in documents if d.greedy})
    chosen = {name for _, name in names[:count]}
    held = [d for d in documents if d.greedy and d.name in chosen]
    return [d for d in documents if d.name not in chosen], held


def packs(documents: Sequence[Document], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """The epoch's updates, as lists of document numbers of at most `batch_tokens` tokens together, in a shuffled order.

    A longer document makes a pack of its own. The order depends on nothing but the arguments.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    pack: list[int] = []
    tokens = 0
    for i in torch.randperm(len(documents), generator=generator).tolist():
        if pack and tokens + len(documents[i]) > batch_tokens:
            yield pack
            pack, tokens = [], 0
        pack.append(i)
        tokens += len(documents[i])
    if pack:
        yield pack
