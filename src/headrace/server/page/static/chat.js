// Conversations and the one in view: sending, queueing, streaming, stopping, going on, asking again, editing.
import { stream } from "/page/api.js";
import { MessageView } from "/page/answer.js";
import { $, h, say } from "/page/dom.js";
import { button } from "/page/buttons.js";
import { asked, score } from "/page/request.js";
import { forgetConversation, loadConversation, loadConversations, onOtherTab, saveConversation, settings } from "/page/storage.js";
import { t } from "/page/texts.js";
import { keptFrom, record } from "/page/versions.js";

const NEAR = 80; // pixels from the end within which the view follows an answer
const TITLE = 60; // characters
const SAVE = 1000; // milliseconds between two savings of an answer that grows

export class Chat {
  /** `hooks`: changed() when the list of conversations did, opened() when another is in view, model() the model's name, key()
   * to ask for a key, full() when the browser keeps no more, look() to ask for the server's state, back(text) to the composer. */
  constructor(hooks) {
    this.hooks = hooks;
    this.list = loadConversations();
    this.now = null;
    this.views = new Map();
    this.jobs = new Map(); // conversation: {message, controller}
    this.follow = true;
    $("#scroll").addEventListener("scroll", () => this.scrolled());
    $("#scroll").addEventListener("grown", () => this.follow && this.toEnd());
    $("#latest").addEventListener("click", () => this.toEnd());
    addEventListener("pagehide", () => [...this.jobs.keys()].forEach(saveConversation));
    onOtherTab((id) => this.elsewhere(id));
  }

  /** What is being answered in the conversation in view. */
  get job() {
    return this.jobs.get(this.now) ?? null;
  }

  // -- conversations --------------------------------------------------------------------------------------------------
  find(id) {
    return this.list.find((one) => one.id === id) ?? null;
  }

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
    for (const message of messages) {
      if (this.views.has(message)) this.views.get(message).settle(); // it may no longer be the last
      else this.views.set(message, new MessageView(message, this.acts()));
    }
    $("#messages").replaceChildren(...messages.map((message) => this.views.get(message).node));
    $("#empty").hidden = messages.length > 0;
    this.buttons();
  }

  /** What can be done with a message. */
  acts() {
    return {
      edit: (message, text) => this.edit(message, text),
      again: (message) => this.again(message),
      goOn: (message) => this.goOn(message),
      revise: (message) => this.revise(message),
      score: (message) => score(this.now.messages, message, message.figures?.by ?? this.hooks.model()),
      last: (message) => this.now?.messages.at(-1) === message,
      chosen: (message) => this.chosen(message),
    };
  }

  begin(title, messages) {
    const one = { id: crypto.randomUUID?.() ?? String(Date.now()), title: title.trim().slice(0, TITLE), made: Date.now(), messages };
    this.list.unshift(one);
    return one;
  }

  /** One that was made elsewhere is kept here and opened. */
  take(title, messages) {
    const one = this.begin(title, messages);
    this.save(one);
    this.hooks.opened(one);
  }

  rename(conversation, title) {
    conversation.title = title;
    this.save(conversation);
  }

  remove(conversation) {
    this.jobs.get(conversation)?.controller.abort();
    const place = this.list.indexOf(conversation);
    this.list.splice(place, 1);
    forgetConversation(conversation);
    if (this.now === conversation) this.hooks.opened(null);
    this.hooks.changed();
    return () => {
      this.list.splice(place, 0, conversation);
      this.save(conversation);
    };
  }

  save(conversation) {
    if (this.list.includes(conversation) && !saveConversation(conversation)) this.hooks.full();
    this.hooks.changed();
  }

  /** Another tab has changed a conversation. One that is answered here is this tab's until it has ended. */
  elsewhere(id) {
    const [old, fresh] = [this.find(id), loadConversation(id)];
    if (this.jobs.has(old) || fresh?.messages.at(-1)?.cut) return;
    if (old && fresh) this.list[this.list.indexOf(old)] = fresh;
    else if (old) this.list.splice(this.list.indexOf(old), 1);
    else if (fresh) this.list.unshift(fresh);
    if (old && old === this.now) fresh ? this.open(fresh) : this.hooks.opened(null);
    this.hooks.changed();
  }

  // -- what the user does ---------------------------------------------------------------------------------------------
  /** Ask, or queue behind the answer that is under way. Whether there was anything to send. */
  send(text) {
    if (!text.trim()) return false;
    if (!this.now) {
      this.now = this.begin(text, []);
      this.hooks.opened(this.now);
    }
    (this.now.queue ??= []).push(text.trim());
    if (this.job) this.save(this.now);
    else this.next(this.now);
    this.buttons();
    return true;
  }

  /** The first of what is queued is asked. */
  next(conversation) {
    const text = conversation.queue?.shift();
    if (text === undefined || this.jobs.has(conversation)) return;
    conversation.messages.push({ role: "user", content: text });
    this.answer(conversation);
  }

  again(message) {
    if (this.job || !this.now) return;
    const place = this.now.messages.indexOf(message ?? this.now.messages.at(-1));
    if (place < 0) return;
    const old = this.now.messages[place];
    if (old.error?.kind === "long") return this.revise(old);
    this.now.messages.length = old.role === "user" ? place + 1 : place;
    this.answer(this.now, null, old.role === "user" ? [] : keptFrom(old));
  }

  /** Another version of the last answer is in place. */
  chosen(message) {
    this.views.delete(message);
    this.show();
    this.save(this.now);
  }

  /** The last answer goes on where it ended. */
  goOn(message) {
    if (!this.job && this.now?.messages.at(-1) === message) this.answer(this.now, message);
  }

  async edit(message, text) {
    const conversation = this.now;
    this.stop();
    await this.job?.ended;
    const place = conversation.messages.indexOf(message);
    if (!place && conversation.title === conversation.messages[0].content.slice(0, TITLE)) conversation.title = text.slice(0, TITLE);
    conversation.messages.length = place;
    conversation.messages.push({ role: "user", content: text });
    this.answer(conversation);
  }

  editLast() {
    const last = this.now?.messages.findLast((message) => message.role === "user");
    if (last && !this.job) this.views.get(last).edit();
  }

  /** Edit the message that an answer is to. */
  revise(message) {
    const before = this.now.messages.slice(0, this.now.messages.indexOf(message));
    this.views.get(before.findLast((one) => one.role === "user"))?.edit();
  }

  stop() {
    this.job?.controller.abort();
  }

  // -- an answer ------------------------------------------------------------------------------------------------------
  /** A new answer at the end of a conversation, next to earlier `versions` of it, or more of its last message. */
  answer(conversation, message = null, versions = []) {
    const body = asked(conversation.messages, this.hooks.model(), !!message, this.hooks.early());
    if (!message) {
      message = { role: "assistant", content: "", figures: null, model: this.hooks.model() };
      if (versions.length) Object.assign(message, { versions, version: versions.length });
      if (settings.tokens) message.tokens = [];
      if ("cascade_threshold" in body) message.cascade = true;
      conversation.messages.push(message);
    } else if (!message.tokens || !settings.tokens) delete message.tokens;
    for (const name of ["finish", "stopped", "cut", "error"]) delete message[name];
    message.running = true;
    const job = { message, conversation, controller: new AbortController() };
    this.jobs.set(conversation, job);
    this.follow = true;
    if (conversation === this.now) {
      this.show();
      this.views.get(message).update();
      this.toEnd();
    }
    this.save(conversation);
    job.ended = this.carry(job, body);
  }

  async carry(job, body) {
    const { message, conversation } = job;
    try {
      await this.receive(job, body);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = { kind: error.kind ?? "failed", message: error.message, until: error.retry && Date.now() + error.retry * 1000 };
      if (error.kind === "key") this.hooks.key(true);
    }
    message.running = false;
    if (message.versions) record(message);
    this.jobs.delete(conversation);
    if (message.error && !message.content) this.hooks.look();
    this.views.get(message)?.update();
    this.save(conversation);
    say(message.content);
    if (!message.error && !message.stopped) this.next(conversation);
    this.buttons();
    if (this.follow) this.toEnd();
  }

  async receive({ message, conversation, controller }, body) {
    const begun = performance.now();
    const before = message.figures?.tokens ?? 0;
    let [first, last, events, usage, saved] = [null, null, 0, null, begun];
    try {
      for await (const event of stream("/v1/chat/completions", body, controller.signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const { content, reasoning_content: thought } = choice.delta;
        const recorded = choice.logprobs?.content ?? [];
        if (content || thought || recorded.length) {
          last = performance.now();
          first ??= last;
          events += recorded.length || 1;
        }
        message.content += content ?? "";
        if (thought) message.thought = (message.thought ?? "") + thought;
        message.tokens?.push(...recorded.map((token, at) => slim(token, choice.exits?.[at])));
        if (choice.finish_reason) message.finish = choice.finish_reason;
        this.views.get(message)?.update();
        if (last - saved > SAVE) {
          saved = last;
          saveConversation(conversation);
        }
      }
    } finally {
      const tokens = usage?.completion_tokens ?? events;
      const speed = tokens > 1 && last > first ? ((tokens - 1) / (last - first)) * 1000 : null;
      message.figures = {
        tokens: before + tokens, prompt: usage?.prompt_tokens, cached: usage?.prompt_tokens_details?.cached_tokens,
        ttft: first === null ? null : (first - begun) / 1000, speed, by: usage?.tiers?.at(-1).model, // of a cascade's models
      };
    }
  }

  // -- the view -------------------------------------------------------------------------------------------------------
  buttons() {
    $("#stop").hidden = !this.job;
    $("#send").hidden = !!this.job;
    this.showQueue();
  }

  /** What waits for the answer to end; after a stop, an error or a reload it waits for the user. */
  showQueue() {
    const queue = this.now?.queue ?? [];
    const take = (place) => {
      const [text] = queue.splice(place, 1);
      this.save(this.now);
      this.showQueue();
      return text;
    };
    const items = queue.map((text, place) => h(
      "li", {}, h("span", { title: text }, text),
      button("edit", "edit", () => this.hooks.back(take(place))), button("close", "unqueue", () => take(place)),
    ));
    const send = h("button", { type: "button", onclick: () => this.next(this.now) }, t("sendQueued"));
    $("#queue").hidden = !queue.length;
    if (this.follow) requestAnimationFrame(() => this.toEnd());
    $("#queue").replaceChildren(h("p", {}, t(this.job ? "queueRuns" : "queueHeld"), !this.job && send), h("ul", {}, ...items));
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

/** A token without its bytes, which the page does not show, and after how many layers it was written. */
function slim({ token, logprob, top_logprobs: best = [] }, exit) {
  return { token, logprob, exit, top_logprobs: best.map((one) => ({ token: one.token, logprob: one.logprob })) };
}
