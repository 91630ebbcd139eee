"""Error messages for bytes that are not JSON: one message per cause, with the position in bytes."""

import re

import msgspec

LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
NO_NUMBER = re.compile(rb"-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
PLACE = re.compile(r"(?:JSON is malformed: )?(?P<cause>.*) \(byte (?P<at>\d+)\)")
# First bytes of data that is not UTF-8 text, and the message for it.
BEGINNINGS = (
    (b"\x1f\x8b", "is compressed with gzip (byte 0); send it without compression"),
    (b"\xef\xbb\xbf", "begins with a byte order mark (byte 0); remove it"),
    (b"\xff\xfe", "is UTF-16 (byte 0 is a byte order mark); send UTF-8"),
    (b"\xfe\xff", "is UTF-16 (byte 0 is a byte order mark); send UTF-8"),
)


def json_problem(data: bytes, what: str = "the body") -> str:
    """Return one line about bytes that `read_json` refuses. `what` names them."""
    for beginning, cause in BEGINNINGS:
        if data.startswith(beginning):
            return f"{what} {cause}"
    try:
        data.decode()
        msgspec.json.decode(data, type=msgspec.Raw)
    except UnicodeDecodeError as error:
        return f"{what} is not UTF-8 at byte {error.start}; send UTF-8"
    except RecursionError:
        return f"{what} is nested too deeply; flatten it"
    except msgspec.DecodeError as error:
        return f"{what} is not JSON: {_cause(data, str(error))}"
    return f"{what} is not JSON, or is nested too deeply"


def _cause(data: bytes, message: str) -> str:
    found = PLACE.fullmatch(message)
    if found is None or "surrogate" in message:  # msgspec reports some lone surrogates as cut off
        if lone := LONE_SURROGATE.search(data.replace(rb"\\", b"  ")):
            return f"the escape {lone[0].decode()} at byte {lone.start()} is a lone surrogate; remove it"
        return f"it ends at byte {len(data)} inside a value; send all of it"
    at, cause = int(found["at"]), found["cause"]
    if "trailing comma" in cause:
        return f"there is a trailing comma before byte {at}; remove it"
    for start in (at - 1, at):  # msgspec reports -Infinity at its second byte
        if start >= 0 and (number := NO_NUMBER.match(data, start)):
            return f"{number[0].decode()} at byte {start} is not a number of JSON; send null or leave the field out"
    return f"{cause} at byte {at}"
