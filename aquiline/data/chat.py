"""The only place with a tokenizer: messages -> ids, conversation -> ids + loss mask, ids -> text, when a reply ends.

Nothing here knows a header string or a marker of any model family. What belongs to a reply is found by rendering the
conversation up to it, once as the prompt it was generated from and once with it; what the second adds is the reply.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from aquiline.config import Limits, UserError, require
from aquiline.files.disk import one_line
from aquiline.files.gguf_file import read_gguf

Message = dict[str, Any]  # role, content, maybe tool_calls: kept opaque beyond what check_messages looks at

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UserError unless this is a conversation that a chat template can be asked to write."""
    form = "not a conversation"
    require(isinstance(messages, (list, tuple)), f"messages must be a list, not {type(messages).__name__}", form)
    require(len(messages) > 0, "messages is empty; give at least one user turn", "empty")
    for number, message in enumerate(messages, 1):
        require(isinstance(message, dict), f"message {number} must be an object with 'role' and 'content'", form)
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        require(
            role in ROLES, f"message {number} has role {role!r}; expected one of {', '.join(ROLES)}", "unknown role"
        )
        calls_ok = not calls or (isinstance(calls, list) and all(_function_of(call).get("name") for call in calls))
        require(
            calls_ok, f"message {number}: tool_calls must be a list of objects with function.name", "broken tool calls"
        )
        if content is None:
            require(
                role == "assistant" and bool(calls),
                f"message {number} ({role}) has no content; only an assistant turn with tool_calls may leave it out",
                "null content",
            )
        else:
            kind = type(content).__name__
            require(
                isinstance(content, str),
                f"message {number} ({role}): content must be a text string, it is a {kind}",
                "content is not text",
            )


@dataclass(frozen=True)
class Row:
    """One training row. `supervised[t]` says that token t was written by the target, its end-of-turn token included."""

    ids: list[int]
    supervised: list[bool]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.supervised)


class Chat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, source: str, eos_token_ids: Iterable[int] = ()) -> None:
        """`tokenizer`: a PreTrainedTokenizerFast. `eos_token_ids`: more end-of-turn ids, from the model's configs."""
        self.tokenizer = tokenizer
        self.source = source
        # The backend is used directly for ids and text: the wrapper may add special tokens or clean up spaces.
        self._backend = tokenizer.backend_tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def from_folder(cls, path: str | Path, eos_token_ids: Iterable[int] = ()) -> "Chat":
        """The tokenizer of a Hugging Face folder on this disk."""
        folder = Path(path)
        require(folder.is_dir(), f"{folder} is not a folder; expected a Hugging Face model folder")
        require(
            (folder / "tokenizer.json").is_file(),
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there (tokenizer.save_pretrained)",
        )
        from transformers import PreTrainedTokenizerFast

        try:
            # The general class, not AutoTokenizer: a family's own class may rebuild the pre-tokenizer from its name,
            # while tokenizer.json says exactly what the model was trained with.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers package raises bare Exception on a damaged file
            raise UserError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
        return cls(tokenizer, str(folder), eos_token_ids)

    @classmethod
    def from_gguf(cls, path: str | Path, eos_token_ids: Iterable[int] = ()) -> "Chat":
        """The tokenizer inside a GGUF file; only kinds that are reproduced exactly, UserError for others."""
        return cls(_tokenizer_from_gguf(Path(path)), str(path), eos_token_ids)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer files so that Transformers 4 and 5 load the same encodings back."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as scratch:
            self.tokenizer.save_pretrained(scratch)
            config_file = Path(scratch, "tokenizer_config.json")
            config = json.loads(config_file.read_text(encoding="utf-8"))
            for key in ("backend", "is_local", "local_files_only"):  # how it was loaded here, of no use to others
                config.pop(key, None)
            # Transformers 5 writes a class name that 4 does not know, and 4 cleans up spaces unless told not to.
            config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            config_file.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            for file in Path(scratch).iterdir():
                os.replace(file, folder / file.name)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: nothing is added, a template's text already holds its BOS."""
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # JSON may carry "\ud800" alone, which is no character
            raise UserError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def render(
        self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Ids of a conversation, by default as a prompt: its last turn is then the user's or a tool's."""
        check_messages(messages)
        return self.encode(self._render_text(messages, add_generation_prompt, template_kwargs))

    def _render_text(self, messages: Sequence[Message], generation: bool, template_kwargs: dict[str, Any]) -> str:
        template = self.tokenizer.chat_template
        require(template is not None, f"{self.source} has no chat template, so messages cannot be written as tokens")
        if generation:
            last = messages[-1]["role"] if messages else "missing"
            require(
                last in ("user", "tool"), f"the last turn before a reply must be the user's or a tool's, not {last!r}"
            )
        written = template if isinstance(template, str) else " ".join(template.values())
        for key in template_kwargs:  # a misspelt switch would silently give another prompt
            known = re.search(rf"\b{re.escape(key)}\b", written)
            require(bool(known), f"the chat template of {self.source} does not know the setting {key!r}")
        try:
            text = self.tokenizer.apply_chat_template(
                [_arguments_as_objects(m) for m in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **template_kwargs,
            )
        except Exception as error:  # a template is foreign code: it raises on purpose, and trips over what it lacks
            systems = any(m["role"] == "system" for m in messages)
            hint = " (some templates take no system message)" if systems else ""
            raise UserError(f"the chat template refused the conversation: {one_line(error)}{hint}") from error
        for message in messages:
            for call in message.get("tool_calls") or ():
                name = str(_function_of(call)["name"])
                require(name in text, f"the chat template of {self.source} does not write tool calls ({name} is lost)")
        return text

    @cached_property
    def _added(self) -> dict[str, int]:
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def end_of_turn_ids(self) -> frozenset[int]:
        """Ids that end a turn: the tokenizer's EOS, the model's own, and what the template closes a reply with."""
        ids = set(self._eos_token_ids)
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        question = {"role": "user", "content": "a"}
        try:
            closing = self._around([question], "assistant")[1]
        except UserError:
            return frozenset(ids)
        ids.update(self._first_added(closing))
        return frozenset(ids)

    def user_turn(self, messages: Sequence[Message] = ()) -> tuple[list[int], Limits]:
        """Ids that end where a user's text begins, after `messages`, and where that text ends: stop ids and strings.

        Both are what the template writes around a user's text, as it would be around an empty one.
        """
        opening, closing = self._around(messages, "user")
        ends = self._first_added(closing)
        require(bool(ends or closing.strip()), f"the chat template of {self.source} does not close a user's turn")
        strings = () if ends else (closing.strip(),)
        return self.encode(opening), Limits(stop_ids=frozenset(ends) | self.end_of_turn_ids, stop_strings=strings)

    def _around(self, messages: Sequence[Message], role: str) -> tuple[str, str]:
        """What the template writes before and behind a text: two messages that share no letter agree on the rest."""
        texts = [self._render_text([*messages, {"role": role, "content": text}], False, {}) for text in ("a", "b")]
        backwards = [text[::-1] for text in texts]
        return os.path.commonprefix(texts), os.path.commonprefix(backwards)[::-1]  # noqa: RUF071 (letters are meant)

    def _first_added(self, text: str) -> list[int]:
        return [i for i in self.encode(text) if i in self._added.values()][:1]

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that stand for no text of their own, special ones above all, and their ids."""
        return self._added

    def rows(
        self, messages: Sequence[Message], written: Sequence[bool] | None = None, **template_kwargs: Any
    ) -> list[Row]:
        """Training rows of a conversation; `written[i]`: the i-th assistant turn is this target's (None: all are).

        One row while the template only appends. Where it rewrites earlier turns (deletes past reasoning, say), each
        supervised turn that no longer stands in the next one's prompt keeps a row of its own. A row ends with its last
        supervised token; without a supervised turn there is no row.
        """
        check_messages(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        written = [True] * len(turns) if written is None else written
        require(
            isinstance(written, (list, tuple)) and all(isinstance(own, bool) for own in written),
            f"'written' is {written!r:.80}; expected a list of true and false, one for each assistant turn",
        )
        require(
            len(written) == len(turns),
            f"'written' has {len(written)} entries for {len(turns)} assistant turns; give one for each",
        )
        rows: list[Row] = []
        for turn in (turn for turn, own in zip(turns, written, strict=True) if own):
            prompt, reply = self._prompt_and_reply(messages, turn, template_kwargs)
            ids, supervised = prompt + reply, [False] * len(prompt) + [True] * len(reply)
            if rows and prompt[: len(rows[-1].ids)] == rows[-1].ids:
                before = rows.pop()
                supervised[: len(before.ids)] = before.supervised
            rows.append(Row(ids, supervised))
        return rows

    def _prompt_and_reply(
        self, messages: Sequence[Message], turn: int, template_kwargs: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """What the target read and what it wrote at `messages[turn]`, as at generation time.

        messages[:turn] with generation prompt   <user>Hi<end><assistant>
        messages[:turn + 1]                      <user>Hi<end><assistant>Hello<end>\\n
        the reply                                                        Hello<end>      up to its end-of-turn token
        """
        prompt_text = self._render_text(messages[:turn], True, template_kwargs)
        full_text = self._render_text(messages[: turn + 1], False, template_kwargs)
        require(
            full_text.startswith(prompt_text),
            f"the chat template is unstable at message {turn + 1}: what it writes for the reply does not continue "
            "the prompt the reply is generated from, so no loss mask can be derived",
        )
        reply_text = full_text[len(prompt_text) :]
        for key in ("content", "reasoning_content"):
            part = "".join(str(messages[turn].get(key) or "").split())
            require(
                part in "".join(reply_text.split()),
                f"the chat template changes or drops part of the {key} of message {turn + 1}: "
                "the row would not hold what the target wrote",
            )
        prompt, full = self.encode(prompt_text), self.encode(full_text)
        reply = full[len(prompt) :]
        if full[: len(prompt)] != prompt:
            # A token of the whole text spans the seam ("\n" + "\n" is one token). The target read the prompt's own
            # tokens and wrote after them, so the pieces are the truth, if the tokenizer can encode a piece alone.
            reply = self.encode(reply_text)
            require(
                self._decode(prompt + reply, False) == self._decode(full, False),
                f"the tokenizer joins the reply of message {turn + 1} to its prompt; no loss mask can be derived",
            )
        # The first such id: generation stops there, whatever the template appends ("\n", a second EOS).
        end = next((i + 1 for i, token in enumerate(reply) if token in self.end_of_turn_ids), 0)
        require(
            end > 0,
            f"the chat template does not close message {turn + 1} with an end-of-turn token "
            f"(known ids: {sorted(self.end_of_turn_ids)}); add the model's own to eos_token_id in generation_config",
        )
        return prompt, reply[:end]

    def _decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def text(self, ids: Iterable[int]) -> str:
        """Text for people: special and end-of-turn tokens left out, spaces as they were."""
        return self._decode([i for i in ids if i not in self.end_of_turn_ids])

    def raw_text(self, ids: Iterable[int]) -> str:
        """Text with every special token in it."""
        return self._decode(list(ids), False)

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, part of a character too; of a special token its name. b"" where there is none."""
        name = self._backend.id_to_token(token)
        if name is None:  # a model may have more ids than its tokenizer
            return b""
        if name in self._added:
            return name.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[letter] for letter in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # a byte that no token covers, as SentencePiece writes it
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self._backend.decoder  # its pickled state is its JSON; the whole tokenizer's is megabytes
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def text_stream(self) -> "TextStream":
        """An incremental `text`."""
        return TextStream(self)

    def stop_matcher(self, limits: Limits) -> "StopMatcher":
        """The object a request carries to know when it ends. Stop ids are those of `limits`, no others.

        A stop string that names a token (`<|im_end|>`) is met by that token too: special tokens have no visible text.
        """
        named = {self._added[string] for string in limits.stop_strings if string in self._added}
        return StopMatcher(limits.stop_ids | named, limits.stop_strings, TextStream(self))

    def fingerprint(self) -> str:
        """Names everything that turns text into ids and back: equal for a tokenizer and its saved or converted copy."""
        parts = json.loads(self._backend.to_str())
        for key in ("version", "truncation", "padding", "post_processor"):  # never used here
            parts.pop(key, None)
        parts["model"] = {k: v for k, v in parts["model"].items() if v not in (None, "", False)}  # defaults
        parts["special"] = [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]
        return _short_hash(parts)

    def template_fingerprint(self) -> str:
        """Names the chat template."""
        return _short_hash(self.tokenizer.chat_template)


_MOST_UNFINISHED = 64  # tokens; some decoders show a run of bytes as nothing but U+FFFD until it ends in a character


class TextStream:
    """Token ids in, text out, never splitting a character: an unfinished one is held back until it is complete.

    Only a window of tokens is decoded at a time: those since the last point where the text was whole, and the stretch
    before it, because a decoder may treat the beginning of a text differently.
    """

    def __init__(self, chat: Chat) -> None:
        self._decode = chat._decode
        self._hidden = chat.end_of_turn_ids
        self._window: list[int] = []
        self._whole = 0  # tokens of the window whose text was whole
        self._sent = 0  # characters of the window's text already given out

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the text that became certain."""
        self._window += [i for i in ids if i not in self._hidden]
        text = self._decode(self._window)
        certain = text.rstrip("\ufffd")  # how decoders show bytes that are not (yet) a character
        delta = certain[self._sent :]
        self._sent += len(delta)
        if delta and certain == text:
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._sent = len(self._decode(self._window))
        elif len(self._window) - self._whole > _MOST_UNFINISHED:
            delta += self._let_go(text)
        return delta

    def _let_go(self, text: str) -> str:
        """Shorten a window, whose text is given, in which no character will be finished but at its very end."""
        if self._sent == len(text):  # ids without text
            del self._window[self._whole :]
            return ""
        for cut in range(len(self._window) - 4, len(self._window) - 12, -1):  # a character has four bytes at most
            known = self._decode(self._window[:cut])
            if known + self._decode(self._window[cut:]) == text:
                delta = text[self._sent : len(known)]
                del self._window[:cut]
                self._whole, self._sent = 0, max(0, self._sent - len(known))
                return delta
        return ""

    def finish(self) -> str:
        """The held back rest, unfinished characters as U+FFFD."""
        delta = self._decode(self._window)[self._sent :]
        self._sent += len(delta)
        return delta


@dataclass(frozen=True)
class StopResult:
    """Why a request ended: the id or the string that was met."""

    stop_id: int | None = None
    stop_string: str | None = None
    reason: str = "stop"


class StopMatcher:
    """Scans a reply token by token, in order; pure: it knows text and ids, nothing of engines.

    Text is made only when asked for or when there are stop strings. Of several strings the one completed first wins,
    so the outcome does not depend on how the text is cut into tokens.
    """

    def __init__(self, stop_ids: frozenset[int], stop_strings: tuple[str, ...], stream: TextStream) -> None:
        self.result: StopResult | None = None
        self._stop_ids = stop_ids
        self._stop_strings = [_Begun(string) for string in stop_strings]
        self._stream = stream
        self._unread: list[int] = []
        self._text = ""
        self._finished = False

    def push(self, token_id: int) -> StopResult | None:
        """Take the next emitted token. A result means it is the last one: push nothing after it."""
        assert not self._finished, "a token after the end"
        if token_id in self._stop_ids:
            self.finish()
            self.result = StopResult(stop_id=token_id)
        else:
            self._unread.append(token_id)
            if self._stop_strings:
                self._read()
        return self.result

    def finish(self) -> None:
        """The reply ended otherwise (length, cancel): whatever was held back becomes visible."""
        if not self._finished:
            self._read()
            self._text += self._stream.finish()
            self._finished = True

    @property
    def text(self) -> str:
        """The visible text that is certain so far; it only grows. What may begin a stop string is held back."""
        self._read()
        if self._finished:
            return self._text
        held = max((begun.length for begun in self._stop_strings), default=0)
        return self._text[: len(self._text) - held]

    def _read(self) -> None:
        """Turn the tokens not yet read into text, up to the stop string that is completed first, if one is."""
        if not self._unread:
            return
        end, delta = len(self._text), self._stream.push(self._unread)
        self._text += delta
        self._unread = []
        for letter in delta if self._stop_strings else "":
            end += 1
            met = [begun.string for begun in self._stop_strings if begun.push(letter)]
            if met:
                string = max(met, key=len)
                self._text = self._text[: end - len(string)]
                self.result = StopResult(stop_string=string)
                self._finished = True
                return


class _Begun:
    """How many letters of a string a text ends with, kept up letter by letter (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.string, self.length = string, 0
        self._shorter = _shorter(string)

    def push(self, letter: str) -> bool:
        """Whether the string is completed, after which nothing may follow."""
        while self.length and self.string[self.length] != letter:
            self.length = self._shorter[self.length - 1]
        self.length += self.string[self.length] == letter
        return self.length == len(self.string)


@lru_cache(64)  # the choices of one call have the same
def _shorter(string: str) -> tuple[int, ...]:
    """For every beginning of a string: how many letters of the string it ends with, itself apart."""
    found = [0] * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = found[length - 1]
        length += string[at] == string[length]
        found[at] = length
    return tuple(found)


# The letters by which byte-level tokenizers write bytes: printable ones are themselves, the others follow from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def _function_of(call: Any) -> dict[str, Any]:
    """{"function": {...}} as OpenAI writes it, or the bare {...}; an empty one for anything else."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _arguments_as_objects(message: Message) -> Message:
    """OpenAI clients send a tool call's arguments as a JSON string; templates expect the object."""
    if not message.get("tool_calls"):
        return message
    message = json.loads(json.dumps(message))
    for call in message["tool_calls"]:
        function = _function_of(call)
        if isinstance(function.get("arguments"), str):
            # Not JSON: what the model wrote is passed on as it is.
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"])
    return message


def _tokenizer_from_gguf(path: Path) -> Any:
    """A byte-level BPE tokenizer as a PreTrainedTokenizerFast."""
    fields = read_gguf(path).fields

    def need(name: str, kind: type) -> Any:
        key = f"tokenizer.{name}"
        require(key in fields, f"{path} has no {key}; expected a GGUF file of a language model with its tokenizer")
        require(isinstance(fields[key], kind), f"{path} is damaged: {key} is {fields[key]!r:.80}")
        return fields[key]

    kind, pre = need("ggml.model", str), need("ggml.pre", str)
    tokens, types, merges = (need(f"ggml.{name}", list) for name in ("tokens", "token_type", "merges"))
    require(kind == "gpt2", f"{path}: tokenizer model {kind!r} is not supported (only gpt2); use a Hugging Face folder")
    require(len(tokens) == len(types), f"{path} is damaged: {len(tokens)} tokens and {len(types)} token types")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    known = {"gpt-2": byte_level, "smollm": pre_tokenizers.Sequence([digits, byte_level])}
    require(
        pre in known,
        f"{path}: pre-tokenizer {pre!r} is not supported (only {', '.join(known)}); use a Hugging Face folder",
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ", 1)) for merge in merges]))
        ids = {name: fields.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in names.items()}
        named = {name: tokens[i] for name, i in ids.items() if i is not None}
    except Exception as error:  # the tokenizers package raises bare Exception on a merge of unknown tokens
        raise UserError(f"{path} is damaged: its tokenizer cannot be built ({one_line(error)})") from error
    backend.pre_tokenizer = known[pre]
    backend.decoder = decoders.ByteLevel()
    unknown, control, user_defined = 2, 3, 4  # llama.cpp's token types
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (unknown, control):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == user_defined:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=need("chat_template", str) if "tokenizer.chat_template" in fields else None,
        clean_up_tokenization_spaces=False,
        **named,
    )
