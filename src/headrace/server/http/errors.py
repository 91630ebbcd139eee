"""Maps exceptions to the errors that clients receive."""

from collections.abc import Collection

from headrace.confined.pool import BusyError
from headrace.data.fields import PROMPT
from headrace.data.params import ParamError
from headrace.decoding.tools import ToolError
from headrace.server.access.principals import QuotaError
from headrace.server.access.queueing import QueueFullError
from headrace.server.engines.inflight import (
    ConstraintFailedError,
    DeadlineError,
    EngineDownError,
    EngineLostError,
    QuarantinedError,
    RequestFailedError,
    RequestRefusedError,
    TooLongError,
)
from headrace.server.http.api_error import ApiError, bad
from headrace.text.chat import TemplateError
from headrace.text.tokenizer import TokenizerError

ENGINE_LOST = "engine_lost"
QUARANTINED = "request_quarantined"
CONSTRAINT_FAILED = "constraint_failed"
UNFIT = "answer_unfit"  # the answer does not match its schema
# Fields that requests hold inside another one.
PARENTS = {"chat_template": "chat_template_kwargs"}
TOO_LONG = "context_length_exceeded"  # clients read the code, some also the message


def wrong_field(error: Exception, fields: Collection[str], text_field: str | None = None) -> str | None:
    """The field that an error is about, in a request with these `fields` and its text in `text_field`; None: none of them."""
    match error:
        case TokenizerError() | TooLongError():
            return text_field
        case ParamError() | RequestRefusedError() | TemplateError():
            field = PARENTS.get(error.field, error.field)
            return text_field if field == PROMPT else field if field in fields else None
    return None


def as_api_error(error: Exception) -> ApiError | None:
    """The error that a client receives for an exception, or None for one that clients must not see."""
    match error:
        case ApiError():
            return error
        case QuotaError(retry_after=None):
            return ApiError(400, str(error), code="quota_exceeded")
        case QuotaError():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case QueueFullError() | BusyError():
            message = f"the server is busy: {error}; try again in {error.retry_after} s"
            return ApiError(429, message, code="rate_limit_exceeded", retry_after=error.retry_after)
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
