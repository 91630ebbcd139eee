// How messages look: the user's as written, the model's as Markdown that grows while it streams, with figures and actions.
import { button, copier, worded } from "/page/buttons.js";
import { $, h } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { Markdown } from "/page/markdown.js";
import { language, number, seconds, t } from "/page/texts.js";
import { split, Thought } from "/page/thoughts.js";
import { hideTip, tokenView } from "/page/tokens.js";
import { versionPicker } from "/page/versions.js";

/** One message on the page. `acts`: edit(message, text), again(message), goOn(message), revise(message) (what it answers),
 * score(message) to tokens, and last(message), whether it is. */
export class MessageView {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.asTokens = false;
    this.thought = new Thought();
    this.body = h("div", { className: message.role === "user" ? "body" : "body prose" });
    this.foot = h("div", { className: "foot" });
    this.trouble = h("div", { className: "trouble", role: "alert", hidden: true });
    const name = h("h2", { className: "unseen" }, t(message.role === "user" ? "you" : "answer"));
    this.node = h("li", { className: message.role }, name, message.role !== "user" && this.thought.node, this.body, this.trouble, this.foot);
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
    const { thought, text, open } = split(message);
    this.node.classList.toggle("running", !!message.running);
    this.node.setAttribute("aria-busy", !!message.running);
    this.thought.set(this.asTokens ? "" : thought, open && message.running);
    if (this.asTokens && message.tokens) this.body.replaceChildren(tokenView(message.tokens, message.cascade));
    else if (message.running && !message.content && !thought) this.body.replaceChildren(h("span", { className: "dots", role: "img", "aria-label": t("waiting") }, h("i"), h("i"), h("i")));
    else this.markdown.set(text, !message.running);
    this.showTrouble();
    this.settle();
  }

  /** What can be done with an answer, and its figures, once it has ended. */
  settle() {
    if (this.message.role === "user") return;
    if (this.message.running) this.foot.replaceChildren();
    else this.finish();
  }

  finish() {
    const { message } = this;
    const said = figures(message).map((text) => h("span", {}, text));
    const long = message.error?.kind === "long"; // the same again would be as long
    const actions = long ? [] : [worded("again", "againWord", "again", () => this.acts.again(message))];
    if (message.content) {
      actions.unshift(copier(() => split(message).text, true));
      if (message.tokens?.length || !message.thought) {
        actions.push(worded("tokens", "tokens", "tokensHint", () => this.toggle(), { "aria-pressed": String(this.asTokens) }));
      }
      if (unfinished(message) && this.acts.last(message)) actions.push(worded("goOn", "goOn", "goOnHint", () => this.acts.goOn(message)));
    }
    const picker = this.acts.last(message) && versionPicker(message, () => this.acts.chosen(message));
    this.foot.replaceChildren(h("div", { className: "acts" }, ...actions, picker), h("p", { className: "figures" }, ...said));
  }

  /** From text to tokens and back. Tokens that were not recorded are asked for. */
  async toggle() {
    const { message } = this;
    if (!this.asTokens && !message.tokens?.length) {
      $("[aria-pressed]", this.foot).disabled = true;
      try {
        message.tokens = await this.acts.score(message);
      } catch (error) {
        this.update();
        this.foot.lastChild.replaceChildren(h("span", { role: "alert" }, `${t("noTokens")} ${error.message}`));
        return;
      }
    }
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
    const names = { key: "errorKey", busy: "errorBusy", down: "errorDown", unreachable: "errorUnreachable", long: "errorLong", refused: "errorRefused", failed: "errorFailed" };
    const text = reason(error);
    const long = error.kind === "long"; // the same again would be as long
    const retry = h("button", { type: "button", onclick: () => (long ? this.acts.revise(this.message) : this.acts.again(this.message)) }, t(long ? "editPrompt" : "tryAgain"));
    const detail = error.message && error.message !== text ? { title: error.message } : {};
    this.trouble.replaceChildren(icon("warn"), h("div", detail, h("strong", {}, t(names[error.kind] ?? "errorFailed")), text && h("p", {}, text)), retry);
    if (long) return;
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

/** Why there is no answer, in the page's language; the server's own words for what the page has no words for. */
function reason({ kind, message = "" }) {
  const [most, asked] = kind === "long" ? (message.match(/\d+/g) ?? []).map(Number) : [];
  if (asked) return t("errorLongText", { most: number(most), asked: number(asked) });
  if (message && language() === "en") return message;
  const own = { unreachable: "errorUnreachableText", busy: "errorBusyText", down: "errorDownText", key: "errorKeyText" }[kind];
  return own ? t(own) : message;
}

/** Whether an answer ended before the model meant it to. */
function unfinished({ finish, stopped, cut, error }) {
  return finish === "length" || stopped || cut || !!error;
}

function figures({ figures: made, finish, stopped, cut, error, content }) {
  const said = [];
  if (made) {
    if (made.ttft !== null) said.push(t("ttft", { value: seconds(made.ttft) }));
    if (made.speed) said.push(t("speed", { value: number(made.speed, made.speed < 10 ? 1 : 0) }));
    if (made.tokens) said.push(made.tokens === 1 ? t("one") : t("counted", { n: number(made.tokens) }));
    if (made.by) said.push(t("by", { model: made.by }));
    if (made.prompt) said.push(t(made.cached ? "promptCached" : "promptTokens", { n: number(made.prompt), cached: number(made.cached ?? 0) }));
  }
  if (finish === "length") said.push(t("length"));
  if (stopped) said.push(t("stopped"));
  if (cut || (error && content)) said.push(t("broken"));
  return said;
}
