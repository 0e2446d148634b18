"""The few exceptions that leave ctatune. Everything infeasible is data, not an exception."""


class CtatuneError(Exception):
    """Base of every error that ctatune raises on purpose; the message is one line for a person."""

    exit_code = 1  # of a command that it ends


class UsageError(CtatuneError, ValueError):
    """The caller asked for something that no machine could do."""

    exit_code = 2


class NoAnswer(CtatuneError):  # noqa: N818
    """Nothing is known for a problem, and nothing can be computed."""

    exit_code = 3


class DeviceError(CtatuneError):
    """The machine lacks something, or a driver call failed."""


class PipelineTimeoutError(DeviceError):
    """A bounded poll inside a kernel ran out; names GPU, what was awaited, target and value."""


class StoreError(CtatuneError):
    """The database cannot be opened, read or written."""


class ScheduleError(CtatuneError):
    """A schedule blocks for ever, writes an output twice, or leaves a promised one unwritten."""
