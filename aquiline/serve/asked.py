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
        _to_blame("prompt", model, functools.partial(model.chat.encode, text)) if isinstance(text, str) else list(text)
        for text in texts
    ]


def _request(
    model: Model, body: ChatBody | CompletionBody, ids: list[int], grammar: JsonGrammar | None, seed: int
) -> Request:
    most, logprobs = body.max_tokens, body.logprobs
    if isinstance(body, ChatBody):
        most = body.max_completion_tokens if most is None else most
        logprobs = body.top_logprobs if logprobs else None
    tree = None if model.draft is None else _tree(body)
    return model.request(
        ids,
        max_new_tokens=model.target.config.max_positions if most is None else most,
        stop=body.stop,
        tree=tree,
        plain=tree is None,
        grammar=grammar,
        logprobs=logprobs,
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
