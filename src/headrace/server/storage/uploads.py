"""Uploads: a multipart form with one file, stored in chunks as they arrive."""

import contextlib
from functools import partial
from typing import Any

from starlette.requests import Request

from headrace.server.access.principals import PRINCIPAL
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.forms import MultipartForm, receive_form
from headrace.server.settings import Limits
from headrace.server.storage import files
from headrace.server.storage.store import StorageError, Store
from headrace.server.storage.store_schema import PIECE_BYTES

FIELDS = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")


async def upload(store: Store, request: Request, limits: Limits) -> dict[str, Any]:
    """Store the file of a form. Raises ApiError."""
    incoming = IncomingFile(store, limits, MultipartForm(request.headers.get("content-type"), FIELDS, needs="purpose and file"))
    try:
        await incoming.receive(request)
        return await incoming.complete(*_checked(incoming.form, incoming.file is None))
    except BaseException:
        await incoming.abandon()
        raise


class IncomingFile:
    """A file during its upload. The first chunk creates it; it is hidden until it is complete."""

    def __init__(self, store: Store, limits: Limits, form: MultipartForm) -> None:
        self.form = form
        self.file: int | None = None
        self._store, self._limits, self._who = store, limits, PRINCIPAL.get()

    async def receive(self, request: Request) -> None:
        """Store the file of a request. Raises ApiError."""
        await receive_form(request, self.form, self._take)

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


def _checked(form: MultipartForm, empty: bool) -> tuple[str, str, int | None]:
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
