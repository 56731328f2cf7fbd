"""/v1/files: the files of batches. Uploads go to the disk part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from penstock.openai.batches.runner import BatchRunner
from penstock.openai.batches.storing import (
    UPLOAD_S,
    FileInUse,
    Folder,
    FolderFull,
    Growing,
    StoredFile,
    to_its_end,
)
from penstock.openai.callers import caller_of
from penstock.openai.calls import call_of
from penstock.openai.endpoints import endpoint_of
from penstock.openai.failures import (
    ApiError,
    ClientGone,
    invalid_value,
    missing,
    unknown,
    unsupported_value,
)
from penstock.openai.front import front_of
from penstock.openai.replying import json_response
from penstock.openai.schemas.batches import LEAST_KEPT_S, MOST_KEPT_S

MOST_FILE: Final = 512 << 20
"""How many bytes a file may have, as in OpenAI's API."""
MOST_LISTED: Final = 10_000
PURPOSES: Final = ("batch", "batch_output")
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MOST_FIELD: Final = 1 << 10
_MOST_PARTS: Final = 10
_BESIDE_FILE: Final = 64 << 10
_MOST_NAME: Final = 255

QUERY_OF_FILES: Final[Mapping[str, Any]] = {
    "purpose": {"enum": list(PURPOSES)},
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
"""The parameters of the query of a list of files."""


async def files_of(request: Request) -> tuple[BatchRunner, str]:
    """Return what keeps files and runs batches, and the caller, of whom the server is asked whether its key
    counts. Raises ApiError, and the client's errors.
    """
    batches: BatchRunner | None = request.app.state.batches
    if batches is None:
        message = "this front keeps no files; start it with --files FOLDER"
        raise ApiError(501, message, code="unsupported_endpoint", may_retry=False)
    call = call_of(request)
    # Not `answered`, which would read the body, and drop it, to learn whether the client goes away.
    await front_of(request).backend.facts(call, fresh=True)
    return batches, caller_of(call.key, batches.folder.secret)


def full(folder: Folder) -> ApiError:
    """Make the error of what there is no room for."""
    message = f"all files together may have {folder.max_bytes} bytes here; delete files first"
    return ApiError(413, message, code="files_full")


def no_such(param: str, what: str) -> ApiError:
    """Make the error of an id that is none of the caller's."""
    return ApiError(404, f"No such {what}.", param=param, code="not_found")


def read_query(request: Request) -> Mapping[str, str]:
    """Read the parameters behind the path. Raises ApiError for one that the endpoint does not have, and for
    one that comes twice, unless its schema makes it a list: of that the last value is given.
    """
    endpoint = endpoint_of(request.scope)
    schemas = {} if endpoint is None else endpoint.query
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in schemas:
            raise unknown(name[:100])
        if name in found and schemas[name].get("type") != "array":
            raise invalid_value(name, "it is given twice.")
        found[name] = value
    return found


def read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Tell how many things a list shall have. Raises ApiError."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise invalid_value("limit", f"it must be from 1 to {most}.")
    return int(text)


def page_of(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Make a list in OpenAI's form."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _told(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def list_files(request: Request) -> Response:
    """Serve GET /v1/files."""
    batches, caller = await files_of(request)
    query = read_query(request)
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid_value("order", "it must be 'asc' or 'desc'.")
    if (purpose := query.get("purpose")) not in (None, *PURPOSES):
        raise unsupported_value("purpose", "files are of the purposes 'batch' and 'batch_output'.")
    try:
        files, has_more = await asyncio.to_thread(
            batches.folder.files,
            caller,
            purpose=purpose,
            after=query.get("after"),
            limit=read_limit(query, MOST_LISTED, MOST_LISTED),
            is_ascending=order == "asc",
        )
    except KeyError:
        raise invalid_value("after", "there is no such file.") from None
    return json_response(page_of([_told(file) for file in files], has_more))


async def show_file(request: Request) -> Response:
    """Serve GET /v1/files/{file_id}."""
    _, file = await _file_of(request)
    return json_response(_told(file))


async def show_content(request: Request) -> Response:
    """Serve GET /v1/files/{file_id}/content."""
    folder, file = await _file_of(request)
    path = folder.content_of(file.id)
    try:
        found = await asyncio.to_thread(path.stat)
    except FileNotFoundError:  # it was deleted since it was looked up
        raise no_such("file_id", "file") from None
    # A browser must not take for a page of ours what a caller has stored.
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(path, headers=headers, media_type="application/octet-stream", stat_result=found)


async def _file_of(request: Request) -> tuple[Folder, StoredFile]:
    batches, caller = await files_of(request)
    file = await asyncio.to_thread(batches.folder.file, caller, request.path_params["file_id"])
    if file is None:
        raise no_such("file_id", "file")
    return batches.folder, file


async def delete_file(request: Request) -> Response:
    """Serve DELETE /v1/files/{file_id}."""
    batches, caller = await files_of(request)
    file_id = request.path_params["file_id"]
    try:
        is_deleted = await asyncio.to_thread(batches.folder.delete_file, caller, file_id)
    except FileInUse:
        message = "a batch that has not ended reads this file; cancel it first"
        raise ApiError(409, message, param="file_id", code="file_in_use", may_retry=False) from None
    if not is_deleted:
        raise no_such("file_id", "file")
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def upload_file(request: Request) -> Response:
    """Serve POST /v1/files."""
    _check_origin(request)
    batches, caller = await files_of(request)
    folder, form = batches.folder, _Form(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MOST_FILE + _BESIDE_FILE:
        raise _too_large()
    try:
        file_id = await asyncio.to_thread(folder.begin_file, caller, "batch", "")
        try:
            with Growing(folder, file_id) as file:
                await _receive(request, form, file, front_of(request).settings.receive_limit_s)
                keep_s = form.keep_s()
                if not file.size:
                    raise missing("file") if form.filename is None else invalid_value("file", "it is empty.")
                await to_its_end(file.finish, keep_s, form.filename)
        except BaseException:  # whatever it is, nothing of the upload stays
            await to_its_end(folder.drop_file, file_id)
            raise
    except FolderFull:
        raise full(folder) from None
    made = await asyncio.to_thread(folder.file, caller, file_id)
    assert made is not None, "it was just made"
    return json_response(_told(made))


def _check_origin(request: Request) -> None:
    """Refuse what a page of another origin sends: a browser lets every page send a form, which a body of JSON
    is not, and so asks nobody first.
    """
    origin, allowed = request.headers.get("origin"), front_of(request).settings.cors_origins
    is_ours = origin is not None and origin.partition("://")[2] == request.headers.get("host")
    if origin is not None and not is_ours and not {origin, "*"} & set(allowed):
        message = f"pages of {origin[:100]!r} may not upload files; see --cors-origin"
        raise ApiError(403, message, "permission_error", code="forbidden")


def _too_large() -> ApiError:
    return ApiError(413, f"a file may have at most {MOST_FILE} bytes", param="file", code="body_too_large")


async def _receive(request: Request, form: _Form, file: Growing, limit_s: float) -> None:
    """Read the body to its end, and write the file in it. A part must come each `limit_s` seconds."""
    parts = request.stream()
    try:
        async with asyncio.timeout(UPLOAD_S):
            while True:
                async with asyncio.timeout(limit_s):
                    data = await anext(parts, None)
                if data is None:
                    break
                content = b"".join(form.contents(data))
                if file.size + len(content) > MOST_FILE:
                    raise _too_large()
                if content:
                    await to_its_end(file.write, content)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    form.end()


@dataclass(slots=True)
class _Part:
    """A part of a form, as far as it has come."""

    name: str = ""
    filename: str | None = None
    value: bytes = b""


class _Form:
    """Takes a multipart form apart: the file's content is handed out as it comes, and fields are kept."""

    def __init__(self, content_type: str) -> None:
        """Raise ApiError unless this is the type of a form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            told = kind.decode("latin-1")[:100]
            message = f"the body must be multipart/form-data, not {told!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        self.filename: str | None = None
        """The name of the file, once it has come."""
        self._fields: dict[str, str] = {}
        self._part = _Part()
        self._num_parts = 0
        self._header = [b"", b""]
        self._content: list[bytes] = []
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                options.get(b"boundary", b""),
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._check_name,
                    "on_part_data": lambda data, start, end: self._add(data[start:end]),
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _not_a_form(str(error)) from None
        if b"boundary" not in options:
            raise _not_a_form("its type has no boundary")

    def contents(self, data: bytes) -> Iterator[bytes]:
        """Take in a part of the body, and give what of it is the file's content. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _not_a_form(str(error)) from None
        yield from self._content
        self._content.clear()

    def end(self) -> None:
        """Check that the form is whole and for a batch. Raises ApiError."""
        if not self._is_whole:
            raise _not_a_form("it ends too early")
        if "purpose" not in self._fields:
            raise missing("purpose")
        if (purpose := self._fields["purpose"]) != "batch":
            raise unsupported_value("purpose", f"files are for batches here: 'batch', not {purpose[:100]!r}.")

    def keep_s(self) -> int | None:
        """Tell how long the file shall be kept, in seconds; None if the form does not say. Raises
        ApiError.
        """
        anchor, seconds = (self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise unsupported_value("expires_after[anchor]", "it must be 'created_at'.")
        text = seconds or ""
        is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_KEPT_S))
        if not is_number or not LEAST_KEPT_S <= int(text) <= MOST_KEPT_S:
            raise invalid_value("expires_after[seconds]", f"it must be {LEAST_KEPT_S} to {MOST_KEPT_S}.")
        return int(text)

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise _not_a_form(f"it has more than {_MOST_PARTS} parts")
        self._part = _Part()

    def _add_header(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options:
                self._part.filename = options[b"filename"].decode("utf-8", "replace")

    def _check_name(self) -> None:
        part = self._part
        if part.name == "file":
            if self.filename is not None:
                raise invalid_value("file", "it is given twice.")
            self.filename = (part.filename or "upload.jsonl")[:_MOST_NAME]
        elif part.name not in _FIELDS:
            raise unknown(part.name[:100])
        elif part.name in self._fields:
            raise invalid_value(part.name, "it is given twice.")

    def _add(self, data: bytes) -> None:
        if self._part.name == "file":
            self._content.append(data)
        elif len(self._part.value) + len(data) > _MOST_FIELD:
            raise invalid_value(self._part.name, f"it has more than {_MOST_FIELD} bytes.")
        else:
            self._part.value += data

    def _end_part(self) -> None:
        if self._part.name != "file":
            self._fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True


def _not_a_form(why: str) -> ApiError:
    return ApiError(400, f"the body is not a form: {why}", code="invalid_form")
