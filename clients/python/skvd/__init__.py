"""Client of skvd, the local language-model daemon. See Client (blocking) and AsyncClient (asyncio)."""
from .aio import AsyncClient, AsyncStream
from .client import Client, Stream
from .errors import (BadRequest, Cancelled, ContextOverflow, Deadline, Draining, Error, Forbidden, Internal, NoDaemon, NotFound,
                     Overloaded, ProtocolError, TooLarge, UnknownMethod)
from .wire import Record, default_path

__version__ = "0.1.0"
__all__ = ["AsyncClient", "AsyncStream", "BadRequest", "Cancelled", "Client", "ContextOverflow", "Deadline", "Draining",
           "Error", "Forbidden", "Internal", "NoDaemon", "NotFound", "Overloaded", "ProtocolError", "Record", "Stream",
           "TooLarge", "UnknownMethod", "default_path"]
