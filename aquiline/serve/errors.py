"""What is answered in place of a reply: a status, and an error object in OpenAI's form."""

import json
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Refused(Exception):
    """A call that gets an error for an answer.

    `param`: the field of the body that is to blame. `in_vain`: sent again, it would end like this again; OpenAI's
    clients, which otherwise repeat whatever has a status of 500 or more, are told so.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        in_vain: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if in_vain:
            self.headers["X-Should-Retry"] = "false"

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()  # in ASCII: what is quoted may hold half a surrogate pair
