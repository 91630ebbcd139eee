// What a model thought before it answered: folded, above the answer.
import { h } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { Markdown } from "/page/markdown.js";
import { t } from "/page/texts.js";

const [OPEN, CLOSE] = ["<think>", "</think>"];

/** A message's thought and its text; `open` while the thought has not ended. Templates may write the opening mark themselves. */
export function split({ content, thought = "" }) {
  const text = content.trimStart();
  const end = text.indexOf(CLOSE);
  if (!text.startsWith(OPEN) && end < 0) return { thought, text: content, open: !content };
  const begin = text.startsWith(OPEN) ? OPEN.length : 0;
  if (end < 0) return { thought: thought + text.slice(begin), text: "", open: true };
  return { thought: (thought + text.slice(begin, end)).trim(), text: text.slice(end + CLOSE.length).trimStart(), open: false };
}

/** A thought on the page; it is made into HTML when it is unfolded. */
export class Thought {
  constructor() {
    this.body = h("div", { className: "prose" });
    this.word = h("span");
    this.node = h("details", { className: "thought", hidden: true, ontoggle: () => this.draw() }, h("summary", {}, icon("thought"), this.word), this.body);
    this.markdown = new Markdown(this.body);
    this.text = "";
  }

  set(text, running) {
    this.text = text.trim();
    this.node.hidden = !this.text;
    this.node.classList.toggle("running", !!running);
    this.word.textContent = t(running ? "thinking" : "thought");
    this.draw();
  }

  draw() {
    if (this.node.open && this.text) this.markdown.set(this.text);
  }
}
