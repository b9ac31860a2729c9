"""Ownership of KV-cache blocks while they move from a prefill engine to a decode engine.

`SchedulerCore` answers an engine's scheduler: who may read which blocks, until when, and what became of it.
`WorkerCore`, one per rank, moves the bytes on threads of its own. Between the two the engine carries bytes: a plan per
step to every worker, reports back. `examples/two_engines.py` is a whole engine in sixty lines; `kv_connector.vllm` is the
connector for vLLM.

Calls release the interpreter's lock and wait for nothing. A call that is refused raises an exception whose text names the
field and the value, and has changed nothing.
"""

from ._native import (
    VERSION as __version__,
    BlocksReleased,
    ConfigError,
    Drained,
    Finished,
    Identity,
    InternalError,
    KvConnectorError,
    LoadEnd,
    LoadEnded,
    RequestError,
    SchedulerCore,
    StepReport,
    WorkerCore,
    WorkersSilent,
    check_config,
    config_defaults,
)

__all__ = [
    "BlocksReleased",
    "ConfigError",
    "Drained",
    "Finished",
    "Identity",
    "InternalError",
    "KvConnectorError",
    "LoadEnd",
    "LoadEnded",
    "RequestError",
    "SchedulerCore",
    "StepReport",
    "WorkerCore",
    "WorkersSilent",
    "__version__",
    "check_config",
    "config_defaults",
]
