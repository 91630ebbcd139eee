// The token view: every token shaded by its probability; its alternatives on hover, focus or tap.
import { $, h } from "/page/dom.js";
import { deepest, exitSummary, writer } from "/page/exits.js";
import { number, t } from "/page/texts.js";

export const ALTERNATIVES = 5;

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return `${number(share, share >= 99.95 ? 0 : share < 10 ? 2 : 1)} %`;
};

/** Spaces and line ends made visible, for the list of alternatives. */
const spelled = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

/** The tokens as buttons in a flow of text. `cascade`: a smaller model might write them, and no exit. */
export function tokenView(tokens, cascade) {
  const node = h("div", { className: "tokens", role: "group", "aria-label": t("tokens") });
  const most = deepest(tokens);
  tokens.forEach((token, index) => {
    const step = Math.min(9, Math.floor(Math.exp(token.logprob) * 10));
    const text = token.token.startsWith("bytes:") ? token.token.slice(6) : token.token;
    const left = token.exit && token.exit.layers < most ? " left" : "";
    const one = h("span", { className: `token p${step}${left}`, tabIndex: index ? -1 : 0 }, text.replaceAll("\n", "⏎\n"));
    one.setAttribute("role", "button"); // it shows the alternatives
    one.setAttribute("aria-label", `${spelled(text)} ${percent(token.logprob)}${left && ` ${writer(token.exit, cascade)}`}`);
    node.append(one);
  });
  const at = (target) => {
    const one = target.closest?.(".token");
    return one && node.contains(one) ? one : null;
  };
  const show = (event) => {
    const one = at(event.target);
    if (one) showTip(one, tokens[[...node.children].indexOf(one)], cascade);
  };
  const scale = h("div", { className: "scale" }, t("unlikely"), ...[0, 1, 3, 5, 7, 9].map((step) => h("i", { className: `p${step}` })), t("likely"));
  node.addEventListener("pointerover", show);
  node.addEventListener("focusin", show);
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("focusout", hideTip);
  node.addEventListener("keydown", (event) => walk(event, at(event.target)));
  return h("div", {}, node, scale, exitSummary(tokens, cascade, (index) => choose(node.children[index])));
}

function walk(event, one) {
  const next = { ArrowRight: one?.nextElementSibling, ArrowLeft: one?.previousElementSibling }[event.key];
  if (event.key === "Escape") hideTip();
  if (!next) return;
  event.preventDefault();
  choose(next);
}

/** The one token of a view that the Tab key comes to. */
function choose(one) {
  for (const other of one.parentNode.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  one.tabIndex = 0;
  one.focus();
}

function showTip(one, token, cascade) {
  const tip = $("#tip");
  const best = token.top_logprobs ?? [];
  const row = (entry, drawn) => {
    const bar = h("i");
    bar.style.setProperty("--share", Math.exp(entry.logprob));
    return h("tr", { className: drawn ? "drawn" : "" }, h("td", {}, spelled(entry.token.replace(/^bytes:/, ""))), h("td", {}, bar), h("td", {}, percent(entry.logprob)));
  };
  const rows = best.map((entry) => row(entry, entry.token === token.token));
  if (!best.some((entry) => entry.token === token.token)) {
    rows.push(row(token, true));
    if (best.length) rows.push(h("tr", {}, h("td", { colSpan: 3, className: "faint" }, t("among", { n: best.length }))));
  }
  if (token.exit) rows.push(h("tr", {}, h("td", { colSpan: 3, className: "faint" }, writer(token.exit, cascade))));
  tip.replaceChildren(h("table", {}, h("tbody", {}, ...rows)));
  tip.hidden = false;
  const box = one.getClientRects()[0];
  const size = tip.getBoundingClientRect();
  const above = box.top - size.height - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

export function hideTip() {
  $("#tip").hidden = true;
}
