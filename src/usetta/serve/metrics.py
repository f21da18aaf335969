"""What the server counts, for Prometheus. Labels take few values: no path, name or method of a caller becomes one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest


class Metrics:
    """The counters of one application, apart from those of any other in the same process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "usetta_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "usetta_request_seconds", "Time from request to answer.", ["route"], registry=self._registry
        )
        self.queue = Gauge("usetta_queue", "Requests that are read, waiting or answered.", registry=self._registry)
        self.batches = Histogram(
            "usetta_batch_images",
            "Images that went through the model together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self._registry,
        )
        self.text_lists = Gauge("usetta_text_lists", "Class lists whose text is kept.", registry=self._registry)
        self.text_bytes = Gauge("usetta_text_bytes", "Memory of the text that is kept.", registry=self._registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
