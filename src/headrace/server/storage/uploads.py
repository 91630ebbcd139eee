"""Uploads: a multipart form with one file, stored in chunks as they arrive."""

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from headrace.server.access.principals import PRINCIPAL
from headrace.server.http.api_error import ApiError, bad
from headrace.server.settings import Limits
from headrace.server.storage import files
from headrace.server.storage.store import StorageError, Store
from headrace.server.storage.store_schema import PIECE_BYTES

# The parser would log a line for each invalid form, without its client.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

FIELDS = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")
# Of a form field, and of the name or value of a header of a part.
MAX_FIELD_BYTES = 1000


class UploadForm:
    """The received part of a form: its fields, the file name, and the content that is not stored yet.

    Raises ApiError.
    """

    def __init__(self, content_type: str | None) -> None:
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.content = bytearray()
        self.ended = False
        self._header, self._value = bytearray(), bytearray()
        self._part = self.content
        self._disposition = b""
        callbacks: Any = {
            "on_part_begin": self._begin, "on_header_field": _appender(self._header), "on_header_value": _appender(self._value),
            "on_header_end": self._header_end, "on_headers_finished": self._named, "on_part_data": self._data,
            "on_end": self._end,
        }  # fmt: skip
        self._boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        try:
            self._parser = MultipartParser(self._boundary, callbacks)
        except FormParserError:  # a boundary that is too long
            raise _invalid_form() from None

    def write(self, data: bytes) -> None:
        """Parse more of the body. Raises ApiError."""
        if not self._boundary:
            raise _invalid_form()
        try:
            self._parser.write(data)
        except FormParserError:
            raise _invalid_form() from None

    def field(self, name: str) -> str | None:
        """A field as text; None if missing. Raises ApiError if it is not UTF-8."""
        try:
            return bytes(self.fields[name]).decode() if name in self.fields else None
        except UnicodeDecodeError:
            raise bad(f"{name} must be text", name) from None

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
            raise _invalid_form()
        if name not in FIELDS:
            raise ApiError(400, f"unknown field {name[:100]!r}; remove it", param=name[:100], code="unknown_field")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise _invalid_form()
        if name == "file" and b"filename" in options:
            self.filename = options[b"filename"].decode(errors="replace")
            self._part = self.content
        else:
            self._part = self.fields[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part += data[start:end]
        if self._part is not self.content and len(self._part) > MAX_FIELD_BYTES:
            raise _invalid_form()

    def _end(self) -> None:
        self.ended = True


async def upload(store: Store, request: Request, limits: Limits) -> dict[str, Any]:
    """Store the file of a form. Raises ApiError."""
    incoming = IncomingFile(store, limits, UploadForm(request.headers.get("content-type")))
    try:
        await incoming.receive(request)
        return await incoming.complete(*_checked(incoming.form, incoming.file is None))
    except BaseException:
        await incoming.abandon()
        raise


class IncomingFile:
    """A file during its upload. The first chunk creates it; it is hidden until it is complete."""

    def __init__(self, store: Store, limits: Limits, form: UploadForm) -> None:
        self.form = form
        self.file: int | None = None
        self._store, self._limits, self._who = store, limits, PRINCIPAL.get()

    async def receive(self, request: Request) -> None:
        """Store the file of a request. After an error the rest of the body is read, so that the client receives the error.

        Raises ApiError.
        """
        refused: ApiError | None = None
        try:
            async for data in request.stream():
                try:
                    if refused is None:
                        await self._take(data)
                except ApiError as error:
                    refused = error
        except ClientDisconnect:
            raise bad("the client went away") from None
        if refused is not None or not self.form.ended:
            raise refused or _invalid_form()

    async def complete(self, name: str, purpose: str, life: int | None) -> dict[str, Any]:
        file = self.file
        assert file is not None  # an empty file is refused before
        return await self._store.run(lambda db: files.complete(db, file, name, purpose, life))

    async def abandon(self) -> None:
        file = self.file
        if file is not None:
            with contextlib.suppress(StorageError):  # `delete_expired` removes it later
                await self._store.run(lambda db: files.discard(db, file))

    async def _take(self, data: bytes) -> None:
        self.form.write(data)
        content = self.form.content
        if len(content) >= PIECE_BYTES or (self.form.ended and content):
            if self.file is None:
                self.file = await self._store.run(lambda db: files.create(db, self._limits, self._who))
            await self._store.run(
                partial(files.append, file=self.file, piece=bytes(content), most=self._limits.stored, who=self._who)
            )
            content.clear()


def _checked(form: UploadForm, empty: bool) -> tuple[str, str, int | None]:
    """Name, purpose and lifetime of the file. Raises ApiError."""
    if form.filename is None:
        raise ApiError(400, "file is missing; give it", param="file", code="missing_field")
    purpose = form.field("purpose")
    if purpose not in files.PURPOSES:
        raise bad(f"purpose must be one of {', '.join(files.PURPOSES)}", "purpose")
    life = _lifetime(form.field("expires_after[anchor]"), form.field("expires_after[seconds]"))
    if empty:
        raise bad("the file is empty; send what it should hold", "file")
    name = form.filename.replace("\\", "/").rpartition("/")[2][:200] or "file"
    return name, purpose, files.INPUT_SECONDS if life is None and purpose == "batch" else life


def _lifetime(anchor: str | None, seconds: str | None) -> int | None:
    if anchor is None and seconds is None:
        return None
    if seconds is None or not (seconds.isascii() and seconds.isdigit()) or len(seconds) > 9:
        raise bad("expires_after has the anchor created_at, and seconds", "expires_after")
    return files.lifetime({"anchor": anchor, "seconds": int(seconds)}, "expires_after")


def _appender(text: bytearray) -> Callable[[bytes, int, int], None]:
    def take(data: bytes, start: int, end: int) -> None:
        text.extend(data[start:end])
        if len(text) > MAX_FIELD_BYTES:
            raise _invalid_form()

    return take


def _invalid_form() -> ApiError:
    return bad("the body is not a multipart form with one file; send purpose and file")
