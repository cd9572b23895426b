"""What a body asks of the engine: prompts as ids, settings, limits."""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aquiline.api import Model
from aquiline.config import DEFAULT_TREE, TreeConfig, UserError
from aquiline.data.grammar import Grammars, JsonGrammar
from aquiline.decode.engine import Engine, Request
from aquiline.decode.sampling import Sampler
from aquiline.serve.errors import Refused
from aquiline.serve.schema import ChatBody, CompletionBody, Generation, JsonSchemaFormat, TextFormat

T = TypeVar("T")
_WHOLE = 2**63  # seeds
MOST_REPLIES = 128  # of one call: it takes turns with the others, but all that it asks for is kept meanwhile
MOST_KEPT = 2**21  # tokens of all replies of one call, those that are told beside them counted too


@dataclass(frozen=True)
class Asked:
    """The engine's requests of one call, `n` for each prompt, those of a prompt side by side."""

    requests: Sequence[Request]
    prompt_tokens: int  # each prompt counted once


def check_count(body: Generation) -> None:
    """Refused for more replies than a call may have."""
    prompts = 1
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list):
        prompts = len(body.prompt) if body.prompt and not isinstance(body.prompt[0], int) else 1
    if prompts * body.n > MOST_REPLIES:
        field = "prompt" if prompts > MOST_REPLIES else "n"
        message = f"{prompts} prompts with {body.n} replies each are more than the {MOST_REPLIES} replies of one call"
        raise Refused(400, message, param=field, code="invalid_value")


def check_name(model: Model, name: str) -> None:
    """Refused for the name of another model."""
    if name != model.target_name:
        message = f"model {name!r:.200} is not here; this server has {model.target_name!r}"
        raise Refused(404, message, param="model", code="model_not_found")


def asked(model: Model, engine: Engine, grammars: Grammars | None, body: ChatBody | CompletionBody) -> Asked:
    """Refused, with the field to blame, for what the engine would not run. `grammars` None: the model has none."""
    check_name(model, body.model or model.target_name)
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    prompts = _prompts(model, body)
    for ids in prompts:
        if not ids:
            raise Refused(400, "the prompt is empty: give at least one token", param=field)
        if len(ids) >= engine.context:
            raise Refused(
                400,
                f"the prompt has {len(ids)} tokens and leaves no room in a context of {engine.context}; shorten it",
                param=field,
                code="context_length_exceeded",
            )
    _check_kept(model, engine, body, prompts)
    seed = secrets.randbelow(_WHOLE) if body.seed is None else body.seed
    grammar = _grammar(model, grammars, body) if isinstance(body, ChatBody) else None
    requests = [
        _request(model, body, ids, grammar.copy() if grammar and choice else grammar, (seed + choice) % _WHOLE)
        for ids in prompts
        for choice in range(body.n)
    ]
    _to_blame("logit_bias", model, lambda: Sampler(requests[0].sampling, (), model.target.config.vocab_size))
    for request in requests:
        _to_blame(field, model, functools.partial(engine.check, request))
    return Asked(requests, sum(map(len, prompts)))


def _to_blame(field: str, model: Model, make: Callable[[], T]) -> T:
    """Where making it fails, the field is to blame."""
    try:
        return make()
    except UserError as error:
        # The source of a tokenizer is a path of this machine.
        raise Refused(400, str(error).replace(model.chat.source, model.target_name), param=field) from error


def _prompts(model: Model, body: ChatBody | CompletionBody) -> list[list[int]]:
    if isinstance(body, ChatBody):
        messages = [message.plain() for message in body.messages]
        if body.chat_template_kwargs:
            _to_blame("messages", model, lambda: model.chat.render(messages, **model.template_kwargs))
        settings = model.template_kwargs | body.chat_template_kwargs
        field = "chat_template_kwargs" if body.chat_template_kwargs else "messages"
        return [_to_blame(field, model, lambda: model.chat.render(messages, **settings))]
    prompt = body.prompt
    texts: list[Any] = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else list(prompt)
    return [
        _to_blame("prompt", model, functools.partial(model.chat.encode, text)) if isinstance(text, str) else text
        for text in texts
    ]


def _check_kept(model: Model, engine: Engine, body: ChatBody | CompletionBody, prompts: list[list[int]]) -> None:
    """Refused for more than one call may have kept until it ends."""
    field, most = _length(model, body)
    top = _logprobs(body) or 0
    longest = [min(most, engine.context - len(ids)) for ids in prompts]
    if body.n * sum(longest) * (1 + top) > MOST_KEPT:
        beside = f", each with the {top} likeliest beside it," if top else ""
        message = (
            f"{body.n * len(prompts)} replies of up to {max(longest)} tokens{beside} are more than the {MOST_KEPT} "
            f"tokens that are kept for one call: give a smaller {field}, or ask for fewer replies or logprobs"
        )
        raise Refused(400, message, param=field, code="invalid_value")


def _length(model: Model, body: ChatBody | CompletionBody) -> tuple[str, int]:
    """The field that says how many tokens a reply may have, and what it says."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", model.target.config.max_positions if body.max_tokens is None else body.max_tokens


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    """How many of the likeliest tokens are told beside each; None: no logprobs at all."""
    if isinstance(body, ChatBody):
        return body.top_logprobs if body.logprobs else None
    return body.logprobs


def _request(
    model: Model, body: ChatBody | CompletionBody, ids: list[int], grammar: JsonGrammar | None, seed: int
) -> Request:
    tree = None if model.draft is None else _tree(body)
    request = model.request(
        ids,
        max_new_tokens=_length(model, body)[1],
        stop=body.stop,
        tree=tree,
        plain=tree is None,
        grammar=grammar,
        logprobs=_logprobs(body),
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
        seed=seed,
    )
    request.prompt_ids = ids  # one list for all replies, which nobody changes, not a copy for each
    return request


def _grammar(model: Model, grammars: Grammars | None, body: ChatBody) -> JsonGrammar | None:
    form = body.response_format
    if isinstance(form, TextFormat):
        return None
    if grammars is None:
        raise Refused(400, "this model's tokenizer cannot be held to JSON", param="response_format", code="unsupported")
    schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else None
    return _to_blame("response_format", model, lambda: grammars.json(schema))


def _tree(body: Generation) -> TreeConfig | None:
    """The default tree, or what a node cap leaves of it."""
    cap = DEFAULT_TREE.num_nodes if body.max_nodes is None else min(body.max_nodes, DEFAULT_TREE.num_nodes)
    if not body.speculative or cap == 0:
        return None
    depth, top_k = min(DEFAULT_TREE.depth, cap), min(DEFAULT_TREE.top_k, cap)
    return dataclasses.replace(DEFAULT_TREE, depth=depth, top_k=top_k, num_nodes=cap)
