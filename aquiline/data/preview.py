"""`data show`: what training would read: rows in colour, lengths, coverage of draft vocabularies, what is cut."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from aquiline.data.chat import Chat
from aquiline.data.dataset import Document, Reading, token_counts

DRAFT_VOCABULARIES = (4096, 8192, 16384, 32768)
_FIRST_IDS = 8  # of a stretch, and as many of its last
_BAR = 40


def stretches(document: Document) -> Iterator[tuple[int, int, bool]]:
    """(first, end, supervised) of the stretches a document consists of."""
    first = 0
    for supervised, group in itertools.groupby(document.supervised.tolist()):
        end = first + sum(1 for _ in group)
        yield first, end, supervised
        first = end


def preview(document: Document, chat: Chat) -> Text:
    """One document: its text and ids, what this target wrote in green and the rest dim. Special tokens are shown."""
    title = f"{document.name}, {document.source or 'no source'}, {len(document)} tokens"
    text = Text(f"{title}{', greedy' if document.greedy else ''}\n", style="bold")
    for first, end, supervised in stretches(document):
        ids = document.ids[first:end].tolist()
        style = "green" if supervised else "dim"
        text.append(f"{'written' if supervised else 'context'} {first}..{end - 1}  {_some(ids)}\n", style="cyan")
        text.append(chat.raw_text(ids).rstrip("\n") + "\n", style=style)
    return text


def _some(ids: list[int]) -> str:
    if len(ids) <= 2 * _FIRST_IDS:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[:_FIRST_IDS]), "...", *map(str, ids[-_FIRST_IDS:])])


def lengths(documents: Sequence[Document]) -> Table:
    """How many documents are how long, in doubling steps."""
    table = Table("tokens", "documents", "", title="lengths", title_justify="left")
    counts = Counter((len(d) - 1).bit_length() for d in documents)  # 2**n is the upper bound
    most = max(counts.values())
    for power in range(min(counts), max(counts) + 1):
        bar = "#" * -(-counts[power] * _BAR // most)
        table.add_row(f"{2**power // 2 + 1}..{2**power}", str(counts[power]), bar)
    return table


def coverage(documents: Sequence[Document], vocab_size: int) -> dict[str, list[float]]:
    """Share of the supervised tokens, of all and of each source's, that the most frequent tokens of all cover.

    One share for each of DRAFT_VOCABULARIES below the target's vocabulary, and one for the whole of it.
    """
    sources = sorted({d.source for d in documents})
    counts = {"": token_counts(documents, vocab_size)}
    counts |= {
        s: token_counts([d for d in documents if d.source == s], vocab_size) for s in sources if len(sources) > 1
    }
    order = counts[""].argsort(descending=True, stable=True)
    return {name or "all": [_share(c, order[:size]) for size in sizes(vocab_size)] for name, c in counts.items()}


def sizes(vocab_size: int) -> list[int]:
    return [*(size for size in DRAFT_VOCABULARIES if size < vocab_size), vocab_size]


def _share(counts_V: Tensor, ids: Tensor) -> float:
    return int(counts_V[ids].sum()) / max(1, int(counts_V.sum()))


def coverage_table(documents: Sequence[Document], vocab_size: int) -> Table:
    title = "share of the supervised tokens that a draft vocabulary covers"
    table = Table("source", "tokens", title=title, title_justify="left")
    for size in sizes(vocab_size):
        table.add_column(f"{size:,}", justify="right")
    tokens = Counter[str]()
    for d in documents:
        tokens[d.source] += int(d.supervised.sum())
    for name, shares in coverage(documents, vocab_size).items():
        count = tokens.total() if name == "all" else tokens[name]
        table.add_row(name, f"{count:,}", *(f"{share:.1%}" for share in shares))
    return table


def facts(reading: Reading) -> str:
    """Counts in a few lines."""
    documents = reading.documents
    finish = Counter(reason for d in documents for reason in d.finish)
    total, written = sum(map(len, documents)), int(torch.stack([d.supervised.sum() for d in documents]).sum())
    lines = [
        f"{len(documents)} documents, {total:,} tokens, {written:,} of them written by the target",
        f"{sum(d.greedy for d in documents)} documents decoded greedily",
        f"cut at the longest length: {reading.cut} documents, {reading.cut / len(documents):.1%}",
    ]
    if finish:
        lines.append("replies that ended by " + ", ".join(f"{k}: {n}" for k, n in sorted(finish.items())))
    lines += [f"template arguments {kwargs}" for kwargs in reading.template_kwargs if kwargs]
    lines += [f"dropped: {count} {reason}" for reason, count in sorted(reading.dropped.items())]
    return "\n".join(lines)
