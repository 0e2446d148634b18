"""The few exceptions that leave ctatune. Everything infeasible is data, not an exception."""


class CtatuneError(Exception):
    """Base of every error that ctatune raises on purpose; the message is one line for a person."""


class UsageError(CtatuneError, ValueError):
    """The caller asked for something that no machine could do (exit code 2)."""


class DeviceError(CtatuneError):
    """The machine lacks something, or a driver call failed (exit code 1)."""


class PipelineTimeoutError(DeviceError):
    """A bounded poll inside a kernel ran out; names GPU, what was awaited, target and value."""


class StoreError(CtatuneError):
    """The database cannot be opened, read or written (exit code 1)."""


class ScheduleError(CtatuneError):
    """A schedule blocks for ever, writes an output twice, or leaves a promised one unwritten."""
