"""The bodies that are taken, field by field. What stands here is done, everything else is refused by its name.

A null asks for nothing, as in OpenAI's own clients, and counts as left out. What asks for nothing here either, such as
`user` or `store: false`, is taken and not looked at.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

MOST_CHOICES = 16  # of one call, for each of its prompts
_MOST = 4096  # messages of a call, parts of a message
_MOST_BIASES = 1024
_MOST_FIELDS = 100  # of an object: each that is not known makes an error of its own

# A list ends at its first fault: a small body could make a million of them.
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
BiasedId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _few(value: Any) -> Any:
    """Before any entry is looked at, for of an object every fault is kept."""
    if isinstance(value, dict) and len(value) > _MOST_BIASES:
        raise ValueError(f"{len(value)} entries are more than {_MOST_BIASES}")
    return value


class Body(BaseModel):
    """Strict: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_FIELDS:
            raise ValueError(f"an object has {len(value)} fields, more than any that is taken")
        return {k: v for k, v in value.items() if v is not None}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Generation(Body):
    """What both kinds of completion take."""

    model: str = ""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] = []
    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31, description="0 is off.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Over prompt and output; 1 is off.")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[BiasedId, Bias], BeforeValidator(_few)] = {}
    speculative: bool = Field(True, description="false decodes plainly: the same text, without the draft.")
    max_nodes: int | None = Field(None, ge=0, le=4096, description="The most nodes of a drafted tree.")
    token_origins: bool = Field(False, description="Say of every token at which depth it was drafted, and show trees.")
    timeout: float | None = Field(None, gt=0, description="Seconds after which the request is given up.")

    user: str = ""
    metadata: dict[str, Any] = {}
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: Any, others: ValidationInfo) -> Any:
        if not others.data.get("stream"):
            raise ValueError("this is for streams only: set stream, or leave it out")
        return value


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=_MOST, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=_MOST, fail_fast=True)
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return self.model_dump(exclude_none=True, exclude={"content"}) | {"content": content}


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: dict[str, Any] = Field({}, alias="schema")


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1, max_length=_MOST, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] = (
        TextFormat(type="text")
    )
    chat_template_kwargs: dict[str, Any] = {}
    modalities: list[Literal["text"]] = Field([], fail_fast=True)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _asks_for_a_reply(cls, value: Any) -> Any:
        if "add_generation_prompt" in value:
            raise ValueError("it may not hold add_generation_prompt: a reply is always asked for")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_one_limit(cls, value: Any, others: ValidationInfo) -> Any:
        if others.data.get("max_tokens") is not None:
            raise ValueError("max_tokens means the same: give one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: Any, others: ValidationInfo) -> Any:
        if value and not others.data.get("logprobs"):
            raise ValueError("it is given without logprobs: set logprobs, or leave it out")
        return value


class CompletionBody(Generation):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] = 1
    echo: Literal[False] = False
