"""Metrics for Prometheus. Names are vLLM's with the prefix `headrace:`, so that dashboards can be reused."""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.audio.transcript import Transcript
from headrace.data.types import Delta, RequestMetrics
from headrace.server.access.principals import Principal
from headrace.server.engines.engine_requests import EngineRequests
from headrace.server.engines.inflight import InflightRequest
from headrace.server.engines.messages import Deltas, Loaded, PeerStats, Stats, StoreStats
from headrace.server.engines.supervision import ENDS, State
from headrace.server.logs import log_request
from headrace.startup.classifier import ClassifierThreshold

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
LABELS = ("model_name",)
BY_REPLICA = (*LABELS, "replica")
NO_STATS = Stats()
LOOKS = ("fit", "unfit", "unchecked")
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BEAT = 0.25  # seconds between two measurements of the event loop's lag
ANSWERS = 32  # the exit layers of the last answers are compared with the calibration
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTHS = (*range(0, 33, 2), 36, 40, 48, 56, 64, 80, 96, 128)  # layers


class BucketCounts:
    """Number of values in each bucket, and their sum."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class TokenHistogram(Collector):
    """A histogram by model for values of every token: equal values are counted in one call."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._tallies: dict[str, BucketCounts] = {}
        registry.register(self)

    def of(self, model: str) -> BucketCounts:
        return self._tallies.setdefault(model, BucketCounts(self._buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        names = [*map(floatToGoString, self._buckets), "+Inf"]
        for model, tally in self._tallies.items():
            family.add_metric([model], list(zip(names, accumulate(tally.counts), strict=True)), tally.sum)
        yield family


class ServerMetrics:
    """Metrics of a server: the registry, in which each model has a label, and the metrics of responses and principals."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Gauge | Counter | Histogram | TokenHistogram] = {}
        ProcessCollector(registry=self.registry)
        self._responses = Counter("headrace:http_responses", "Responses by status.", ("status",), registry=self.registry)
        asked, took = "Responses by the name of the key.", "Prompt and answer tokens by the name of the key."
        self._asked = Counter("headrace:principal_responses", asked, ("principal",), registry=self.registry)
        self._took = Counter("headrace:principal_tokens", took, ("principal", "kind"), registry=self.registry)
        late = "Delay of the event loop behind a timer, measured four times a second."
        self.lag = Histogram("headrace:event_loop_lag_seconds", late, registry=self.registry, buckets=LAGS)

    async def watch(self) -> None:
        """Measure the event loop's lag, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + BEAT
            await asyncio.sleep(BEAT)
            self.lag.observe(max(0.0, clock() - due))

    def text(self, who: Principal) -> bytes:
        """Return the metrics in the exposition format. Only operators see those of other principals."""
        text = generate_latest(self.registry)
        if who.operates:
            return text
        own = f'principal="{who.name}"'.encode()
        return b"".join(line for line in text.splitlines(True) if b'principal="' not in line or own in line)

    def count(self, status: int, principal: str) -> None:
        """Count a response; `principal` is empty if no key was needed or valid."""
        self._responses.labels(str(status)).inc()
        if principal:
            self._asked.labels(principal).inc()

    def used(self, principal: str, prompt: int, generated: int) -> None:
        """Count the tokens of a request."""
        self._took.labels(principal, "prompt").inc(prompt)
        self._took.labels(principal, "generation").inc(generated)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = LABELS) -> Gauge:
        return self._once(name, lambda: Gauge(f"headrace:{name}", text, labels, registry=self.registry))

    def counter(self, name: str, text: str, labels: tuple[str, ...] = LABELS) -> Counter:
        return self._once(name, lambda: Counter(f"headrace:{name}", text, labels, registry=self.registry))

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = LABELS) -> Histogram:
        return self._once(name, lambda: Histogram(f"headrace:{name}", text, labels, registry=self.registry, buckets=buckets))

    def often(self, name: str, text: str, buckets: tuple[float, ...]) -> TokenHistogram:
        return self._once(name, lambda: TokenHistogram(f"headrace:{name}", text, buckets, self.registry))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


class ModelMetrics:
    """Metrics of one served model. Times are in seconds."""

    def __init__(self, figures: ServerMetrics, model: str) -> None:
        self._figures = figures
        self._model = model
        # By number of the replica.
        self._num_blocks: dict[int, int] = {}
        self._stats: dict[int, Stats] = {}
        self._last: dict[tuple[str, int], float] = {}  # time of each answer's last token
        self._reasons: dict[str, str] = {}  # finish reason of each open request's last answer
        self._depths: dict[tuple[str, int], BucketCounts] = {}  # exit layers of each open answer with early exit
        self._means: deque[float] = deque(maxlen=ANSWERS)
        self._usual: tuple[float, float] | None = None
        self._gauges()
        self._counters()
        self._histograms()

    def _gauges(self) -> None:
        self.running = self._gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self.restarts = self._gauge("engine_restarts", "Restarts of the engine process.")
        self.states = self._figures.gauge("engine_state", "1 for the current state, 0 for the others.", (*LABELS, "state"))
        why = "Unexpected ends of the engine process, by cause."
        self.ends = self._figures.gauge("engine_ends", why, (*LABELS, "reason"))
        self.banned = self._gauge("requests_quarantined", "Requests refused because the engine ended twice under them.")
        self.memory = self._gauge("model_memory_bytes", "Bytes of the model in memory, with its K/V cache; 0: not loaded.")
        self.loading_waits = self._gauge("model_requests_waiting", "Requests that wait until the model is loaded.")
        where = "1 for loaded, loading or unloaded, 0 for the others."
        self.residency = self._figures.gauge("model_state", where, (*LABELS, "state"))
        deeper = f"Mean exit layer of the last {ANSWERS} answers or classified texts above calibration, in standard deviations."
        self.above = self._gauge("exit_layers_above_calibration", deeper)
        self.store_bytes = self._gauge("kv_store_bytes", "Bytes of the segments in the folder of the K/V store.")
        self.failing = self._gauge("engine_failing_steps", "Failed steps since the last successful one.")
        # Of models with several replicas.
        self.replica_ready = self._by_replica("replica_ready", "1 if the replica is ready, otherwise 0.")
        self.replica_restarts = self._by_replica("replica_restarts", "Restarts of the replica's engine process.")
        self.replica_running = self._by_replica("replica_requests_running", "Requests in the replica's batch.")
        self.replica_waiting = self._by_replica("replica_requests_waiting", "Requests in the replica's queue.")
        self.replica_kv_usage = self._by_replica("replica_kv_cache_usage_perc", "Share of its KV blocks in use, 0 to 1.")

    def _counters(self) -> None:
        self.preempted = self._counter("num_preemptions", "Preemptions: a request lost its KV blocks to another one.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts that were verified.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        by_place = "Drafts whose token at this position was accepted; 0 is the first."
        self.accepted_at = self._figures.counter("spec_decode_num_accepted_tokens_per_pos", by_place, (*LABELS, "position"))
        self.ended = self._figures.counter("request_success", "Requests by finish reason.", (*LABELS, "finished_reason"))
        looked = "Finished answers that were checked against a constraint that no mask enforces, by result."
        self.looked = self._figures.counter("late_checks", looked, (*LABELS, "result"))
        for result in LOOKS:
            self.looked.labels(self._model, result)
        self.generated_chars = self._counter("generation_chars", "Characters of generated text.")
        self.load_failures = self._counter("model_load_failures", "Loads of the model on demand that failed.")
        why = "Unloads of the model: room for another one, idle, or by the operator."
        self.unloaded = self._figures.counter("model_unloads", why, (*LABELS, "reason"))
        self.store = {
            "loaded": self._counter("kv_store_segments_loaded", "Segments of K/V that were read from disk."),
            "saved": self._counter("kv_store_segments_saved", "Segments of K/V that were written to disk."),
            "evicted": self._counter("kv_store_segments_evicted", "Segments that were deleted to make room."),
            "damaged": self._counter("kv_store_segments_damaged", "Segments that could not be read and were computed."),
            "bytes_read": self._counter("kv_store_read_bytes", "Bytes of K/V that were read from disk."),
            "bytes_written": self._counter("kv_store_written_bytes", "Bytes of K/V that were written to disk."),
        }
        self.peers = {
            "fetched": self._counter("kv_peer_segments_fetched", "Segments of K/V that came from another replica."),
            "failed": self._counter("kv_peer_failures", "Fetches from another replica that a fault ended."),
            "lent": self._counter("kv_peer_segments_lent", "Segments of K/V that were sent to another replica."),
            "bytes_fetched": self._counter("kv_peer_fetched_bytes", "Bytes of K/V that came from another replica."),
            "bytes_lent": self._counter("kv_peer_lent_bytes", "Bytes of K/V that were sent to another replica."),
        }
        sent = "Prompt tokens of the requests that the router sent to a replica."
        self.routed_tokens = self._figures.counter("routed_prompt_tokens", sent, BY_REPLICA)
        known = "Prompt tokens that the router expected in the replica's prefix cache."
        self.routed_hits = self._figures.counter("routed_prefix_hits", known, BY_REPLICA)
        self.sound_seconds = self._counter("audio_seconds", "Seconds of sound of transcribed files.")
        self.sound_windows = self._counter("audio_windows", "Requests of the engine for windows of sound.")
        self.sound_fallbacks = self._counter("audio_fallbacks", "Windows that were decoded again at a higher temperature.")
        self.sound_skipped = self._counter("audio_skipped_seconds", "Seconds of sound that were skipped as silence.")
        self.replays = self._counter("request_replays", "Requests sent to a new engine process after theirs was lost.")

    def _histograms(self) -> None:
        self.first_token = self._histogram("time_to_first_token_seconds", "From submission to the first token.", FIRST)
        self.between = self._figures.often("inter_token_latency_seconds", "Time between two tokens of an answer.", BETWEEN).of(
            self._model
        )
        self.exit_layer = self._figures.often(
            "exit_layer", "Exit layer of each token or classified text of a request with early exit.", DEPTHS
        ).of(self._model)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of an answer, after the first.", BETWEEN
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From submission to the end.", WHOLE)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the first step.", WHOLE)
        self.prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.", WHOLE)
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", WHOLE)
        self.inference = self._histogram("request_inference_time_seconds", "From the first step to the last token.", WHOLE)
        self.load_seconds = self._histogram("model_load_seconds", "Time of a load on demand.", WHOLE)
        self.prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", SIZES)
        self.answer_size = self._histogram("request_generation_tokens", "Tokens generated for a request.", SIZES)
        self.asked_n = self._histogram("request_params_n", "Number of answers that a request asks for (n).", BATCH)
        self.asked_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", SIZES)
        self.batch = self._histogram("iteration_requests", "Running requests after each step that generated tokens.", BATCH)
        self.fed = self._histogram("iteration_tokens_total", "Tokens processed in a step, of prompts and answers.", SIZES)

    def step(self, message: Deltas, inflight: Mapping[str, InflightRequest], replica: int = 0) -> None:
        """Record the results of one step of a replica; `inflight`: the open requests."""
        now = time.perf_counter()
        stats = message.stats
        earlier = self._stats.get(replica, NO_STATS)
        self._show(replica, stats)
        if stats.preemptions > earlier.preemptions:
            self.preempted.inc(stats.preemptions - earlier.preemptions)
        if stats.store is not None and stats.store != (stored := earlier.store or StoreStats()):
            self._record_store(stats.store, stored)
        if stats.peers is not None and stats.peers != (before := earlier.peers or PeerStats()):
            for name, counter in self.peers.items():
                counter.inc(getattr(stats.peers, name) - getattr(before, name))
        if stats.fed:
            self.fed.observe(stats.fed)
        if message.deltas:
            self.batch.observe(stats.running)
            self._tokens(message, inflight, now)
        for name, metrics in message.ended.items():
            self._end(name, metrics, inflight.get(name), now)

    def _record_store(self, stats: StoreStats, before: StoreStats) -> None:
        self.store_bytes.set(stats.bytes)
        for name, counter in self.store.items():
            counter.inc(getattr(stats, name) - getattr(before, name))

    def _show(self, replica: int, stats: Stats) -> None:
        """Set the gauges of the model to the sums over its replicas."""
        self._stats[replica] = stats
        every = self._stats.values()
        self.running.set(sum(one.running for one in every))
        self.waiting.set(sum(one.waiting for one in every))
        self.kv_usage.set(sum(one.blocks_used for one in every) / max(1, sum(self._num_blocks.values())))
        self.failing.set(max(one.failing for one in every))

    def _tokens(self, message: Deltas, inflight: Mapping[str, InflightRequest], now: float) -> None:
        # Number of answers by the time of their token before, which for most answers is that of the last step.
        gaps: dict[float, int] = {}
        for delta in message.deltas:
            key = (delta.request_id, delta.index)
            if delta.token_ids:
                last = self._last.get(key)
                if last is not None:
                    gaps[last] = gaps.get(last, 0) + 1
                elif delta.index == 0 and (request := inflight.get(delta.request_id)) is not None:
                    self.first_token.observe(now - request.submitted)
                self._last[key] = now
            if delta.exits:
                self._record_exits(key, delta)
            if delta.finish_reason is not None:
                self._last.pop(key, None)
                self._compare_depth(key)
                self._reasons[delta.request_id] = delta.finish_reason
        for last, count in gaps.items():
            self.between.observe(now - last, count)
        self.generated_tokens.inc(sum(len(delta.token_ids) for delta in message.deltas))
        self.generated_chars.inc(sum(len(delta.text) for delta in message.deltas))

    def _record_exits(self, key: tuple[str, int], delta: Delta) -> None:
        depth = self._depths.setdefault(key, BucketCounts(()))
        for exited in delta.exits:
            self.exit_layer.observe(exited.layers)
            depth.observe(exited.layers)

    def _compare_depth(self, key: tuple[str, int]) -> None:
        if (depth := self._depths.pop(key, None)) is not None and self._usual is not None:
            self._show_depth(depth.sum / depth.counts[0], *self._usual)

    def _show_depth(self, layers: float, usual: float, spread: float) -> None:
        """Compare the exit layers of the last ANSWERS answers or texts with the calibration, in standard deviations."""
        self._means.append(layers)
        self.above.set((sum(self._means) / len(self._means) - usual) / max(spread, 1e-3))

    def record_classified(self, layers: Sequence[int], calibrated: ClassifierThreshold | None) -> None:
        """Record the layers that texts used. calibrated: their rule, if it is a calibrated one whose spread is known."""
        for count in layers:
            self.exit_layer.observe(count)
            if calibrated is not None:
                self._show_depth(count, calibrated.mean_layers, calibrated.spread)

    def _end(self, name: str, metrics: RequestMetrics, request: InflightRequest | None, now: float) -> None:
        reason = self._reasons.pop(name, "abort")
        self.ended.labels(self._model, reason).inc()
        if request is None:
            return
        prompt = len(request.prompt)
        self.whole.observe(now - request.submitted)
        cached = min(metrics.cached_tokens, prompt)  # a replay may also find answer tokens
        http, who = request.http_request, request.principal.name
        log_request(self._model, name, http, who, reason, prompt, request.generated, cached, now - request.submitted)
        self._figures.used(who, prompt, request.generated)
        self.prompt_tokens.inc(prompt)
        self.cache_queries.inc(prompt)
        self.cache_hits.inc(cached)
        self.drafts.inc(metrics.drafts)
        self.drafted.inc(metrics.drafted)
        self.accepted.inc(metrics.accepted)
        for place, count in enumerate(metrics.accepted_at):
            self.accepted_at.labels(self._model, str(place)).inc(count)
        self.prompt_size.observe(prompt)
        self.answer_size.observe(request.generated)
        self.asked_n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self.asked_tokens.observe(request.params.max_tokens)
        if metrics.scheduled is None or metrics.first_token is None or metrics.last_token is None:
            return
        if request.replays:  # these times are of its last engine process alone
            return
        self.queued.observe(metrics.scheduled - metrics.arrival)
        self.prefill.observe(metrics.first_token - metrics.scheduled)
        self.decode.observe(metrics.last_token - metrics.first_token)
        self.inference.observe(metrics.last_token - metrics.scheduled)
        if request.generated > request.params.n:
            self.per_token.observe((metrics.last_token - metrics.first_token) / (request.generated / request.params.n - 1))

    def look(self, result: str) -> None:
        """Count the check of a finished answer: fit, unfit or unchecked. The last two fail their request."""
        self.looked.labels(self._model, result).inc()

    def record_transcript(self, transcript: Transcript, windows: int) -> None:
        """Count a transcribed file. windows: its requests of the engine."""
        self.sound_seconds.inc(transcript.duration)
        self.sound_windows.inc(windows)
        self.sound_fallbacks.inc(len(transcript.fallbacks))
        self.sound_skipped.inc(sum(one.end - one.start for one in transcript.skipped))

    def supervise(self, state: State, replicas: Sequence[EngineRequests], banned: int) -> None:
        """Record the state of the engine processes."""
        self.restarts.set(sum(one.replica.supervision.restarts for one in replicas))
        self.banned.set(banned)
        for each in State:
            self.states.labels(self._model, each.value).set(each is state)
        for event in ENDS:
            self.ends.labels(self._model, event.value).set(sum(one.replica.supervision.ends[event] for one in replicas))
        for one in replicas if len(replicas) > 1 else ():
            labels = self._model, one.name
            self.replica_ready.labels(*labels).set(one.replica.state is State.READY)
            self.replica_restarts.labels(*labels).set(one.replica.supervision.restarts)
            self.replica_running.labels(*labels).set(one.stats.running)
            self.replica_waiting.labels(*labels).set(one.stats.waiting)
            used = one.stats.blocks_used / max(1, self._num_blocks.get(one.number, 1))
            self.replica_kv_usage.labels(*labels).set(used)

    def route(self, replica: str, tokens: int, hit: int) -> None:
        """Count the prompt of a request that the router sends to a replica, and the tokens expected in its prefix cache."""
        self.routed_tokens.labels(self._model, replica).inc(tokens)
        self.routed_hits.labels(self._model, replica).inc(hit)

    def begin(self, loaded: Loaded, replica: int = 0) -> None:
        """Record that an engine process is ready."""
        self._num_blocks[replica] = loaded.num_blocks
        self._usual = None if loaded.rule is None else (loaded.rule.layers, loaded.rule.spread)

    def replay(self) -> None:
        """Count a request that is sent to a new engine process."""
        self.replays.inc()

    def end(self, inflight: Mapping[str, InflightRequest], replica: int = 0) -> None:
        """Record that an engine process ended: nothing runs there, its counts start at 0. `inflight`: requests that go on."""
        self._last = {key: last for key, last in self._last.items() if key[0] in inflight}
        self._depths = {key: depth for key, depth in self._depths.items() if key[0] in inflight}
        self._reasons = {name: reason for name, reason in self._reasons.items() if name in inflight}
        self._show(replica, NO_STATS)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._figures.gauge(name, text).labels(self._model)

    def _by_replica(self, name: str, text: str) -> Gauge:
        return self._figures.gauge(name, text, BY_REPLICA)

    def _counter(self, name: str, text: str) -> Counter:
        return self._figures.counter(name, text).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._figures.histogram(name, text, buckets).labels(self._model)
