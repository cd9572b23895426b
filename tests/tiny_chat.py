"""Tiny tokenizers and chat templates for tests: every text can be encoded, nothing is downloaded."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aquiline.data.chat import Chat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such\n role') }}{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

# As reasoning models do: past reasoning is deleted, and enable_thinking=false writes an empty one into the prompt.
THINKING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = m.content.split('</think>')[-1] | trim %}{% endif %}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in text %}"
    "{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def wrap(backend: Tokenizer, specials: Sequence[str], template: str | None, **names: Any) -> Chat:
    """A Chat over any tokenizer of the tokenizers package."""
    backend.add_special_tokens(list(specials))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)
    return Chat(tokenizer, "the tiny tokenizer")


def byte_chat(
    template: str | None = CHATML,
    specials: Sequence[str] = CHATML_SPECIALS,
    eos: str | None = "<|im_end|>",
    bos: str | None = None,
    merges: Sequence[tuple[str, str]] = (("Ċ", "Ċ"), ("Ġ", "Ġ"), ("h", "i")),
) -> Chat:
    """Byte-level BPE with a token a byte plus `merges` (Ċ is a line feed, Ġ a space), special tokens last."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend, specials, template, eos_token=eos, bos_token=bos)


def word_chat(
    words: Sequence[str], specials: Sequence[str] = CHATML_SPECIALS, template: str | None = CHATML, **names: Any
) -> Chat:
    """One token a word, words split at spaces; id 0 is the unknown word, then `words`, then `specials`."""
    vocab = {word: i for i, word in enumerate(["[unk]", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(backend, specials, template, **names)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
