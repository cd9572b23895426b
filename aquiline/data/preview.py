"""`data show`: what training would read: rows in colour, lengths, coverage of draft vocabularies, what is cut."""

import itertools
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

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


def coverage(documents: Sequence[Document], chat: Chat, vocab_size: int) -> dict[str, tuple[int, list[float]]]:
    """How many supervised tokens there are, and the shares of them that the most frequent tokens of all cover: of all,
    of each source's, and of each language's.

    One share for each of DRAFT_VOCABULARIES below the target's vocabulary, and one for the whole of it. Where no
    document names its language, they are told apart by script.
    """
    counts = {"all": token_counts(documents, vocab_size)}
    kinds: dict[str, Callable[[Document], str]] = {"source": lambda d: d.source or "not named"}
    if any(d.language for d in documents):
        kinds["language"] = lambda d: d.language or "not named"
    else:
        kinds["script"] = lambda d: script(chat.text(d.ids[d.supervised].tolist()))
    for kind, of in kinds.items():
        groups = defaultdict[str, list[Document]](list)
        for d in documents:
            groups[of(d)].append(d)
        if len(groups) > 1:
            counts |= {f"{kind} {name}": token_counts(groups[name], vocab_size) for name in sorted(groups)}
    order = counts["all"].argsort(descending=True, stable=True)
    return {name: (int(c.sum()), [_share(c, order[:size]) for size in sizes(vocab_size)]) for name, c in counts.items()}


def script(text: str) -> str:
    """The script of most of its letters, a guess: Latin, Cyrillic, CJK and so on. It tells no languages apart."""
    letters = Counter(_script(c) for c in text if c.isalpha())
    return letters.most_common(1)[0][0] if letters else "none"


@cache
def _script(letter: str) -> str:
    """By the first word of its name in Unicode; Japanese mixes three scripts, which count as one."""
    name = unicodedata.name(letter, "unknown").split()[0]
    return "CJK" if name in ("CJK", "HIRAGANA", "KATAKANA") else name.capitalize()


def sizes(vocab_size: int) -> list[int]:
    return [*(size for size in DRAFT_VOCABULARIES if size < vocab_size), vocab_size]


def _share(counts_V: Tensor, ids: Tensor) -> float:
    return int(counts_V[ids].sum()) / max(1, int(counts_V.sum()))


def coverage_table(documents: Sequence[Document], chat: Chat, vocab_size: int) -> Table:
    title = "share of the supervised tokens that a draft vocabulary covers"
    table = Table("rows", "tokens", title=title, title_justify="left", caption_justify="left")
    for size in sizes(vocab_size):
        table.add_column(f"{size:,}", justify="right")
    rows = coverage(documents, chat, vocab_size)
    for name, (tokens, shares) in rows.items():
        table.add_row(name, f"{tokens:,}", *(f"{share:.1%}" for share in shares))
    if any(name.startswith("script ") for name in rows):
        table.caption = "by script, a guess from the text, as no row has a 'language'"
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
