// How messages look: the user's as written, the model's as Markdown that grows while it streams, with figures and actions.
import { button, copier } from "/page/buttons.js";
import { $, h } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { Markdown } from "/page/markdown.js";
import { hideTip, tokenView } from "/page/tokens.js";
import { number, seconds, t } from "/page/texts.js";

/** One message on the page. `acts`: edit(message, text) and again(message). */
export class MessageView {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.asTokens = false;
    this.body = h("div", { className: "body" });
    this.foot = h("div", { className: "foot" });
    this.trouble = h("div", { className: "trouble", role: "alert", hidden: true });
    this.node = h("li", { className: message.role }, h("h2", { className: "unseen" }, t(message.role === "user" ? "you" : "answer")), this.body, this.trouble, this.foot);
    this.markdown = new Markdown(this.body);
    this.update();
  }

  update() {
    const { message } = this;
    if (message.role === "user") {
      this.body.textContent = message.content;
      this.foot.replaceChildren(button("edit", "edit", () => this.edit()), copier(() => message.content));
      return;
    }
    this.node.classList.toggle("running", !!message.running);
    this.node.setAttribute("aria-busy", !!message.running);
    if (this.asTokens && message.tokens) this.body.replaceChildren(tokenView(message.tokens));
    else if (message.running && !message.content) this.body.replaceChildren(h("span", { className: "dots", role: "img", "aria-label": t("waiting") }, h("i"), h("i"), h("i")));
    else if (message.content) this.markdown.set(message.content);
    else this.body.replaceChildren();
    this.showTrouble();
    if (!message.running) this.finish();
    else this.foot.replaceChildren();
  }

  finish() {
    const { message } = this;
    const said = figures(message).map((text) => h("span", {}, text));
    const actions = [button("again", "again", () => this.acts.again(message))];
    if (message.content) actions.unshift(copier(() => message.content));
    if (message.tokens?.length) {
      const toggle = button("tokens", "tokens", () => this.toggle(), { "aria-pressed": String(this.asTokens) });
      actions.push(toggle);
    }
    this.foot.replaceChildren(...actions, h("p", { className: "figures" }, ...said));
  }

  toggle() {
    this.asTokens = !this.asTokens;
    this.markdown.closed = true;
    hideTip();
    this.body.classList.remove("plain");
    this.body.replaceChildren();
    this.markdown = new Markdown(this.body);
    this.update();
    $("[aria-pressed]", this.foot)?.focus();
  }

  showTrouble() {
    const { error } = this.message;
    clearInterval(this.clock);
    this.trouble.hidden = !error;
    if (!error) return;
    const names = { key: "errorKey", busy: "errorBusy", down: "errorDown", unreachable: "errorUnreachable", refused: "errorRefused", failed: "errorFailed" };
    const text = error.message || (error.kind === "unreachable" ? t("errorUnreachableText") : "");
    const retry = h("button", { type: "button", onclick: () => this.acts.again(this.message) }, t("tryAgain"));
    this.trouble.replaceChildren(icon("warn"), h("div", {}, h("strong", {}, t(names[error.kind] ?? "errorFailed")), text && h("p", {}, text)), retry);
    let left = error.until ? Math.ceil((error.until - Date.now()) / 1000) : 0;
    const tick = () => {
      retry.textContent = left > 0 ? t("tryIn", { s: left }) : t("tryAgain");
      if (left-- <= 0) clearInterval(this.clock);
    };
    tick();
    if (left >= 0 && error.until) this.clock = setInterval(tick, 1000);
  }

  edit() {
    const area = h("textarea", { value: this.message.content, rows: Math.min(10, this.message.content.split("\n").length + 1), "aria-label": t("edit") });
    const done = (send) => {
      const text = area.value.trim();
      if (send && text) this.acts.edit(this.message, text);
      else this.update();
      $("#prompt").focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey && !event.isComposing)) {
        event.preventDefault();
        done(event.key === "Enter");
      }
    });
    this.body.replaceChildren(area);
    this.foot.replaceChildren(
      h("button", { type: "button", className: "quiet", onclick: () => done(false) }, t("cancel")),
      h("button", { type: "button", className: "primary", onclick: () => done(true) }, t("save")),
    );
    area.focus();
  }
}

function figures({ figures: made, finish, stopped, error, content }) {
  if (!made) return stopped && !content ? [t("stopped")] : [];
  const said = [];
  if (made.ttft !== null) said.push(t("ttft", { value: seconds(made.ttft) }));
  if (made.speed) said.push(t("speed", { value: number(made.speed, made.speed < 10 ? 1 : 0) }));
  if (made.tokens) said.push(made.tokens === 1 ? t("one") : t("counted", { n: number(made.tokens) }));
  if (made.prompt) said.push(t("promptTokens", { n: number(made.prompt) }));
  if (made.cached) said.push(t("cachedTokens", { n: number(made.cached) }));
  if (finish === "length") said.push(t("length"));
  if (stopped) said.push(t("stopped"));
  if (error && content) said.push(t("broken"));
  return said;
}
