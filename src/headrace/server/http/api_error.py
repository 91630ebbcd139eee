"""Error responses of the OpenAI protocol: {"error": {"message", "type", "param", "code"}}."""

import msgspec

# Statuses after which OpenAI's clients repeat the request, as after 5xx.
RETRIED = (408, 409, 429)
# Code of an error that a repetition cannot help.
MODEL_UNUSABLE = "model_unusable"
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response. `param`: the invalid field; `retry_after`: seconds."""

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
        """Return the error with `known` in place of the field name `name`, for clients that know the field as `known`."""
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
        # Clients repeat these requests by themselves; the header prevents it if that cannot help.
        if self.status in RETRIED or self.status >= 500:
            again = self.retry_after is not None and self.code != MODEL_UNUSABLE
            headers["x-should-retry"] = "true" if again else "false"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad(message: str, param: str | None = None) -> ApiError:
    """Return a 400 for an invalid value; the message names the change that it needs."""
    return ApiError(400, message, param=param, code="invalid_value")
