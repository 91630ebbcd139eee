// What the server says of itself: its state from /health, its figures from /metrics.
import { getJson, getText } from "/page/api.js";
import { keepHistory, keptHistory } from "/page/storage.js";

export const KEEP = 300; // seconds of history
const WINDOW = 30; // seconds whose tokens a percentile is of

/** One reading of /metrics: sums over labels (of shares the largest), histograms as [upper bound, cumulative count] pairs. */
export function parse(text) {
  const sums = {};
  const buckets = {};
  for (const line of text.split("\n")) {
    const found = /^headrace:(\w+?)(?:\{(.*)\})? ([-+.\w]+)$/.exec(line);
    if (!found) continue;
    const [, name, labels, written] = found;
    const value = Number(written);
    const bound = /(?:^|,)le="([^"]+)"/.exec(labels ?? "");
    if (bound) {
      const histogram = (buckets[name.replace(/_bucket$/, "")] ??= new Map());
      const upper = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      histogram.set(upper, (histogram.get(upper) ?? 0) + value);
    } else if (name.endsWith("_perc")) sums[name] = Math.max(sums[name] ?? 0, value); // of several models the fullest
    else sums[name] = (sums[name] ?? 0) + value;
  }
  return { sums, buckets };
}

/** The value under which a share of the new observations lie, linear within a bucket; null where there are none. */
export function percentile(before, after, share) {
  if (!after) return null;
  const counts = [...after].sort((a, b) => a[0] - b[0]).map(([upper, count]) => [upper, count - (before?.get(upper) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let lower = 0;
  let below = 0;
  for (const [upper, count] of counts) {
    if (count >= share * total) {
      if (upper === Infinity) return lower;
      return lower + ((upper - lower) * (share * total - below)) / (count - below);
    }
    [lower, below] = [upper, count];
  }
  return lower;
}

/** Readings over time. `points`: those of this tab before a reload. */
export class History {
  constructor(points = []) {
    this.readings = []; // {at (seconds since 1970), sums, buckets}
    this.points = points; // the plotted values: {at, name: value or null}
    if (points.length) points.push({ at: points.at(-1).at }); // a gap
  }

  add(text, at) {
    const now = { at, ...parse(text) };
    const last = this.readings.at(-1);
    this.readings.push(now);
    if (last) this.points.push(last.sums.generation_tokens_total > now.sums.generation_tokens_total ? { at } : this.point(last, now));
    while (this.readings[0].at < at - WINDOW) this.readings.shift();
    while (this.points[0]?.at < at - KEEP) this.points.shift();
  }

  point(last, now) {
    const rate = (name) => ((now.sums[name] ?? 0) - (last.sums[name] ?? 0)) / (now.at - last.at);
    const early = this.readings[0];
    const within = (name, share) => percentile(early.buckets[name], now.buckets[name], share);
    const ask = (now.sums.prefix_cache_queries_total ?? 0) - (early.sums.prefix_cache_queries_total ?? 0);
    const hit = (now.sums.prefix_cache_hits_total ?? 0) - (early.sums.prefix_cache_hits_total ?? 0);
    const point = {
      at: now.at, generated: rate("generation_tokens_total"), prompted: rate("prompt_tokens_total"),
      running: now.sums.num_requests_running, queued: now.sums.num_requests_waiting,
      kv: now.sums.kv_cache_usage_perc, hits: ask > 0 ? hit / ask : null,
    };
    for (const share of [0.5, 0.9, 0.99]) {
      const tail = `p${share * 100}`;
      point[`ttft_${tail}`] = within("time_to_first_token_seconds", share);
      point[`itl_${tail}`] = within("inter_token_latency_seconds", share);
    }
    return point;
  }
}

/** Asks every `period` milliseconds while the page is seen; tells `onState` and `onFigures`. */
export class Watch {
  constructor(onState, onFigures) {
    this.onState = onState;
    this.onFigures = onFigures;
    this.history = new History(keptHistory());
    addEventListener("pagehide", () => keepHistory(this.history.points));
    this.period = 2000;
    this.timer = null;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  async ask() {
    clearTimeout(this.timer);
    let state = "unreachable";
    try {
      const health = await getJson("/health");
      state = health.status;
      this.history.add(await getText("/metrics"), Date.now() / 1000);
      this.onState(state, health);
      this.onFigures(this.history);
    } catch (error) {
      this.onState(error.kind === "key" ? "locked" : state, {}, error);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), state === "ready" ? this.period : 1000);
  }
}
