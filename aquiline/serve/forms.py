"""What is answered, as it stands in the OpenAPI document. Chunks of a stream have the same parts, a `delta` for a
`message`.
"""

from typing import Any, Literal

from typing_extensions import TypedDict  # of these pydantic makes a schema on Python 3.11 too


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: Error


class Speculation(TypedDict):
    """What speculation made of a call; seconds since it was taken."""

    cycles: int
    tau: float | None  # tokens per cycle
    accepted: int  # tokens that were drafted
    drafted: int  # nodes of all trees
    plain_steps: int
    reused_prompt_tokens: int
    seconds: float
    first_token_seconds: float


class PromptDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    aquiline: Speculation


class Origin(TypedDict):
    id: int
    text: str  # "" where the token ends inside a character, or has no text
    origin: int  # 0: the target's own; n: drafted at depth n


class DrawnTree(TypedDict):
    tokens: list[str]
    parents: list[int]  # -1: the token before
    accepted: list[int]  # nodes, in order


class Origins(TypedDict):
    tokens: list[Origin]
    tree: DrawnTree | None  # of the last step; None: it was a plain one


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class _Choice(TypedDict, total=False):
    aquiline: Origins  # with token_origins


class ChatChoice(_Choice):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextChoice(_Choice):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage


class ChatAnswer(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextAnswer(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ServedModel(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    draft: str


class Models(TypedDict):
    object: Literal["list"]
    data: list[ServedModel]


class Status(TypedDict):
    status: str


_STREAM = {"schema": {"description": "With `stream`: chunks as OpenAI has them, the last one being [DONE]."}}


_ERRORS = {
    400: "What the body asks for cannot be done; `param` names the field",
    401: "The API key is missing or wrong",
    403: "Called by another name, or by a page from elsewhere",
    404: "The model is not here",
    408: "The body did not come to its end",
    413: "The body is too large",
    429: "The queue is full; `Retry-After` says for about how long",
    431: "The headers are too large",
    500: "The engine, or the server, has failed",
    503: "The server is starting or shutting down, or its engine has failed",
    504: "The request took longer than its timeout",
}
OF_A_BODY = (400, 401, 404, 408, 413, 429, 500, 503, 504)  # what a route with one may answer


def documented(model: Any, *errors: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answers are `model`, these errors, or those of any route; None: plain text."""
    good: dict[str, Any] = {"description": "The answer", "model": model}
    if model is None:
        good = {"description": "The answer", "content": {"text/plain": {"schema": {"type": "string"}}}}
    if streams:
        good["content"] = {"text/event-stream": _STREAM}
    found: dict[int | str, dict[str, Any]] = {200: good}
    for status in sorted((*errors, 403, 431)):
        found[status] = {"model": ErrorAnswer, "description": _ERRORS[status]}
    return found
