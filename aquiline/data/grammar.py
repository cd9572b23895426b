"""What a reply must look like, by llguidance: JSON, or JSON of a schema.

Shapes: V target vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from aquiline.config import UserError, require
from aquiline.data.chat import Chat

# Any amount of it would let a model that has nothing to say write spaces up to its limit.
_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


class JsonGrammar:
    """One request's text as JSON: it may end where the JSON does, and nowhere else.

    Of what the matcher is ahead of the committed tokens it knows the path, which the next call nearly always goes on
    with, so every token is consumed once.
    """

    def __init__(self, tokens: LLTokenizer, stop_ids: frozenset[int], grammar: str, vocab_size: int) -> None:
        self._matcher = LLMatcher(tokens, grammar, log_level=0)
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._path: list[int] = []  # consumed, not yet committed

    @property
    def error(self) -> str | None:
        """What kept the text from going on: the library's limits. The request has then been ended."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else None

    def allowed(self, path_tokens: Sequence[int]) -> Tensor:
        """Bool [V]: what may follow the committed tokens and these. After an end, which a draft may have written and
        the walk goes one step beyond, and after an error: an end alone.
        """
        allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._stop_ids.isdisjoint(path_tokens):
            self._follow(list(path_tokens))
            if not self._matcher.is_error():
                mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.bool)
                allowed_V[: len(mask)] = mask[: self._vocab_size]
        if not allowed_V.any():
            allowed_V[sorted(self._stop_ids)] = True
        return allowed_V

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that were allowed have been emitted."""
        self._follow(list(tokens))
        self._path = []

    def copy(self) -> "JsonGrammar":
        """Another that stands where this one does; far cheaper than reading the schema again."""
        other = copy.copy(self)
        other._matcher, other._path = self._matcher.deep_copy(), list(self._path)
        return other

    def _follow(self, path: list[int]) -> None:
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        self._matcher.consume_tokens(path[shared:])
        self._path = path


class Grammars:
    """Makes the grammars of requests for one tokenizer, which takes a second to prepare."""

    def __init__(self, chat: Chat, stop_ids: frozenset[int], vocab_size: int) -> None:
        """`stop_ids`: what ends a reply. UserError for a tokenizer that llguidance cannot read, or without an end."""
        require(bool(stop_ids), "the model has no end-of-turn token, so a reply in JSON could never end")
        try:
            self._tokens = from_tokenizer(chat.tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids))
        except Exception as error:  # the library raises whatever its parser met
            raise UserError(f"this model's tokenizer cannot be used for JSON replies: {error}") from error
        self._stop_ids, self._vocab_size = stop_ids, vocab_size

    def json(self, schema: dict[str, Any] | None = None) -> JsonGrammar:
        """Any JSON object, or what `schema` describes. UserError names what the schema has that cannot be enforced."""
        try:
            grammar = LLMatcher.grammar_from_json_schema({"type": "object"} if schema is None else schema, _OPTIONS)
            problem = LLMatcher.validate_grammar(grammar, self._tokens)
        except ValueError as error:  # a number of more than 64 bits, half of a surrogate pair
            problem = str(error)
        require(not problem, f"the JSON schema cannot be enforced: {problem}")
        return JsonGrammar(self._tokens, self._stop_ids, grammar, self._vocab_size)
