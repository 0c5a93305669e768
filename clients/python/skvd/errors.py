"""The daemon's error codes as exceptions."""


class Error(Exception):
    """What the daemon refused or could not do. `code` is the wire's name, `fields` all that came with it."""

    code = "internal"

    def __init__(self, message, fields=None):
        super().__init__(message)
        self.message = message
        self.fields = fields or {}
        if "code" in self.fields:
            self.code = self.fields["code"]

    @property
    def retry_after_ms(self):
        """When to come again (Overloaded); None for other errors."""
        return self.fields.get("retry_after_ms")

    @property
    def result(self):
        """What there was until then (Cancelled, Deadline): the fields of a result, as far as they are known."""
        return self.fields


class BadRequest(Error):
    code = "bad_request"


class UnknownMethod(Error):
    code = "unknown_method"


class TooLarge(Error):
    code = "too_large"


class ContextOverflow(Error):
    code = "context_overflow"


class Overloaded(Error):
    code = "overloaded"


class Cancelled(Error):
    code = "cancelled"


class Deadline(Error):
    code = "deadline"


class Forbidden(Error):
    code = "forbidden"


class Draining(Error):
    code = "draining"


class NotFound(Error):
    code = "not_found"


class Internal(Error):
    code = "internal"


class NoDaemon(Error, ConnectionError):
    """Nobody listens, or the connection is over."""

    code = "no_daemon"


class ProtocolError(Error):
    """What came over the socket is not what a daemon of this protocol sends."""

    code = "io"


_BY_CODE = {c.code: c for c in (BadRequest, UnknownMethod, TooLarge, ContextOverflow, Overloaded, Cancelled, Deadline,
                                Forbidden, Draining, NotFound, Internal)}


def from_wire(error):
    """The exception for the error element of a response."""
    if not isinstance(error, dict):
        return Internal(str(error))
    return _BY_CODE.get(error.get("code"), Error)(str(error.get("message", "")), error)
