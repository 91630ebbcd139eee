"""Errors as the OpenAI protocol writes them: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Collection

import msgspec

from headrace.confined.pool import BusyError
from headrace.data.params import BEAM_NAMES, ParamError
from headrace.decoding.tools import ToolError
from headrace.server.fields import Meaningless
from headrace.server.principals import QuotaError
from headrace.server.queueing import QueueFullError
from headrace.server.tickets import (
    ConstraintFailedError,
    DeadlineError,
    EngineDownError,
    EngineLostError,
    QuarantinedError,
    RequestFailedError,
    RequestRefusedError,
    TooLongError,
)
from headrace.text.chat import TemplateError
from headrace.text.tokenizer import TokenizerError

ENGINE_LOST = "engine_lost"
QUARANTINED = "request_quarantined"
CONSTRAINT_FAILED = "constraint_failed"
UNFIT = "answer_unfit"  # an answer that is not of the form that was asked for
TOO_LONG = "context_length_exceeded"  # clients act on it, some on the words of the message
RETRIED = (408, 409, 429)  # statuses after which clients ask again, beside those of servers
MODEL_UNUSABLE = "model_unusable"  # which does not pass
# Words of messages for fields of requests.
OTHER_NAMES = {"refine": "refine_block", **{name: flat for flat, name in BEAM_NAMES.items()}}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `param` names the field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def renamed(self, name: str, known: str) -> "ApiError":
        """The same about a field that the client knows by another name."""
        if self.param != name:
            return self
        message = self.message.replace(name, known, 1)
        return ApiError(self.status, message, param=known, code=self.code, retry_after=self.retry_after)

    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if (
            self.status in RETRIED or self.status >= 500
        ):  # clients ask again by themselves: not where it would end in the same way
            again = self.retry_after is not None and self.code != MODEL_UNUSABLE
            headers["x-should-retry"] = "true" if again else "false"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad(message: str, param: str | None = None) -> ApiError:
    """A request that says something wrong; the message says what to change."""
    return ApiError(400, message, param=param, code="invalid_value")


def blamed(message: str, fields: Collection[str], text_field: str | None) -> str | None:
    """The field that a message is about: the first one it names, else, where it tells of a text, `text_field`."""
    words = [OTHER_NAMES.get(word, word) for word in re.findall(r"[a-z_]+", message)]
    of_text = bool({"prompt", "text", "message", "messages", "template"} & set(words[:4]))
    named = next((word for word in words if word in fields and word not in Meaningless.__struct_fields__), None)
    return text_field if of_text else named


def as_api_error(error: Exception) -> ApiError | None:
    """What a client is told of an error of ours; None: it is not for clients."""
    match error:
        case ApiError():
            return error
        case QuotaError(retry_after=None):
            return ApiError(400, str(error), code="quota_exceeded")
        case QuotaError():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case QueueFullError():
            message = f"the server is busy: {error}; try again in {error.retry_after} s"
            return ApiError(429, message, code="rate_limit_exceeded", retry_after=error.retry_after)
        case BusyError():
            return ApiError(429, f"the server is busy: {error}; try again in 1 s", code="rate_limit_exceeded", retry_after=1)
        case EngineLostError():
            return ApiError(503, str(error), code=ENGINE_LOST, retry_after=error.retry_after)
        case EngineDownError():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=error.retry_after)
        case DeadlineError():
            return ApiError(408, str(error), code="deadline_exceeded")
        case RequestFailedError():
            return ApiError(500, str(error), code="request_failed")
        case ConstraintFailedError():
            return ApiError(422, str(error), code=CONSTRAINT_FAILED)
        case QuarantinedError():
            return ApiError(422, str(error), code=QUARANTINED)
        case TooLongError():
            return ApiError(400, str(error), code=TOO_LONG)
        case ToolError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case ParamError() | RequestRefusedError() | TemplateError() | TokenizerError():
            return bad(str(error))
    return None
