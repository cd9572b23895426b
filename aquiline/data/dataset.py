"""Conversations and stored answers to documents, and documents to packs, which go through the models as one.

A document is token ids plus, per token, whether THIS target wrote it: only such tokens are supervised.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.config import AquilineWarning, require
from aquiline.data.chat import Chat
from aquiline.data.rows import Dropped, conversation, language
from aquiline.files.disk import json_object, read_lines
from aquiline.files.state_files import StateFolder


@dataclass(frozen=True)
class Document:
    """One row of training data. `greedy` says that its supervised tokens were decoded at temperature 0."""

    ids: Tensor  # int32 [T]
    supervised: Tensor  # bool [T]
    greedy: bool
    source: str
    name: str
    finish: tuple[str, ...] = ()  # of its replies, where it is known
    language: str = ""  # where the row tells

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
    dropped: dict[str, int]  # rows that are no document, by reason
    writers: Counter[str]  # rows by who says to have written them, template arguments and system message, as JSON

    @property
    def template_kwargs(self) -> list[dict[str, Any]]:
        """The different chat-template arguments of the rows."""
        found = {json.dumps(json.loads(writer)["template_kwargs"], sort_keys=True) for writer in self.writers}
        return [json.loads(text) for text in sorted(found)]

    @property
    def systems(self) -> list[str]:
        """The system messages of the rows, the three most frequent first; "" stands for none."""
        counts = Counter[str]()
        for writer, rows in self.writers.items():
            counts[json.loads(writer)["system"]] += rows
        return [text for text, _ in counts.most_common(3)]


def read_documents(
    paths: Sequence[Path], chat: Chat, vocab_size: int, max_length: int, strict: bool = False
) -> Reading:
    """Read JSON lines of any of four shapes; documents are cut at `max_length`.

    What `data answer` writes: `ids`, with `replies`, the [first, end] spans that this target wrote.
    Stored answers: `prompt_ids` and `response_ids`, taken exactly as they were generated.
    Other trainers' rows, also those of folders of hidden states: `input_ids`, and `loss_mask`, 1 where it wrote.
    Conversations: `messages` or `conversations`, rendered with the target's own chat template and the row's
    `template_kwargs`; `written` (a list of booleans, one per assistant turn) says which turns this target wrote, by
    default all of them.

    Rows of no use are counted by reason; UserError when nothing is left, for rows of another tokenizer, and, if
    `strict`, for the first of no use.
    """
    given, tokenizer = set[Path](), chat.fingerprint()
    documents: list[Document] = []
    cut, dropped, writers = 0, Dropped(strict), Counter[str]()
    for path in paths:
        require(path.resolve() not in given, f"{path} is given twice: its rows would count double")
        given.add(path.resolve())
        for where, name, read in _rows(path):
            row, found = None, list[Document]()
            with dropped.row(where):
                row = read()
            if row is None:
                continue
            _check_tokenizer(row, tokenizer, where)
            with dropped.row(where):
                found = _documents(row, name, chat, vocab_size)
                writers[_writer(row)] += 1
            for document in found:
                with dropped.row(where):
                    _check_supervised(document, max_length)
                    cut += len(document) > max_length
                    documents.append(_cut(document, max_length))
    require(
        bool(documents),
        f"no usable row in {', '.join(map(str, paths))}: {dropped}. The first: {dropped.first or 'there was none'}. "
        "Training reads what `aquiline data answer` makes of prompts, or conversations with their answers",
    )
    return Reading(documents, cut, dict(dropped.counts), writers)


def _rows(path: Path) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(where it is, its name unless it has one, what reads it) of every row of a file, or a folder of hidden states."""
    if path.is_dir():
        for name, read in StateFolder.open(path).rows():
            yield f"{path}/{name}", state_name(path, name), read
        return
    for number, line in read_lines(path):
        yield f"{path}:{number}", f"{path.name}:{number}", functools.partial(json_object, line)


def state_name(folder: Path, name: str) -> str:
    """The name of the document whose states a folder's file of this name holds."""
    return f"{folder.resolve().name}/{name}"


def _check_supervised(d: Document, max_length: int) -> None:
    # x_{t+2} is the first token a row can be taught.
    require(
        bool(d.supervised[2:max_length].any()),
        "no supervised token: nothing was written by this target, or the replies are cut off by max_length",
        "nothing supervised within max_length" if d.supervised.any() else "nothing supervised",
    )


def _documents(row: dict[str, Any], default_name: str, chat: Chat, vocab_size: int) -> list[Document]:
    finish = row.get("finish") or ()
    finish = (finish,) if isinstance(finish, str) else finish
    about = (
        row.get("temperature") == 0 and not row.get("retokenised"),  # other tokens than those that were chosen
        str(row.get("source", "")),
        str(row.get("id", default_name)),
        tuple(map(str, finish)) if isinstance(finish, (list, tuple)) else (),
        language(row),
    )
    if "ids" in row and "replies" in row:
        ids = _ids(row["ids"], vocab_size)
        return [Document(ids, _spans(row["replies"], len(ids)), *about)]
    if "prompt_ids" in row and "response_ids" in row:
        prompt, reply = _ids(row["prompt_ids"], vocab_size), _ids(row["response_ids"], vocab_size)
        flags = torch.arange(len(prompt) + len(reply)) >= len(prompt)
        return [Document(torch.cat((prompt, reply)), flags, *about)]
    if "input_ids" in row and "loss_mask" in row:
        ids = _ids(row["input_ids"], vocab_size)
        return [Document(ids, _mask(row["loss_mask"], len(ids)), *about)]
    messages = conversation(row)
    kwargs = row.get("template_kwargs") or {}
    require(
        isinstance(kwargs, dict), f"'template_kwargs' is {kwargs!r:.80}; expected an object", "broken template_kwargs"
    )
    require(row.get("written", ()) is not None, "'written' is null; leave it out, or give a list", "broken 'written'")
    rows = chat.rows(messages, row.get("written"), **kwargs)
    require(bool(rows), "no turn of this conversation was written by this target", "nothing supervised")
    return [Document(_ids(list(r.ids), vocab_size), torch.tensor(r.supervised, dtype=torch.bool), *about) for r in rows]


def _spans(replies: Any, length: int) -> Tensor:
    """Flags from [first, end] pairs."""
    pairs = isinstance(replies, list) and all(
        isinstance(p, list) and len(p) == 2 and all(type(i) is int for i in p) for p in replies
    )
    edges = [i for pair in replies for i in pair] if pairs else []
    ordered = all(a <= b for a, b in itertools.pairwise([0, *edges, length]))
    require(
        pairs and ordered,
        f"'replies' is {replies!r:.80}; expected [first, end] positions in ascending order, of {length} ids",
        "broken 'replies'",
    )
    flags = torch.zeros(length, dtype=torch.bool)
    for first, end in replies:
        flags[first:end] = True
    return flags


def _mask(values: Any, length: int) -> Tensor:
    ok = isinstance(values, list) and len(values) == length and all(v in (0, 1) for v in values)
    require(ok, f"'loss_mask' is {values!r:.80}; expected {length} numbers, 0 or 1, one a token", "broken 'loss_mask'")
    return torch.tensor(values, dtype=torch.bool)


def _target(row: dict[str, Any]) -> dict[str, Any]:
    """Who says to have written a row."""
    target = row.get("target")
    return target if isinstance(target, dict) else {}


def _writer(row: dict[str, Any]) -> str:
    kwargs = row.get("template_kwargs") or {}
    return json.dumps({"target": _target(row), "template_kwargs": kwargs, "system": _system(row)}, sort_keys=True)


def _system(row: dict[str, Any]) -> str:
    """The system message of a row; "" where it has none, or does not tell."""
    messages = row.get("messages") or row.get("conversations")
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict) or first.get("role", first.get("from")) not in ("system", "developer"):
        return ""
    return str(first.get("content", first.get("value", "")))


def _check_tokenizer(row: dict[str, Any], tokenizer: str, where: str) -> None:
    writer = _target(row)
    require(
        writer.get("tokenizer", tokenizer) == tokenizer,
        f"{where} holds the ids of another tokenizer, that of {writer.get('name')}: give --target the model that wrote "
        "it, or answer the prompts with this one",
    )


def check_writers(reading: Reading, target: str, template: str) -> None:
    """Say it when rows are another target's, by the fingerprints they carry."""
    ours = {"fingerprint": target, "template": template}
    strange = Counter[str]()
    for text, count in reading.writers.items():
        writer = json.loads(text)["target"]
        for key, value in ours.items():
            if writer.get(key, value) != value:
                strange[key] += count
    rows = sum(reading.writers.values())
    said = {
        "fingerprint": "were written by other weights than this target's: it would not have written them",
        "template": "were written under another chat template: the head will see other prompts than in training",
    }
    notes = [f"{strange[key]} of {rows} rows {text}" for key, text in said.items() if strange[key]]
    if len(reading.template_kwargs) > 1:
        notes.append(f"the rows were written with different template arguments: {reading.template_kwargs}")
    for note in notes:
        warnings.warn(note, AquilineWarning, stacklevel=2)


def _ids(values: Any, vocab_size: int) -> Tensor:
    require(
        isinstance(values, list) and all(type(v) is int and 0 <= v < vocab_size for v in values),
        f"token ids must be a list of integers within 0..{vocab_size - 1}, the target's vocabulary",
        "ids outside the vocabulary",
    )
    return torch.tensor(values, dtype=torch.int32)


def _cut(d: Document, max_length: int) -> Document:
    if len(d) <= max_length:
        return d
    return dataclasses.replace(d, ids=d.ids[:max_length].clone(), supervised=d.supervised[:max_length].clone())


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


def prompt_hash(d: Document) -> str:
    """Names what was asked, by the tokens before the first that this target wrote: the same under another id, in
    another file, and when it is answered anew. A document without a prompt is named by all its tokens.
    """
    return hashlib.sha256(d.ids[: d.replies[0][0] or None].numpy().tobytes()).hexdigest()[:16]


def hold_out(
    documents: list[Document], count: int, seed: int, earlier: Collection[str] = (), *, sampled: bool = False
) -> tuple[list[Document], list[Document]]:
    """(training, held-out greedy) documents; every row with the name of a held-out one goes with it. `sampled`: rows
    that are not known to be greedy may be held out, too.

    Those whose prompt was held out `earlier`, by `prompt_hash`, all are again. Others are added until there are
    `count`, drawn by hashed name: which, depends on the rows that are there.
    """

    def key(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode()).digest()

    greedy = {d.name for d in documents if d.greedy or sampled}
    chosen = {d.name for d in documents if prompt_hash(d) in earlier} if earlier else set()
    missing = max(0, count - len(chosen & greedy))
    chosen.update(sorted(greedy - chosen, key=key)[:missing])
    held = [d for d in documents if (d.greedy or sampled) and d.name in chosen]
    training = [d for d in documents if d.name not in chosen]
    if 0 < len(training) < len(held):
        warnings.warn(
            f"{len(held)} rows are held out to measure tau, and {len(training)} are left to train on: give more "
            "answers, or a lower held_out",
            AquilineWarning,
            stacklevel=2,
        )
    return training, held


def still_held_out(held_out: Sequence[Document], before: Collection[str], head: str) -> int:
    """How many of the prompts that were held out of a head's training, by `prompt_hash`, are so again; says it when
    these are not the same ones.
    """
    now = {prompt_hash(d) for d in held_out}
    again = len(now & set(before))
    others = f", and {len(now) - again} others are held out, which it may have learnt" if len(now) > again else ""
    if others or again < len(before):
        warnings.warn(
            f"{again} of the {len(before)} rows that were held out of the training of {head} are in this data{others}: "
            "its tau here is not to be compared with its earlier one",
            AquilineWarning,
            stacklevel=2,
        )
    return again


def packs(documents: Sequence[Document], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """The epoch's packs: lists of document numbers, of at most `batch_tokens` tokens together, in a shuffled order.

    An update takes one or several of them. A longer document makes a pack of its own. The order depends on nothing but
    the arguments.
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
