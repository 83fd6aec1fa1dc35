"""The one exception family: a class for each status code, each also the built-in that a caller expects."""

from __future__ import annotations


class Error(RuntimeError):
    """Whatever shardpull refuses, or fails with.

    Attributes:
        code: the status code, "INVALID_ARGUMENT" and so on.
        message: what happened, for people; also ``str(error)``.
        reason: what went wrong, from the closed list of include/shardpull/status.h: "bad_argument", "peer_lost", ...
        fault: whose fault it is: "user", "peer", "host" or "library".
        retryable: whether the same call may succeed later without anybody changing anything.
        process: the process that raised it: "trainer 0", "worker 3", or "".
        peer: the process that it is about, or "".
        tensor: the checkpoint name or parameter that it is about, or "".
    """

    code: str = "UNKNOWN"
    reason: str = "unspecified"

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        reason: str | None = None,
        fault: str = "user",
        retryable: bool = False,
        process: str = "",
        peer: str = "",
        tensor: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason
        self.fault = fault
        self.retryable = retryable
        self.process = process
        self.peer = peer
        self.tensor = tensor

    def __str__(self) -> str:
        return self.message


class CancelledError(Error):
    """The call was ended: by ``shutdown`` from another thread, or by a peer that was interrupted."""

    code = "CANCELLED"


class UnknownError(Error):
    """What has no class of its own."""

    code = "UNKNOWN"


class InvalidArgumentError(Error, ValueError):
    """A value that the caller passed; the message names the argument."""

    code = "INVALID_ARGUMENT"
    reason = "bad_argument"


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument of another type than the one named."""


class DeadlineExceededError(Error, TimeoutError):
    """Something that did not happen in the time that it had."""

    code = "DEADLINE_EXCEEDED"


class NotFoundError(Error, LookupError):
    """A name, file or process that is not there."""

    code = "NOT_FOUND"


class AlreadyExistsError(Error, ValueError):
    """A name that is taken."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error, PermissionError):
    """Something that the host, or the other side, does not allow."""

    code = "PERMISSION_DENIED"


class ResourceExhaustedError(Error, MemoryError):
    """Memory, descriptors or another limit of the host."""

    code = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(Error):
    """A call that the state does not allow, or two sides that do not agree."""

    code = "FAILED_PRECONDITION"


class AbortedError(Error):
    """A sync, or a fleet, that failed elsewhere."""

    code = "ABORTED"


class OutOfRangeError(Error, IndexError):
    """A number beyond what it may be."""

    code = "OUT_OF_RANGE"


class UnimplementedError(Error, NotImplementedError):
    """Something that shardpull does not have, by name."""

    code = "UNIMPLEMENTED"


class InternalError(Error):
    """A mistake of the library's own."""

    code = "INTERNAL"


class UnavailableError(Error, ConnectionError):
    """A peer that was lost, or a fleet that has ended."""

    code = "UNAVAILABLE"


class DataLossError(Error, OSError):
    """Bytes that are not those that were sent or written."""

    code = "DATA_LOSS"


class UnauthenticatedError(Error, PermissionError):
    """A token that is not the fleet's."""

    code = "UNAUTHENTICATED"


BY_CODE: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (
        CancelledError,
        UnknownError,
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        UnimplementedError,
        InternalError,
        UnavailableError,
        DataLossError,
        UnauthenticatedError,
    )
}


def from_status(
    code: str, message: str, reason: str, fault: str, retryable: bool, peer: str, tensor: str, process: str
) -> Error:
    """The exception for a C++ Status."""
    return BY_CODE.get(code, UnknownError)(
        message, code=code, reason=reason, fault=fault, retryable=retryable, process=process, peer=peer, tensor=tensor
    )
