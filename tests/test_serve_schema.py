"""Whatever the document of the server allows, and much that it does not: never an error of the server's own."""

import hypothesis
import pytest
from pydantic import ValidationError

from aquiline.serve.schema import ChatBody, CompletionBody
from tests.serving import WAIT, serving
from tests.test_api import folders, load  # noqa: F401 (a fixture)
from tests.test_serve import HI, no_cache  # noqa: F401 (a fixture)

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

checks = pytest.importorskip("schemathesis.specs.openapi.checks")
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
CHECKS.append(schemathesis.checks.not_a_server_error)
POSTS = ("POST /v1/chat/completions", "POST /v1/completions")
GETS = ("GET /v1/models/{name}", "GET /v1/models", "GET /health", "GET /ready", "GET /metrics")
STATUSES = (200, 400, 404, 413, 429)
CASES = [(route, valid) for route in (*POSTS, *GETS) for valid in (True, False) if valid or route in POSTS]


@pytest.fixture(scope="module")
def document(folders, no_cache):  # noqa: F811
    with serving(load(folders, "none"), context=48, queue=4) as running:
        yield schemathesis.openapi.from_url(f"http://{running.address}/openapi.json")


@pytest.mark.parametrize(("route", "valid"), CASES)
def test_no_body_makes_the_server_fail(document, route, valid):
    method, path = route.split()
    operation = document[path][method]
    mode = schemathesis.GenerationMode.POSITIVE if valid else schemathesis.GenerationMode.NEGATIVE
    most = 20 if method == "POST" else 2

    @hypothesis.settings(
        max_examples=most, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck),
        database=None, phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # a short one is kept, by 504
            if valid:
                agree(case.body, as_generated=len(answered) % 4 == 3)
        answer = case.call_and_validate(checks=CHECKS, timeout=WAIT)
        answered.append(answer.status_code)
        assert answer.status_code in STATUSES  # the document names more: of shutting down, of keys, of failures

    answered: list[int] = []
    check()
    if valid and method == "POST":
        assert answered.count(200) > most // 3  # it was asked for more than errors


def agree(body: dict, as_generated: bool) -> None:
    """What the document cannot say: of this model, and no field against another. `as_generated`: but for the name,
    which may then be that of another, and the prompt, which may be too long, or hold ids of no token.
    """
    if not as_generated:
        body.pop("model", None)
        body |= {"messages": HI} if "messages" in body else {"prompt": "a b"}
    if "logit_bias" in body:
        body["logit_bias"] = {str(int(k) % 260): v for k, v in body["logit_bias"].items() if k.isdecimal()}
    if body.get("top_logprobs"):
        body["logprobs"] = True
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
    body.pop("chat_template_kwargs", None)


MANY = 100_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [-1] * MANY}),
        (CompletionBody, {"prompt": [[-1] * MANY]}),
        (CompletionBody, {"prompt": [[-1]] * MANY}),
        (CompletionBody, {"prompt": ["a", *[1] * MANY]}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
        (ChatBody, {"messages": HI, "stop": [1] * MANY}),
        (ChatBody, {"messages": HI, "modalities": [1] * MANY}),
        (ChatBody, {"messages": HI, "logit_bias": {f"x{n}": "a" for n in range(MANY)}}),
        (ChatBody, {"messages": HI} | {f"x{n}": 1 for n in range(MANY)}),
        (ChatBody, {"messages": [{f"x{n}": 1 for n in range(MANY)}]}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_a_body_of_many_faults_makes_few_errors(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 4
