"""What vLLM's log and its Prometheus endpoint say of us, under our own names, with units."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
BYTES = tuple(2.0 ** (10 + 2 * i) for i in range(13))

PREFIX = "vllm:kv_connector_"


class Stats(KVConnectorStats):
    """Observations of one interval. `data` is plain, since vLLM sends it between processes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {
            "load_seconds": [],
            "confirm_seconds": [],
            "load_bytes": [],
            "loads_failed": {},
            "leases_ended": {},
            "loads_cancelled": 0,
            "requests_refused": 0,
            "offers_missed": 0,
        }

    def loaded(self, size: int, seconds: float, confirm_seconds: float) -> None:
        self.data["load_bytes"].append(size)
        self.data["load_seconds"].append(seconds)
        self.data["confirm_seconds"].append(confirm_seconds)

    def failed(self, reason: str) -> None:
        _add(self.data["loads_failed"], reason, 1)

    def cancelled(self) -> None:
        self.data["loads_cancelled"] += 1

    def lease_ended(self, how: str) -> None:
        _add(self.data["leases_ended"], how, 1)

    def refused(self) -> None:
        self.data["requests_refused"] += 1

    def missed(self) -> None:
        self.data["offers_missed"] += 1

    def take(self) -> "Stats | None":
        """What was observed since the last call; None if nothing was."""
        if self.is_empty():
            return None
        taken = Stats(self.data)
        self.reset()
        return taken

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name].extend(value)
            elif isinstance(value, dict):
                for key, count in value.items():
                    _add(self.data[name], key, count)
            else:
                self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, sizes = self.data["load_seconds"], self.data["load_bytes"]
        reduced: dict[str, int | float] = {"loads": len(seconds)}
        if seconds:
            ordered = sorted(seconds)
            reduced["load p50 (ms)"] = round(ordered[len(ordered) // 2] * 1e3, 2)
            reduced["load max (ms)"] = round(ordered[-1] * 1e3, 2)
            reduced["MB per load"] = round(sum(sizes) / len(sizes) / 1e6, 3)
            reduced["MB/s"] = round(sum(sizes) / max(sum(seconds), 1e-9) / 1e6, 1)
        for reason, count in sorted(self.data["loads_failed"].items()):
            reduced[f"failed: {reason}"] = count
        for how, count in sorted(self.data["leases_ended"].items()):
            reduced[f"leases {how}"] = count
        if self.data["loads_cancelled"]:
            reduced["cancelled"] = self.data["loads_cancelled"]
        if self.data["requests_refused"]:
            reduced["requests refused"] = self.data["requests_refused"]
        if self.data["offers_missed"]:
            reduced["offers missed"] = self.data["offers_missed"]
        return reduced


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count


class PromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus. Reasons and ends are labels, known ones present from the start at 0."""

    REASONS = ("peer_lost", "lapsed", "read_timed_out", "handshake_unreachable", "wrong_peer", "incompatible")
    ENDS = ("confirmed", "released", "expired", "consumer_lost", "revoked")

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._load_seconds = self._histogram(
            "load_seconds", "Time from the order of a load to its last byte, per rank, in seconds.", SECONDS
        )
        self._confirm_seconds = self._histogram(
            "confirm_seconds",
            "Time from the last byte to the producer's word that its lease held, in seconds.",
            SECONDS,
        )
        self._load_bytes = self._histogram("load_bytes", "Bytes of a load, per rank.", BYTES)
        self._failed = self._labelled("loads_failed", "Loads that failed on a rank, by reason.", "reason", self.REASONS)
        self._ended = self._labelled(
            "leases_ended", "Leases that ended on a rank of the producer, by how they did.", "end", self.ENDS
        )
        self._counts = {
            name: create_metric_per_engine(
                self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in (
                ("requests_refused", "Requests whose kv_transfer_params could not be; they were computed here."),
                ("offers_missed", "Requests for which no producer had an offer; they were computed here."),
                ("loads_cancelled", "Loads of requests whose client went away, per rank."),
            )
        }

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> dict[int, Any]:
        metric = self._histogram_cls(
            name=PREFIX + name, documentation=text, buckets=list(buckets), labelnames=self._labelnames
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _labelled(self, name: str, text: str, label: str, known: tuple[str, ...]) -> dict[int, dict[str, Any]]:
        metric = self._counter_cls(name=PREFIX + name, documentation=text, labelnames=[*self._labelnames, label])
        made: dict[int, dict[str, Any]] = {}
        for engine, values in self.per_engine_labelvalues.items():
            made[engine] = _Labelled(metric, values)
            for value in known:
                made[engine][value]
        return made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        for metric, name in (
            (self._load_seconds, "load_seconds"),
            (self._confirm_seconds, "confirm_seconds"),
            (self._load_bytes, "load_bytes"),
        ):
            for value in data.get(name, ()):
                metric[engine_idx].observe(value)
        for counters, name in ((self._failed, "loads_failed"), (self._ended, "leases_ended")):
            for key, count in data.get(name, {}).items():
                counters[engine_idx][key].inc(count)
        for name, metric in self._counts.items():
            if data.get(name):
                metric[engine_idx].inc(data[name])


class _Labelled(dict):
    """Children of a labelled metric, made when they are first asked for."""

    def __init__(self, metric: Any, values: list[object]) -> None:
        super().__init__()
        self._metric = metric
        self._values = values

    def __missing__(self, key: str) -> Any:
        self[key] = child = self._metric.labels(*self._values, key)
        return child
