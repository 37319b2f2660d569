"""What a request may ask of PipelineConnector in its `kv_transfer_params`.

    engine.generate(prompt, kv_transfer_params={"skip_save": True})

`skip_save`: nothing is saved for this request, neither what it computes nor, to files, what it
loads from memory. A block that another request has too is saved for that one. `skip_load`: nothing
is loaded for it; what is cached on the device is used as ever. Each is true or false, and false if
it is left out; anything else ends the request with an error. Other keys are left to other
connectors.
"""

from __future__ import annotations

from interlace.engine.errors import RequestError
from interlace.engine.request import Request

SKIP_SAVE = "skip_save"
SKIP_LOAD = "skip_load"


def check_params(request: Request) -> None:
    """Raises: `RequestError` for what is neither true nor false."""
    if not request.kv_transfer_params:
        return
    for name in (SKIP_SAVE, SKIP_LOAD):
        value = request.kv_transfer_params.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"kv_transfer_params: {name} must be true or false, not {value!r}.")


def has_flag(request: Request, name: str) -> bool:
    """Whether the request asks for that."""
    params = request.kv_transfer_params
    return params is not None and params.get(name) is True
