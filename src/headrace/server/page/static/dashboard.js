// The dashboard: tiles with the newest figures, plots of the last minutes.
import { $, h } from "/page/dom.js";
import { Plot } from "/page/plot.js";
import { number, t } from "/page/texts.js";

const percentiles = (kind) => [[`${kind}_p50`, "one", "p50"], [`${kind}_p90`, "two", "p90"], [`${kind}_p99`, "three", "p99"]];

const PLOTS = [
  new Plot("throughput", "rate", [["generated", "one", "generated"], ["prompted", "two", "prompted"]]),
  new Plot("queue", "count", [["running", "one", "running"], ["queued", "three", "queued"]]),
  new Plot("firstToken", "time", percentiles("ttft")),
  new Plot("between", "time", percentiles("itl")),
  new Plot("kv", "share", [["kv", "one", "used"]]),
  new Plot("prefixes", "share", [["hits", "two", "hits"]]),
];

export function drawDashboard(history) {
  const plots = $("#plots");
  if (!plots.childElementCount) plots.append(...PLOTS.map((plot) => plot.node));
  const now = history.readings.at(-1);
  if (!now) return;
  const last = history.points.at(-1) ?? {};
  const share = (value) => (value == null ? "–" : `${number(value * 100, value > 0 && value < 0.1 ? 1 : 0)} %`);
  const tiles = [
    ["tileSpeed", number(last.generated ?? 0)], ["tileRunning", number(last.running ?? now.sums.num_requests_running ?? 0)],
    ["tileQueued", number(last.queued ?? now.sums.num_requests_waiting ?? 0)], ["tileKv", share(last.kv ?? now.sums.kv_cache_usage_perc ?? 0)],
    ["tileHits", share(last.hits)], ["tileDone", number(now.sums.request_success_total ?? 0)],
    ["tileRestarts", number(now.sums.engine_restarts ?? 0)],
  ];
  $("#tiles").replaceChildren(...tiles.map(([name, value]) => h("div", { className: "tile" }, h("b", {}, value), h("span", {}, t(name)))));
  for (const plot of PLOTS) plot.draw(history.points, now.at);
}
