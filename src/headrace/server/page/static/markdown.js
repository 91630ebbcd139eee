// An answer as HTML from the server's Markdown renderer. Text whose HTML is late appears as plain text meanwhile.
import { getJson } from "/page/api.js";
import { copier } from "/page/buttons.js";
import { fromRenderer, h } from "/page/dom.js";
import { t } from "/page/texts.js";

const PAUSE = 90; // milliseconds between two renderings of an answer that grows
const LONGEST_PAUSE = 1000; // a slow renderer gets a longer pause, up to this
const LATE = 150; // milliseconds that new text waits for its HTML before it appears as plain text
const RETRIES = 5; // failed renderings of the same text; the pause doubles after each
const PERMANENT = ["refused", "key"]; // kinds of ApiError that a second attempt does not change

/** Text shown as HTML; only blocks that changed are replaced, so that a selection above them stays. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.shown = ""; // the text whose HTML is shown, or the plain text that will get none
    this.visible = 0; // characters of the text on the screen
    this.blocks = []; // the HTML of each block that is shown
    this.tail = h("span", { className: "tail" }); // plain text behind the last HTML
    this.busy = false;
    this.ended = false;
    this.failures = 0;
    this.wake = () => {};
    this.closed = false; // another view owns the node
  }

  /** `ended`: the text is complete, so the pause between two renderings is skipped. */
  set(text, ended = false) {
    this.text = text;
    this.ended = ended;
    if (!text) this.shown = text;
    this.settle();
    if (!this.blocks.length || !text.startsWith(this.shown)) this.plain(text);
    else setTimeout(() => this.reveal(text), LATE);
    if (ended) this.wake();
    if (!this.busy && text !== this.shown) this.render();
  }

  async render() {
    this.busy = true;
    const text = this.text;
    const begun = performance.now();
    let pause = null;
    try {
      const { html } = await getJson("/page/render", { body: { text } });
      if (this.current(text)) this.put(fromRenderer(html), text);
      this.failures = 0;
    } catch (error) {
      if (this.current(text)) this.plain(this.text);
      if (PERMANENT.includes(error.kind) || this.failures >= RETRIES) this.shown = text;
      else pause = 1000 * 2 ** this.failures++;
    }
    this.settle();
    pause ??= Math.min(LONGEST_PAUSE, Math.max(PAUSE, 3 * (performance.now() - begun)));
    await new Promise((resolve) => {
      this.wake = resolve;
      setTimeout(resolve, pause);
    });
    this.busy = false;
    if (!this.closed && this.text !== this.shown) this.render();
  }

  /** Whether a rendering of `text` still belongs on the screen. */
  current(text) {
    return !this.closed && text && this.text.startsWith(text);
  }

  /** Whether all of the text is shown. */
  settle() {
    this.node.toggleAttribute("data-settled", this.text === this.shown);
  }

  put(nodes, text) {
    this.tail.remove();
    const made = nodes.filter((node) => node.nodeType === Node.ELEMENT_NODE);
    if (!this.ended && made.at(-1)?.matches("pre") && !made.at(-1).textContent.trim()) made.pop(); // its code follows
    level(made);
    this.shown = text;
    if (!made.length) return this.plain(this.text);
    const html = made.map((node) => node.outerHTML);
    let same = 0;
    while (same < html.length && html[same] === this.blocks[same]) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const node of made.slice(same)) this.node.append(framed(node));
    this.blocks = html;
    this.visible = Math.max(this.visible, text.length);
    this.node.classList.remove("plain");
    this.drawTail();
    this.grown();
  }

  plain(text) {
    this.blocks = [];
    this.visible = text.length;
    this.node.classList.add("plain");
    this.node.replaceChildren(text);
    this.grown();
  }

  /** Show text that has waited long enough for its HTML. */
  reveal(text) {
    if (!this.current(text) || !this.blocks.length || text.length <= this.visible) return;
    this.visible = text.length;
    this.drawTail();
    this.grown();
  }

  drawTail() {
    const rest = this.text.slice(this.shown.length, this.visible);
    this.tail.remove();
    this.tail.textContent = rest;
    if (rest) innermost(this.node).append(this.tail);
  }

  grown() {
    this.node.dispatchEvent(new Event("grown", { bubbles: true }));
  }
}

/** The last paragraph, list item or block of code within a node: text that follows belongs there until it is rendered. */
function innermost(node) {
  const last = node.lastElementChild;
  return last?.matches("p, ul, ol, li, blockquote, div.code, pre, pre > code") ? innermost(last) : node;
}

/** Headings are below their answer's, and skip no level, whatever the model wrote. */
function level(nodes) {
  let last = 2;
  for (const node of nodes.flatMap((one) => [one, ...one.querySelectorAll("*")]).filter((one) => /^H[1-6]$/.test(one.tagName))) {
    last = Math.min(Number(node.tagName[1]) + 2, last + 1);
    node.setAttribute("aria-level", last);
  }
}

/** Code gets a bar with its language and a button to copy it; wide tables and formulas scroll. */
function framed(node) {
  for (const link of node.querySelectorAll?.("a[href]") ?? []) link.target = "_blank";
  if (node.tagName === "TABLE") return h("div", { className: "wide-table", tabIndex: 0 }, node);
  if (node.matches("p:has(> math[display=block]:only-child)")) return h("div", { className: "formula", tabIndex: 0 }, node.firstElementChild);
  if (node.tagName !== "PRE") return node;
  const language = /language-([\w+#.-]+)/.exec(node.firstElementChild?.className ?? "")?.[1] ?? t("code");
  node.tabIndex = 0;
  return h("div", { className: "code" }, h("div", { className: "bar" }, h("span", {}, language), copier(() => node.textContent)), node);
}
