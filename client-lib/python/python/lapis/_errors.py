"""Exceptions: one class per kind of failure. Each has `retryable`, `object`, `asked`, `in_use` and `limit`."""


class Error(Exception):
    """A call failed. Nothing of it was done."""

    def __init__(self, message="", retryable=False, object=0, asked=0, in_use=0, limit=0):
        super().__init__(message)
        self.retryable = retryable
        self.object = object
        self.asked = asked
        self.in_use = in_use
        self.limit = limit

    def __reduce__(self):
        numbers = (self.retryable, self.object, self.asked, self.in_use, self.limit)
        return type(self), (self.args[0] if self.args else "", *numbers)


class Refused(Error):
    """What was asked for can't be had as it is."""


class Fault(Error):
    """Something failed at the daemon."""


class BadRequest(Refused, ValueError):
    """The request makes no sense, such as an allocation of no bytes."""


class OutOfRange(Refused, IndexError):
    """Bytes outside an allocation, a range or a file."""


class ReadOnly(Refused):
    """Writing what can only be read."""


class OverCapacity(Refused, MemoryError):
    """More than can ever be mapped at once."""


class OutOfMemory(Refused, MemoryError):
    """The tiers can't hold another allocation of this size."""


class TimedOut(Refused, TimeoutError):
    """The wait ended first."""


class VersionUnsupported(Refused):
    """Client and daemon have no protocol version in common."""


class NotPermitted(Refused, PermissionError):
    """This user may not do that."""


class TooMany(Refused):
    """A count limit of the session or the daemon is met."""


class InUse(Refused):
    """Pages are mapped for writing."""


class NotAFile(Refused, ValueError):
    """What was opened isn't a readable regular file."""


class ShuttingDown(Refused):
    """The daemon is stopping."""


class Unsupported(Refused):
    """The daemon, the device or this library can't do this."""


class OverQuota(Refused):
    """A quota is met."""


class FileChanged(Fault):
    """The file isn't the one that was opened any more."""


class FileTruncated(Fault):
    """The file ended before the bytes asked for."""


class IoFailed(Fault, OSError):
    """Reading or writing failed."""


class DataLost(Fault):
    """Spilled bytes don't match their checksum."""


class DeviceLost(Fault):
    """The GPU failed, and the daemon restarts."""


class ConnectFailed(Error, ConnectionError):
    """No daemon at the socket."""


class NotLapis(Error, ConnectionError):
    """Something else than lapisd is at the socket."""


class ProtocolFailed(Error):
    """The daemon broke the protocol; the connection is closed."""


class Disconnected(Error, ConnectionError):
    """The daemon is gone. What is mapped stays readable; connect anew for anything else."""


class Forked(Error):
    """The object is of the process that this one was forked from; connect anew."""


class SystemFailed(Error, OSError):
    """A system call failed in this process."""


class OpenFailed(Error, OSError):
    """A file can't be opened."""


class ModelFailed(Error, ValueError):
    """A model's files can't be used."""


class CudaFailed(Error):
    """The GPU's memory can't be used by this process."""


class OnDevice(Error, BufferError):
    """The bytes are in a GPU's memory, out of the CPU's reach: use DLPack, or tobytes()."""


class Conflict(Error):
    """A live mapping of this process has some of the bytes, and one of the two writes."""


class TooLarge(Error, ValueError):
    """More in one request than the protocol can carry."""


class Foreign(Error, ValueError):
    """An allocation of another client."""


class Closed(Error, ValueError):
    """The client, allocation, mapping or model was closed."""
