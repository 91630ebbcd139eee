// The conversation in view: sending, streaming, stopping, asking again, editing.
import { stream } from "/page/api.js";
import { MessageView } from "/page/answer.js";
import { $, h, say } from "/page/dom.js";
import { loadConversations, saveConversations, settings } from "/page/storage.js";
import { ALTERNATIVES } from "/page/tokens.js";
import { t } from "/page/texts.js";

const NEAR = 80; // pixels from the end within which the view follows an answer
const TITLE = 60; // characters

export class Chat {
  /** `hooks`: changed() when the list of conversations did, model() the model's name, key() to ask for a key. */
  constructor(hooks) {
    this.hooks = hooks;
    this.list = loadConversations();
    this.now = null;
    this.views = new Map();
    this.job = null; // {message, conversation, controller}
    this.follow = true;
    $("#scroll").addEventListener("scroll", () => this.scrolled());
    $("#scroll").addEventListener("grown", () => this.follow && this.toEnd());
    $("#latest").addEventListener("click", () => this.toEnd());
  }

  // -- conversations --------------------------------------------------------------------------------------------------
  open(conversation) {
    this.now = conversation;
    this.views.clear();
    this.follow = true;
    this.show();
    this.hooks.changed();
    requestAnimationFrame(() => this.toEnd());
  }

  show() {
    const messages = this.now?.messages ?? [];
    for (const message of [...this.views.keys()]) if (!messages.includes(message)) this.views.delete(message);
    const acts = { edit: (message, text) => this.edit(message, text), again: (message) => this.again(message) };
    for (const message of messages) if (!this.views.has(message)) this.views.set(message, new MessageView(message, acts));
    $("#messages").replaceChildren(...messages.map((message) => this.views.get(message).node));
    $("#empty").hidden = messages.length > 0;
    this.buttons();
  }

  remove(conversation) {
    if (this.job?.conversation === conversation) this.stop();
    const place = this.list.indexOf(conversation);
    this.list.splice(place, 1);
    this.save();
    if (this.now === conversation) this.open(null);
    return () => {
      this.list.splice(place, 0, conversation);
      this.save();
    };
  }

  save() {
    if (!saveConversations(this.list)) this.hooks.full();
    this.hooks.changed();
  }

  // -- what the user does ---------------------------------------------------------------------------------------------
  send(text) {
    if (this.job || !text.trim()) return false;
    if (!this.now) {
      this.now = { id: crypto.randomUUID?.() ?? String(Date.now()), title: text.trim().slice(0, TITLE), made: Date.now(), messages: [] };
      this.list.unshift(this.now);
    }
    this.now.messages.push({ role: "user", content: text.trim() });
    this.answer();
    return true;
  }

  again(message) {
    if (this.job || !this.now) return;
    const place = this.now.messages.indexOf(message ?? this.now.messages.at(-1));
    if (place < 0) return;
    this.now.messages.length = this.now.messages[place].role === "user" ? place + 1 : place;
    this.answer();
  }

  edit(message, text) {
    this.stop();
    const place = this.now.messages.indexOf(message);
    this.now.messages.length = place;
    if (!place) this.now.title = text.slice(0, TITLE);
    this.now.messages.push({ role: "user", content: text });
    this.job = null;
    this.answer();
  }

  editLast() {
    const last = this.now?.messages.findLast((message) => message.role === "user");
    if (last && !this.job) this.views.get(last).edit();
  }

  stop() {
    this.job?.controller.abort();
  }

  // -- an answer ------------------------------------------------------------------------------------------------------
  async answer() {
    const conversation = this.now;
    const body = request(conversation.messages, this.hooks.model());
    const message = { role: "assistant", content: "", running: true, figures: null };
    if (settings.tokens) message.tokens = [];
    conversation.messages.push(message);
    const job = { message, conversation, controller: new AbortController() };
    this.job = job;
    this.follow = true;
    this.show();
    this.toEnd();
    this.save();
    try {
      await this.receive(job, body);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = { kind: error.kind ?? "failed", message: error.message, until: error.retry && Date.now() + error.retry * 1000 };
      if (error.kind === "key") this.hooks.key(true);
    }
    message.running = false;
    if (this.job === job) this.job = null;
    if (message.error && !message.content) this.hooks.look();
    this.views.get(message)?.update();
    this.buttons();
    this.save();
    say(message.content);
    if (this.follow) this.toEnd();
  }

  async receive({ message, controller }, body) {
    const begun = performance.now();
    let [first, last, events] = [null, null, 0];
    try {
      for await (const event of stream("/v1/chat/completions", body, controller.signal)) {
        const choice = event.choices[0];
        if (event.usage) {
          message.figures ??= {};
          Object.assign(message.figures, { tokens: event.usage.completion_tokens, prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens });
        }
        if (!choice) continue;
        if (choice.delta.content || choice.logprobs?.content?.length) {
          last = performance.now();
          first ??= last;
          events += choice.logprobs?.content?.length || 1;
        }
        message.content += choice.delta.content ?? "";
        if (choice.logprobs) message.tokens?.push(...choice.logprobs.content);
        if (choice.finish_reason) message.finish = choice.finish_reason;
        this.views.get(message)?.update();
      }
    } finally {
      const tokens = message.figures?.tokens ?? events;
      const speed = tokens > 1 && last > first ? ((tokens - 1) / (last - first)) * 1000 : null;
      message.figures = { tokens, ...message.figures, ttft: first === null ? null : (first - begun) / 1000, speed };
    }
  }

  // -- the view -------------------------------------------------------------------------------------------------------
  buttons() {
    $("#send").hidden = !!this.job;
    $("#stop").hidden = !this.job;
  }

  scrolled() {
    const box = $("#scroll");
    this.follow = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
    $("#latest").hidden = this.follow;
  }

  toEnd() {
    const box = $("#scroll");
    box.scrollTop = box.scrollHeight;
  }
}

/** What is asked of the server: the conversation so far, with the settings that were made. */
function request(messages, model) {
  const said = messages.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) said.unshift({ role: "system", content: settings.system.trim() });
  const body = { model, messages: said, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]) if (settings[name] !== null) body[name] = settings[name];
  if (settings.max_tokens !== null) body.max_completion_tokens = settings.max_tokens;
  const stop = settings.stop.split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  if (settings.tokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}
