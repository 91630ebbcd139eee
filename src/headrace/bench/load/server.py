"""Which models a server has."""

import http.client
import json
from urllib.parse import urlsplit

from headrace.bench.load.client import HTTP_OK, Target

PATIENCE = 30.0  # seconds


def first_model(target: Target) -> str:
    """The first name of /v1/models. Raises ValueError."""
    host, port, tls = target.address()
    connection = (
        http.client.HTTPConnection(host, port, timeout=PATIENCE)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=tls)
    )
    headers = {"Authorization": f"Bearer {target.key}"} if target.key is not None else {}
    try:
        connection.request("GET", urlsplit(target.base).path + "/models", headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != HTTP_OK:
            raise ValueError(f"{target.base} does not tell its models ({answer.status} {answer.reason}); give --model")
        return str(json.loads(data)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{target.base} cannot be reached ({error}); is the server running?") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{target.base} does not tell its models; give --model") from None
    finally:
        connection.close()
