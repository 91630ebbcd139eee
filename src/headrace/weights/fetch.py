"""Files of the model hub: their descriptions, and downloads that resume and are verified before they get their name."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers

from headrace.data.progress import Progress
from headrace.weights.store import FetchError, HubFile, StoredFile, one_line, require_space, verify_file

HUB_PATIENCE = 2.5  # seconds for the hub to describe a file; HF_HUB_ETAG_TIMEOUT may raise it
STALL = 10.0  # seconds without a byte after which a download reconnects
RETRIES = 3  # in a row without a byte
UNREACHABLE_REMEDY = "check the network, or name a mirror in HF_ENDPOINT"

T = TypeVar("T")


def look_up(repo: str, path: str, revision: str) -> HubFile:
    """Description of a file. Raises FetchError, at the latest after HUB_PATIENCE seconds."""

    def ask() -> HubFile:
        url = hf_hub_url(repo, path, revision=revision, endpoint=_endpoint())
        metadata = get_hf_file_metadata(url, timeout=_patience(), endpoint=_endpoint())
        etag = metadata.etag or ""
        sha256, blob = (etag if re.fullmatch(f"[0-9a-f]{{{digits}}}", etag) else None for digits in (64, 40))
        return HubFile(repo, path, metadata.commit_hash or revision, metadata.size, sha256, blob)

    return _ask_hub(ask, repo, path)


def listing(repo: str, revision: str = "main") -> list[HubFile]:
    """All files of a repository. Raises FetchError as `look_up` does."""

    def ask() -> list[HubFile]:
        info = HfApi(endpoint=_endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=_patience())
        return [
            HubFile(repo, file.rfilename, info.sha or revision, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
            for file in info.siblings or []
        ]

    return _ask_hub(ask, repo, "")


def fetch_hub(file: HubFile, folder: Path, want: str | None, progress: Progress) -> StoredFile:
    """Download a file into `folder`, resuming an earlier attempt. want: the SHA-256 that it must have.

    Raises FetchError; after a wrong hash the file is deleted.
    """
    if want and file.sha256 and want != file.sha256:
        raise FetchError(f"{file.path} there is another file than the catalog's (SHA-256 {file.sha256[:12]}…)")
    want = want or file.sha256
    if not (want or file.blob):
        raise FetchError(f"the hub names no hash for {file.path}, so it could not be checked; use another source")
    target = folder / file.name
    target.parent.mkdir(exist_ok=True)
    if target.exists():  # from an earlier try that another file stopped
        if known := verify_file(target, want, file.blob):
            return StoredFile(file.name, known.size, known.sha256)
        target.unlink()
    partial = folder / f"{file.name}.{(file.sha256 or file.blob or '')[:16]}"
    have = partial.stat().st_size if partial.exists() else 0
    if file.size is not None and have > file.size:
        partial.unlink()
        have = 0
    require_space(folder, max((file.size or 0) - have, 0))
    progress.start(file.name, file.size, have)
    try:
        _stream(file, partial, progress)
    finally:
        progress.finish()
    known = verify_file(partial, want, file.blob)
    if known is None:
        partial.unlink()
        raise FetchError(f"{file.path} has the wrong hash and was deleted; pull again")
    partial.rename(target)
    return StoredFile(file.name, known.size, known.sha256)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _patience() -> float:
    return max(HUB_PATIENCE, float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0))


def _ask_hub(ask: Callable[[], T], repo: str, path: str) -> T:
    """Result of a short request to the hub, with its errors as FetchError."""
    try:
        return _within(_patience(), ask)
    except GatedRepoError:
        raise FetchError(f"{repo} is gated: accept its licence on the hub, then log in there (hf auth login)") from None
    except RepositoryNotFoundError:
        raise FetchError(f"{repo} is not on the hub, or is private (set HF_TOKEN)") from None
    except RevisionNotFoundError:
        raise FetchError(f"{repo} has no such revision") from None
    except EntryNotFoundError:
        raise FetchError(f"{repo} has no file {path}") from None
    except HfHubHTTPError as error:
        raise FetchError(f"the hub answered {error.response.status_code} for {repo}") from None
    except TimeoutError:
        raise FetchError(f"the hub does not answer within {_patience():g} s; {UNREACHABLE_REMEDY}") from None
    except Exception as error:  # the transport's own errors, whose classes differ between versions of the hub's library
        raise FetchError(f"the hub cannot be reached ({one_line(error)}); {UNREACHABLE_REMEDY}") from None


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result, or TimeoutError. Runs in a thread, because name resolution has no timeout."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _stream(file: HubFile, partial: Path, progress: Progress) -> None:
    """Append missing bytes to the partial file, reconnecting as long as bytes arrive.

    The hub's library has its own loop, but it deletes the partial file of an interrupted run.
    """
    stalled = 0
    while stalled < RETRIES:
        before = partial.stat().st_size if partial.exists() else 0
        if before == file.size:
            return
        try:
            _request(file, partial, before, progress)
            if file.size is None or partial.stat().st_size == file.size:
                return
            reason = "the connection ended early"
        except HfHubHTTPError as error:
            raise FetchError(f"the hub answered {error.response.status_code} for {file.path}") from None
        except (OSError, FetchError):
            raise  # a disk error, or an answer that a retry would not change
        except Exception as error:  # see _ask_hub
            reason = one_line(error)
        stalled = 0 if partial.exists() and partial.stat().st_size > before else stalled + 1
    raise FetchError(f"the download of {file.path} broke off ({reason}); the downloaded part is kept; pull again to continue")


def _request(file: HubFile, partial: Path, have: int, progress: Progress) -> None:
    url = hf_hub_url(file.repo, file.path, revision=file.revision, endpoint=_endpoint())
    headers: dict[str, Any] = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream("GET", url, headers=headers, timeout=STALL) as response, partial.open("ab") as out:
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # the server sends it all again
            out.truncate(0)
            progress.advance(-have)
            have = 0
        for chunk in response.iter_raw():
            have += len(chunk)
            if file.size is not None and have > file.size:
                raise FetchError(f"the hub sent more for {file.path} than the {file.size} bytes it spoke of")
            out.write(chunk)
            progress.advance(len(chunk))
