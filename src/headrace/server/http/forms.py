"""Multipart forms with one file, parsed as they arrive."""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from headrace.server.http.api_error import ApiError, bad

# The parser would log a line for each invalid form, without its client.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

MAX_HEADER_BYTES = 1000  # of the name or value of a header of a part
MAX_VALUES = 64  # of a field that may come more than once


class MultipartForm:
    """The received part of a form: its fields, the file name, and the content of the file, which the owner may take away.

    names: the fields that it may have. lists: those of them that may come more than once, also as `name[]`. longest: bytes of a
    field. needs: the fields that a form must have, for errors. Raises ApiError.
    """

    def __init__(
        self, content_type: str | None, names: Collection[str], *, needs: str, lists: Collection[str] = (), longest: int = 1000
    ) -> None:
        self.filename: str | None = None
        self.content = bytearray()
        self.ended = False
        self._fields: dict[str, list[bytearray]] = {}
        self._names, self._lists, self._longest, self._needs = names, lists, longest, needs
        self._header, self._value = bytearray(), bytearray()
        self._part = self.content
        self._disposition = b""
        callbacks: Any = {
            "on_part_begin": self._begin, "on_header_field": self._appender(self._header),
            "on_header_value": self._appender(self._value), "on_header_end": self._header_end,
            "on_headers_finished": self._named, "on_part_data": self._data, "on_end": self._end,
        }  # fmt: skip
        self._boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        try:
            self._parser = MultipartParser(self._boundary, callbacks)
        except FormParserError:  # a boundary that is too long
            raise self.invalid() from None

    def write(self, data: bytes) -> None:
        """Parse more of the body. Raises ApiError."""
        if not self._boundary:
            raise self.invalid()
        try:
            self._parser.write(data)
        except FormParserError:
            raise self.invalid() from None

    def field(self, name: str) -> str | None:
        """A field as text; None if missing. Raises ApiError if it is not UTF-8."""
        return next(iter(self.values(name)), None)

    def values(self, name: str) -> list[str]:
        """All values of a field as text. Raises ApiError."""
        try:
            return [bytes(value).decode() for value in self._fields.get(name, ())]
        except UnicodeDecodeError:
            raise bad(f"{name} must be text", name) from None

    def given(self) -> dict[str, Any]:
        """The fields by name: a text, or a list of texts. Raises ApiError."""
        return {name: self.values(name) if name in self._lists else self.field(name) for name in self._fields}

    def invalid(self) -> ApiError:
        return bad(f"the body is not a multipart form with one file; send {self._needs}")

    def _begin(self) -> None:
        self._disposition = b""

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _named(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise self.invalid()
        if name.removesuffix("[]") in self._lists:
            name = name.removesuffix("[]")
        if name not in self._names:
            raise ApiError(400, f"unknown field {name[:100]!r}; remove it", param=name[:100], code="unknown_field")
        before = self._fields.setdefault(name, [])
        if name in self._lists and len(before) >= MAX_VALUES:
            raise bad(f"{name} is given more than {MAX_VALUES} times; give fewer", name)
        if name not in self._lists and (before or (name == "file" and self.filename is not None)):
            raise bad(f"{name} is given twice; give it once", name)
        if name == "file" and b"filename" in options:
            self.filename = options[b"filename"].decode(errors="replace")
            self._part = self.content
            del self._fields[name]
        else:
            self._part = bytearray()
            before.append(self._part)

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part += data[start:end]
        if self._part is not self.content and len(self._part) > self._longest:
            name = next(name for name, parts in self._fields.items() if any(part is self._part for part in parts))
            raise bad(f"{name} has more than {self._longest:,} bytes; shorten it", name)

    def _end(self) -> None:
        self.ended = True

    def _appender(self, text: bytearray) -> Callable[[bytes, int, int], None]:
        def take(data: bytes, start: int, end: int) -> None:
            text.extend(data[start:end])
            if len(text) > MAX_HEADER_BYTES:
                raise self.invalid()

        return take


async def receive_form(request: Request, form: MultipartForm, take: Callable[[bytes], Awaitable[None]]) -> None:
    """Pass the body of a request to `take`, which writes it to the form. After an error the rest of the body is read, so that
    the client receives the error. Raises ApiError."""
    refused: ApiError | None = None
    try:
        async for data in request.stream():
            try:
                if refused is None:
                    await take(data)
            except ApiError as error:
                refused = error
    except ClientDisconnect:
        raise bad("the client went away") from None
    if refused is not None or not form.ended:
        raise refused or form.invalid()
