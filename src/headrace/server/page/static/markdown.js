// Text as the server's Markdown, which grows while it streams.
import { getJson } from "/page/api.js";
import { copier } from "/page/buttons.js";
import { fromRenderer, h } from "/page/dom.js";
import { t } from "/page/texts.js";

const PAUSE = 90; // milliseconds between two renderings of an answer that grows

/** Text shown as the server's Markdown; only blocks that changed are replaced, so that a selection above stays. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.text = this.shown = "";
    this.blocks = []; // the HTML of each block that is shown
    this.busy = false;
    this.closed = false; // another view has the node
  }

  set(text) {
    this.text = text;
    this.settle();
    if (!this.busy && text !== this.shown) this.render();
  }

  async render() {
    this.busy = true;
    const text = this.text;
    const begun = performance.now();
    try {
      const { html } = await getJson("/page/render", { body: { text } });
      if (this.closed) return;
      this.put(fromRenderer(html));
    } catch {
      if (this.closed) return;
      this.plain(text);
    }
    this.shown = text;
    this.settle();
    await new Promise((resolve) => setTimeout(resolve, Math.max(PAUSE, 3 * (performance.now() - begun))));
    this.busy = false;
    if (!this.closed && this.text !== this.shown) this.render();
  }

  /** Whether all of the text is shown. */
  settle() {
    this.node.toggleAttribute("data-settled", this.text === this.shown);
  }

  put(nodes) {
    const made = nodes.filter((node) => node.nodeType === Node.ELEMENT_NODE);
    level(made);
    const html = made.map((node) => node.outerHTML);
    let same = 0;
    while (same < html.length && html[same] === this.blocks[same]) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const node of made.slice(same)) this.node.append(framed(node));
    this.blocks = html;
    this.node.classList.remove("plain");
    this.node.dispatchEvent(new Event("grown", { bubbles: true }));
  }

  plain(text) {
    this.blocks = [];
    this.node.classList.add("plain");
    this.node.replaceChildren(text);
    this.node.dispatchEvent(new Event("grown", { bubbles: true }));
  }
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
