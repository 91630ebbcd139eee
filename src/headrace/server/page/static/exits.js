// What the layers did, under the token view: a strip of the layers by token, and the line that sums it up.
import { h, svg } from "/page/dom.js";
import { number, t } from "/page/texts.js";

/** After how many layers, or by whom, a token was written, and how sure was who is asked first. */
export function writer({ layers, confidence }, cascade) {
  const by = !cascade ? "layers" : layers ? "byItself" : "bySmaller";
  return t(confidence == null ? by : `${by}Sure`, { n: layers, sure: number((confidence ?? 0) * 100, 1) });
}

/** How many layers the whole model has: the first token of an answer is always its own. */
export const deepest = (tokens) => Math.max(...tokens.map((token) => token.exit?.layers ?? 0));

/** Both, or nothing where no token says who wrote it. A click on the strip calls `choose` with the token's index. */
export function exitSummary(tokens, cascade, choose) {
  const exits = tokens.filter((token) => token.exit).map((token) => token.exit.layers);
  if (!exits.length) return null;
  const most = deepest(tokens);
  const early = exits.filter((depth) => depth < most).length;
  const mean = exits.reduce((sum, depth) => sum + depth, 0) / exits.length;
  const sums = t(cascade ? "turns" : "exits", { mean: number(mean, 1), deepest: most, early: number((100 * early) / exits.length) });
  const line = h("p", { className: "exits faint" }, h("span", { className: "token left" }, t(cascade ? "bySmaller" : "left")), sums);
  return h("div", {}, !cascade && early > 0 && strip(tokens, most, sums, choose), line);
}

/** Tokens from left to right, each as high as its layers. */
function strip(tokens, most, sums, choose) {
  const top = (token) => most - (token.exit?.layers ?? 0);
  const outline = tokens.map((token, i) => `V${top(token)}H${i + 1}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${tokens.length} ${most}`, preserveAspectRatio: "none", role: "img", "aria-label": sums });
  picture.append(svg("path", { d: `M0 ${most}${outline}V${most}Z` }));
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    choose(Math.min(tokens.length - 1, Math.floor(((event.clientX - box.left) / box.width) * tokens.length)));
  });
  const depths = [...new Set([most, ...tokens.filter((token) => token.exit).map((token) => token.exit.layers)])];
  const ticks = depths.map((depth) => {
    const tick = h("span", {}, String(depth));
    tick.style.setProperty("--height", depth / most);
    return tick;
  });
  return h("figure", { className: "strip" }, h("div", { className: "depths faint" }, ...ticks), picture);
}
