"""What vLLM carries for us between its processes. Plans and reports are bytes to it and to us."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once: who it is and where its blocks lie."""

    identity: bytes
    card: bytes


@dataclass
class Loading:
    """A request's load: what a worker needs to tell vLLM how it ended."""

    request: str
    blocks: tuple[list[int], ...]
    """The request's blocks by group, from the load's first one."""


@dataclass
class StepMeta(KVConnectorMetadata):
    """From the scheduler to every worker, each step."""

    plan: bytes | None = None
    loads: dict[int, Loading] = field(default_factory=dict)
    """Loads that begin with this plan."""
    leases: dict[int, str] = field(default_factory=dict)
    """Requests whose blocks a lease holds from this plan on."""
    refused: list[Loading] = field(default_factory=list)
    """Loads that could not begin although vLLM waits for them."""


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: their reports of a step."""

    reports: list[bytes]

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "Reports":
        if not isinstance(other, Reports):
            raise TypeError(f"reports of {type(other).__name__} are not ours")
        return Reports(self.reports + other.reports)
